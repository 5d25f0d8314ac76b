"""Where nothing is clipped, a result of a prepared call hands its gradient on by a node of torch's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bitwright.kernels import Grid, fake_quantize, reference, saved_as_codes, set_form
from bitwright.kernels.dispatch import ready_call
from bitwright.kernels.straight_through import is_straight_through

memory = pytest.importorskip("bitwright.kernels.cpu.memory")

GRID = Grid(torch.int8, -128, 127)
SIZES = [64, 1 << 18, (1 << 18) + 5]
INSIDE, OUTSIDE = 1 / 20, 1 / 400


@pytest.fixture(autouse=True)
def _no_result_is_the_one_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory._sources, "untold", 0)


def _call(x: torch.Tensor, scale: float) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, None]]:
    made = torch.full((1,) * x.dim(), scale), torch.zeros((1,) * x.dim(), dtype=torch.int32), None
    return ready_call(x, made, block_size=tuple(x.shape), grid=GRID), made


def _data(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).clamp(-6, 6)


@pytest.mark.parametrize("size", [64, 1 << 18])
@pytest.mark.parametrize("unneeded", [False, True])
def test_nothing_is_kept_where_nothing_is_clipped(size: int, unneeded: bool) -> None:
    leaf = _data(size).requires_grad_()
    call, made = _call(leaf, INSIDE)
    x = leaf * 1
    expected = reference.fake_quantize(x.detach(), *made, block_size=(size,), grid=GRID)
    y = call.run_with_gradient(x, unneeded)
    assert type(y.grad_fn).__name__ == "UnsafeViewBackward0"
    assert y._base is None
    assert y.requires_grad
    assert torch.equal(y, expected)
    died = weakref.ref(x)
    del x
    gc.collect()
    assert died() is None
    gradient = torch.randn(size)
    (y * y).backward(gradient)
    assert torch.equal(leaf.grad, 2 * y.detach() * gradient)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unneeded", [False, True])
def test_what_is_clipped_has_no_gradient(size: int, unneeded: bool) -> None:
    leaf = _data(size).requires_grad_()
    call, made = _call(leaf, OUTSIDE)
    y = call.run_with_gradient(leaf * 1, unneeded)
    assert is_straight_through(y.grad_fn)
    y.backward(torch.ones(size))
    inside = reference.inside_range(leaf.detach(), *made, block_size=(size,), grid=GRID)
    assert not inside.all()
    assert torch.equal(leaf.grad, inside.to(leaf.dtype))
    assert torch.equal(y, reference.fake_quantize(leaf.detach(), *made, block_size=(size,), grid=GRID))


def test_a_second_derivative() -> None:
    leaf = _data(1 << 18).requires_grad_()
    y = _call(leaf, 0.5)[0].run_with_gradient(leaf * leaf)
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.equal(second, torch.full_like(leaf, 2.0))


@pytest.mark.parametrize("scale", [INSIDE, OUTSIDE])
def test_hooks_of_others_see_the_same_number_of_tensors(scale: float) -> None:
    """A checkpoint's second pass must save what its first one did, whatever it clips."""
    leaf = _data(1 << 18).requires_grad_()
    call = _call(leaf, scale)[0]
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call.run_with_gradient(leaf.clone())
    assert len(packed) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    leaf = _data(1 << 18).requires_grad_()
    call = _call(leaf, INSIDE)[0]
    y = checkpoint(lambda x: call.run_with_gradient(x * 2).square(), leaf, use_reentrant=reentrant)
    y.sum().backward()
    other = leaf.detach().clone().requires_grad_()
    call.run_with_gradient(other * 2).square().sum().backward()
    assert torch.equal(leaf.grad, other.grad)


def test_results_that_are_saved_as_codes() -> None:
    leaf = _data(1 << 18).view(512, 512).requires_grad_()
    call, _ = _call(leaf, INSIDE)
    call.encode_from_now_on()
    weight = torch.randn(512, 8, requires_grad=True)
    gradients = []
    for scope in (saved_as_codes(), torch.enable_grad()):
        with scope as freed:
            y = call.run_with_gradient(leaf * 1)
            loss = (y @ weight).square().sum()
        assert freed is None or freed.bytes == 3 * leaf.numel()
        gradients.append(torch.autograd.grad(loss, (leaf, weight)))
    assert all(map(torch.equal, *gradients))


def test_some_result_tells_that_the_backward_pass_has_begun() -> None:
    leaf = _data(1 << 18).requires_grad_()
    call = _call(leaf, INSIDE)[0]
    x = leaf * 1
    telling = [is_straight_through(call.run_with_gradient(x).grad_fn) for _ in range(2 * memory._TELLING)]
    assert sum(telling) == 2


@pytest.mark.parametrize("size", [64, 1 << 18])
def test_a_clipped_result_takes_gradients_that_stand_for_many(size: int) -> None:
    """``is_grads_batched``, as a vectorized Jacobian uses it, gives what one gradient after the other gives."""
    leaf = _data(size).requires_grad_()
    call, _ = _call(leaf, OUTSIDE)
    y = call.run_with_gradient(leaf * 1)
    gradients = torch.stack([torch.ones(size), torch.arange(size, dtype=torch.float32)])
    (found,) = torch.autograd.grad(y, leaf, gradients, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, leaf, gradient, retain_graph=True)[0] for gradient in gradients]
    assert torch.equal(found, torch.stack(expected))
    assert not torch.equal(found, gradients)


@pytest.mark.parametrize("form", ["auto", "reference"])
def test_a_clipped_weight_takes_a_sparse_gradient(form: str) -> None:
    """As that of ``torch.nn.Embedding(sparse=True)``."""
    before = set_form(form)
    try:
        weight = torch.linspace(-10, 10, 64).reshape(8, 8).requires_grad_()
        scale, zero_point = torch.tensor([0.05]), torch.tensor([0], dtype=torch.int32)
        y = fake_quantize(weight, scale, zero_point, None, block_size=(8, 8), grid=GRID)
        torch.nn.functional.embedding(torch.tensor([0, 4]), y, sparse=True).sum().backward()
    finally:
        set_form(before)
    assert weight.grad is not None
    assert weight.grad.is_sparse
    expected = torch.zeros(8, 8)
    expected[4] = 1
    assert torch.equal(weight.grad.to_dense(), expected)
