"""Operators on narrow integers, which ONNX Runtime has no kernels for on the CPU, in wider ones between casts.

What does not fit wraps around when it is cast back, as in PyTorch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .casts import cast_around

__all__ = ["widen_integers"]

_WIDER = {"INT8": "INT32", "UINT8": "INT32", "INT16": "INT32", "UINT16": "INT32"}
_BYTES, _PAIRS = {"INT8", "UINT8"}, {"INT16", "UINT16"}
_ANY = _BYTES | _PAIRS
_LACKING = {
    "Clip": _PAIRS, "CumSum": _ANY, "Einsum": _ANY, "MatMul": _ANY, "Max": _PAIRS, "Min": _PAIRS,
    "Neg": {"UINT8", "UINT16"}, "NonZero": {"INT8", *_PAIRS}, "Pad": _PAIRS, "ReduceMax": _PAIRS, "ReduceMean": _ANY,
    "ReduceMin": _PAIRS, "ReduceProd": _ANY, "ReduceSum": _ANY, "Relu": {"UINT8", *_PAIRS}, "Trilu": _ANY,
    "Where": _PAIRS,
}  # fmt: skip
"""The types that operators have no kernels for; powers have none for any, and need more bits."""


def widen_integers(model: Any) -> None:
    """Let operators on narrow integers compute in as many bits as ONNX Runtime has kernels for.

    Args:
        model: an ``onnx_ir.Model``; changed in place.
    """
    for narrow, wide in _WIDER.items():
        cast_around(model, narrow, "INT64", _is_power)
        cast_around(model, narrow, wide, partial(_lacks, narrow))


def _is_power(node: Any) -> bool:
    return bool(node.domain == "" and node.op_type == "Pow")


def _lacks(narrow: str, node: Any) -> bool:
    return node.domain == "" and narrow in _LACKING.get(node.op_type, ())
