"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx, nn

__all__ = ["export_model"]


def export_model(
    model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any = None, export_with_no_grad: bool = True
) -> fx.GraphModule:
    """Return the model as ``torch.export`` captures it, in the mode that it is in."""
    with torch.no_grad() if export_with_no_grad else contextlib.nullcontext():
        module = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes).module()
    assert isinstance(module, fx.GraphModule)
    return module
