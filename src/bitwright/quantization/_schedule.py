"""QAT schedules applied to simulators."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["ScheduleDriver"]


class ScheduleDriver:
    """Switches the simulators of a model as their schedules say.

    Args:
        schedules: schedule by the simulator's name in the prepared model (``named_modules`` name, the first alias).
    """

    def __init__(self, schedules: Mapping[str, QATSchedule]) -> None:
        self._schedules = dict(schedules)
        self.step_count = 0

    def __bool__(self) -> bool:
        return bool(self._schedules)

    def apply(self, model: nn.Module) -> None:
        """Bring every scheduled simulator of ``model`` into the state for the current step."""
        for name, simulator in model.named_modules():
            schedule = self._schedules.get(name)
            if schedule is None or not isinstance(simulator, FakeQuantizeImplBase):
                continue
            state = schedule._compute_state(self.step_count)
            switch(simulator, observer=state.obs_on, fake_quant=state.fq_on)


def switch(simulator: FakeQuantizeImplBase, *, observer: bool, fake_quant: bool) -> None:
    """Turn a simulator's observer and its fake quantization on or off."""
    (simulator.enable_observer if observer else simulator.disable_observer)()
    (simulator.enable_fake_quant if fake_quant else simulator.disable_fake_quant)()
