"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import torch

__all__: list[str] = []

# The ops of planning.graph_ops that hand values on, as far as torch.export leaves them as ops of their own there too.
_PASSTHROUGH_OP_OVERLOADS = frozenset(
    {
        torch.ops.aten.clone,
        torch.ops.aten.dropout,
        torch.ops.aten.expand,
        torch.ops.aten.feature_dropout,
        torch.ops.aten.permute,
        torch.ops.aten.reshape,
        torch.ops.aten.select,
        torch.ops.aten.slice,
        torch.ops.aten.squeeze,
        torch.ops.aten.t,
        torch.ops.aten.transpose,
        torch.ops.aten.unsqueeze,
        torch.ops.aten.view,
    }
)
