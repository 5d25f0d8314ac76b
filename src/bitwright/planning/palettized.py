"""Turn a palettization spec and a weight into a resolved spec: axis filled in, groups checked, bytes counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from bitwright.common import CompressionType
from bitwright.palettization.spec import PalettizationSpec, PerGroupedChannelGranularity
from bitwright.palettization.spec._vector_layout import VectorLayout
from bitwright.palettization.spec.errors import _IncompatibleClusterDimError, _IncompatibleGranularityError
from bitwright.program import Op

from .ops import PALETTIZER_OPS
from .packed_sizes import stored_bytes, table_bytes
from .plan import Problem, Severity
from .stacking import kinds_on
from .weight_only import WeightRequest, WeightResolution, WeightTechnique

__all__ = ["OpRegistry", "PalettizationTechnique"]


class OpRegistry(Protocol):
    """Functions of the user's that palettization knows besides its own."""

    def key_for_func(self, function: Callable[..., Any]) -> str | None:
        """Return the ``op_type_config`` key of a function, None if it is not known."""

    def default_axis_of(self, function: Callable[..., Any]) -> int | None:
        """Return the dimension of output channels of a function's weight, None if it is not known."""


class PalettizationTechnique(WeightTechnique):
    """What is particular to palettization while planning.

    Args:
        registry: further functions.
    """

    kind = CompressionType.PALETTIZATION
    ops = PALETTIZER_OPS

    def __init__(self, registry: OpRegistry) -> None:
        self._registry = registry

    def key_of(self, op: Op) -> str | None:
        """Return the key of a known function, or of one that was registered for palettization."""
        return super().key_of(op) or self._registry.key_for_func(op.target)

    def resolve(self, spec: PalettizationSpec, request: WeightRequest) -> WeightResolution:
        """Fill in the axis of groups, check that groups and vectors divide the weight, and count bytes."""
        name = request.state.name
        granularity = spec.granularity
        if isinstance(granularity, PerGroupedChannelGranularity) and granularity.axis is None:
            axis = self._default_axis(request)
            if axis is None:
                return WeightResolution(None, problems=[_unresolved(request, granularity)])
            spec = spec.model_copy(update={"granularity": granularity.model_copy(update={"axis": axis})})
        is_pruned = CompressionType.PRUNING in kinds_on(request.stack)
        if spec.cluster_dim > 1 and (is_pruned or _own_zeros(spec, request)):
            return WeightResolution(None, problems=[_masked_vectors(request, spec.cluster_dim)])
        try:
            layout = VectorLayout.of(request.shape, spec.granularity, spec.cluster_dim)
        except (_IncompatibleGranularityError, _IncompatibleClusterDimError) as error:
            dim = isinstance(error, _IncompatibleClusterDimError)
            message = f"{error} ({request.rule}), so it stays dense. Choose a size that divides it."
            problem = Problem("cluster-dim" if dim else "group-size", name, message)
            return WeightResolution(
                None, note=f"{'vector' if dim else 'group'} size does not divide", problems=[problem]
            )
        return WeightResolution(spec, _group_shape(layout), _packed_bytes(spec, layout, request))

    def _default_axis(self, request: WeightRequest) -> int | None:
        """Return the output axis of the ops that consume the weight."""
        if request.axes is not None:
            return request.axes.channel
        found = (self._registry.default_axis_of(use.op.target) for use in request.state.uses)
        return next((axis for axis in found if axis is not None), None)


def _unresolved(request: WeightRequest, granularity: PerGroupedChannelGranularity) -> Problem:
    message = (
        f"{type(granularity).__name__} asked for by {request.rule} has no axis, and no op that consumes the weight "
        "gives a default. Set the axis in the spec, or exclude the weight with None."
    )
    return Problem("axis-unresolved", request.state.name, message, Severity.ERROR)


def _own_zeros(spec: PalettizationSpec, request: WeightRequest) -> int:
    """Return how many zeros of the weight are kept as such; 0 where the spec does not ask for it, or there are few."""
    share, weight = spec.sparsity_detection_threshold, request.state.tensor
    if share is None or weight.is_meta:
        return 0
    zeros = weight.numel() - int(torch.count_nonzero(weight.detach()))
    return zeros if zeros >= share * weight.numel() else 0


def _masked_vectors(request: WeightRequest, dim: int) -> Problem:
    message = (
        f"cluster_dim={dim} asked for by {request.rule}, but the weight is pruned or keeps its zeros, and a vector "
        "cannot be zero in part. Use cluster_dim=1 for it."
    )
    return Problem("order", request.state.name, message, Severity.ERROR)


def _group_shape(layout: VectorLayout) -> tuple[int, ...]:
    return tuple(size // layout.groups if dim == layout.axis else size for dim, size in enumerate(layout.shape))


def _packed_bytes(spec: PalettizationSpec, layout: VectorLayout, request: WeightRequest) -> int:
    dtype, entries = request.state.tensor.dtype, (1 << spec.n_bits) * spec.cluster_dim
    tables = table_bytes(spec.lut_qspec, layout.groups, entries, dtype)
    if spec.enable_per_channel_scale:
        axis = 0 if request.axes is None else min(request.axes.channel, len(layout.shape) - 1)
        tables += layout.shape[axis] * dtype.itemsize
    numel = request.state.tensor.numel()
    masks = [s for s in request.stack if getattr(s, "compression_type", None) is CompressionType.PRUNING]
    kept = numel - int(numel * float(getattr(masks[-1], "sparsity", 0.0))) if masks else None
    zeros = 0 if masks else _own_zeros(spec, request)
    kept = numel - zeros if zeros else kept
    return stored_bytes(numel, spec.n_bits / spec.cluster_dim, kept, tables, needs_mask=True)
