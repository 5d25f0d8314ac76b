"""Prepare, calibrate, train, switch modes, copy, finalize: the life of a quantized graph."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright import ExportBackend
from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec import PerBlockGranularity
from tests.lambda_module import Lambda
from tests.measures import sqnr

from .networks import IMAGE, calibrated, net, simulators, train_steps


@pytest.fixture
def quantizer() -> Quantizer:
    """A quantizer of the small network: int8 weights and activations."""
    return Quantizer(net(), QuantizerConfig())


class TestPrepare:
    def test_returns_a_new_graph_and_leaves_the_model_alone(self) -> None:
        """The user's model computes what it did before, and has no simulators."""
        model = net()
        before = model(IMAGE)
        prepared = Quantizer(model, QuantizerConfig()).prepare((IMAGE,))
        assert isinstance(prepared, fx.GraphModule)
        assert not simulators(model)
        assert torch.equal(model(IMAGE), before)
        assert 10 < sqnr(before, prepared(IMAGE)) < 80

    def test_leaves_observers_off_and_fake_quantize_on(self, quantizer: Quantizer) -> None:
        """A prepared model is ready for inference."""
        for simulator in simulators(quantizer.prepare((IMAGE,))):
            assert simulator.observer_enabled.item() == 0
            assert simulator.fake_quant_enabled.item() == 1

    def test_keeps_the_mode_of_the_model(self) -> None:
        """A model in training mode gives a graph in training mode."""
        assert Quantizer(net().train(), QuantizerConfig()).prepare((IMAGE,)).training
        assert not Quantizer(net().eval(), QuantizerConfig()).prepare((IMAGE,)).training

    @pytest.mark.parametrize("training", [False, True])
    def test_simulators_are_in_the_mode_of_the_model(self, training: bool) -> None:
        """As a model in eval mode is prepared, calibrated and called, its weights are quantized once."""
        x = torch.randn(4, 8)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).train(training)
        prepared = calibrated(Quantizer(model, QuantizerConfig()), (x,))
        found = simulators(prepared)
        assert {part.training for simulator in found for part in simulator.modules()} == {training}
        weights = [s for s in found if s.quantization_target == CompressionTargetTensor.WEIGHT]
        results: list[list[torch.Tensor]] = [[], []]
        with torch.no_grad():
            for seen in results:
                hooks = [s.register_forward_hook(lambda _m, _a, y, seen=seen: seen.append(y)) for s in weights]
                prepared(x)
                for hook in hooks:
                    hook.remove()
        assert len(results[0]) == len(weights) > 0
        kept = [first is second for first, second in zip(*results, strict=True)]
        assert not any(kept) if training else all(kept)

    def test_a_second_prepare_is_refused(self, quantizer: Quantizer) -> None:
        """As in the peer."""
        quantizer.prepare((IMAGE,))
        with pytest.raises(RuntimeError, match="Model has already been prepared"):
            quantizer.prepare((IMAGE,))

    def test_a_plan_is_made_without_preparing(self, quantizer: Quantizer) -> None:
        """``plan`` may be called any number of times, and prints every weight."""
        plan = quantizer.plan((IMAGE,))
        assert str(plan) == str(quantizer.plan((IMAGE,)))
        assert {row.tensor for row in plan if row.kind == "weight"} == {"conv1.weight", "conv2.weight", "fc.weight"}
        quantizer.prepare((IMAGE,))

    def test_example_inputs_do_not_change_a_cache(self) -> None:
        """A buffer that forward writes to is as before, although activations were observed."""

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(4))
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.seen.add_(x.sum(0))
                return self.linear(x + self.seen)

        model = Counting().eval()
        prepared = Quantizer(model, QuantizerConfig()).prepare((torch.ones(2, 4),))
        assert torch.equal(model.seen, torch.zeros(4))
        prepared(torch.ones(2, 4))
        assert torch.allclose(prepared.seen, torch.full((4,), 2.0), rtol=1e-2)  # what is added is quantized

    def test_does_not_import_torchao(self) -> None:
        """A whole graph prepare, calibration and finalize get by without torchao."""
        code = (
            "import sys, torch\n"
            "from bitwright.quantization import Quantizer, QuantizerConfig\n"
            "q = Quantizer(torch.nn.Linear(4, 4), QuantizerConfig())\n"
            "x = torch.randn(2, 4)\n"
            "p = q.prepare((x,))\n"
            "with q.calibration_mode():\n"
            "    p(x)\n"
            "q.finalize(backend='_torch')\n"
            "assert not [name for name in sys.modules if name.startswith('torchao')]\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    def test_preserved_attributes(self, caplog: pytest.LogCaptureFixture) -> None:
        """Named attributes are on the prepared model, its copies and the finalized one; missing ones are logged."""
        model: Any = net()
        model.labels = {"key": [1, 2]}
        quantizer = Quantizer(model, QuantizerConfig(preserved_attributes=["labels", "nonexistent"]))
        prepared: Any = quantizer.prepare((IMAGE,))
        assert prepared.labels == copy.deepcopy(prepared).labels == {"key": [1, 2]}
        finalized: Any = quantizer.finalize(backend="_torch")
        assert finalized.labels == {"key": [1, 2]}
        assert not hasattr(prepared, "nonexistent")
        assert "nonexistent" in caplog.text
        assert "will be skipped" in caplog.text


class TestModes:
    def test_train_and_eval_return_the_model_and_switch_it(self, quantizer: Quantizer) -> None:
        """Dropout and batch norm follow; the peer's ``train`` returns None."""
        prepared = calibrated(quantizer, (IMAGE,))
        for model in (prepared, quantizer.finalize(backend="_torch")):
            first = model.eval()(IMAGE)
            assert model.eval() is model
            assert torch.equal(model(IMAGE), first)
            assert model.train() is model
            assert model._exported_training
            assert not torch.equal(model(IMAGE), model(IMAGE))  # dropout
            model.eval()
            assert not model._exported_training
        assert not any(module.training for module in prepared.modules())

    @pytest.mark.parametrize("training", [False, True])
    def test_dropout_keeps_its_probability(self, training: bool) -> None:
        """In whatever mode it was captured; the peer trains with 0.5."""
        for probability in (0.0, 0.9):
            model = nn.Sequential(nn.Linear(8, 256), nn.Dropout(probability)).train(training)
            prepared = Quantizer(model, QuantizerConfig.presets.w8()).prepare((torch.randn(4, 8),)).train()
            dropped = (prepared(torch.randn(4, 8)) == 0).float().mean().item()
            assert dropped == pytest.approx(probability, abs=0.05)

    def test_training_updates_batch_norm_statistics(self, quantizer: Quantizer) -> None:
        """Running statistics and their counter advance in training as those of the float model do."""
        float_model = net().train()
        prepared: Any = quantizer.prepare((IMAGE,))
        prepared.train()
        for simulator in simulators(prepared):
            simulator.disable_fake_quant()
        prepared(IMAGE)
        float_model(IMAGE)
        for name in ("bn1", "bn2"):
            mine, theirs = getattr(prepared, name), getattr(float_model, name)
            torch.testing.assert_close(mine.running_mean, theirs.running_mean, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-4, atol=1e-5)
            assert mine.num_batches_tracked == theirs.num_batches_tracked == 1

    def test_calibration_mode(self, quantizer: Quantizer) -> None:
        """Eval mode, observers on, activations unquantized, weights quantized; everything back afterwards."""
        prepared: Any = quantizer.prepare((IMAGE,))
        prepared.train()
        with quantizer.calibration_mode():
            assert not prepared.training
            for simulator in simulators(prepared):
                weight = simulator.quantization_target == CompressionTargetTensor.WEIGHT
                assert simulator.observer_enabled.item() == 1
                assert simulator.fake_quant_enabled.item() == int(weight)
        assert prepared.training
        assert all(not s.observer_enabled.item() and s.fake_quant_enabled.item() for s in simulators(prepared))

    def test_training_mode_trains(self, quantizer: Quantizer) -> None:
        """Weights and scales move in training and stand still afterwards."""
        prepared = calibrated(quantizer, (IMAGE,))
        before = {name: p.detach().clone() for name, p in prepared.named_parameters()}
        moving = [s for s in simulators(prepared) if s.quantization_target == CompressionTargetTensor.ACTIVATION]
        scales = [s.calculate_qparams()[0].clone() for s in moving]
        train_steps(quantizer, prepared, (IMAGE,), (IMAGE * 2,))
        unmoved = {name for name, p in prepared.named_parameters() if torch.equal(p, before[name])}
        assert unmoved <= {"conv2.bias"}  # a batch norm behind it cancels its gradient
        assert all(not torch.equal(s.calculate_qparams()[0], old) for s, old in zip(moving, scales, strict=True))
        assert not prepared.training

    def test_schedules_switch_by_the_deciding_module(self) -> None:
        """A schedule of one module reaches the simulators of its ops and no others."""
        schedule = QATSchedule(enable_observer=0, enable_fake_quant=1, disable_observer=2)
        config = QuantizerConfig(
            global_config=ModuleQuantizerConfig(),
            module_name_configs={"fc": ModuleQuantizerConfig(qat_schedule=schedule)},
        )
        quantizer = Quantizer(net(), config)
        prepared: Any = quantizer.prepare((IMAGE,))
        weights = {s.tensor_fqn: s for s in simulators(prepared)}
        fc, conv = weights["fc.weight"], weights["conv1.weight"]
        with quantizer.training_mode():
            states = []
            for _ in range(3):
                states.append((fc.observer_enabled.item(), fc.fake_quant_enabled.item()))
                assert (conv.observer_enabled.item(), conv.fake_quant_enabled.item()) == (1, 1)
                quantizer.step()
        assert states == [(1, 0), (1, 1), (0, 1)]

    def test_switches_of_one_module(self, quantizer: Quantizer) -> None:
        """Switching a module of the original model reaches the simulators that it decided about."""
        prepared = quantizer.prepare((IMAGE,))
        model: Any = quantizer._engine.model
        quantizer.disable_fake_quant(model.fc)
        off = {s.tensor_fqn for s in simulators(prepared) if not s.fake_quant_enabled.item()}
        assert "fc.weight" in off
        assert "conv1.weight" not in off
        with pytest.raises(ValueError, match="not part of the model"):
            quantizer.enable_observer(nn.Linear(2, 2))

    def test_switches_of_a_list_of_modules_that_are_known_by_other_names(self) -> None:
        """A list holds modules, whatever these are called elsewhere."""
        model = net()
        model.listed = nn.ModuleList([model.fc])
        quantizer = Quantizer(model, QuantizerConfig())
        prepared = quantizer.prepare((IMAGE,))
        quantizer.disable_fake_quant(model.listed)
        switched = [simulator for simulator in simulators(prepared) if not simulator.fake_quant_enabled]
        quantizer.enable_fake_quant()
        quantizer.disable_fake_quant(model.fc)
        assert switched == [simulator for simulator in simulators(prepared) if not simulator.fake_quant_enabled] != []

    def test_switches_of_one_simulator(self, quantizer: Quantizer) -> None:
        """A simulator of the prepared model is switched alone."""
        prepared = quantizer.prepare((IMAGE,))
        first, *others = simulators(prepared)
        quantizer.disable_fake_quant(first)
        assert not first.fake_quant_enabled.item()
        assert all(simulator.fake_quant_enabled.item() for simulator in others)

    def test_torchaos_switches_work(self, quantizer: Quantizer) -> None:
        """``model.apply(torchao's enable_observer)`` reaches our simulators."""
        torchao = pytest.importorskip("torchao.quantization.pt2e")
        prepared = quantizer.prepare((IMAGE,))
        prepared.apply(torchao.enable_observer)
        assert all(s.observer_enabled.item() == 1 for s in simulators(prepared))
        prepared.apply(torchao.disable_observer)
        assert all(s.observer_enabled.item() == 0 for s in simulators(prepared))


def through_state_dict(prepared: nn.Module) -> nn.Module:
    """A freshly built and prepared model with the state of ``prepared``."""
    fresh = Quantizer(net(seed=5), QuantizerConfig()).prepare((IMAGE,))
    fresh.load_state_dict(prepared.state_dict())
    return fresh


class TestCopies:
    @pytest.mark.parametrize(
        "way",
        [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_state_dict],
        ids=["deep", "pickle", "state"],
    )
    def test_a_copy_computes_the_same_and_finalizes(self, quantizer: Quantizer, way: Callable[[Any], Any]) -> None:
        """Copies carry weights, scales and switches; they live on their own."""
        prepared = calibrated(quantizer, (IMAGE,), (IMAGE * 2,))
        twin = way(prepared)
        expected = prepared(IMAGE)
        assert torch.equal(twin(IMAGE), expected)
        assert torch.equal(quantizer.finalize(twin, "_torch")(IMAGE), expected)
        with torch.no_grad():
            next(twin.parameters()).zero_()
        assert torch.equal(prepared(IMAGE), expected)

    def test_shared_simulators_stay_shared(self) -> None:
        """One simulator at several places has several names, in copies too."""
        model = Lambda(lambda s, x: torch.cat([s.l(x), x], 1), l=nn.Linear(4, 4))
        prepared = Quantizer(model, QuantizerConfig()).prepare((torch.randn(2, 4),))
        for twin in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
            assert twin.activation_post_process_0 is twin.activation_post_process_2 is twin.activation_post_process_3

    def test_compiles_whole_and_exports_again(self, quantizer: Quantizer) -> None:
        """``torch.compile(fullgraph=True)`` and ``torch.export`` take prepared and finalized models."""
        prepared = calibrated(quantizer, (IMAGE,))
        for model in (prepared.eval(), quantizer.finalize(backend="_torch")):
            expected = model(IMAGE)
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert sqnr(expected, compiled(IMAGE)) > 60
            again = torch.export.export(model, (IMAGE,)).module()
            assert sqnr(expected, again(IMAGE)) > 60


class TestFinalize:
    @pytest.mark.parametrize("train", [False, True], ids=["calibrated", "trained"])
    def test_equals_the_prepared_model(self, quantizer: Quantizer, train: bool) -> None:
        """Bit for bit, with batch norms folded."""
        prepared = calibrated(quantizer, (IMAGE,))
        if train:
            train_steps(quantizer, prepared, (IMAGE,), (IMAGE + 1,))
        finalized = quantizer.finalize(backend=ExportBackend._TORCH)
        assert torch.equal(finalized(IMAGE * 0.7), prepared(IMAGE * 0.7))
        assert not [n for n in finalized.graph.nodes if "batch_norm" in n.name]
        assert not any("running_mean" in name for name in finalized.state_dict())

    def test_leaves_the_prepared_model_alone(self, quantizer: Quantizer) -> None:
        """It can be finalized again, calibrated further and trained; the first result stays what it was."""
        prepared = calibrated(quantizer, (IMAGE,))
        first = quantizer.finalize(backend="_torch")
        expected = first(IMAGE)
        assert torch.equal(quantizer.finalize(backend="_torch")(IMAGE), expected)
        with quantizer.calibration_mode():
            prepared(IMAGE * 50)
        assert torch.equal(first(IMAGE), expected)
        assert not torch.equal(prepared(IMAGE), expected)
        assert quantizer._is_model_prepared(prepared)
        assert not quantizer._is_model_prepared(first)

    def test_unknown_arguments_are_refused(self, quantizer: Quantizer) -> None:
        """Misspelled ones were taken without a word."""
        quantizer.prepare((IMAGE,))
        finalize: Any = quantizer.finalize
        with pytest.raises(TypeError, match="mmap_dri"):
            finalize(backend="_torch", mmap_dri="x")
        with pytest.raises(TypeError, match="positional"):
            finalize(None, "_torch", "folder")

    def test_the_finalized_model_is_in_eval_mode(self) -> None:
        """Even if the prepared one is in training mode."""
        quantizer = Quantizer(net().train(), QuantizerConfig())
        prepared = quantizer.prepare((IMAGE,))
        finalized = quantizer.finalize(backend="_torch")
        assert not finalized.training
        assert torch.equal(finalized(IMAGE), prepared.eval()(IMAGE))

    def test_a_dynamic_batch_survives_everything(self) -> None:
        """Prepare, training, finalize and re-export with a free batch size."""
        shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
        quantizer = Quantizer(net(), QuantizerConfig())
        prepared: Any = quantizer.prepare((IMAGE,), dynamic_shapes=shapes)
        train_steps(quantizer, prepared, (IMAGE,), (IMAGE[:2],))
        finalized = quantizer.finalize(backend="_torch")
        bigger = torch.cat([IMAGE, IMAGE, IMAGE])
        assert torch.equal(finalized(bigger), prepared(bigger))
        again = torch.export.export(finalized, (IMAGE,), dynamic_shapes=shapes).module()
        assert again(bigger).shape == (12, 4)

    def test_foreign_models_are_refused(self, quantizer: Quantizer) -> None:
        """Only what ``prepare`` returned can be finalized."""
        with pytest.raises(RuntimeError, match="prepared"):
            quantizer.finalize(net(), "_torch")
        quantizer.prepare((IMAGE,))
        with pytest.raises(TypeError):
            quantizer.finalize("model", "_torch")  # type: ignore[arg-type]


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types(self, dtype: torch.dtype) -> None:
        """Activations keep the model's dtype, and the finalized model equals the prepared one."""
        model, x = net().to(dtype), IMAGE.to(dtype)
        quantizer = Quantizer(model, QuantizerConfig())
        prepared = calibrated(quantizer, (x,))
        finalized = quantizer.finalize(backend="_torch")
        assert prepared(x).dtype == dtype
        assert torch.equal(finalized(x), prepared(x))
        assert sqnr(model(x).float(), prepared(x).float()) > 15


class TestBlocks:
    def test_blocks_that_do_not_divide_leave_the_tensor_alone(self) -> None:
        """The plan warns and names the tensor; the rest is quantized."""
        model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 96))
        spec = QuantizationSpec(granularity=PerBlockGranularity(axis=0, block_size=32))
        module_config = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
        quantizer = Quantizer(model, QuantizerConfig(global_config=module_config))
        with pytest.warns(UserWarning, match=r"0\.weight.*32"):
            prepared = quantizer.prepare((torch.randn(1, 64),))
        assert [s.tensor_fqn for s in simulators(prepared)] == ["1.weight"]


@pytest.mark.parametrize("batches", [1, 4])
def test_tensors_that_share_a_simulator_move_its_range_together(batches: int) -> None:
    """Around a concatenation: the small tensor comes first, and does not hold the range of the large one down."""
    torch.manual_seed(0)
    model = Lambda(lambda s, x: torch.cat([x * 0.5, x * 4], -1) + 0.0)
    data = [torch.randn(4, 8) for _ in range(batches)]
    quantizer = Quantizer(model.eval(), QuantizerConfig())
    prepared: Any = quantizer.prepare((data[0],))
    with quantizer.calibration_mode(), torch.no_grad():
        for batch in data:
            prepared(batch)
    expected = float((data[0] * 4).max())
    for batch in data[1:]:
        expected = 0.99 * expected + 0.01 * float((batch * 4).max())
    shared = next(node for node in prepared.graph.nodes if node.name.startswith("cat")).args[0][0]
    ranges = prepared.get_submodule(shared.target).qparams_calculator
    assert float(ranges.running_max) == pytest.approx(expected, rel=1e-5)


def test_a_compiled_step_observes_what_the_other_does() -> None:
    """Tensors that share a simulator move its range together, and what is simulated may be added to in place."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            y += x
            return torch.cat([y, x], -1)

    results: list[dict[str, torch.Tensor]] = []
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        quantizer = Quantizer(Small(), QuantizerConfig(global_config=ModuleQuantizerConfig(op_state_spec=None)))
        prepared: Any = quantizer.prepare((data[0],))
        run = torch.compile(prepared, fullgraph=True, backend="aot_eager") if compiled else prepared
        with quantizer.training_mode():
            for batch in data:
                run(batch * 4).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in prepared.named_parameters()}
        results.append({**prepared.state_dict(), **gradients})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


class Cached(nn.Module):
    """Keeps keys in a buffer, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.keys[:4] = self.key(x)
        return torch.softmax(self.query(x) @ self.keys[:4].t(), -1) @ x


def test_what_is_kept_from_call_to_call_carries_no_gradients_over() -> None:
    """A second step had gone back into the graph of the first one, and the trained model could not be copied."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    quantizer = Quantizer(Cached(), QuantizerConfig())
    prepared = calibrated(quantizer, (x,))
    with quantizer.training_mode():
        for _ in range(2):
            prepared(x).square().mean().backward()
    assert prepared.query.weight.grad.any()
    assert not prepared.keys.requires_grad
    prepared.eval()
    assert torch.equal(copy.deepcopy(prepared)(x), prepared(x))


class PartialConvolution(nn.Module):
    """As in PLKSR and FasterNet: a convolution of some channels, written over them; others read them before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.partial = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.before, self.after = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.first(x))
        before = self.before(x)
        x[:, :4] = self.partial(x[:, :4])
        return before + self.after(x)


class Convolved(TorchDispatchMode):
    """Keeps what is convolved, as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.inputs.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def test_what_is_written_through_a_view_is_simulated_as_each_reader_sees_it() -> None:
    torch.manual_seed(0)
    model, x = PartialConvolution().eval(), torch.randn(2, 3, 8, 8)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="graph"))
    prepared: Any = quantizer.prepare((x,))
    with torch.no_grad(), quantizer.calibration_mode(), Convolved() as floats:
        prepared(x)
    prepared.eval()
    with torch.no_grad(), Convolved() as codes:
        result = prepared(x)
    with torch.no_grad():
        expected = model(x)
    assert len(floats.inputs) == 4
    for before, after in zip(floats.inputs, codes.inputs, strict=True):
        assert after.unique().numel() <= 256 < before.unique().numel()
        assert sqnr(before, after) > 30
    assert sqnr(expected, result) > 30


class ResidualBlock(nn.Module):
    """A residual block whose sum and ReLU work in place, as in torchvision's ResNets, or do not."""

    def __init__(self, *, add_in_place: bool, relu_in_place: bool) -> None:
        super().__init__()
        self.add_in_place = add_in_place
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.relu = nn.ReLU(inplace=relu_in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = self.relu(self.first(x))
        out = self.second(identity)
        if self.add_in_place:
            out += identity
        else:
            out = out + identity
        return self.third(self.relu(out))


@pytest.mark.parametrize("relu_in_place", [True, False])
@pytest.mark.parametrize("add_in_place", [True, False])
def test_a_sum_in_place_in_front_of_a_relu_in_place_is_quantized(add_in_place: bool, relu_in_place: bool) -> None:
    """Simulators stand where they would if nothing were done in place, and the numbers are the same."""
    x, answers, places = torch.rand(2, 3, 4, 4), [], []
    for block in (
        ResidualBlock(add_in_place=add_in_place, relu_in_place=relu_in_place),
        ResidualBlock(add_in_place=False, relu_in_place=False),
    ):
        torch.manual_seed(0)
        for parameter in block.parameters():
            nn.init.normal_(parameter)
        quantizer = Quantizer(block.eval(), QuantizerConfig())
        prepared: Any = quantizer.prepare((x,))
        with torch.no_grad(), quantizer.calibration_mode():
            prepared(x)
        nodes = [node for node in prepared.graph.nodes if node.op == "call_module" and len(node.args) == 1]
        places.append([len(node.users) for node in nodes])
        answers.append(prepared(x))
    assert places[0] == places[1]
    assert len(places[0]) == 8  # three weights, the input, identity, the second layer, the sum, and the output
    assert torch.equal(*answers)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["deep", "pickle"])
def test_quantizers_are_copied_before_prepare_alone(quantizer: Quantizer, copied: Callable[[Any], Any]) -> None:
    """Once planned, a copy prepares as the original does; once prepared, the error says what can be copied instead."""
    quantizer.plan((IMAGE,))
    twin = copied(quantizer).prepare((IMAGE,))
    prepared = quantizer.prepare((IMAGE,))
    assert torch.equal(twin(IMAGE), prepared(IMAGE))
    with pytest.raises(TypeError, match="Copy or pickle the prepared model instead"):
        copied(quantizer)
    finalized = quantizer.finalize(copied(prepared), backend=ExportBackend._TORCH)
    assert torch.equal(finalized(IMAGE), prepared(IMAGE))
