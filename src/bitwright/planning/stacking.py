"""Which techniques go together on one weight, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bitwright.common import CompressionType

from .plan import Problem, Severity

__all__ = [
    "QUANTIZED_ACTIVATIONS",
    "QUANTIZED_GRAPH",
    "finite_range",
    "kinds_on",
    "stacking_problem",
    "storage_problem",
]

_Q, _P, _S = CompressionType.QUANTIZATION, CompressionType.PALETTIZATION, CompressionType.PRUNING

# (what stands on the weight, what is to come) -> why that has no meaning and what to do.
_MEANINGLESS: dict[tuple[CompressionType, CompressionType], str] = {
    (_Q, _Q): "it is quantized already. Quantize it once, with the spec that you want.",
    (_Q, _P): (
        "it is quantized already, and a palette of quantized values is a palette with quantized entries: palettize "
        "the float weight with lut_qspec in its place."
    ),
    (_P, _P): "it is palettized already. Palettize it once, with the spec that you want.",
    (_P, _Q): (
        "it is palettized already, and quantizing the values of a palette is quantizing its entries: set lut_qspec in "
        "the palettization spec, and exclude the weight here with None."
    ),
    (_S, _S): "it is pruned already. Prune it once, with the spec that you want.",
}

QUANTIZED_GRAPH = Problem(
    "order",
    "model",
    "a Quantizer has quantized this graph already, and its simulators would be quantized with the rest. Quantize the "
    "float model once, with the specs of weights and activations in one configuration.",
    Severity.ERROR,
)

QUANTIZED_ACTIVATIONS = Problem(
    "order",
    "model",
    "a Quantizer has quantized activations of this model already. New simulators would take the places of the old, and "
    "a graph would hold the old as ops of the model. Quantize the activations last, and once; in eager mode, with "
    "op_input_spec=None and op_output_spec=None, weights that are still float may follow.",
    Severity.ERROR,
)


def kinds_on(stack: Sequence[nn.Module]) -> tuple[CompressionType, ...]:
    """Return the technique of each simulator."""
    return tuple(getattr(simulator, "compression_type", _Q) for simulator in stack)


def stacking_problem(name: str, stack: Sequence[nn.Module], new: CompressionType, rule: str) -> Problem | None:
    """Return why a technique has no meaning on a weight that others stand on; None where it has.

    Args:
        name: the weight.
        stack: the simulators on it.
        new: the technique to come.
        rule: the part of the configuration that asks for it.
    """
    for kind in kinds_on(stack):
        reason = _MEANINGLESS.get((kind, new))
        if reason is not None:
            return Problem("order", name, f"{new.value} asked for by {rule} has no meaning: {reason}", Severity.ERROR)
    return None


def storage_problem(name: str, tensor: torch.Tensor, rule: str) -> Problem | None:
    """Return why the numbers of a weight cannot be read, an error for sparse ones; None where they can.

    Args:
        name: the weight.
        tensor: its tensor.
        rule: the part of the configuration that asks for it.
    """
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided:
        message = (
            f"the weight of shape {shape} is stored as {tensor.layout}, which cannot be compressed ({rule}). Store it "
            "dense with .to_dense(), or exclude it with None."
        )
        return Problem("sparse-layout", name, message, Severity.ERROR)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        message = (
            f"the weight of shape {shape} is stored as {tensor.dtype}, so it is compressed already and left as it is "
            f"({rule}). To compress it otherwise, store what it stands for as bfloat16, or exclude it with None."
        )
        return Problem("float8-weight", name, message)
    return None


def finite_range(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest entry; NaN if there is one."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0.0, 1.0
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)
