"""Graph modules that others made are exported like models: exported programs, traces, copies of prepared graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from bitwright.artifact import Artifact
from bitwright.casting import cast_fp32_to_fp16
from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

TARGETS = {
    "onnx": (export_onnx, run_onnx),
    "aimodel": (export_coreai, run_coreai),
    "pte": (export_executorch, run_executorch),
}


def exported(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).module()


def cast(model: nn.Module, x: torch.Tensor) -> nn.Module:
    program = torch.export.export(model, (x,))
    cast_fp32_to_fp16(program, example_inputs=(x,))
    return program.module()


def traced(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return fx.symbolic_trace(model)


def copied(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """A prepared graph behind a pass of somebody else, who knows plain graph modules only."""
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8())
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    assert isinstance(prepared, fx.GraphModule)
    return fx.GraphModule(prepared.eval(), copy.deepcopy(prepared.graph))


@pytest.mark.parametrize("make", [exported, cast, traced, copied])
@pytest.mark.parametrize("target", TARGETS)
def test_they_are_exported(make: Callable[[nn.Module, torch.Tensor], nn.Module], target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.randn(2, 32),
    )
    module = make(model, x)
    x = x.half() if make is cast else x
    code, expected = getattr(module, "code", None), module(x)
    export, run = TARGETS[target]
    export(module, (x,), tmp_path / f"model.{target}")
    (found,) = run(tmp_path / f"model.{target}", (x,))
    assert sqnr(expected.float(), found.float()) > (55 if make is cast else 100)
    assert getattr(module, "code", None) == code
    assert module(x).equal(expected)


def test_a_copied_graph_is_stored_like_the_prepared_one() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.randn(2, 32),
    )
    assert len(Artifact.from_model(copied(model, x)).compressed) == 2
