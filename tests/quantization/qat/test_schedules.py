"""Schedules over steps, and the state that a checkpoint needs: a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._bits import set_dtype
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.qat import FakeQuantizeConfig
from bitwright.quantization.spec import QuantizationComponentFactory
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .networks import MODES, ConvNet, images, make_config

KINDS = ("plain", "lsq", "percentile")
SCHEDULE = QATSchedule(enable_fake_quant=2, disable_observer=6, freeze_batch_norm=4, least_bits={0: 8, 3: 6, 5: 1})


def simulators(model):
    return [module for module in model.modules() if isinstance(module, FakeQuantizeImplBase)]


def start(mode, kind, schedule=SCHEDULE):
    torch.manual_seed(0)
    quantizer = Quantizer(ConvNet(), make_config(mode, kind, schedule))
    prepared = quantizer.prepare((images()[0],))
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    return quantizer, prepared, optimizer


def train(quantizer, prepared, optimizer, steps):
    quantizer.step_with(optimizer) if not getattr(optimizer, "_attached", False) else None
    optimizer._attached = True
    with quantizer.training_mode():
        for step in steps:
            x, y = images(step)
            optimizer.zero_grad()
            F.cross_entropy(prepared(x), y).backward()
            optimizer.step()


def everything(prepared):
    return {name: value for name, value in prepared.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_identical(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def save(quantizer, prepared, optimizer):
    return {"quantizer": quantizer.state_dict(), "model": prepared.state_dict(), "optimizer": optimizer.state_dict()}


def restore(state, mode, kind):
    quantizer, prepared, optimizer = start(mode, kind)
    prepared.load_state_dict(state["model"])
    quantizer.load_state_dict(state["quantizer"])
    optimizer.load_state_dict(state["optimizer"])
    return quantizer, prepared, optimizer


@pytest.mark.parametrize(
    ("mode", "kind", "stop"),
    [*((mode, kind, 4) for mode in MODES for kind in KINDS), ("eager", "lsq", 1), ("graph", "plain", 7)],
)
def test_a_resumed_run_is_the_uninterrupted_one(mode, kind, stop):
    """Saved to disk in the middle of the schedule, loaded into fresh objects, trained on: equal in every bit."""
    whole = start(mode, kind)
    train(*whole, range(9))
    part = start(mode, kind)
    train(*part, range(stop))
    file = io.BytesIO()
    torch.save(save(*part), file)
    file.seek(0)
    resumed = restore(torch.load(file, weights_only=True), mode, kind)
    train(*resumed, range(stop, 9))
    assert_identical(everything(whole[1]), everything(resumed[1]))
    x = images(99)[0]
    assert torch.equal(whole[1].eval()(x), resumed[1].eval()(x))


def test_an_edge_follows_the_schedule_of_its_producer():
    """The one simulator between two layers is the output's of the first, whatever the second one's schedule says."""
    late = ModuleQuantizerConfig(op_input_spec=None, qat_schedule=QATSchedule(enable_fake_quant=3))
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_output_spec=None, qat_schedule=QATSchedule()),
        module_name_configs={"0": late},
        execution_mode="graph",
    )
    quantizer = Quantizer(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config)
    prepared = quantizer.prepare((torch.randn(2, 4),))
    edges = [s for s in simulators(prepared) if s.quantization_target == CompressionTargetTensor.ACTIVATION]
    with quantizer.training_mode():
        for step in range(5):
            assert [bool(edge.fake_quant_enabled) for edge in edges] == [step >= 3], step
            quantizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_bits_follow_the_steps(mode):
    """8 bits, 6 bits, then those of the spec; ranges stay; finalize ends the schedule with a warning."""
    quantizer, prepared, optimizer = start(mode, "plain")
    quantizer.step_with(optimizer)
    seen = []
    with quantizer.training_mode():
        for step in range(6):
            seen.append({simulator.n_bits for simulator in simulators(prepared)})
            x, y = images(step)
            F.cross_entropy(prepared(x), y).backward()
            optimizer.step()
            if step == 2:
                middle = [(s.calculate_qparams()[0].clone(), s.quant_max - s.quant_min) for s in simulators(prepared)]
    assert seen == [{8}, {8}, {8}, {6}, {6}, {4}]
    assert {span for _, span in middle} == {63}
    quantizer, prepared, _ = start(mode, "plain", QATSchedule(least_bits={0: 8, 100: 1}))
    with quantizer.training_mode():
        prepared(images()[0])
    wide = [(s.calculate_qparams()[0] * 255).clone() for s in simulators(prepared)]
    with pytest.warns(UserWarning, match="least_bits at step 0"):
        finalized = quantizer.finalize(backend="_torch")
    for simulator, span in zip(simulators(finalized), wide, strict=True):
        assert simulator.n_bits == 4
        torch.testing.assert_close(simulator.calculate_qparams()[0] * 15, span)
    assert finalized.eval()(images()[0]).isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_batch_norms_freeze(mode):
    """From its step on the running statistics stay, whatever the loop calls train() for; later they are free again."""
    quantizer, prepared, _ = start(mode, "plain", QATSchedule(freeze_batch_norm=1))
    mean = lambda: next(v.clone() for n, v in prepared.state_dict().items() if n.endswith("running_mean"))  # noqa: E731
    with quantizer.training_mode():
        first = mean()
        prepared(images(1)[0])
        second = mean()
        assert not torch.equal(first, second)
        quantizer.step()
        for seed in range(2):
            prepared.train()
            prepared(images(seed)[0])
        assert torch.equal(second, mean())
    prepared.train()
    prepared(images(3)[0])
    assert not torch.equal(second, mean())


@pytest.mark.parametrize("mode", MODES)
def test_compiled_batch_norms_freeze(mode):
    """``torch.compile`` runs them frozen from their step on, though it traced them when they were not."""
    quantizer, prepared, _ = start(mode, "plain", QATSchedule(freeze_batch_norm=2))
    compiled = torch.compile(prepared, backend="eager")
    with quantizer.training_mode():
        for seed in range(4):
            compiled.train()
            compiled(images(seed)[0])
            quantizer.step()
        twin = copy.deepcopy(prepared)
        twin.train()
        twin(images()[0])
    for model in (prepared, twin):
        (count,) = [int(v) for n, v in everything(model).items() if n.endswith("num_batches_tracked")]
        assert count == 2


class OneNorm(nn.Module):
    """Two convolutions, or one that runs twice, share a batch norm."""

    def __init__(self, convs):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.second = self.first if convs == 1 else nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.second(torch.relu(self.norm(self.first(x)))))


NORMED = {
    "conv": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    "conv with bias": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 4)),
    "no gain": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, affine=False)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8), nn.ReLU()),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU6()),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "shared norm": lambda: OneNorm(convs=2),
    "shared layer": lambda: OneNorm(convs=1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("network", "compiled"), [*((name, False) for name in NORMED), ("conv with bias", True)])
def test_frozen_batch_norms_compute_as_in_evaluation(mode, network, compiled):
    """The step's output is the evaluation's while they are frozen; simulators train on, and later so do the norms."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = NORMED[network](), torch.randn(8, 4, 6, 6) * 2 + 1
    for _ in range(20):  # running statistics are those of the batch, but for what weights will change
        model(x)
    quantizer = Quantizer(model, make_config(mode, schedule=QATSchedule(freeze_batch_norm=1), dtype="int8"))
    prepared = quantizer.prepare((x,))
    weights = [s for s in simulators(prepared) if s.quantization_target == CompressionTargetTensor.WEIGHT]
    run = torch.compile(prepared, backend="eager") if compiled else prepared
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    same, scales = [], []
    with quantizer.training_mode():
        for _ in range(3):
            run.train()
            y = run(x)
            scales.append([s.calculate_qparams()[0].clone() for s in weights])
            assert all(simulator.training for simulator in simulators(prepared))
            with quantizer.evaluating(), torch.no_grad():
                same.append(torch.equal(y, prepared(x)))
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
            quantizer.step()
    assert same == [False, True, True]
    assert not any(map(torch.equal, scales[1], scales[2]))
    prepared.train()
    with torch.no_grad():
        assert not torch.equal(prepared(x), prepared.eval()(x))
    assert all("train" not in vars(module) for module in prepared.modules())


@pytest.mark.parametrize("mode", MODES)
def test_batch_norms_freeze_at_a_step_of_their_own(mode):
    """One that froze earlier does not keep the next from it."""
    norms = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    config = make_config(mode)
    for name, step in (("0", 1), ("2", 2)):
        config.set_module_name(name, ModuleQuantizerConfig(qat_schedule=QATSchedule(freeze_batch_norm=step)))
    quantizer = Quantizer(norms, config)
    prepared = quantizer.prepare((images()[0],))
    with quantizer.training_mode():
        for seed in range(4):
            prepared(images(seed)[0])
            quantizer.step()
    counts = {n.removesuffix(".num_batches_tracked"): int(v) for n, v in everything(prepared).items() if "batches" in n}
    assert counts == {"0": 1, "2": 2}


class Listed(nn.Module):
    """A convolution, its batch norm and another, which stand in a list too; the list's names come last."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm1d(2)
        self.layers = nn.ModuleList([self.conv, self.norm, self.last])

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("key", "frozen"), [("norm", {"norm"}), ("layers.1", {"norm"}), (None, {"norm", "last"})])
def test_batch_norms_with_two_names_freeze(mode, key, frozen):
    """A schedule reaches them by either name, and as the global one."""
    schedule, config = QATSchedule(freeze_batch_norm=0), make_config(mode)
    if key is None:
        config = make_config(mode, schedule=schedule)
    else:
        config.set_module_name(key, ModuleQuantizerConfig(qat_schedule=schedule))
    quantizer = Quantizer(Listed(), config)
    prepared = quantizer.prepare((images()[0],))
    with quantizer.training_mode():
        prepared(images()[0])
    counts = {name: int(prepared.get_buffer(f"{name}.num_batches_tracked")) for name in ("norm", "last")}
    assert counts == {name: int(name not in frozen) for name in ("norm", "last")}


def test_frozen_batch_norms_get_back_their_own_train():
    """A norm whose ``train`` somebody replaced keeps that; it is called meanwhile, and stands there afterwards."""
    calls = []
    norms = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 1))
    own = norms[0].train = lambda mode=True: calls.append(mode)
    quantizer = Quantizer(norms, make_config("eager", schedule=QATSchedule(freeze_batch_norm=0)))
    prepared = quantizer.prepare((images()[0],))
    with quantizer.training_mode():
        calls.clear()
        assert prepared.train().training
        assert calls == [True]
        assert not prepared[0].training
    assert prepared[0].train is own


def test_evaluation_in_the_middle_observes_nothing():
    """Inside evaluating() ranges and modes stay as they are."""
    quantizer, prepared, _ = start("eager", "plain", None)
    with quantizer.training_mode():
        prepared(images()[0])
        before = {n: v.clone() for n, v in everything(prepared).items()}
        with quantizer.evaluating():
            assert not prepared.training
            prepared(images(1)[0] * 100)
        assert_identical(before, everything(prepared))
        assert prepared.training
    with pytest.raises(RuntimeError, match="training_mode"), quantizer.evaluating():
        pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "percentile"])
def test_ranges_that_calibration_searched_for_stay_in_training(mode, kind):
    """Ranges of a distribution are fixed by calibration, in a resumed run too; without one they follow, as averages do.

    A schedule that speaks of observers has the last word.
    """
    ranges = lambda model: [  # noqa: E731
        s.calculate_qparams()[0].clone() for s in simulators(model) if s.quantization_target.value == "activation"
    ]
    quantizer, prepared, _ = start(mode, kind, None)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(images(1)[0])
    resumed, fresh, _ = start(mode, kind, None)
    fresh.load_state_dict(prepared.state_dict())
    resumed.load_state_dict(quantizer.state_dict())
    uncalibrated, raw, _ = start(mode, kind, None)
    scheduled, observed, _ = start(mode, kind, QATSchedule(disable_observer=9))
    norms, silent, _ = start(mode, kind, QATSchedule(freeze_batch_norm=9))
    for one, model in ((scheduled, observed), (norms, silent)):
        with one.calibration_mode(), torch.no_grad():
            model(images(1)[0])
    raw(images(1)[0])
    for one, model, stays in (
        (quantizer, prepared, kind == "percentile"),
        (resumed, fresh, kind == "percentile"),
        (uncalibrated, raw, False),
        (scheduled, observed, False),
        (norms, silent, kind == "percentile"),
    ):
        before = ranges(model)
        with one.training_mode():
            model(images(2)[0] * 5)
        assert all(map(torch.equal, before, ranges(model))) == stays


def test_foreign_states_are_refused():
    """Another version or another model is an error that changes nothing."""
    quantizer, _, _ = start("eager", "plain")
    with pytest.raises(TypeError, match="got list"):
        quantizer.load_state_dict([1])
    with pytest.raises(ValueError, match="no state of a Quantizer"):
        quantizer.load_state_dict({"step_count": 3})
    other, _, _ = start("eager", "lsq")
    state = other.state_dict()
    state["progress"]["nowhere"] = [1, 0]
    with pytest.raises(ValueError, match=r"does not belong.*nowhere|does not belong"):
        quantizer.load_state_dict(state)
    assert quantizer.state_dict()["step_count"] == 0


def test_bad_schedules():
    """Bits and steps outside their ranges are refused; the peer's fields and defaults are as they were."""
    for bad in ({"least_bits": {0: 9}}, {"least_bits": {-1: 8}}, {"freeze_batch_norm": -1}):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            QATSchedule(**bad)
    assert QATSchedule().model_dump(exclude_none=True) == {"enable_observer": 0, "enable_fake_quant": 0}


class TwoNames(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("error:.*different qat_schedules")
def test_a_warning_about_schedules_that_is_an_error_leaves_the_model_alone():
    entries = {
        name: ModuleQuantizerConfig(
            op_input_spec=None, op_output_spec=None, qat_schedule=QATSchedule(enable_fake_quant=start)
        )
        for name, start in (("first", 2), ("second", 4))
    }
    model = TwoNames()
    config = QuantizerConfig(global_config=None, module_name_configs=entries, execution_mode="eager")
    with pytest.raises(UserWarning, match="different qat_schedules"):
        Quantizer(model, config).prepare((torch.randn(3, 5),))
    assert type(model.first) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["first.weight"]


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("learned", [False, True])
def test_finalizing_that_fails_leaves_the_bits_of_the_schedule(mode, learned):
    """A backend without dynamic activations refuses; in graph mode the prepared model stays what it is anyway."""
    torch.manual_seed(0)
    dynamic = QuantizationSpec(dtype="int8", qparam_calculator_cls="dynamic")
    weight = QuantizationSpec(dtype="int4", **({"fake_quantize_cls": "lsq"} if learned else {}))
    module = ModuleQuantizerConfig(
        op_input_spec={"*": dynamic},
        op_output_spec=None,
        op_state_spec={"weight": weight},
        qat_schedule=QATSchedule(least_bits={0: 8, 10: 4}),
    )
    x = torch.randn(2, 8)
    quantizer = Quantizer(nn.Linear(8, 8).eval(), QuantizerConfig(global_config=module, execution_mode=mode))
    prepared = quantizer.prepare((x,))
    with quantizer.training_mode():
        prepared(x)
        quantizer.step()
    expected, states = prepared.eval()(x), copy.deepcopy(prepared.state_dict())
    with pytest.warns(UserWarning, match="trained with more bits"), pytest.raises(NotImplementedError):
        quantizer.finalize(backend="coreml")
    assert torch.equal(prepared(x), expected)
    assert all(torch.equal(state, states[name]) for name, state in prepared.state_dict().items())
    with pytest.warns(UserWarning, match="trained with more bits"):
        finalized = quantizer.finalize(backend="_torch")
    assert not torch.equal(finalized(x), expected)
    assert torch.equal(prepared(x), expected if mode == "graph" else finalized(x))


def test_a_weight_with_two_schedules_follows_its_first_module():
    """A warning names both modules; the schedule of the one that comes first in the model is applied."""
    weight_only = {"op_input_spec": None, "op_output_spec": None}
    entries = {
        name: ModuleQuantizerConfig(**weight_only, qat_schedule=QATSchedule(enable_observer=0, enable_fake_quant=start))
        for name, start in (("first", 2), ("second", 4))
    }
    quantizer = Quantizer(
        TwoNames(), QuantizerConfig(global_config=None, module_name_configs=entries, execution_mode="eager")
    )
    with pytest.warns(UserWarning, match=r"shared by the modules 'first', 'second'.*that of 'first' holds"):
        quantizer.prepare((torch.randn(3, 5),))
    [(simulator, schedule)] = quantizer._fq_to_schedule.items()
    assert schedule.enable_fake_quant == 2
    with quantizer.training_mode():
        states = []
        for _ in range(4):
            states.append(int(simulator.fake_quant_enabled))
            quantizer.step()
    assert states == [0, 0, 1, 1]
    assert quantizer._step_count == 4


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint4])
def test_more_bits_keep_the_range_of_a_float_domain(dtype):
    """There a zero point is the value in the middle of the range, as in torchao."""
    simulator = FakeQuantizeConfig(
        dtype,
        "per_channel",
        "ASYMMETRIC",
        zero_point_domain="FLOAT",
        zero_point_precision=torch.float32,
        is_dynamic=False,
    ).build()
    weight = torch.linspace(-1, 3, 32).reshape(2, 16)
    torch.testing.assert_close(simulator(weight), weight)
    simulator.disable_observer()
    set_dtype(simulator, torch.int8 if dtype.is_signed else torch.uint8)
    torch.testing.assert_close(simulator(weight), weight)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_more_bits_keep_the_range_of_minval(dtype):
    """It is not moved to where zero would be a code."""
    spec = QuantizationSpec(dtype=dtype, qscheme="asymmetric", qformulation="minval")
    simulator = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.WEIGHT)
    ends = torch.tensor([[-1.0, 1.7]])
    torch.testing.assert_close(simulator(ends), ends)
    simulator.disable_observer()
    set_dtype(simulator, getattr(torch, dtype.replace("2", "8")))
    torch.testing.assert_close(simulator(ends), ends)
