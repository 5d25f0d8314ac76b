"""What the quantizer says when activation ranges are used that no calibration data made."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bitwright.errors import CalibrationWarning
from bitwright.quantization import Quantizer, QuantizerConfig

BATCH = torch.linspace(-1, 1, 32).view(4, 8)
MODES = ("eager", "graph")


def quantizer_for(mode: str, config: QuantizerConfig | None = None) -> tuple[Quantizer, nn.Module]:
    torch.manual_seed(0)
    config = QuantizerConfig() if config is None else config
    quantizer = Quantizer(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), config.set_execution_mode(mode))
    return quantizer, quantizer.prepare((BATCH,))


@pytest.mark.parametrize("mode", MODES)
def test_finalizing_what_was_never_calibrated(mode: str) -> None:
    quantizer, _ = quantizer_for(mode)
    with pytest.warns(CalibrationWarning, match=r"BW101 \d activation quantizers .*example inputs"):
        quantizer.finalize(backend="_torch")


@pytest.mark.parametrize("mode", MODES)
def test_calibration_without_data(mode: str) -> None:
    quantizer, _ = quantizer_for(mode)
    with pytest.warns(CalibrationWarning, match=r"BW102 .*saw no data"), quantizer.calibration_mode():
        pass
    with pytest.warns(CalibrationWarning, match="BW102"):
        quantizer.finalize(backend="_torch")


@pytest.mark.parametrize("mode", MODES)
def test_calibration_with_nothing_but_nan(mode: str) -> None:
    quantizer, prepared = quantizer_for(mode)
    with pytest.warns(CalibrationWarning, match="BW104.*NaN in the data") as caught, quantizer.calibration_mode():
        prepared(BATCH * float("nan"))
    assert caught[0].filename == __file__
    with pytest.warns(CalibrationWarning, match="BW104"):
        quantizer.finalize(backend="_torch")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["calibrated", "trained", "weights only", "dynamic"])
def test_silence_where_all_is_well(mode: str, way: str) -> None:
    presets = {"weights only": QuantizerConfig.presets.w8, "dynamic": QuantizerConfig.presets.w8a8_dynamic}
    quantizer, prepared = quantizer_for(mode, presets.get(way, QuantizerConfig)())
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        if way != "weights only":
            with quantizer.training_mode() if way == "trained" else quantizer.calibration_mode():
                prepared(BATCH)
        quantizer.finalize(backend="_torch")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("updated", [True, False])
def test_averages_made_before_training_take_over_what_it_measured(mode: str, updated: bool) -> None:
    """The average has the ranges of the model in its buffers; one that never got them has those of the example."""
    quantizer, prepared = quantizer_for(mode)
    average = AveragedModel(prepared, use_buffers=False)
    with quantizer.training_mode():
        prepared(BATCH * 2)
        if updated:
            average.update_parameters(prepared)
    with warnings.catch_warnings() if updated else pytest.warns(CalibrationWarning, match="BW101"):
        if updated:
            warnings.simplefilter("error", CalibrationWarning)
        quantizer.finalize(average.module, backend="_torch")
