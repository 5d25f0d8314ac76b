"""Activations as plain arithmetic: the numbers of the simulators, to the bit and the sign of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.export import Dim

from bitwright.artifact.sites import activation_simulators
from bitwright.export.arithmetic import ArithmeticActivation
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from tests.measures import sqnr

GRANULARITIES = {
    "tensor": {"type": "per_tensor"},
    "token": {"type": "per_token"},
    "channel": {"type": "per_channel", "axis": 1},
    "block": {"type": "per_block", "axis": -1, "block_size": 4},
}


def _dynamic(model, x, mode="eager", weights=None, **fields):
    spec = QuantizationSpec(qparam_calculator_cls="dynamic", **fields)
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec=weights, op_input_spec={"*": spec}, op_output_spec={"*": spec} if mode == "graph" else None
        ),
        execution_mode=mode,
    )
    return Quantizer(model.eval(), config).prepare((x,)).eval()


def _simulator(kind, **fields):
    x = torch.randn(3, 5, 8, dtype=kind)
    (simulator,) = activation_simulators(_dynamic(nn.Sequential(nn.Linear(8, 8)).to(kind), x, **fields)).values()
    return simulator


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("qscheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "int1"])
def test_parameters_found_at_run_time(dtype, qscheme, granularity):
    torch.manual_seed(0)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        simulator = _simulator(kind, dtype=dtype, qscheme=qscheme, granularity=GRANULARITIES[granularity])
        arithmetic = ArithmeticActivation(simulator)
        x = torch.randn(3, 5, 8) * torch.tensor([1e-7, 1.0, 1e4]).view(3, 1, 1)
        x[0, 0], x[1, 1, 2], x[2, 2, 3] = 0, torch.inf, torch.nan
        for value in (x.to(kind), x[:, :0].to(kind)):
            expected, found = simulator(value), arithmetic(value)
            assert found.dtype == kind
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(found.signbit(), expected.signbit()) or value.isnan().any()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_single_numbers(kind, dtype):
    torch.manual_seed(0)
    simulator = _simulator(kind, dtype=dtype)
    arithmetic = ArithmeticActivation(simulator)
    for value in torch.randn(20, dtype=kind):
        assert torch.equal(arithmetic(value), simulator(value))


def test_empty_tensors_of_float_formats():
    simulator = _simulator(torch.float32, dtype="float8_e4m3fn", granularity={"type": "per_token"})
    assert ArithmeticActivation(simulator)(torch.zeros(0, 5, 8)).shape == (0, 5, 8)


class Angle(nn.Module):
    """Angles beside a negative number, where the sign of a zero is that of pi."""

    def forward(self, x):
        return torch.atan2(x * 1.5, torch.full_like(x, -1.0))


def _onnx(ready, x, folder, **options):
    pytest.importorskip("onnxscript")
    from bitwright.export.onnx import export_onnx, run_onnx

    path = export_onnx(ready, (x,), folder / "model.onnx", **options)
    return lambda value: run_onnx(path, (value,))[0]


def _executorch(ready, x, folder, **options):
    pytest.importorskip("executorch.exir")
    from bitwright.export.executorch import export_executorch, run_executorch

    path = export_executorch(ready, (x,), folder / "model.pte", **options)
    return lambda value: run_executorch(path, (value,))[0]


@pytest.mark.parametrize("exported", [_onnx, _executorch])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_files_hold_no_negative_zeros(exported, dtype, tmp_path):
    """Nor does the simulation; and ONNX, which has no atan2, gets its angles right."""
    x = torch.tensor([[-0.0001, 0.5, -1.0, 0.0002]])
    ready = _dynamic(Angle(), x, "graph", dtype=dtype)
    found = exported(ready, x, tmp_path)(x)
    assert torch.allclose(found, ready(x), atol=1e-5)
    assert found[0, 0] > 3


@pytest.mark.parametrize("exported", [_onnx, _executorch])
@pytest.mark.parametrize("qscheme", ["symmetric", "asymmetric"])
def test_parameters_of_whole_tensors_with_a_batch_that_varies(exported, qscheme, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 8)
    ready = _dynamic(model, x, weights={"weight": QuantizationSpec()}, qscheme=qscheme)
    call = exported(ready, x, tmp_path, dynamic_shapes=({0: Dim("batch", min=1, max=16)},))
    for size in (1, 5, 16):
        value = torch.randn(size, 8)
        assert sqnr(ready(value), call(value)) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_onnx_angles_on_the_axes_and_at_infinity(dtype, tmp_path):
    class AngleOf(nn.Module):
        def forward(self, y, x):
            return torch.atan2(y, x)

    pytest.importorskip("onnxscript")
    from bitwright.export.onnx import export_onnx, run_onnx

    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.25, -3.0, math.inf, -math.inf, math.nan], dtype=dtype)
    y, x = (grid.flatten() for grid in torch.meshgrid(numbers, numbers, indexing="ij"))
    found = run_onnx(export_onnx(AngleOf(), (y, x), tmp_path / "model.onnx"), (y, x))[0]
    assert torch.allclose(found, torch.atan2(y, x), atol=1e-6 if dtype == torch.float32 else 2e-3, equal_nan=True)
