"""What a run of quantization-aware training remembers beside parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ._schedule import ScheduleDriver
from .spec import RunningRangeMixin
from .spec.fake_quantize import FakeQuantizeImplBase
from .spec.learned import LearnedQParamsCalculatorBase

__all__ = ["load", "save"]

_VERSION = 1


def save(model: nn.Module, schedules: ScheduleDriver, calibrated: bool, measured: bool) -> dict[str, Any]:
    """Return step count, whether statistics have begun and were calibrated, and how far each running range has come."""
    progress = {}
    for name, calculator in _calculators(model):
        if isinstance(calculator, RunningRangeMixin):
            progress[name] = [calculator._progress.observations, int(calculator._progress.restart)]
        elif isinstance(calculator, LearnedQParamsCalculatorBase):
            progress[name] = [0, int(calculator._restart)]
    return {
        "version": _VERSION,
        "step_count": schedules.step_count,
        "calibrated": calibrated,
        "measured": measured,
        "progress": progress,
    }


def load(model: nn.Module, schedules: ScheduleDriver, state: Mapping[str, Any]) -> tuple[bool, bool]:
    """Apply what ``save`` returned; return whether statistics have begun, and whether a calibration has ended.

    Raises:
        TypeError: the state is no mapping.
        ValueError: the state is of another model or version; nothing has been changed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"Expected what Quantizer.state_dict() returned, got {type(state).__name__}.")
    missing = {"version", "step_count", "calibrated", "progress"} - state.keys()
    if missing or state.get("version") != _VERSION:
        raise ValueError(
            f"This is no state of a Quantizer (version {_VERSION}): missing {sorted(missing)}, version "
            f"{state.get('version')!r}. Pass what Quantizer.state_dict() returned."
        )
    calculators = dict(_calculators(model))
    unknown = sorted(set(state["progress"]) ^ {n for n, c in calculators.items() if _has_progress(c)})
    if unknown:
        raise ValueError(
            f"The state does not belong to this model: {len(unknown)} simulators differ, the first is {unknown[0]!r}. "
            "Prepare the same model with the same config."
        )
    schedules.step_count = int(state["step_count"])
    schedules.apply_bits(model, rescale=False)
    for name, (observations, restart) in state["progress"].items():
        calculator: Any = calculators[name]
        if isinstance(calculator, LearnedQParamsCalculatorBase):
            calculator._restart = bool(restart)
        else:
            calculator._progress.observations, calculator._progress.restart = int(observations), bool(restart)
    return bool(state["calibrated"]), bool(state.get("measured", False))  # older states do not say


def _has_progress(calculator: Any) -> bool:
    return isinstance(calculator, RunningRangeMixin | LearnedQParamsCalculatorBase)


def _calculators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizeImplBase):
            yield name, module.qparams_calculator
