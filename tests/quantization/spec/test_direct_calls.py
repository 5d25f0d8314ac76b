"""Simulators are called without detours where that comes to nothing, and overwrite only what nobody reads any more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from bitwright._utils.direct_calls import caller, pass_last, pass_through
from bitwright.kernels import set_form
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity, PerTensorGranularity

from .test_shortcut import simulator

Op = Callable[[torch.Tensor], torch.Tensor]

SHAPE = (32, 8, 32, 32)


class SavesResult(torch.autograd.Function):
    """An operation whose gradient needs what it returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class InArray(torch.autograd.Function):
    """An operation whose result lies in an array that it keeps."""

    array = np.zeros(SHAPE, dtype=np.float32)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        InArray.array[...] = x.detach().numpy()
        return torch.from_numpy(InArray.array)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.from_numpy(InArray.array)


def _also_saved(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    _also_saved.kept = y.exp().mul(y).sum()  # type: ignore[attr-defined]
    return y


def attend(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


OVERWRITTEN: dict[str, Op] = {
    "neg": torch.neg,
    "square": lambda x: x * x,
    "add": lambda x: x + 1,
    "relu": torch.relu,
    "relu in place": lambda x: F.relu_(x * 2),
    "layer norm": lambda x: F.layer_norm(x, (32,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "linear": lambda x: F.linear(x, torch.linspace(-1, 1, 1024).view(32, 32)),
    "convolution": lambda x: F.conv2d(x, torch.linspace(-1, 1, 64).view(8, 8, 1, 1)),
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "cat": lambda x: torch.cat([x, x]),
    "view": lambda x: (x * 2).view(-1),
    "view of a view": lambda x: (x * 2).view(-1).unflatten(0, (32, -1)),
    "linear with bias": lambda x: F.linear(x, torch.linspace(-1, 1, 1024).view(32, 32), torch.ones(32)),
}
KEPT: dict[str, Op] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "attention": attend,
    "relu of a view": lambda x: torch.relu(x.view(-1)[::2]).view(-1),
    "slice": lambda x: (x * 2)[:16],
    "view of the input": lambda x: x.view(-1),
    "view of what is saved": lambda x: x.exp().view(-1),
    "view of what is held": lambda x: _hold(x * 2).view(-1),
    "one of two views": lambda x: _hold((x * 2).view(-1))._base.view(32, -1),
    "view of an array": lambda x: InArray.apply(x).view(-1),
    "held memory": lambda x: _hold(x * 2, torch.Tensor.untyped_storage),
    "held memory of a view": lambda x: _hold((x * 2).view(-1), torch.Tensor.untyped_storage),
    "own result": SavesResult.apply,
    "array": InArray.apply,
    "also saved": _also_saved,
    "split": lambda x: _hold(torch.unsafe_split(x * 2, 16))[0],
    "held": lambda x: _hold(x * 2),
    "detached": lambda x: _hold(x * 2, torch.Tensor.detach),
    "numpy": lambda x: _hold(x * 2, lambda y: y.detach().numpy()),
    "without gradient": lambda x: x.detach() * 2,
}
_held: list[Any] = []


def _hold(y: Any, form: Callable[[Any], Any] = lambda y: y) -> Any:
    _held.append(form(y))
    return y


@pytest.fixture(autouse=True)
def _nothing_held() -> Any:
    yield
    _held.clear()


def frozen(**spec: Any) -> Any:
    """A simulator of activations whose range is found."""
    mine = simulator(**spec)
    mine(torch.linspace(-2, 3, 4096))
    mine.disable_observer()
    return mine


def passed(op: Op, x: torch.Tensor, module: Any) -> tuple[torch.Tensor, bool]:
    """What ``pass_last`` makes of the result of an operation, and whether in its memory."""
    y = op(x)
    at = y.data_ptr()
    z = pass_last(module, y)
    del y
    return z, z.data_ptr() == at


def gradients(op: Op, last: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Result, gradient, and whether the simulator wrote where its input had been."""
    torch.manual_seed(0)
    x, mine = torch.randn(SHAPE, requires_grad=True), frozen()
    z, over = passed(op, x, mine) if last else (mine(op(x)), False)
    if z.requires_grad:
        (z * torch.linspace(-1, 1, z.numel()).view(z.shape)).sum().backward()
    return z.detach(), torch.zeros(0) if x.grad is None else x.grad, over


@pytest.mark.parametrize("name", [*OVERWRITTEN, *KEPT])
def test_overwriting_changes_no_result_and_no_gradient(name: str) -> None:
    """The memory of a tensor is used again where nobody holds the tensor, and only there."""
    op = OVERWRITTEN.get(name) or KEPT[name]
    z, gradient, over = gradients(op, last=True)
    assert over == (name in OVERWRITTEN)
    expected_z, expected_gradient, _ = gradients(op, last=False)
    assert torch.equal(z, expected_z)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1 << 18,), (3, 5, 211, 97), (2, 64, 2048), (1 << 15, 5, 3)])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_signs_of_a_relu_are_kept_with_the_mask(
    shape: tuple[int, ...], dtype: torch.dtype, axis: int | None, last: bool
) -> None:
    """For every layout of rows: gradients are those of the reference, also through another reader of the ReLU."""
    granularity = PerTensorGranularity() if axis is None else PerChannelGranularity(axis=axis % len(shape))
    results = []
    for form in ("auto", "reference"):
        before = set_form(form)
        try:
            torch.manual_seed(2)
            x = torch.randn(shape).to(dtype).requires_grad_()
            mine = simulator(qscheme="asymmetric", granularity=granularity)
            mine(x.detach().abs() * 0.6)
            mine.disable_observer()
            y = torch.relu(x * 2)
            storage, other = y.untyped_storage(), y.float().mean() * 3
            z = pass_last(mine, y) if last else mine(y)
            del y
            freed = storage.data_ptr() == z.data_ptr() or torch._C._storage_Use_Count(storage._cdata) == 1  # type: ignore[attr-defined]
            assert freed == (form == "auto" and x.numel() >= 1 << 18)
            (z.float().sum() + other).backward()
            results.append((z.detach(), x.grad))
        finally:
            set_form(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_what_somebody_holds_is_left_as_it_is() -> None:
    """References of Python, detached tensors, arrays, hooks on saved tensors."""
    x = torch.randn(SHAPE, requires_grad=True)
    for name in ("held", "detached", "numpy"):
        passed(KEPT[name], x, frozen())
        held = _held.pop()
        assert np.array_equal(held if name == "numpy" else held.detach().numpy(), (x.detach() * 2).numpy())
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        _, over = passed(torch.relu, x, frozen())
    assert not over
    assert any(torch.equal(t, torch.relu(x)) for t in packed)


def test_small_tensors_are_not_asked_about() -> None:
    """What costs more than it gains is left out."""
    x = torch.randn(8, 8, requires_grad=True)
    assert not passed(torch.neg, x, frozen())[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_overwriting_in_other_dtypes(dtype: torch.dtype) -> None:
    """Half precision is overwritten too; what kernels do not know goes the long way."""
    results = []
    for last in (True, False):
        torch.manual_seed(1)
        x, mine = torch.randn(SHAPE, dtype=dtype, requires_grad=True), frozen(qscheme="asymmetric")
        z = passed(torch.neg, x, mine)[0] if last else mine(-x)
        z.sum().backward()
        results.append((z.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_observing_simulators_overwrite_too() -> None:
    """Ranges and results are those of the plain call, step after step."""
    ours, plain = simulator(), simulator()
    torch.manual_seed(0)
    for _ in range(4):
        x = torch.randn(SHAPE, requires_grad=True)
        assert torch.equal(passed(torch.neg, x, ours)[0], plain(-x))
    assert all(map(torch.equal, ours.state_dict().values(), plain.state_dict().values()))


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda m, seen: m.register_forward_hook(lambda *a: seen.append(a[-1].detach().clone())),
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda *a: seen.append(a[1][0].detach().clone())),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda *a: seen.append(a[1])),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(lambda *a: seen.append(a[1])),
    "everywhere": lambda m, seen: register_module_forward_hook(lambda *a: seen.append(a[-1])),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(kind: str) -> None:
    """Hooks registered at any time see every call, until they are removed."""
    mine, x = frozen(), torch.randn(SHAPE, requires_grad=True)
    seen: list[Any] = []
    caller()(mine, x * 1).sum().backward()
    handle = HOOKS[kind](mine, seen)
    try:
        for _ in range(2):
            caller(last=True)(mine, x * 1).sum().backward()
        assert len(seen) == 2
    finally:
        handle.remove()
    caller(last=True)(mine, x * 1).sum().backward()
    assert len(seen) == 2


def test_changed_modules_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another forward of an instance or a class, another ``nn.Module.__call__``, another module."""
    x = torch.randn(4, 4, requires_grad=True)
    mine = frozen()
    caller()(mine, x)
    mine.forward = lambda tensor: tensor + 7
    assert torch.equal(caller()(mine, x), x + 7)
    assert torch.equal(caller(last=True)(nn.Identity(), x), x)

    class Own(type(frozen())):  # type: ignore[misc]
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return super().forward(tensor) * 0

    other = frozen()
    other.__class__ = Own
    assert not caller()(other, x).any()

    calls: list[nn.Module] = []
    original = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *a, **k: calls.append(self) or original(self, *a, **k))
    other = frozen()
    calls.clear()
    caller()(other, x)
    assert calls == [other]


def test_copies_and_pickles_ask_anew() -> None:
    """A copy with a hook is called with it."""
    mine, x = frozen(), torch.randn(4, 4)
    pass_through(mine, x)
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        seen: list[Any] = []
        twin.register_forward_hook(lambda *a, seen=seen: seen.append(a))
        assert torch.equal(pass_through(twin, x), mine(x))
        assert len(seen) == 1


class Network(nn.Module):
    """Every kind of holder of an intermediate result that a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(16), nn.Linear(16, 32)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.first(x))
        y = torch.relu(self.norm(self.second(x)))
        z = torch.sigmoid(x + y) * y
        w = self.last(z.transpose(1, 3)).relu()
        return w.softmax(-1) + w, y


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_is_that_of_plain_calls(mode: str, dtype: torch.dtype) -> None:
    """Outputs, gradients, and running statistics, bit for bit."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 32, 32, dtype=dtype)
    config = QuantizerConfig(execution_mode=mode)
    results = []
    for plainly in (False, True):
        torch.manual_seed(1)
        quantizer = Quantizer(Network().to(dtype), config)
        model = quantizer.prepare((inputs,))
        if plainly:
            for module in model.modules():
                if "fake_quant_enabled" in module._buffers:
                    module.register_forward_hook(lambda *a: None)
        with quantizer.training_mode():
            for _ in range(3):
                w, y = model(inputs)
                (w.float().square().sum() + y.float().mean()).backward()
        results.append([w, y, *(p.grad for p in model.parameters()), *model.state_dict().values()])
    assert len(results[0]) == len(results[1])
    for direct, plain in zip(*results, strict=True):
        assert (direct is None) == (plain is None)
        assert direct is None or torch.equal(direct, plain)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_inference_mode_costs_no_shortcut(mode: str) -> None:
    """A model prepared and calibrated in inference mode is as fast, and as usable, as any other."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    outputs = []
    for context in (torch.inference_mode, torch.no_grad):
        quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig(execution_mode=mode))
        with context():
            prepared: Any = quantizer.prepare((x,))
            with quantizer.calibration_mode():
                prepared(x)
            results = [prepared(x) for _ in range(3)]
        simulators = [part for part in prepared.modules() if hasattr(part, "_shortcut")]
        assert simulators
        assert all(part._shortcut.call is not None for part in simulators)
        prepared.train()
        prepared(x).sum().backward()
        outputs.append([*results, *(parameter.grad for parameter in prepared.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
