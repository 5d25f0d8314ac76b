"""Turn a quantization spec and a tensor into a resolved spec: axis filled in, blocks checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch._subclasses import FakeTensor

from bitwright.config.spec import CompressionTargetTensor
from bitwright.program import StateTensor
from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    QuantizationSpec,
)
from bitwright.quantization.spec.errors import _BlockSizeMismatchError

from .ops import AxisConflictError, default_weight_axes, is_elementwise, is_elementwise_gain
from .plan import Problem, Severity
from .stacking import storage_problem

__all__ = ["Resolution", "resolve_activation", "resolve_weight"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Outcome for one tensor: a spec that can be built, or none and why; ``unfit`` where blocks do not divide sizes."""

    spec: QuantizationSpec | None
    block_size: tuple[int, ...] = ()
    note: str = ""
    problem: Problem | None = None
    unfit: bool = False


def resolve_weight(spec: QuantizationSpec, state: StateTensor, rule: str, *, by_module: bool = False) -> Resolution:
    """Fill in the axis of a weight's spec from the ops that consume it and check its blocks.

    A gain along one dimension, which no op reads as a weight (that of an RMS norm), is left alone: quantizing it per
    channel would give each element a scale of its own. ``by_module`` says that a ``module_state_spec`` asked for it by
    name, which is obeyed.
    """
    granularity = spec.granularity
    shape = tuple(state.tensor.shape)
    if (
        not by_module
        and is_elementwise_gain(state)
        and isinstance(granularity, PerChannelGranularity | PerBlockGranularity)
        and _one_for_each(granularity.axis, shape)
    ):
        return Resolution(None, note="elementwise gain, left as it is")
    if _needs_axis(granularity):
        try:
            axes = default_weight_axes(state, products=True)
        except AxisConflictError as error:
            return Resolution(None, problem=Problem("axis-conflict", state.name, str(error), Severity.ERROR))
        if axes is None and not by_module and is_elementwise(state):
            return Resolution(None, note="no op multiplies matrices with it, so it has no axis; left as it is")
        if axes is None:
            return Resolution(None, problem=_unresolved("Weight", state.name, granularity, rule))
        axis = axes.channel if isinstance(granularity, PerChannelGranularity) else axes.block
        spec = spec.model_copy(update={"granularity": granularity.model_copy(update={"axis": axis})})
    problem = storage_problem(state.name, state.tensor, rule)
    if problem is not None:
        return Resolution(None, note="left as it is", problem=problem)
    resolution = _with_blocks(spec, shape, CompressionTargetTensor.WEIGHT, state.name, rule)
    return resolution if resolution.problem is not None else replace(resolution, problem=_non_finite(state))


def resolve_activation(spec: QuantizationSpec, shape: tuple[int, ...], where: str, rule: str) -> Resolution:
    """Check an activation's spec against the tensor seen while tracing; activations have no default axis."""
    if _needs_axis(spec.granularity):
        return Resolution(None, problem=_unresolved("Activation", where, spec.granularity, rule))
    return _with_blocks(spec, shape, CompressionTargetTensor.ACTIVATION, where, rule)


def _non_finite(state: StateTensor) -> Problem | None:
    tensor = state.tensor.detach()
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return None
    if tensor.sum(dtype=torch.float64 if tensor.device.type == "cpu" else None).isfinite():
        return None
    bad = int((~tensor.isfinite()).sum())
    if not bad:
        return None
    message = (
        f"{bad} of {tensor.numel()} entries are NaN or infinite; each spoils the scale of its whole block. Repair them."
    )
    return Problem("non-finite", state.name, message)


def _one_for_each(axis: int | None, shape: tuple[int, ...]) -> bool:
    """Whether scales along an axis, or along one that is still to be chosen, are as many as there are numbers."""
    if axis is None or not -len(shape) <= axis < len(shape):
        return True
    return shape[axis] == math.prod(shape)


def _needs_axis(granularity: object) -> bool:
    if isinstance(granularity, PerChannelGranularity):
        return granularity.axis is None
    return (
        isinstance(granularity, PerBlockGranularity)
        and granularity.axis is None
        and isinstance(granularity.block_size, int)
    )


def _unresolved(kind: str, where: str, granularity: object, rule: str) -> Problem:
    return Problem(
        "axis-unresolved",
        where,
        f"{kind} fake-quantize modules with unresolved axis=None{' remain' if kind == 'Weight' else ''}: "
        f"{type(granularity).__name__} asked for by {rule} "
        "has no axis, and no op that consumes the tensor gives a default. Set the axis in the spec, or exclude the "
        "tensor with None.",
        Severity.ERROR,
    )


def _with_blocks(
    spec: QuantizationSpec, shape: tuple[int, ...], target: CompressionTargetTensor, where: str, rule: str
) -> Resolution:
    try:
        block_size = spec.granularity.get_block_size(shape, target)
    except _BlockSizeMismatchError as error:
        message = f"Skipping quantization: {error} ({rule}). Choose a block size that divides it."
        problem = Problem("block-size", where, message)
        return Resolution(None, note="block size does not divide", problem=problem, unfit=True)
    except ValueError as error:
        message = f"{error} (asked for by {rule}, tensor shape {shape})."
        return Resolution(None, problem=Problem("axis-range", where, message, Severity.ERROR))
    return Resolution(spec, block_size)
