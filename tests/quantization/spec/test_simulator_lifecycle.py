"""Modules with simulators in them: state_dict, copies, compile, export, checkpoints of another size."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from bitwright._utils.module_copy import replicate_module
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity

from .spec_strategies import ACTIVATION, WEIGHT, bits_equal, fake_quantizer

SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "w8a8": ({"granularity": PerChannelGranularity(axis=0)}, {}),
    "w4a8 dynamic per token": (
        {"dtype": "int4", "granularity": PerBlockGranularity(axis=1, block_size=4)},
        {"qparam_calculator_cls": "dynamic", "granularity": PerTokenGranularity()},
    ),
    "fp8": ({"dtype": "float8_e4m3"}, {"dtype": "float8_e5m2", "qparam_calculator_cls": "global_minmax"}),
    "mxfp4, minval": (
        {"dtype": "float4_e2m1fn", "granularity": PerBlockGranularity(axis=1, block_size=8)},
        {"qscheme": "asymmetric", "qformulation": "minval"},
    ),
}


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weight and input are fake-quantized."""

    def __init__(self, name: str, features: int = 16) -> None:
        super().__init__()
        weight_spec, input_spec = SPECS[name]
        self.weight = torch.nn.Parameter(torch.randn(8, features, generator=torch.Generator().manual_seed(1)))
        self.weight_quantizer = fake_quantizer(WEIGHT, **weight_spec)
        self.input_quantizer = fake_quantizer(ACTIVATION, **input_spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight))

    def observe(self, on: bool) -> None:
        self.weight_quantizer.enable_observer(on)
        self.input_quantizer.enable_observer(on)


def batch(size: float = 1.0, rows: int = 4) -> torch.Tensor:
    return torch.linspace(-size, size * 0.7, rows * 16).reshape(rows, 16).sin()


def calibrated(name: str) -> QuantizedLinear:
    model = QuantizedLinear(name)
    for size in (1.0, 3.0, 2.0):
        model(batch(size))
    model.observe(False)
    return model.eval()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("observed", [True, False])
def test_calibrated_state_loads_into_a_fresh_model(name: str, observed: bool) -> None:
    """Whether that has seen a tensor or not, it gives the same outputs, is off where the other was, and goes on."""
    model, other = calibrated(name), QuantizedLinear(name)
    if observed:
        other(batch(9.0))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert not other.load_state_dict(torch.load(buffer, weights_only=True)).missing_keys
    other.eval()
    assert torch.equal(other(batch()), model(batch()))
    for one in (model, other):
        one.observe(True)
        one(batch(5.0))
    assert all(bits_equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_state_loads_by_assignment_too() -> None:
    model, other = calibrated("w8a8"), QuantizedLinear("w8a8")
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert torch.equal(other.eval()(batch()), model(batch()))
    assert not other.input_quantizer._observer_on


def test_state_of_another_number_of_channels_loads() -> None:
    """Buffers take the size of what is loaded; only then is it clear how many blocks there are."""
    narrow, wide = (
        fake_quantizer(granularity=PerChannelGranularity(axis=0)),
        fake_quantizer(granularity=PerChannelGranularity(axis=0)),
    )
    narrow(torch.randn(3, 4))
    wide(torch.randn(7, 4))
    narrow.load_state_dict(copy.deepcopy(wide.state_dict()))
    x = torch.randn(7, 4)
    assert torch.equal(narrow(x), wide(x))


def test_keys_of_the_state() -> None:
    assert set(fake_quantizer().state_dict()) == {
        "fake_quant_enabled",
        "observer_enabled",
        "_disabled",
        "qparams_calculator.scale",
        "qparams_calculator.zero_point",
        "qparams_calculator.minval",
        "qparams_calculator.running_min",
        "qparams_calculator.running_max",
    }
    assert set(fake_quantizer(WEIGHT, dtype="float8_e4m3").state_dict()) == {
        "fake_quant_enabled",
        "observer_enabled",
        "_disabled",
        "qparams_calculator.scale",
    }
    dynamic = fake_quantizer(qparam_calculator_cls="dynamic")
    assert set(dynamic.state_dict()) == {"fake_quant_enabled", "observer_enabled", "_disabled"}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal_and_independent(name: str, duplicate: Any) -> None:
    model = calibrated(name)
    other = duplicate(model)
    assert torch.equal(other(batch()), model(batch()))
    kept = copy.deepcopy(model.state_dict())
    other.observe(True)
    other(batch(50.0))
    other.input_quantizer.disable_fake_quant()
    assert all(bits_equal(value, kept[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), replicate_module]
)
def test_a_copy_has_the_switches_that_the_buffers_say(duplicate: Any, is_loaded: bool) -> None:
    """Also where a buffer was written to directly, and no tensor has passed since."""
    simulator = fake_quantizer()
    simulator(torch.ones(2))
    if is_loaded:  # buffers of the copies count the versions that these do
        simulator.load_state_dict(simulator.state_dict())
    simulator.observer_enabled.fill_(0)
    twin = duplicate(simulator)
    twin(torch.full((2,), 9.0))
    assert torch.equal(twin.qparams_calculator.scale, simulator.qparams_calculator.scale)
    assert not twin.is_observing()


class _Compilations:
    """A backend of torch.compile that counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("observing", [True, False])
def test_compiles_into_one_graph_and_counts_on_correctly(name: str, observing: bool) -> None:
    """No graph break, no recompilation from step to step, the same outputs, gradients and statistics as eager."""
    model = QuantizedLinear(name)
    model(batch())
    model.observe(observing)
    reference = copy.deepcopy(model)
    backend = _Compilations()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in (1.0, 4.0, 2.0):
        y, expected = compiled(batch(size)), reference(batch(size))
        assert torch.equal(y, expected)
        y.sum().backward()
        expected.sum().backward()
    assert backend.count == 1
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, reference.weight.grad)
    assert all(bits_equal(value, reference.state_dict()[key]) for key, value in model.state_dict().items())


def test_switches_reach_a_compiled_model() -> None:
    model = calibrated("w8a8")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    quantized = compiled(batch())
    for quantizer in (model.weight_quantizer, model.input_quantizer):
        quantizer.disable_fake_quant()
    plain = compiled(batch())
    assert torch.equal(plain, torch.nn.functional.linear(batch(), model.weight))
    assert not torch.equal(plain, quantized)


def test_reset_statistics_reaches_a_compiled_model() -> None:
    model = QuantizedLinear("w8a8")
    model(batch(100.0))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    model.input_quantizer.reset_statistics()
    compiled(batch(1.0))
    calculator = model.input_quantizer.qparams_calculator
    assert float(calculator.running_max) == float(batch(1.0).max())
    compiled(torch.zeros(4, 16))
    assert float(calculator.running_max) == pytest.approx(float(batch(1.0).max()) * 0.99)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_a_symbolic_batch(name: str, strict: bool) -> None:
    model = calibrated(name)
    dynamic_shapes = ({0: torch.export.Dim("rows", min=1)},)
    program = torch.export.export(model, (batch(),), dynamic_shapes=dynamic_shapes, strict=strict)
    for rows in (4, 9):
        assert torch.equal(program.module()(batch(rows=rows)), model(batch(rows=rows)))


def test_survives_a_fake_tensor_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = calibrated("w8a8")
        assert model(mode.from_tensor(batch())).shape == (4, 8)


def test_prepared_under_inference_mode_it_still_works_outside() -> None:
    with torch.inference_mode():
        quantizer = fake_quantizer()
        quantizer(batch())
        quantizer.disable_observer()
    quantizer.enable_observer()
    quantizer(batch(5.0))
    x = batch().requires_grad_()
    quantizer(x).sum().backward()
    assert x.grad is not None


def test_moving_to_another_dtype_and_back_changes_no_parameter() -> None:
    model = calibrated("w8a8")
    before = {key: value.clone() for key, value in model.state_dict().items() if "quantizer" in key}
    model.bfloat16()
    assert model(batch().bfloat16()).dtype == torch.bfloat16
    assert all(bits_equal(model.state_dict()[key], value) for key, value in before.items())


@torch.no_grad()
def test_an_averaged_model_follows_its_weights() -> None:
    """AveragedModel updates in place while it stays in eval mode."""
    model = calibrated("w8a8")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.eval()
    average.update_parameters(model)
    before = average(batch())
    model.weight.mul_(3)
    average.update_parameters(model)
    expected = average.module.weight_quantizer._fake_quantize(
        average.module.weight.detach().clone(), *average.module.weight_quantizer.calculate_qparams()
    )
    x = average.module.input_quantizer(batch())
    assert torch.equal(average(batch()), torch.nn.functional.linear(x, expected))
    assert not torch.equal(average(batch()), before)
