"""What tools look up about a prepared eager model, and what its problems say."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bitwright import ExportBackend
from bitwright._utils.insertion.torch_function.modes import RegisterEagerOptimizationMode
from bitwright._utils.insertion.torch_function.registered_optimizers_tracker import (
    FunctionRegisteredOptimizers as Record,
)
from bitwright._utils.insertion.torch_function.registered_optimizers_tracker import RegisteredOptimizersTracker
from bitwright.errors import ConfigMatchWarning
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._eager.supported_ops_registry import EagerQuantizerSupportedOpsRegistry
from bitwright.quantization.spec import PerBlockGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.measures import sqnr

NOTHING = {"op_input_spec": None, "op_output_spec": None, "op_state_spec": None}


class Gated(nn.Module):
    """A buffer that is one number is doubled, the input scaled by it twice, then projected."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor([0.5]))
        self.proj = nn.Linear(6, 3)

    def forward(self, x):
        gain = self.gain * 2.0
        return self.proj(x * gain * gain)


def eager(**fields):
    return QuantizerConfig(execution_mode="eager", **fields)


def names_of(model):
    return {name for name, module in model.named_modules() if isinstance(module, FakeQuantizeImplBase)}


def test_every_call_is_recorded_in_order_with_what_stands_on_it():
    """Calls of known functions count even where nothing of them is simulated; simulators carry the call's number."""
    quantizer = Quantizer(Gated(), eager())
    prepared = quantizer.prepare((torch.randn(2, 6),))
    records = quantizer._quantizer._handler.act_handler.reference_tracker
    assert records.get_module_registrations("") == {
        "mul": [
            Record(),
            Record(["mul_1_quantize_input"], ["mul_1_quantize_output_0"]),
            Record(["mul_2_quantize_input"], ["mul_2_quantize_output_0"]),
        ]
    }
    assert records.get_module_registrations("proj") == {
        "linear": [Record(["linear_quantize_input"], ["linear_quantize_output_0"])]
    }
    recorded = {
        f"{path}.{name}" if path else name
        for path, functions in records.get_registry_dict().items()
        for calls in functions.values()
        for call in calls
        for name in (*call.input_optimizer_names, *call.output_optimizer_names)
    }
    assert recorded == names_of(prepared) - {"proj.parametrizations.weight.0"}
    assert quantizer._quantizer._handler.act_handler.registered_optimizers_tracker.get_registry_dict() == {}


def test_counts_of_a_module_that_was_not_seen():
    """Asking for a module without records is an error that names it; an unknown function was called no times."""
    tracker = RegisteredOptimizersTracker()
    tracker.register("a", "mul", Record())
    assert tracker.has_module("a")
    assert tracker.has_function("a", "mul")
    assert (tracker.get_function_call_count("a", "mul"), tracker.get_function_call_count("a", "add")) == (1, 0)
    with pytest.raises(RuntimeError, match=r"no module 'b'"):
        tracker.get_function_call_count("b", "mul")


def test_nothing_is_recorded_before_prepare():
    """A look at a quantizer that has not prepared anything finds nothing."""
    assert Quantizer(Gated(), eager())._handler.act_handler.reference_tracker.get_registry_dict() == {}


def test_simulators_by_module():
    """Each simulator is listed once, under the module whose configuration decided about it."""
    quantizer = Quantizer(Gated(), eager())
    prepared = quantizer.prepare((torch.randn(2, 6),))
    found = quantizer._get_fake_quantize_modules()
    assert set(found) == {"", "proj"}
    listed = [simulator for simulators in found.values() for simulator in simulators]
    assert len(listed) == len(set(listed)) == len(names_of(prepared))
    assert found["proj"][-1] is prepared.proj.linear_quantize_output_0


def test_simulators_of_palettes_are_not_the_quantizers():
    """A palettizer has simulators for its tables; no module's quantization decided about them."""
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 16)
    spec = PalettizationSpec(n_bits=2, lut_qspec=QuantizationSpec(dtype="int8"))
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    palettizer = KMeansPalettizer(model, config)
    palettizer.prepare((x,))
    palettized = palettizer.finalize(backend="_torch")
    module = ModuleQuantizerConfig(op_state_spec=None)
    quantizer = Quantizer(palettized, QuantizerConfig(global_config=module, execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    found = quantizer._get_fake_quantize_modules()
    assert set(found) == {"0"}
    assert all(simulator in prepared[0].children() for simulator in found["0"])


def test_which_modules_a_boundary_spec_reaches():
    """A ``module_*_spec`` marks the module that it stands on and everything inside."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    entry = ModuleQuantizerConfig(**NOTHING, module_input_spec={0: QuantizationSpec()})
    quantizer = Quantizer(model, eager(global_config=None, module_name_configs={"0": entry}))
    marked: dict[str, bool] = {}
    RegisterEagerOptimizationMode._fill_module_has_module_spec_dict(
        "", model, False, quantizer._handler.module_components_dict, marked
    )
    assert marked == {"": False, "0": True, "0.0": True, "1": False}


def test_a_function_taken_out_of_its_family_is_not_quantized(monkeypatch):
    """Only what a module's boundary asks for is left then."""
    family = EagerQuantizerSupportedOpsRegistry.get_class("linear")
    assert "linear" in EagerQuantizerSupportedOpsRegistry.list_registry_keys()
    monkeypatch.setattr(family, "ops", [])
    assert names_of(Quantizer(nn.Linear(4, 4), eager()).prepare((torch.randn(1, 4),))) == set()
    entry = ModuleQuantizerConfig(**NOTHING, module_output_spec={"*": QuantizationSpec()})
    config = eager(global_config=None, module_name_configs={"": entry})
    assert names_of(Quantizer(nn.Linear(4, 4), config).prepare((torch.randn(1, 4),))) == {"linear_quantize_output_0"}
    with pytest.raises(KeyError, match="'conv9d'"):
        EagerQuantizerSupportedOpsRegistry.get_class("conv9d")


class Table(nn.Module):
    """Adds a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6).reshape(2, 3), requires_grad=False)

    def forward(self, x):
        return x + self.table


@pytest.mark.parametrize(("key", "warns"), [("table", True), ("*", False)])
def test_naming_an_integer_state_warns(key, warns, caplog):
    """A key that names it is reported, as warning and in the log; ``"*"`` sweeps over it in silence."""
    config = eager(global_config=ModuleQuantizerConfig(**{**NOTHING, "op_state_spec": {key: QuantizationSpec()}}))
    quantizer = Quantizer(Table(), config)
    if not warns:
        assert names_of(quantizer.prepare((torch.randn(2, 3),))) == set()
        assert not caplog.records
        return
    with pytest.warns(ConfigMatchWarning, match=r"state 'table', which is of dtype torch\.int64"):
        quantizer.prepare((torch.randn(2, 3),))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_one_tensor_at_two_positions_of_a_boundary(caplog):
    """The key that is declared last holds, and the log says so."""

    class Twice(nn.Module):
        def forward(self, x, y):
            return torch.add(x, y)

    specs = {1: QuantizationSpec(dtype="int4"), 0: QuantizationSpec(dtype="int8")}
    entry = ModuleQuantizerConfig(**NOTHING, module_input_spec=specs)
    x = torch.randn(2, 3)
    prepared = Quantizer(Twice(), eager(global_config=None, module_name_configs={"": entry})).prepare((x, x))
    assert {prepared.add_quantize_input.dtype, prepared.add_quantize_other.dtype} == {torch.int8}
    assert any("multiple specifications" in record.message for record in caplog.records)


def test_what_is_skipped_is_logged(caplog):
    """Services that collect logs see what terminal users see as a warning."""
    spec = QuantizationSpec(granularity=PerBlockGranularity(axis=0, block_size=4))
    config = eager(global_config=ModuleQuantizerConfig(**{**NOTHING, "op_state_spec": {"weight": spec}}))
    with pytest.warns(ConfigMatchWarning, match="Skipping quantization"):
        Quantizer(nn.Linear(4, 6), config).prepare((torch.randn(1, 4),))
    assert "Skipping quantization" in caplog.text


def test_the_state_of_a_finalized_model_can_be_saved(tmp_path):
    """No two tensors of it share memory, which safetensors refuses."""
    pytest.importorskip("coreai_torch")
    quantizer = Quantizer(nn.Sequential(nn.Linear(4, 4)), eager())
    quantizer.prepare((torch.randn(2, 4),))
    finalized = quantizer.finalize(backend=ExportBackend.CoreAI)
    state = {name: value.contiguous() for name, value in finalized.state_dict().items()}
    save_file(state, tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").stat().st_size > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_a_half_precision_model_are_kept_in_half_precision(dtype):
    """The finalized model computes what the prepared one does, from scales in the model's own dtype."""
    pytest.importorskip("coreai_torch")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    x = torch.randn(16, 8).to(dtype)
    quantizer = Quantizer(model, eager())
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(3 * x)
    with torch.no_grad():
        expected = prepared(x)
        finalized = quantizer.finalize(backend=ExportBackend.CoreAI)
        assert torch.equal(finalized(x), expected)
    scales = {name: value.dtype for name, value in finalized.state_dict().items() if name.endswith("scale")}
    assert len(scales) >= 8
    assert set(scales.values()) == {dtype}
    exported = torch.export.export(finalized, (x,)).module()
    with torch.no_grad():
        assert torch.equal(exported(x), expected)


@pytest.mark.parametrize("side", ["input", "output"])
def test_boundaries_of_a_module_that_assigns(side: str) -> None:
    """``x[0] = y`` of a simulated ``x`` writes to ``x`` itself, and so does a simulator behind it."""

    class Assigning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[0] = x[1] * 2
            return x

    spec = {"*": QuantizationSpec()}
    entry = ModuleQuantizerConfig(**NOTHING, **{f"module_{side}_spec": spec})
    x = torch.randn(4, 16)
    quantizer = Quantizer(Assigning(), eager(global_config=None, module_name_configs={"": entry}))
    prepared = quantizer.prepare((x.clone(),))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x.clone())
    with torch.no_grad():
        given = x.clone()
        out = prepared.eval()(given)
        expected = Assigning()(x.clone())
    assert out is given
    assert 30 < sqnr(expected, out) < 80
