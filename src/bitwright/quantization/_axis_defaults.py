"""Default axes of weights by module class, in the form in which code written for coreai-opt reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from bitwright.planning.ops import WeightAxes, function_axes

from .spec.granularity import PerBlockGranularity, PerChannelGranularity

__all__: list[str] = []

_MODULES: Mapping[type[nn.Module], str] = {
    **{getattr(nn, f"Conv{d}d"): f"conv{d}d" for d in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{d}d"): f"conv_transpose{d}d" for d in (1, 2, 3)},
    nn.Linear: "linear",
    nn.Embedding: "embedding",
}
_AXES: Mapping[type[nn.Module], WeightAxes] = {
    module: axes for module, function in _MODULES.items() if (axes := function_axes(function)) is not None
}

_PER_CHANNEL_WEIGHT_AXIS_DEFAULTS: Mapping[type[nn.Module], int] = {m: axes.channel for m, axes in _AXES.items()}
_PER_BLOCK_WEIGHT_AXIS_DEFAULTS: Mapping[type[nn.Module], int] = {m: axes.block for m, axes in _AXES.items()}

_WeightFQMap: TypeAlias = Mapping[Any, Sequence[tuple[type[nn.Module] | None, str]]]
"""Simulator to the class and name of each module that reads its weight."""


def _apply_defaults(consumers: _WeightFQMap) -> None:
    """Give each simulator whose granularity has no axis the one that the modules reading its weight have.

    Raises:
        ValueError: two modules of one weight differ, or none of them has a default.
    """
    unresolved = []
    for simulator, modules in consumers.items():
        granularity = simulator.granularity
        if granularity.axis is not None or not isinstance(granularity, PerChannelGranularity | PerBlockGranularity):
            continue
        per_channel = isinstance(granularity, PerChannelGranularity)
        defaults = _PER_CHANNEL_WEIGHT_AXIS_DEFAULTS if per_channel else _PER_BLOCK_WEIGHT_AXIS_DEFAULTS
        found = {name: defaults[kind] for kind, name in modules if kind is not None and kind in defaults}
        if len(set(found.values())) > 1:
            raise ValueError(f"Conflicting default axes of one weight: {found}. Set the axis in its spec.")
        if found:
            simulator.granularity = granularity.model_copy(update={"axis": next(iter(found.values()))})
        else:
            unresolved.append([name for _, name in modules])
    if unresolved:
        raise ValueError(
            f"Weight fake-quantize modules with unresolved axis=None remain: {unresolved}. Set the axis in their specs."
        )
