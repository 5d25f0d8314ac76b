"""Modules that trace to one node each, which the exporter replaces by standard ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bitwright.artifact import CompressedTensor
from bitwright.export.arithmetic import ArithmeticActivation
from bitwright.export.lowering import LoweredModel

__all__ = ["ACTIVATION", "DOMAIN", "WEIGHT", "ActivationStandIn", "WeightStandIn", "meaning", "stands_for_quantizer_of"]

DOMAIN = "bitwright"
WEIGHT = "Weight"
ACTIVATION = "Activation"


class WeightStandIn(nn.Module):
    """Traces to ``bitwright::Weight(name)``.

    Args:
        name: key of the weight.
        tensor: gives shape and dtype.
    """

    def __init__(self, name: str, tensor: CompressedTensor[Any]) -> None:
        super().__init__()
        self.name = name
        self.shape = list(tensor.shape)
        self.dtype = tensor.dtype
        self.register_buffer("anchor", torch.zeros(0, dtype=torch.float32))

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        """Return the node of the weight; the argument, a parametrization's original, is not read."""
        anchor: Any = self.anchor
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{WEIGHT}", (anchor,), {"name": self.name}, dtype=self.dtype, shape=self.shape, version=1
        )


class ActivationStandIn(nn.Module):
    """Traces to ``bitwright::Activation(x, name)``.

    Args:
        name: key of the activation.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the node that quantizes ``x``, of the same shape and dtype."""
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{ACTIVATION}", (x,), {"name": self.name}, dtype=x.dtype, shape=x.shape, version=1
        )


def meaning(node: fx.Node, lowered: LoweredModel) -> Callable[..., torch.Tensor] | None:
    """Return what computes in PyTorch what the call of a stand-in stands for; None for other calls.

    Args:
        node: of a program that was captured from ``lowered``.
        lowered: has the weights and activations that stand-ins name.
    """
    if not _is_stand_in(node):
        return None
    names: Any = node.kwargs["attr_strs"]
    if node.args[1] == WEIGHT:
        weight = lowered.weights[names[0]]
        return lambda *_, **__: weight.decode()
    activation = ArithmeticActivation(lowered.activations[names[0]])
    return lambda inputs, *_, **__: activation(inputs[0])


def stands_for_quantizer_of(node: fx.Node) -> fx.Node | None:
    """Return the operand of the quantizer that the call of a stand-in stands for; None for other calls."""
    if not _is_stand_in(node) or node.args[1] != ACTIVATION:
        return None
    operands: Any = node.args[0]
    return operands[0] if isinstance(operands[0], fx.Node) else None


def _is_stand_in(node: fx.Node) -> bool:
    return str(node.target) == "onnx_symbolic._symbolic.default" and node.kwargs.get("domain") == DOMAIN
