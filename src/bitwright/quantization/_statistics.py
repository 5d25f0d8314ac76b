"""Which activation ranges were never measured, and which came out unusable."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from bitwright.config.spec import CompressionTargetTensor
from bitwright.errors import CalibrationWarning

from .spec import AccumulatedQParamsCalculator
from .spec.fake_quantize import FakeQuantizeImplBase

__all__ = [
    "gathering",
    "has_searched_range",
    "running_activations",
    "unmeasured",
    "warn_of_calibration",
    "warn_of_ranges",
]


def gathering(simulators: Iterable[FakeQuantizeImplBase]) -> list[Any]:
    """Return the calculators that gather statistics of activations, each once."""
    found = {
        id(simulator.qparams_calculator): simulator.qparams_calculator
        for simulator in simulators
        if simulator.quantization_target == CompressionTargetTensor.ACTIVATION and not simulator.is_stateless
    }
    return list(found.values())


def has_searched_range(simulator: FakeQuantizeImplBase) -> bool:
    """Return whether the range is that of all activations so far, searched for in their distribution."""
    calculator: Any = simulator.qparams_calculator
    activation = simulator.quantization_target == CompressionTargetTensor.ACTIVATION
    return activation and isinstance(calculator, AccumulatedQParamsCalculator) and calculator._initialized


def running_activations(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeImplBase]]:
    """Yield name and simulator of the activations whose range is measured and in use."""
    for name, simulator in model.named_modules():
        if (
            isinstance(simulator, FakeQuantizeImplBase)
            and simulator.quantization_target == CompressionTargetTensor.ACTIVATION
            and not (simulator.is_stateless or simulator.is_disabled())
            and hasattr(simulator.qparams_calculator, "_progress")
            and not getattr(simulator.qparams_calculator, "is_frozen", False)
        ):
            yield name, simulator


def unmeasured(model: nn.Module) -> Mapping[str, list[str]]:
    """Return the names of activation simulators by diagnostic code: BW101 never calibrated, BW102 without data."""
    found: dict[str, list[str]] = {"BW101": [], "BW102": []}
    for name, simulator in running_activations(model):
        calculator: Any = simulator.qparams_calculator
        if calculator._progress.restart:
            found["BW102"].append(name)
        elif not (calculator._progress.calibrated or calculator.is_loaded):
            found["BW101"].append(name)
    return found


def warn_of_calibration(model: nn.Module, stacklevel: int) -> None:
    """Warn if a calibration that has just ended measured nothing at all, or data that no scale serves."""
    empty = unmeasured(model)["BW102"]
    if empty and len(empty) == sum(1 for _ in running_activations(model)):
        _warn("BW102", empty, "saw no data in this calibration. Call the model inside the `with` block.", stacklevel)
    _warn_of_broken_scales(model, stacklevel + 1)


def warn_of_ranges(model: nn.Module, stacklevel: int) -> None:
    """Warn of activation ranges that are about to be frozen though no data made them, or none can use them."""
    found = unmeasured(model)
    if found["BW101"]:
        remedy = "have only seen the example inputs of prepare(). Call the model on representative data inside "
        _warn("BW101", found["BW101"], f"{remedy}`with quantizer.calibration_mode():` first.", stacklevel)
    if found["BW102"]:
        _warn("BW102", found["BW102"], "saw no data in calibration; their ranges are stale.", stacklevel)
    _warn_of_broken_scales(model, stacklevel + 1)


def _warn_of_broken_scales(model: nn.Module, stacklevel: int) -> None:
    broken = [name for name, simulator in running_activations(model) if simulator.check_health()]
    if broken:
        _warn("BW104", broken, "have a scale that is no positive finite number; look for NaN in the data.", stacklevel)


def _warn(code: str, names: Sequence[str], what: str, stacklevel: int) -> None:
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    text = f"{code} {len(names)} activation quantizers ({listed}) {what} (bitwright explain {code})"
    warnings.warn(text, CalibrationWarning, stacklevel=stacklevel + 1)
