"""Quantized weights that are made again in the backward pass: same gradients, less memory, and errors that help."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.kernels import Grid, fake_quantize, quantized_weights_kept, saved_as_codes
from bitwright.kernels.layout import SMALL
from bitwright.kernels.remade import forget_weight, remember_making
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

LARGE = 384  # so many outputs of so many inputs make a weight that is large enough
assert LARGE * LARGE >= SMALL


class Gemm(nn.Module):
    """A weight that is turned over, in a product of a module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(LARGE, LARGE, bias=False)
        self.outer = nn.Linear(LARGE, LARGE)

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, LARGE * LARGE // 128) / 8)

    def forward(self, x):
        return torch.bmm(x, self.weight)


def _convolutions():
    return nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(128, 128, 3, groups=1))


MODELS = {
    "linear, two dimensions": (Gemm, (5, LARGE)),
    "linear, three dimensions": (Gemm, (2, 5, LARGE)),
    "convolutions": (_convolutions, (2, 128, 6, 6)),
    "experts": (Experts, (3, 5, 64)),
}
MODES = ("eager", "graph")


def _prepared(name, mode, preset="w8a8"):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    return prepared.train(), x.requires_grad_()


def _gradients(model, x, times=2):
    """The gradients of the last of some steps; the first takes the long way through the simulators."""
    for _ in range(times):
        x.grad = None
        model.zero_grad()
        model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def _weights_that_live(model, x):
    """How many quantized weights there are, and how many of them live until the backward pass."""
    found = []
    handles = [
        module.register_forward_hook(lambda _, __, y: found.append(weakref.ref(y.untyped_storage())))
        for module in model.modules()
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target.value == "weight"
    ]
    loss = model(x).square().mean()
    alive = sum(storage() is not None for storage in found)
    loss.backward()
    for handle in handles:
        handle.remove()
    return len(found), alive


@pytest.mark.parametrize("preset", ["w4", "w8a8"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name, mode, preset):
    """With and without the quantized weights, by the long way and by the short ones."""
    model, x = _prepared(name, mode, preset)
    for times in (1, 2):
        found = _gradients(model, x, times)
        with quantized_weights_kept():
            expected = _gradients(model, x, times)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("preset", ["w4", "w8a8"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_no_quantized_weight_lives_until_the_backward_pass(name, mode, preset):
    if (name, mode, preset) == ("experts", "eager", "w4"):
        pytest.skip("nothing watches the functions of a module whose activations are not quantized")
    model, x = _prepared(name, mode, preset)
    for _ in range(2):
        count, alive = _weights_that_live(model, x)
        assert count > 0
        assert alive == 0
    with quantized_weights_kept():
        assert _weights_that_live(model, x) == (count, count)


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_has_changed_is_told(mode):
    """As autograd tells of a weight that is not quantized; the way out is named, and it gives the right gradient."""
    model, x = _prepared("linear, two dimensions", mode)
    expected = _gradients(model, x)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for kept in (False, True):
        x.grad = None
        model.zero_grad()
        with quantized_weights_kept() if kept else contextlib.nullcontext():
            loss = model(x).square().mean()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        if kept:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"has been changed since .*quantized_weights_kept"):
                loss.backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
    assert torch.equal(x.grad, expected[0])


def test_parameters_of_the_forward_pass_count():
    """A second forward pass may change the scales before the first one's backward pass."""
    model, x = _prepared("linear, two dimensions", "eager")
    expected = _gradients(model, x)[0]
    x.grad = None
    loss = model(x).square().mean()
    for module in model.modules():
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target.value == "weight":
            module.qparams_calculator.scale.mul_(3)
    loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(mode):
    """Through a gradient that reads a weight made again."""
    model, x = _prepared("linear, two dimensions", mode)

    def second():
        model.zero_grad()
        (first,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        first.square().sum().backward()
        return [p.grad for p in model.parameters()]

    second()
    found = second()
    with quantized_weights_kept():
        expected = second()
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_graph_that_is_used_twice():
    model, x = _prepared("linear, three dimensions", "eager")
    model(x)
    loss = model(x).square().mean()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, x)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("codes", [False, True])
def test_hooks_of_others_keep_what_they_saw(codes):
    """Where somebody else sees to what is saved, the quantized weight goes to them, and the gradient is the same."""
    model, x = _prepared("linear, two dimensions", "eager")
    expected = _gradients(model, x)
    seen = []

    def pack(tensor):
        seen.append(tensor.numel())
        return tensor

    for parameter in (x, *model.parameters()):
        parameter.grad = None
    with saved_as_codes() if codes else torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    assert codes or seen.count(LARGE * LARGE) == 2
    for one, other in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert torch.equal(one, other)


class _Counted(nn.Module):
    """Counts how often a model is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x):
        self.calls += 1
        return self.model(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_computes_its_forward_twice_and_no_oftener(mode):
    """Nobody asks it for what it keeps, and both passes save as many tensors, the first in a process too."""
    relu = pytest.importorskip("bitwright.kernels.cpu.relu")
    model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.ReLU(), nn.Linear(LARGE, LARGE), nn.ReLU())
    x = torch.randn(LARGE, LARGE, requires_grad=True)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    counted = _Counted(quantizer.prepare((x,)))
    with quantizer.training_mode():
        relu.relu_node.cache_clear()
        y = checkpoint(counted, x, use_reentrant=False)
        assert counted.calls == 1
        y.sum().backward()
    assert counted.calls == 2


def test_a_layer_whose_input_needs_no_gradient():
    """Such a layer keeps no weight at all."""
    model, x = _prepared("linear, two dimensions", "eager", "w4")
    expected = _gradients(model, x)[1:]
    model.zero_grad()
    model(x.detach()).square().mean().backward()
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, other)


def test_a_weight_that_no_operation_was_asked_about_disturbs_no_compiler():
    """Such as one that a module's own function has read."""
    model, x = _prepared("linear, two dimensions", "eager")
    experts, y = _prepared("experts", "eager", "w4")
    expected = _gradients(model, x)
    experts(y)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for one, other in zip(_gradients(compiled, x, 1), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_what_is_made_of_a_quantized_weight_is_kept():
    """Only the quantized weight itself is made again, not what somebody computes from it."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(LARGE, LARGE)), torch.randn(4, LARGE, requires_grad=True)
    made, grid = (torch.full((1,), 0.05), torch.zeros(1, dtype=torch.int32), None), Grid(torch.int8, -128, 127)
    options = {"block_size": (LARGE, LARGE), "grid": grid}
    for factor in (1.0, 2.0):
        y = fake_quantize(weight, *made, **options)
        remember_making(y, weight, made, options["block_size"], grid)
        kept = y if factor == 1 else y * factor
        result = F.linear(x, kept)
        forget_weight(result)
        storage = weakref.ref(kept.untyped_storage())
        expected = torch.ones(4, LARGE) @ kept
        del y, kept
        assert (storage() is None) == (factor == 1)
        x.grad = None
        result.sum().backward()
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("mode", MODES)
def test_codes_of_activations_and_weights_made_again(mode):
    """Inside ``saved_as_codes`` weights are made again as without it, so that one that has changed is an error."""
    model, x = _prepared("linear, three dimensions", mode)
    expected = _gradients(model, x)
    for kept in (False, True):
        x.grad = None
        model.zero_grad()
        with saved_as_codes(), quantized_weights_kept() if kept else contextlib.nullcontext():
            loss = model(x).square().mean()
        weight = next(model.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1)
        with contextlib.nullcontext() if kept else pytest.raises(RuntimeError, match="quantized_weights_kept"):
            loss.backward()
        with torch.no_grad():
            weight.copy_(before)
    assert torch.equal(x.grad, expected[0])
