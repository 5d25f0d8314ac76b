"""Types of operands of PyTorch's operators, for translations to ONNX: its operators take operands of one type only."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.export.extras import require

from .torchlib import operators

__all__ = ["in_type", "number", "result_type", "type_of"]

_TYPES = {
    torch.bool: "BOOL", torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32", torch.int64: "INT64",
    torch.uint8: "UINT8", torch.uint16: "UINT16", torch.uint32: "UINT32", torch.uint64: "UINT64",
    torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT", torch.float64: "DOUBLE",
}  # fmt: skip


def type_of(x: Any) -> torch.dtype:
    """Return the dtype of a tensor that is being translated; its type has to be known."""
    return next(dtype for dtype, name in _TYPES.items() if name == x.dtype.name)


def result_type(*operands: Any) -> torch.dtype:
    """Return the dtype that PyTorch computes in.

    Args:
        *operands: two of them; tensors that are being translated, or numbers.
    """
    as_torchs: list[Any] = [
        one if isinstance(one, bool | int | float) else torch.empty([1] * len(one.shape), dtype=type_of(one))
        for one in operands
    ]
    return torch.result_type(*as_torchs)


def in_type(x: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a number that has a place in it, in a type."""
    if isinstance(x, bool | int | float):
        return number(x, dtype)
    return x if x.dtype is not None and type_of(x) == dtype else operators().Cast(x, to=_onnx(dtype))


def number(value: float, dtype: torch.dtype) -> Any:
    """Return a number as a tensor of no dimensions."""
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    return operators().Constant(value=ir.tensor(value, dtype=_onnx(dtype)))


def _onnx(dtype: torch.dtype) -> Any:
    return require("onnx_ir", "onnx", "Export to ONNX").DataType[_TYPES[dtype]]
