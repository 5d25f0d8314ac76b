"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import torch

__all__: list[str] = []

# The ops of planning.graph_ops that hand values on, as far as torch.export leaves them as ops of their own there too.
_NAMES = (
    "clone", "dropout", "expand", "feature_dropout", "permute", "reshape", "select", "slice", "squeeze", "t",
    "transpose", "unsqueeze", "view",
)  # fmt: skip
_PASSTHROUGH_OP_OVERLOADS = frozenset(getattr(torch.ops.aten, name) for name in _NAMES)
