"""Example inputs that are passed in another form than a tuple."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.export.onnx import export_onnx
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"input": torch.randn(1, 4)}, "pass inputs by name as example_kwargs"),
        ([torch.randn(1, 4)], r"write tuple\(\.\.\.\) around it"),
        (torch.randn(1, 4), r"wrap it as \(x,\)"),
    ],
)
def test_the_remedy_fits_what_was_passed(wrong: Any, remedy: str, tmp_path: Path) -> None:
    """Compressors and exporters answer alike."""
    model = nn.Linear(4, 2)
    for entry in (
        Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare,
        MagnitudePruner(model, MagnitudePrunerConfig()).prepare,
        lambda inputs: export_onnx(model, inputs, tmp_path / "model.onnx"),
    ):
        with pytest.raises(TypeError, match=f"example_inputs must be a tuple.*: {remedy}"):
            entry(wrong)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_mapping_inside_of_the_tuple(mode: str) -> None:
    """Its keys are arguments of forward, so the error says where they go."""
    quantizer = Quantizer(nn.Linear(4, 2), QuantizerConfig(execution_mode=mode))
    with pytest.raises(RuntimeError, match=r"Inputs by name \(input\) go into example_kwargs"):
        quantizer.prepare(({"input": torch.randn(1, 4)},))
