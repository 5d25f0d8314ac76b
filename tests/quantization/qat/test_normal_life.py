"""What happens to models in training, with a prepared one, in both modes."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._averages import refuse_averaged_buffers
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.qat import DistillationLoss
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.matrix import each_pair

from .networks import MODES, ConvNet, Tied, images, make_config

both_modes = pytest.mark.parametrize("mode", MODES)
both_kinds = pytest.mark.parametrize("kind", ["plain", "lsq"])


def start(mode, kind="plain", model=None, example=None, schedule=None, **prepare):
    torch.manual_seed(0)
    quantizer = Quantizer(ConvNet() if model is None else model, make_config(mode, kind, schedule))
    prepared = quantizer.prepare((images()[0] if example is None else example,), **prepare)
    if kind == "lsq":
        with quantizer.calibration_mode(), torch.no_grad():
            prepared(images(5)[0] if example is None else example)
    return quantizer, prepared


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_identical(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


def step(model, optimizer, seed=1):
    x, y = images(seed)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize(("mode", "kind", "how"), each_pair(MODES, ["plain", "lsq"], ["deepcopy", "pickle"]))
def test_copies_train_as_the_original(mode, kind, how):
    """A copy made in the middle of training goes on by itself, and as the original does."""
    quantizer, prepared = start(mode, kind)
    with quantizer.training_mode():
        step(prepared, torch.optim.SGD(prepared.parameters(), 0.1))
        twin = copy.deepcopy(prepared) if how == "deepcopy" else pickle.loads(pickle.dumps(prepared))
        before = tensors(prepared)
        step(twin, torch.optim.SGD(twin.parameters(), 0.1), 2)
        assert_identical(before, tensors(prepared))
        step(prepared, torch.optim.SGD(prepared.parameters(), 0.1), 2)
    original, copied = ({n: v for n, v in tensors(m).items() if "enabled" not in n} for m in (prepared, twin))
    assert_identical(original, copied)


@both_modes
@both_kinds
def test_averaged_models(mode, kind):
    """An EMA model averages weights and learned steps, takes over the buffers, and quantizes."""
    quantizer, prepared = start(mode, kind)
    averaged = AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False)
    with quantizer.training_mode():
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        mean = [p.detach().clone() for p in prepared.parameters()]
        for seed in range(3):
            step(prepared, optimizer, seed)
            averaged.update_parameters(prepared)
            share = 0.5 if seed else 1.0
            mean = [torch.lerp(m, p.detach(), share) for m, p in zip(mean, prepared.parameters(), strict=True)]
    for m, p in zip(mean, averaged.parameters(), strict=True):
        torch.testing.assert_close(m, p)
    ranges = {name: b.clone() for name, b in averaged.named_buffers()}
    with quantizer.evaluating(averaged):
        y = averaged(images()[0])
        assert torch.equal(averaged(images()[0]), y)
    assert y.isfinite().all()
    assert not torch.equal(y, prepared.eval()(images()[0]))
    activations = [name for name in ranges if "running" in name and "qparams" in name]
    assert bool(activations) == (kind == "plain")
    for name in activations:
        assert torch.equal(ranges[name], averaged.get_buffer(name)), name


@both_modes
def test_averages_of_switches_and_zero_points_are_refused(mode):
    """Whole numbers are cut off: fake quantization that a schedule turned on stays off in the average."""
    quantizer, prepared = start(mode, "plain", schedule=QATSchedule(enable_fake_quant=1))
    with quantizer.training_mode():
        averages = [
            AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=used) for used in (True, False)
        ]
        by_hand = copy.deepcopy(prepared)
        for seed in range(3):
            prepared(images(seed)[0])
            quantizer.step()
            for averaged in averages:
                averaged.update_parameters(prepared)
            for own, now in zip(by_hand.buffers(), prepared.buffers(), strict=True):
                if own.shape == now.shape:
                    own.copy_(own * 0.5 + now * 0.5)
        with (
            pytest.raises(ValueError, match=r"evaluating\(\): the model is an AveragedModel.*use_buffers=False"),
            quantizer.evaluating(averages[0]),
        ):
            pass
        with pytest.raises(ValueError, match="net is an AveragedModel"):
            refuse_averaged_buffers(nn.ModuleDict({"net": averages[0]}), "here")
        partial = pytest.warns(UserWarning, match="simulators of this copy .*do not quantize")
        with partial as caught, quantizer.evaluating(by_hand):
            pass
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for model in (averages[1], copy.deepcopy(prepared), prepared):
                with quantizer.evaluating(model):
                    pass
    refuse_averaged_buffers(AveragedModel(nn.Linear(2, 2), use_buffers=True), "here")


@both_modes
def test_switches_written_past_autograd_hold_in_model_and_copy(mode):
    """A write through ``.data`` counts no version: evaluating, a mode and finalize look at the buffers themselves."""
    x = images()[0]
    quantizer, prepared = start(mode, "plain")
    prepared.eval()
    quantized = prepared(x)
    observed = copy.deepcopy(prepared)
    for model, name, value in ((prepared, "fake_quant_enabled", 0), (observed, "observer_enabled", 1)):
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(name):
                buffer.data.fill_(value)
    twin = copy.deepcopy(prepared)
    assert torch.equal(prepared.eval()(x), twin(x))
    assert not torch.equal(twin(x), quantized)
    before = tensors(observed)
    with quantizer.evaluating(observed):
        observed(x * 100)
    assert_identical(before, tensors(observed))
    for buffer_name, buffer in prepared.named_buffers():
        if buffer_name.endswith("fake_quant_enabled"):
            buffer.data.fill_(1)
    with torch.no_grad():
        assert torch.equal(quantizer.finalize(backend="_torch")(x), quantized)


@both_modes
@both_kinds
def test_gradient_checkpointing_changes_nothing(mode, kind):
    """The recomputed forward neither observes twice nor quantizes differently: equal gradients and ranges."""
    results = []
    for recompute in (False, True):
        quantizer, prepared = start(mode, kind)
        x, y = images(1)
        with quantizer.training_mode():
            for module in prepared.modules():  # batch norm statistics do move twice, in any model
                if hasattr(module, "momentum"):
                    module.momentum = 0.0
            for _ in range(2):  # the second time by the short way, where there is one
                prepared.zero_grad()
                output = checkpoint(prepared, x, use_reentrant=False) if recompute else prepared(x)
                F.cross_entropy(output, y).backward()
        state = {n: v for n, v in tensors(prepared).items() if "num_batches" not in n}
        results.append((state, {n: p.grad for n, p in prepared.named_parameters()}))
    assert_identical(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        torch.testing.assert_close(grad, results[1][1][name], rtol=0, atol=0, msg=name)


class Half(nn.Module):
    """A layer that is called twice, and an add."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(F.relu(self.layer(x) + 2 * x))


class Repeated(nn.Module):
    """One block that is called several times in a forward, checkpointed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Half()
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return x


@pytest.mark.parametrize("kind", ["plain", "percentile", "lsq"])
def test_checkpoints_of_a_layer_that_is_called_again_and_again(kind):
    """Segments are recomputed last to first, each with the ranges that its own calls had."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        quantizer, prepared = start("eager", kind, Repeated(), torch.randn(4, 6))
        prepared.recompute = recompute
        with quantizer.training_mode():
            for seed in range(3):
                prepared.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
                prepared(x).square().sum().backward()
        results.append({n: p.grad for n, p in prepared.named_parameters()} | tensors(prepared))
    assert_identical(*results)


@pytest.mark.parametrize(("mode", "kind", "dtype"), each_pair(MODES, ["plain", "lsq"], [torch.bfloat16, torch.float16]))
def test_autocast(mode, kind, dtype):
    """Half-precision activations pass through simulators whose parameters stay float32; gradients are finite."""
    quantizer, prepared = start(mode, kind)
    x, y = images(1)
    with quantizer.training_mode():
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(prepared(x), y)
        loss.backward()
    assert loss.isfinite()
    assert all(
        p.grad.isfinite().all() and p.dtype == torch.float32 for p in prepared.parameters() if p.grad is not None
    )
    for simulator in (m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
        assert simulator.calculate_qparams()[0].dtype == torch.float32
    prepared.eval()
    assert prepared(x).isfinite().all()


@both_modes
def test_gradient_accumulation(mode):
    """Two half batches accumulate to the gradient of the whole one, and count as one step of the schedule."""
    torch.manual_seed(0)
    quantizer = Quantizer(ConvNet(), make_config(mode, "lsq", QATSchedule(disable_observer=50)))
    any_batch = {} if mode == "eager" else {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2, max=64)},)}
    prepared = quantizer.prepare((images()[0],), **any_batch)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(images(1)[0])
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    quantizer.step_with(optimizer)
    x, y = images(1)
    with quantizer.training_mode():
        prepared.eval()  # batch norms see the halves apart
        for simulator in (m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
            simulator.disable_observer()
        F.cross_entropy(prepared(x), y).backward()
        whole = {n: p.grad.clone() for n, p in prepared.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        for half in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(prepared(x[half]), y[half]) / 2).backward()
        for name, parameter in prepared.named_parameters():
            if name in whole:
                torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-5, msg=name)
        optimizer.step()
    assert quantizer.state_dict()["step_count"] == 1


@both_modes
@both_kinds
def test_torch_compile(mode, kind):
    """A compiled model gives the same outputs and gradients; the backend traces without compiling to C++."""
    _, prepared = start(mode, kind)
    x, y = images(1)
    prepared.eval()
    for simulator in (m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
        simulator.disable_observer()
    expected = prepared(x)
    F.cross_entropy(expected, y).backward()
    grads = {n: p.grad.clone() for n, p in prepared.named_parameters() if p.grad is not None}
    prepared.zero_grad()
    compiled = torch.compile(prepared, backend="aot_eager", fullgraph=True)
    output = compiled(x)
    F.cross_entropy(output, y).backward()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(dict(prepared.named_parameters())[name].grad, grad, rtol=1e-3, atol=1e-4, msg=name)


@both_modes
@both_kinds
def test_tied_weights_stay_tied(mode, kind):
    """One weight, one simulator, one learned step; both uses see the same numbers after training."""
    tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))
    quantizer, prepared = start(mode, kind, Tied(), tokens)
    weights = [p for p in prepared.parameters() if p.shape == (16, 8)]
    assert len(weights) == 1
    simulators = [m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)]
    assert sum(simulator.quantization_target.value == "weight" for simulator in simulators) == 2
    with quantizer.training_mode():
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        before = weights[0].detach().clone()
        prepared(tokens).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, weights[0])


@both_modes
def test_any_batch_size(mode):
    """Prepared with one batch size, trained with others."""
    any_batch = {} if mode == "eager" else {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2, max=64)},)}
    quantizer, prepared = start(mode, "lsq", example=images()[0], **any_batch)
    with quantizer.training_mode():
        for count in (3, 8, 17):
            x, y = images(count, count)
            F.cross_entropy(prepared(x), y).backward()
    assert prepared.eval()(images(0, 5)[0]).shape == (5, 4)


@both_modes
@both_kinds
def test_frozen_submodules(mode, kind):
    """A frozen weight stays, gets no gradient, and the rest trains."""
    quantizer, prepared = start(mode, kind)
    frozen = next(p for n, p in prepared.named_parameters() if "block" in n and p.ndim == 4)
    frozen.requires_grad_(False)
    before = frozen.clone()
    with quantizer.training_mode():
        free = [p for p in prepared.parameters() if p.requires_grad]
        values = [p.detach().clone() for p in free]
        step(prepared, torch.optim.SGD(free, 0.1))
    assert torch.equal(frozen, before)
    assert frozen.grad is None
    assert sum(not torch.equal(a, b) for a, b in zip(values, free, strict=True)) > len(free) // 2


class Adapter(nn.Module):
    """A low-rank update beside a frozen layer, as LoRA does it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@both_modes
def test_adapters_over_quantized_bases(mode):
    """Only the adapter trains; the base stays at its quantized values."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))
    for p in model.parameters():
        p.requires_grad_(False)
    model[0].down.requires_grad_(True)
    model[0].up.requires_grad_(True)
    x = torch.randn(16, 8)
    config = make_config(mode)
    everywhere = config.global_config
    config.set_module_name("0", None).set_module_name(r"0\.base", everywhere)
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare((x,))
    adapters = [p for p in prepared.parameters() if p.requires_grad]
    assert {tuple(p.shape) for p in adapters} == {(2, 8), (8, 2)}
    with quantizer.training_mode():
        optimizer = torch.optim.Adam(adapters, 1e-2)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (prepared(x) - x[:, :4]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_adapters():
    """PEFT wraps the layers of a prepared eager model and trains over them."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = nn.Sequential()
    model.first, model.second = nn.Linear(8, 8), nn.Linear(8, 4)
    quantizer, prepared = start("eager", model=model, example=torch.randn(16, 8))
    x = torch.randn(16, 8)
    expected = prepared.eval()(x)
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["first"], r=2), prepared)
    torch.testing.assert_close(adapted.eval()(x), expected)
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    with quantizer.training_mode():
        adapted(x).sum().backward()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_adapters_over_quantized_convolutions():
    """PEFT builds its convolutions of the class of the layer that it wraps; copies and pickles are made of them too."""
    from peft import LoraConfig, inject_adapter_in_model

    x = images(1)[0]
    model = nn.Sequential()
    model.first, model.norm, model.relu = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    model.second, model.flat = nn.Conv2d(8, 4, 4), nn.Flatten()
    quantizer, prepared = start("eager", model=model, example=x)
    expected = prepared.eval()(x)
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["first", "second"], r=2), prepared)
    assert torch.equal(adapted.eval()(x), expected)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    with quantizer.training_mode():
        for seed in range(2):
            step(adapted, optimizer, seed)
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    trained = adapted.eval()(x)
    assert not torch.equal(trained, expected)
    for twin in (copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
        assert torch.equal(twin.eval()(x), trained)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore::bitwright.errors.UnplannedCallWarning")
@pytest.mark.parametrize("targets", [["head"], ["conv", "block"], ["conv", "block", "head"]])
def test_sums_of_adapters_are_not_taken_for_those_of_the_model(targets):
    """Adapters that come after ``prepare`` add up inside of a forward whose own sums are quantized."""
    from peft import LoraConfig, inject_adapter_in_model

    _, prepared = start("eager")
    x = images(1)[0]
    expected = prepared.eval()(x)
    adapted = inject_adapter_in_model(LoraConfig(target_modules=targets, r=2), prepared)
    assert torch.equal(adapted.eval()(x), expected)


@both_modes
def test_distillation(mode):
    """The loss is the divergence by the formula, and training with it brings the student nearer to the teacher."""
    torch.manual_seed(0)
    teacher = ConvNet().eval()
    quantizer = Quantizer(copy.deepcopy(teacher), make_config(mode, "plain", dtype="int3"))
    prepared = quantizer.prepare((images()[0],))
    loss = DistillationLoss(prepared, teacher, temperature=2.0)
    x = images(1)[0]
    output = prepared.eval()(x)
    p, q = (F.softmax(z.detach().double() / 2, -1) for z in (teacher(x), output))
    torch.testing.assert_close(loss(output, x).double(), 4 * (p * (p / q).log()).sum(-1).mean(), rtol=1e-4, atol=1e-6)
    assert not list(loss.parameters())
    values = []
    with quantizer.training_mode():
        optimizer = torch.optim.Adam(prepared.parameters(), 1e-3)
        prepared.eval()
        for _ in range(100):
            optimizer.zero_grad()
            value = loss(prepared(x), x)
            value.backward()
            optimizer.step()
            values.append(value.item())
    assert min(values[-5:]) < 0.7 * values[0]


def test_distillation_of_layers():
    """Relative squared errors of layers are added with their weights; unknown layers and temperatures are refused."""
    teacher, student = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(2))
    x = torch.randn(5, 4)
    plain, layered = DistillationLoss(student, teacher), DistillationLoss(student, teacher, layers={"0": 0.5})
    error = (student[0](x) - teacher[0](x)).square().sum() / teacher[0](x).square().sum()
    torch.testing.assert_close(layered(student(x), x), plain(student(x), x) + 0.5 * error)
    layered.close()
    with pytest.raises(ValueError, match=r"layers \['9'\].*named_modules"):
        DistillationLoss(student, teacher, layers=["9"])
    with pytest.raises(ValueError, match="temperature"):
        DistillationLoss(student, teacher, temperature=0)


class Named(nn.Module):
    """Returns its logits beside others by name, as models of torchvision do, and an inner layer in a list."""

    def __init__(self, first="out"):
        super().__init__()
        self.first, self.inner = first, InList()

    def forward(self, x):
        (y,) = self.inner(x)
        return {self.first: y, "logits" if self.first == "aux" else "aux": 2 * y}


class InList(nn.Linear):
    """Returns a list."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return [super().forward(x)]


@pytest.mark.parametrize(("first", "share"), [("out", 1), ("aux", 2)])
def test_distillation_of_named_outputs(first, share):
    """Of a mapping the logits are its ``logits``, or else its first entry; a layer may return a list."""
    student, teacher, x = Named(first), Named(first), torch.randn(2, 4)
    loss = DistillationLoss(student, teacher, layers=["inner"])(student(x), x)
    (y,), (wanted,) = student.inner(x), teacher.inner(x)
    logs = [F.log_softmax(share * t, -1) for t in (y, wanted)]
    expected = F.kl_div(*logs, reduction="batchmean", log_target=True) + (y - wanted).norm() ** 2 / wanted.norm() ** 2
    assert torch.allclose(loss, expected)


def test_distillation_of_what_is_no_tensor_says_what_to_pass():
    """An output without a tensor at its beginning is a ``TypeError`` that names the argument to give."""
    student, teacher = nn.Identity(), nn.Identity()
    with pytest.raises(TypeError, match=r"got dict; pass logits="):
        DistillationLoss(student, teacher)({"loss": 1.0}, {"loss": 1.0})


def test_a_refused_distillation_leaves_both_models_alone():
    """A layer that the teacher lacks is found before the teacher changes its mode and the student has hooks."""
    student, teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3)).train()
    with pytest.raises(ValueError, match="are not modules"):
        DistillationLoss(student, teacher, layers=["1"])
    assert teacher.training
    assert not student[1]._forward_hooks


def test_a_second_loss_of_one_output_names_the_layers():
    student, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(2, 4)
    loss = DistillationLoss(student, copy.deepcopy(student), layers=["0"])
    output = student(x)
    loss(output, x)
    with pytest.raises(RuntimeError, match=r"layers \['0'\] have given no output since the last loss"):
        loss(output, x)
    assert loss(student(x), x).item() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_attention_drops_weights_in_training_alone(mode, training):
    """In evaluation ``nn.MultiheadAttention`` calls attention without dropout, and a graph showed no trace of it."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)
    model.self_attn.dropout = 0.5
    quantizer = Quantizer(model.train(training), QuantizerConfig.presets.w8(execution_mode=mode))
    prepared = quantizer.prepare((x,)).eval()
    assert torch.equal(prepared(x), prepared(x))
    with quantizer.training_mode():
        assert not torch.equal(prepared(x), prepared(x))
    assert torch.equal(prepared(x), prepared(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_instance_norms_follow_the_mode(mode, training):
    """With running statistics they use them in evaluation, and move them in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, track_running_stats=True)).train(training)
    x = torch.randn(2, 3, 4, 4)
    expected = copy.deepcopy(model)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode))
    prepared = quantizer.prepare((x,))
    with quantizer.training_mode():
        quantizer.disable_fake_quant()
        torch.testing.assert_close(prepared(x), expected.train()(x))
        quantizer.enable_fake_quant()
    torch.testing.assert_close(model[1].running_mean, expected[1].running_mean, rtol=0.05, atol=0.01)
    prepared.eval()
    quantizer.disable_fake_quant()
    torch.testing.assert_close(prepared(x), expected.eval()(x))


class Stops(nn.Module):
    """Calls a layer twice; once, where it is told to stop or to leave early."""

    def __init__(self):
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.layer(x)
        if self.way == "raises":
            raise KeyboardInterrupt
        return y if self.way == "leaves early" else self.layer(y)


@pytest.mark.parametrize("way", ["raises", "leaves early"])
def test_forwards_that_end_early_leave_ranges_in_step(way):
    """Of two calls together: the first one of the next forward was taken for the second one of this."""
    model, x = Stops(), torch.rand(3, 4)
    weight, bias = model.layer.weight.detach().clone(), model.layer.bias.detach().clone()
    spec = QuantizationSpec(averaging_constant=0.25)
    parts = ModuleQuantizerConfig(op_input_spec={"*": spec}, op_state_spec=None, op_output_spec=None)
    quantizer = Quantizer(model, QuantizerConfig(global_config=parts, execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    expected = None
    with quantizer.calibration_mode(), torch.no_grad():
        for scale, model.way in ((1.0, None), (3.0, way), (2.0, None)):
            with contextlib.suppress(KeyboardInterrupt):
                prepared(x * scale)
            calls = [x * scale] if model.way else [x * scale, F.linear(x * scale, weight, bias)]
            largest = torch.stack([call.max() for call in calls]).max()
            expected = largest if expected is None else expected * 0.75 + largest * 0.25
    (simulator,) = (module for module in prepared.modules() if isinstance(module, FakeQuantizeImplBase))
    torch.testing.assert_close(simulator.qparams_calculator.running_max.squeeze(), expected)
    assert "forward" not in vars(model) or not hasattr(vars(model)["forward"], "is_over")
