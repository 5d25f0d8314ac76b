"""What a quantizer decided and did, in the form in which tools written for coreai-opt look it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bitwright._utils.insertion.torch_function.registered_optimizers_tracker import RegisteredOptimizersTracker
from bitwright.config.matching import ModuleRule, resolve_module_rules
from bitwright.planning import Plan

from ._engine import Engine
from ._schedule import ScheduleDriver
from .config import QATSchedule
from .spec.fake_quantize import FakeQuantizeImplBase

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class _Calls:
    """Simulators on function calls.

    Attributes:
        reference_tracker: what the plan put on each call.
        registered_optimizers_tracker: calls of a forward in progress; empty, because none is kept between forwards.
    """

    reference_tracker: RegisteredOptimizersTracker
    registered_optimizers_tracker: RegisteredOptimizersTracker


class _Views:
    """Read-only looks at a quantizer, mixed into it."""

    _model: nn.Module
    _engine: Engine
    _plan: Plan | None
    _schedules: ScheduleDriver

    @property
    def _quantizer(self) -> _Views:
        return self

    @property
    def _handler(self) -> _Views:
        return self

    @property
    def act_handler(self) -> _Calls:
        from ._eager.records import call_records

        known = RegisteredOptimizersTracker()
        if self._plan is not None and self._plan.mode == "eager":
            known = call_records(self._engine.program, self._plan)
        return _Calls(known, RegisteredOptimizersTracker())

    @property
    def module_components_dict(self) -> Mapping[str, ModuleRule]:
        return resolve_module_rules(self._engine.config, self._engine.model)

    @property
    def _step_count(self) -> int:
        return self._schedules.step_count

    @property
    def _fq_to_schedule(self) -> dict[FakeQuantizeImplBase, QATSchedule]:
        return {simulator: schedule for _, simulator, schedule in self._schedules._named(self._model)}

    def _get_fake_quantize_modules(self) -> dict[str, list[FakeQuantizeImplBase]]:
        """Return the simulators that the quantizer inserted, by the module whose configuration decided about them."""
        found: dict[str, list[Any]] = {}
        paths = self._engine.module_paths()
        for name, module in self._model.named_modules():
            if isinstance(module, FakeQuantizeImplBase) and name in paths:
                found.setdefault(paths[name], []).append(module)
        return found
