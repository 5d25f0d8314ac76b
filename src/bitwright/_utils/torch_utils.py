"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from bitwright.formats import format_of

__all__ = [
    "export_model",
    "get_n_bits_from_dtype",
    "is_float4_dtype",
    "move_model_to_eval",
    "move_model_to_train",
    "normalize_axis",
]


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


def normalize_axis(axis: int, ndim: int) -> int:
    """Return ``axis`` counted from the front. Whether it is in range is not checked."""
    return axis if axis >= 0 else ndim + axis


def move_model_to_train(
    model: nn.Module, original_state: bool | None = None
) -> contextlib.AbstractContextManager[None]:
    """Put a model in train mode for a block, and then in the mode ``original_state``; None for the one that it has.

    Raises:
        RuntimeError: a module of ``torch.export`` whose mode was never set.
    """
    return _moved(model, True, original_state)


def move_model_to_eval(model: nn.Module, original_state: bool | None = None) -> contextlib.AbstractContextManager[None]:
    """Put a model in eval mode for a block; otherwise as ``move_model_to_train``."""
    return _moved(model, False, original_state)


@contextlib.contextmanager
def _moved(model: nn.Module, training: bool, before: bool | None) -> Iterator[None]:
    if before is None:
        # The flag of a captured module does not follow its mode, which torchao notes under this name.
        before = getattr(model, "_exported_training", None) if isinstance(model, fx.GraphModule) else model.training
    if before is None:
        raise RuntimeError(
            "The mode of a captured module is not known. Call .train() or .eval() on it first, or pass original_state."
        )
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
