"""What happens to real models in training, quantized, in both modes: each item against the run without it."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bitwright.quantization import Quantizer
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.quantization.qat.networks import MODES, make_config

from .architectures import build

pytest.importorskip("transformers")

NAMES = ("bert", "vit", "gpt2", "llama", "resnet")
LIGHT = {("bert", "eager"), ("resnet", "graph")}
SCHEDULE = QATSchedule(enable_fake_quant=1, disable_observer=4, freeze_batch_norm=3, least_bits={0: 8, 2: 1})
models = pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in LIGHT else pytest.mark.slow)
        for name in NAMES
        for mode in MODES
    ],
)
all_slow = pytest.mark.parametrize(
    ("name", "mode"), [pytest.param(name, mode, marks=pytest.mark.slow) for name in NAMES for mode in MODES]
)


class Run:
    """A prepared model with its quantizer, an optimizer, and the inputs.

    Args:
        name: of the architecture.
        mode: execution mode.
        kind: of ranges, see ``make_config``.
        schedule: for all modules.
        change: applied to the model before it is prepared.
        dynamic: whether the batch may have any size.
    """

    def __init__(
        self,
        name: str,
        mode: str,
        kind: str = "plain",
        schedule: QATSchedule | None = None,
        change: Any = None,
        dynamic: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.architecture = build(name)
        model = self.architecture.model
        model = model if change is None else change(model)
        self.quantizer = Quantizer(model, make_config(mode, kind, schedule, dtype="int8"))
        names = list(inspect.signature(self.architecture.model.forward).parameters)[: len(self.architecture.args)]
        shapes = {key: {0: Dim.AUTO} for key in (*names, *self.architecture.kwargs)}
        self.prepared: Any = self.quantizer.prepare(
            self.architecture.args,
            dynamic_shapes=shapes if dynamic and mode == "graph" else None,
            example_kwargs=self.architecture.kwargs,
        )
        if kind == "lsq":
            with self.quantizer.calibration_mode(), torch.no_grad():
                self.outputs()
        self.optimizer = torch.optim.Adam([p for p in self.prepared.parameters() if p.requires_grad], lr=1e-3)
        self.quantizer.step_with(self.optimizer)

    def outputs(self, model: Any = None, rows: Any = slice(None), **options: Any) -> torch.Tensor:
        """The first floating point result for some rows of the inputs, which ``copies`` repeats."""
        copies = options.pop("copies", 1)
        args = [torch.cat([x] * copies)[rows] for x in self.architecture.args]
        kwargs = {key: torch.cat([x] * copies)[rows] for key, x in self.architecture.kwargs.items()}
        result = (self.prepared if model is None else model)(*args, **kwargs)
        leaves = tree_leaves(list(result.values()) if isinstance(result, dict) else result)
        return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())

    def backward(self, model: Any = None, step: int = 0, **options: Any) -> torch.Tensor:
        """Forward and backward of a step, whose number seeds dropout."""
        torch.manual_seed(100 + step)
        loss = self.outputs(model, **options).float().square().mean()
        loss.backward()
        return loss.detach()

    def train(self, steps: range) -> None:
        """Train in training mode."""
        with self.quantizer.training_mode():
            for step in steps:
                self.optimizer.zero_grad()
                self.backward(step=step)
                self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the model."""
        return {k: v.detach().clone() for k, v in self.prepared.state_dict().items() if isinstance(v, torch.Tensor)}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients."""
        return {k: p.grad.detach().clone() for k, p in self.prepared.named_parameters() if p.grad is not None}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float) -> None:
    """All tensors agree, in every bit unless a tolerance is given."""
    assert one.keys() == other.keys()
    assert one
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], msg=lambda text, n=name: f"{n}: {text}", **(tolerance or {"rtol": 0, "atol": 0})
        )


@models
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, mode: str, kind: str) -> None:
    """Saved in the middle of a schedule, loaded without pickle into fresh objects, trained on."""
    whole = Run(name, mode, kind, SCHEDULE)
    whole.train(range(5))
    part = Run(name, mode, kind, SCHEDULE)
    part.train(range(3))
    file = io.BytesIO()
    torch.save({key: getattr(part, key).state_dict() for key in ("quantizer", "prepared", "optimizer")}, file)
    file.seek(0)
    resumed = Run(name, mode, kind, SCHEDULE)
    for key, value in torch.load(file, weights_only=True).items():
        getattr(resumed, key).load_state_dict(value)
    resumed.train(range(3, 5))
    assert_equal(whole.state(), resumed.state())


@models
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_as_the_original(name: str, mode: str, how: str) -> None:
    """A copy that is made in the middle of training gives the gradients of the original, and leaves it alone."""
    run = Run(name, mode)
    run.train(range(2))
    with run.quantizer.training_mode():
        twin = copy.deepcopy(run.prepared) if how == "deepcopy" else pickle.loads(pickle.dumps(run.prepared))
        before = run.state()
        run.optimizer.zero_grad()
        twin.zero_grad()
        run.backward(twin, 2)
        assert_equal(before, run.state())
        run.backward(step=2)
    assert_equal(run.gradients(), {k: p.grad for k, p in twin.named_parameters() if p.grad is not None})


@models
def test_averaged_weights(name: str, mode: str) -> None:
    """An average of the weights over the steps is a model of its own that quantizes."""
    run = Run(name, mode)
    averaged = AveragedModel(run.prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False)
    mean = None
    with run.quantizer.training_mode():
        for step in range(3):
            run.optimizer.zero_grad()
            run.backward(step=step)
            run.optimizer.step()
            averaged.update_parameters(run.prepared)
            now = [p.detach().clone() for p in run.prepared.parameters()]
            mean = now if mean is None else [torch.lerp(m, p, 0.5) for m, p in zip(mean, now, strict=True)]
    assert mean is not None
    for expected, parameter in zip(mean, averaged.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected)
    run.prepared.eval()
    averaged.eval()
    averaged.module.load_state_dict(
        {**run.prepared.state_dict(), **{k: p.detach() for k, p in averaged.module.named_parameters()}}
    )
    with torch.no_grad():
        result = run.outputs(averaged)
        assert result.isfinite().all()
        assert not torch.equal(result, run.outputs())


@models
def test_gradient_checkpointing(name: str, mode: str) -> None:
    """Every bit of gradients and ranges is that of training without it; layers are recomputed with their dropout."""
    results = []
    for recompute in (False, True):
        run = Run(name, mode)
        with run.quantizer.training_mode():
            for module in run.prepared.modules():
                if isinstance(module, nn.BatchNorm2d):  # its statistics move twice in any eager model
                    module.momentum = 0.0
            layers = recompute and mode == "eager" and run.prepared.supports_gradient_checkpointing
            if layers:
                old = "gradient_checkpointing_enable"
                enable = getattr(run.prepared, "activation_checkpointing_enable", None) or getattr(run.prepared, old)
                enable({"use_reentrant": False})
            whole = recompute and not layers

            def called(*args: Any, model: Any = run.prepared, **kwargs: Any) -> Any:
                return checkpoint(model, *args, use_reentrant=False, **kwargs)

            for step in range(2):
                run.prepared.zero_grad()
                run.backward(called if whole else None, step)
        results.append((run.gradients(), {k: v for k, v in run.state().items() if "num_batches" not in k}))
    for plain, recomputed in zip(*results, strict=True):
        assert_equal(plain, recomputed)


@all_slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(name: str, mode: str, dtype: torch.dtype) -> None:
    """Under autocast, with a gradient scaler for float16: weights move, ranges stay float32, nothing overflows."""
    run = Run(name, mode)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=1024.0)
    before = {k: p.detach().clone() for k, p in run.prepared.named_parameters()}
    with run.quantizer.training_mode():
        for step in range(3):
            run.optimizer.zero_grad()
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype):
                loss = run.outputs().float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
    gradients = run.gradients()
    assert all(value.isfinite().all() for value in gradients.values())
    moved = [k for k, p in run.prepared.named_parameters() if not torch.equal(p, before[k])]
    assert len(moved) > len(gradients) // 2
    for simulator in (m for m in run.prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
        assert simulator.calculate_qparams()[0].dtype == torch.float32
    run.prepared.eval()
    with torch.no_grad():
        assert run.outputs().isfinite().all()


@all_slow
def test_gradient_accumulation(name: str, mode: str) -> None:
    """The gradients of single rows add up to that of the batch, with ranges that stand still."""
    run = Run(name, mode, dynamic=True)
    with run.quantizer.training_mode():
        run.backward()
        run.prepared.eval()
        for simulator in (m for m in run.prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
            simulator.disable_observer()
        run.prepared.zero_grad()
        run.backward(copies=2)
        whole = run.gradients()
        run.prepared.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            (run.outputs(copies=2, rows=rows).square().mean() / 2).backward()
    largest = max(float(value.abs().max()) for value in whole.values())
    assert_equal(whole, run.gradients(), rtol=1e-3, atol=1e-4 * largest)


@all_slow
def test_compiled_training(name: str, mode: str) -> None:
    """A compiled model gives the gradients of the other and observes the same ranges."""
    results = []
    for compiled in (False, True):
        run = Run(name, mode)
        for module in run.prepared.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with run.quantizer.training_mode():
            run.prepared.eval()  # random numbers are another matter
            run.backward(torch.compile(run.prepared, backend="aot_eager") if compiled else None)
        ranges = {k: v for k, v in run.state().items() if k.endswith(("running_min", "running_max"))}
        results.append((run.gradients(), ranges))
    (gradients, ranges), (compiled_gradients, compiled_ranges) = results
    assert_equal(ranges, compiled_ranges, rtol=1e-5, atol=1e-6)
    largest = max(float(value.abs().max()) for value in gradients.values())
    assert gradients.keys() == compiled_gradients.keys()
    for key, value in gradients.items():
        error = (value - compiled_gradients[key]).norm() / max(float(value.norm()), 1e-3 * largest)
        assert error < 1e-4, key


@all_slow
def test_any_batch_size(name: str, mode: str) -> None:
    """Prepared with one batch size, trained and evaluated with others."""
    run = Run(name, mode, dynamic=True)
    with run.quantizer.training_mode():
        for copies in (2, 3):
            assert run.backward(copies=copies).isfinite()
    run.prepared.eval()
    with torch.no_grad():
        assert len(run.outputs(copies=4)) == 4 * len(run.outputs())


@all_slow
def test_frozen_parts(name: str, mode: str) -> None:
    """Weights that were frozen before ``prepare`` stay and get no gradient; the others train."""

    def freeze(model: nn.Module) -> nn.Module:
        for index, (_, parameter) in enumerate(model.named_parameters()):
            parameter.requires_grad_(index % 2 == 0)
        return model

    run = Run(name, mode, change=freeze)
    frozen = {k: p.detach().clone() for k, p in run.prepared.named_parameters() if not p.requires_grad}
    free = {k: p.detach().clone() for k, p in run.prepared.named_parameters() if p.requires_grad}
    assert len(frozen) > 3
    run.train(range(2))
    now = dict(run.prepared.named_parameters())
    assert all(torch.equal(now[k], value) and now[k].grad is None for k, value in frozen.items())
    assert sum(not torch.equal(now[k], value) for k, value in free.items()) > len(free) // 2


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("bert", ["query", "value"]),
        ("vit", ["query", "value", "q_proj", "v_proj"]),
        ("gpt2", ["c_attn"]),
        ("llama", ["q_proj", "v_proj"]),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_adapters(name: str, targets: list[str], mode: str) -> None:
    """PEFT's LoRA over a quantized base: only the adapters move."""
    from peft import LoraConfig, inject_adapter_in_model

    def adapt(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return inject_adapter_in_model(LoraConfig(target_modules=targets, r=2, fan_in_fan_out=name == "gpt2"), model)

    run = Run(name, mode, change=adapt)
    before = {k: p.detach().clone() for k, p in run.prepared.named_parameters()}
    run.train(range(3))
    changed = {k for k, p in run.prepared.named_parameters() if not torch.equal(p, before[k])}
    assert changed
    assert all("lora" in key for key in changed)
