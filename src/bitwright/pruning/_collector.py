"""Collects the inputs of pruned layers while the model runs on calibration data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright._utils.weight_simulators import SimulatorPlace
from bitwright.pruning.spec import PruneImplBase

from ._matrix_form import layer_inputs
from ._statistics import GramStatistics, NormStatistics

__all__ = ["InputCollector"]


class InputCollector(TorchFunctionMode):
    """While entered, adds what reaches each weight to its statistics; weights are dense meanwhile.

    Attributes:
        statistics: what was seen, by simulator.
    """

    def __init__(self, places: Sequence[SimulatorPlace[PruneImplBase]]) -> None:
        super().__init__()
        self.statistics: dict[PruneImplBase, NormStatistics] = {}
        self._places = places
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], PruneImplBase]] = {}
        self._handles: list[Any] = []
        self._enabled: dict[PruneImplBase, bool] = {}

    def __enter__(self) -> InputCollector:
        for place in self._places:
            impl = place.simulator
            if impl.input_statistics != "none":
                kind = GramStatistics if impl.input_statistics == "gram" else NormStatistics
                self.statistics.setdefault(impl, kind())
                self._handles.append(place.chain.register_forward_hook(self._note(impl)))
            self._enabled[impl] = impl.enabled
            impl.enabled = False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        for impl, enabled in self._enabled.items():
            impl.enabled = enabled
        self._live.clear()

    def _note(self, impl: PruneImplBase) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        """Return a hook that remembers whose weight a tensor is."""

        def hook(module: nn.Module, args: Any, weight: torch.Tensor) -> None:
            self._live[id(weight)] = weakref.ref(weight), impl

        return hook

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = layer_inputs(func, args, kwargs)
        if found is not None:
            weight, read = found
            known = self._live.get(id(weight))
            if known is not None and known[0]() is weight:
                self.statistics[known[1]].add(read())
        return func(*args, **kwargs)
