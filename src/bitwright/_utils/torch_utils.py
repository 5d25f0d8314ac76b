"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx, nn

from bitwright.formats import format_of

__all__ = ["export_model", "get_n_bits_from_dtype", "is_float4_dtype"]


def export_model(
    model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any = None, export_with_no_grad: bool = True
) -> fx.GraphModule:
    """Return the model as ``torch.export`` captures it, in the mode that it is in."""
    with torch.no_grad() if export_with_no_grad else contextlib.nullcontext():
        module = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes).module()
    assert isinstance(module, fx.GraphModule)
    return module


def get_n_bits_from_dtype(dtype: torch.dtype) -> int:
    """Return the bits of one code of a quantized dtype."""
    return format_of(dtype).bits


def is_float4_dtype(dtype: torch.dtype | str) -> bool:
    """Return whether a dtype, or its name, is the FP4 format."""
    return "float4" in str(dtype)
