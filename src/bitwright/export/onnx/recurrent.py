"""LSTMs for torch's ONNX exporter, whose own translation knows no projections; neither does ONNX's operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .torchlib import torchs_translation

__all__ = ["PROJECTED", "lstm"]

_lstm = torch.ops.aten.lstm.input


def lstm(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::lstm`` without projections; the others are decomposed.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def layers(x: Any, state: Sequence[Any], parameters: Sequence[Any], has_biases: bool, *options: Any) -> Any:
        if _are_projected(parameters, has_biases, *options):
            raise NotImplementedError("LSTMs with projections (proj_size) of a length that is not known at export")
        return torchs_translation(_lstm, opset)(x, state, parameters, has_biases, *options)

    return layers


def _in_steps(x: Tensor, state: Sequence[Tensor], parameters: Sequence[Tensor], has_biases: bool, *options: Any) -> Any:
    """An LSTM with projections as one operation after the other, for each step."""
    if not _are_projected(parameters, has_biases, *options):
        return NotImplemented
    return decomposition_table[_lstm](x, state, parameters, has_biases, *options)


def _are_projected(
    parameters: Sequence[Any], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, *_: Any
) -> bool:
    """Whether a layer has one matrix more than those of its input and its state, in each direction."""
    return len(parameters) > layers * (2 if bidirectional else 1) * (4 if has_biases else 2)


PROJECTED: dict[Any, Callable[..., Any]] = {_lstm: _in_steps}
"""Decompositions of LSTMs with projections."""
