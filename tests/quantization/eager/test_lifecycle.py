"""prepare, calibrate, train, switch, finalize; and everything that must survive in between."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as control_map
from torch._higher_order_ops.scan import scan

from bitwright import ExportBackend
from bitwright.errors import BitwrightWarning, ConfigMatchWarning, PlanError, TraceError
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .networks import GroupedCNN, TinyTransformer


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


def make_prepared(tokens, config=None):
    torch.manual_seed(0)
    quantizer = Quantizer(TinyTransformer(), config or QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((tokens,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(tokens)
    return quantizer, prepared.eval()


def simulators(model):
    return [m for m in model.modules() if isinstance(m, FakeQuantizeImplBase)]


def states(model):
    return {(bool(s.observer_enabled.item()), bool(s.fake_quant_enabled.item())) for s in simulators(model)}


def test_switches_follow_the_modes(tokens):
    """Observers are on inside the modes only; calibration leaves activations unquantized."""
    quantizer, prepared = make_prepared(tokens)
    assert states(prepared) == {(False, True)}
    prepared.train()
    with quantizer.calibration_mode():
        assert not prepared.training
        by_target = {(s.quantization_target.value, bool(s.fake_quant_enabled.item())) for s in simulators(prepared)}
        assert by_target == {("weight", True), ("activation", False)}
    assert prepared.training
    prepared.eval()
    with quantizer.training_mode():
        assert prepared.training
        assert states(prepared) == {(True, True)}
    assert not prepared.training
    assert states(prepared) == {(False, True)}


def test_a_mode_that_nobody_holds_ends_with_a_warning(tokens):
    """A forgotten ``with`` leaves the mode at once, and says so; leaving early in code of the caller's does not."""
    quantizer, prepared = make_prepared(tokens)
    with pytest.warns(BitwrightWarning, match=r"training_mode\(\) has ended, because what it returned was not kept"):
        quantizer.training_mode().__enter__()
    assert states(prepared) == {(False, True)}
    kept = quantizer.training_mode()
    kept.__enter__()
    gc.collect()
    assert states(prepared) == {(True, True)}
    kept.__exit__(None, None, None)

    def batches():
        with quantizer.training_mode():
            yield from range(3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in batches():
            break
        gc.collect()
    assert states(prepared) == {(False, True)}


def test_modes_do_not_nest_and_need_a_prepared_model(tokens):
    """Each wrong order is a RuntimeError that says what to do."""
    quantizer = Quantizer(TinyTransformer(), QuantizerConfig(execution_mode="eager"))
    with pytest.raises(RuntimeError, match="must be prepared before"), quantizer.calibration_mode():
        pass
    with pytest.raises(RuntimeError, match=r"must be prepared before finalization\. Model has not been prepared"):
        quantizer.finalize()
    quantizer.prepare((tokens,))
    with quantizer.training_mode(), pytest.raises(RuntimeError, match="Nested modes"), quantizer.training_mode():
        pass
    with pytest.raises(RuntimeError, match="training_mode"):
        quantizer.step()
    with quantizer.calibration_mode(), pytest.raises(RuntimeError, match="finalize"):
        quantizer.finalize(backend="_torch")
    with pytest.warns(UserWarning, match="already been prepared"):
        quantizer.prepare((tokens,))


def test_running_ranges_start_with_calibration_data():
    """Example inputs leave no trace in the moving average; its constant comes from the spec."""
    spec = QuantizationSpec(qparam_calculator_cls="moving_average", averaging_constant=0.5)
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_input_spec={0: spec}, op_output_spec=None, op_state_spec=None),
        execution_mode="eager",
    )
    quantizer = Quantizer(nn.Linear(1, 1), config)
    prepared = quantizer.prepare((torch.full((2, 1), 1e-3),))
    with quantizer.calibration_mode():
        prepared(torch.tensor([[-4.0], [8.0]]))
        prepared(torch.tensor([[-2.0], [16.0]]))
    calculator = prepared.linear_quantize_input.qparams_calculator
    assert calculator.running_max.item() == 12.0
    assert calculator.running_min.item() == -3.0


def test_schedule_drives_the_switches(tokens):
    """Observer from 0, fake quantization from 1, observer off from 3; the count survives re-entry."""
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(qat_schedule=QATSchedule(enable_fake_quant=1, disable_observer=3)),
        execution_mode="eager",
    )
    quantizer, prepared = make_prepared(tokens, config)
    seen = []
    with quantizer.training_mode():
        seen.append(states(prepared))
        quantizer.step()
        seen.append(states(prepared))
    with quantizer.training_mode():
        seen.append(states(prepared))
        quantizer.step()
        quantizer.step()
        seen.append(states(prepared))
    assert seen == [{(True, False)}, {(True, True)}, {(True, True)}, {(False, True)}]
    with pytest.raises(RuntimeError, match="qat_schedule"):
        quantizer.disable_observer()


def test_switches_of_one_module(tokens):
    """A submodule's simulators can be switched alone; a foreign module is refused."""
    quantizer, prepared = make_prepared(tokens)
    quantizer.disable_fake_quant(prepared.blocks[0])
    off = {
        n
        for n, m in prepared.named_modules()
        if isinstance(m, FakeQuantizeImplBase) and not m.fake_quant_enabled.item()
    }
    assert off
    assert all(name.startswith("blocks.0.") for name in off)
    quantizer.enable_fake_quant()
    assert states(prepared) == {(False, True)}
    with pytest.raises(ValueError, match="not part of the model"):
        quantizer.enable_observer(nn.Linear(1, 1))


@pytest.mark.parametrize("survive", ["deepcopy", "pickle", "state_dict", "torch.save"])
def test_prepared_model_survives(tokens, survive, tmp_path):
    """A copy by any way computes the same and can be calibrated and finalized on."""
    quantizer, prepared = make_prepared(tokens)
    expected = prepared(tokens)
    if survive == "deepcopy":
        other = copy.deepcopy(prepared)
    elif survive == "pickle":
        other = pickle.loads(pickle.dumps(prepared))
    else:
        torch.manual_seed(1)
        other = Quantizer(TinyTransformer(), QuantizerConfig(execution_mode="eager")).prepare((tokens[:1, :3],)).eval()
        state = prepared.state_dict()
        if survive == "torch.save":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state)
    assert torch.equal(other(tokens), expected)
    with quantizer.calibration_mode(other):
        other(tokens)
    finalized = quantizer.finalize(other, ExportBackend._TORCH)
    assert torch.isfinite(finalized(tokens)).all()
    assert torch.equal(prepared(tokens), expected)


@pytest.mark.parametrize("make", [pytest.param("transformer", marks=pytest.mark.slow), "cnn"])
def test_compiled_model_computes_the_same(make, tokens):
    """torch.compile of a prepared model, with activations, in eval mode."""
    torch.manual_seed(0)
    model, inputs = (
        (TinyTransformer(), (tokens,)) if make == "transformer" else (GroupedCNN(), (torch.randn(2, 3, 8, 8),))
    )
    prepared = Quantizer(model, QuantizerConfig(execution_mode="eager")).prepare(inputs).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(torch.compile(prepared, backend="aot_eager")(*inputs), prepared(*inputs), atol=1e-5)


def test_unmatched_keys_warn_each_or_raise_together():
    """strict=True lists all problems in one error; otherwise there is one warning for each."""
    config = QuantizerConfig(
        module_name_configs={"layer0": None},
        module_type_configs={"torch.nn.modules.conv.Conv2d": None},
        execution_mode="eager",
    )
    model, x = nn.Sequential(nn.Linear(4, 4)), (torch.randn(1, 4),)
    with pytest.raises(PlanError) as caught:
        Quantizer(model, config).prepare(x, strict=True)
    assert len(caught.value.problems) == 2
    assert "layer0" in str(caught.value)
    assert "Conv2d" in str(caught.value)
    with pytest.warns(ConfigMatchWarning) as warned:
        Quantizer(model, config).prepare(x)
    assert len([w for w in warned if issubclass(w.category, ConfigMatchWarning)]) == 2


def test_blocks_that_do_not_divide_are_skipped_with_a_warning():
    """The layer is named, and stays float."""
    model = nn.Sequential(nn.Linear(48, 8), nn.Linear(8, 4))
    quantizer = Quantizer(model, QuantizerConfig.presets.w4_per_block(block_size=16, execution_mode="eager"))
    with pytest.warns(ConfigMatchWarning, match=r"1\.weight.*block size 16"):
        prepared = quantizer.prepare((torch.randn(2, 48),))
    assert not hasattr(prepared[1], "parametrizations")
    assert hasattr(prepared[0], "parametrizations")


@pytest.mark.parametrize(
    ("model", "config", "error"),
    [("no module", None, TypeError), (nn.Linear(2, 2), {"quantization_config": {}}, TypeError)],
)
def test_wrong_arguments_are_refused(model, config, error):
    """A non-module and a plain dict are named."""
    with pytest.raises(error):
        Quantizer(model, config)


def test_example_inputs_must_be_a_tuple():
    """A bare tensor is a common slip; the message shows the right form."""
    quantizer = Quantizer(nn.Linear(2, 2), QuantizerConfig(execution_mode="eager"))
    with pytest.raises(TypeError, match=r"\(x,\)"):
        quantizer.prepare(torch.randn(1, 2))
    with pytest.raises(ValueError, match="empty"):
        quantizer.prepare(())


def test_zero_size_batches_and_nan_do_not_crash():
    """A batch without rows passes through; NaN in a weight stays where it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((torch.randn(2, 4),)).eval()
    assert prepared(torch.zeros(0, 4)).shape == (0, 4)
    with quantizer.calibration_mode():
        prepared(torch.zeros(0, 4))
    assert torch.isfinite(prepared(torch.randn(2, 4))).all()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_scripted_modules_are_refused_by_name(mode):
    """The remedy is the module that was scripted."""
    with pytest.raises(TypeError, match=r"TorchScript module .*scripted or traced from"):
        Quantizer(torch.jit.script(nn.Linear(2, 2)), QuantizerConfig(execution_mode=mode))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_parts_are_refused_or_left_out():
    """Eager mode calls what the configuration leaves out; torch.export takes none."""
    x, model = torch.randn(3, 4), nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2)).eval()
    eager, graph = (QuantizerConfig.presets.w8(execution_mode=mode) for mode in ("eager", "graph"))
    with pytest.raises(PlanError, match=r"torchscript\] 0: .*set_module_name\('0', None\)"):
        Quantizer(model, eager).prepare((x,))
    with pytest.raises(TraceError, match=r"TorchScript module, '0'.*set_module_name\('0', None\)"):
        Quantizer(model, graph).prepare((x,))
    expected = model(x)
    prepared = Quantizer(model, eager.set_module_name("0", None)).prepare((x,), strict=True)
    assert hasattr(prepared[1], "parametrizations")
    assert torch.allclose(prepared(x), expected, atol=0.05)


@pytest.mark.parametrize("part", ["model", "layer", "wrapped"])
def test_compiled_models_are_prepared(part):
    """Before or after their first call; they compile again, with the simulators in them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    x, plain = torch.randn(3, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model = copy.deepcopy(plain)
    if part == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if part == "model" else model[0]).compile(backend="eager")
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        for one in (quantizers := [Quantizer(m, QuantizerConfig(execution_mode="eager")) for m in (model, plain)]):
            one.prepare((x,))
        torch.testing.assert_close(model(x), plain(x))
        for one, prepared in zip(quantizers, (model, plain), strict=True):
            with one.calibration_mode():
                prepared(3 * x)
        torch.testing.assert_close(model(3 * x), plain(3 * x))


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_without_data_are_refused_by_name(mode, preset):
    """Models on meta can be planned for, not prepared."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("meta").eval(), torch.zeros(2, 4, device="meta")
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    assert len(quantizer.plan((x,)).placements) >= 2
    with pytest.raises(ValueError, match=r"Quantizer.*meta device.*'0\.weight'.*'1\.weight'.*load_state_dict"):
        quantizer.prepare((x,))
    assert not any(hasattr(module, "parametrizations") for module in model.modules())


def test_weights_of_inference_mode_are_refused_by_name():
    """A copy that was made outside of it can be prepared."""
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(2, 4)
    x = x.clone()
    with pytest.raises(ValueError, match=r"inference_mode.*'0\.weight', '1\.weight'.*copy\.deepcopy"):
        Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,))
    assert not any(hasattr(module, "parametrizations") for module in model.modules())
    with pytest.raises(TraceError, match=r"'0\.weight' was made under torch\.inference_mode.*copy\.deepcopy"):
        Quantizer(model, QuantizerConfig.presets.w8()).prepare((x,))
    for mode in ("eager", "graph"):
        prepared = Quantizer(copy.deepcopy(model), QuantizerConfig(execution_mode=mode)).prepare((x,))
        with torch.no_grad():
            assert torch.allclose(prepared(x), model(x), atol=0.1)


IN_SCOPES = {
    "cond": lambda layer, x: torch.cond(x.sum() > 0, lambda y: layer(y), lambda y: y * 2, (x,)),
    "map_impl": lambda layer, x: control_map(lambda row: layer(row), x),
    "scan": lambda layer, x: scan(lambda carried, row: (layer(row) + carried, carried.clone()), x[0] * 0, x)[1],
    "a transform such as torch.vmap": lambda layer, x: associative_scan(
        lambda one, other: layer(one) + other, x, 0, combine_mode="generic"
    ),
}


@pytest.mark.parametrize("name", IN_SCOPES)
def test_layers_in_branches_and_loops_are_told(name):
    """Weights that only a higher-order operator reads stay as they are."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(IN_SCOPES[name](self.first, x))

    torch.manual_seed(0)
    x, model, config = torch.ones(3, 4), Branches().eval(), QuantizerConfig.presets.w8(execution_mode="eager")
    with pytest.raises(PlanError, match=rf"enclosed-weight.*1 weight.*first\.weight \({name}\)"):
        Quantizer(model, config).prepare((x,), strict=True)
    expected = model(x)
    prepared = Quantizer(model, config.set_module_name("first", None)).prepare((x,), strict=True)
    assert torch.allclose(prepared(x), expected, atol=0.05)


@pytest.mark.parametrize("batches", [1, 5])
def test_calls_of_one_module_move_its_range_together(batches):
    """A shared layer sees small numbers, then large ones: each forward counts with the union of its calls."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.layer.weight)

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x) * 4
            return x

    torch.manual_seed(0)
    quantizer = Quantizer(Shared(), QuantizerConfig(execution_mode="eager"))
    data = [torch.randn(2, 4) for _ in range(batches)]
    prepared = quantizer.prepare((data[0],))
    simulator = prepared.layer.linear_quantize_input
    with quantizer.calibration_mode(), torch.no_grad():
        for batch in data:
            prepared(batch)
    gain = float(prepared.layer.weight.detach()[0, 0])  # nearly 1: weights are quantized while calibrating
    ends = [max(float((batch * 16 * gain**2).max()), 0.0) for batch in data]
    expected = ends[0]
    for end in ends[1:]:
        expected = 0.99 * expected + 0.01 * end
    assert float(simulator.qparams_calculator.running_max) == pytest.approx(expected, rel=1e-5)


class _Twice(nn.Module):
    """Calls one layer twice, and may fail in between."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x):
        large = self.layer(10 * x)
        if self.fails:
            raise RuntimeError("out of memory")
        return large.sum() + self.layer(x).sum()


def test_a_new_calibration_begins_with_the_first_call_of_a_forward():
    """Whatever became of the forward before it: the range of each forward is the union of its calls."""
    spec = QuantizationSpec(averaging_constant=1.0)
    config = ModuleQuantizerConfig(op_output_spec=None, op_input_spec={"*": spec})
    quantizer = Quantizer(_Twice().eval(), QuantizerConfig(execution_mode="eager", global_config=config))
    x = torch.ones(1, 4)
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
        prepared.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            prepared(x)
        prepared.fails = False
    with quantizer.calibration_mode():
        for _ in range(3):
            prepared(x)
    ranges = {name: value for name, value in prepared.named_buffers() if name.endswith("running_max")}
    assert ranges["layer.linear_quantize_input.qparams_calculator.running_max"].item() == 10.0


def test_preparing_leaves_what_forward_keeps_as_it_was():
    """Two forwards run while preparing: a counter would begin at 2, and a cache with the example's numbers."""

    class Streaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.last, self.log = nn.Linear(4, 4), 0, None, []

        def forward(self, x):
            self.calls += 1
            self.log.append(x)
            y = self.layer(x) if self.last is None else self.layer(x) + self.last
            self.last = y
            return y

    model = Streaming().eval()
    Quantizer(model, QuantizerConfig(execution_mode="eager")).prepare((torch.randn(2, 4),))
    assert (model.calls, model.last, model.log) == (0, None, [])
