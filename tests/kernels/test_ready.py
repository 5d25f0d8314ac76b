"""Prepared calls give the reference's numbers bit for bit, and memory is used again."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.kernels import Grid, reference, release_idle_memory
from bitwright.kernels.dispatch import fake_quantize, min_max, observe_and_fake_quantize, ready_call, take_snapshot

from .kernel_comparing import assert_same
from .kernel_strategies import Case, cases

ready = pytest.importorskip("bitwright.kernels.cpu.ready")
memory = pytest.importorskip("bitwright.kernels.cpu.memory")
threads_module = pytest.importorskip("bitwright.kernels.cpu.threads")
more = settings(max_examples=int(os.environ.get("BITWRIGHT_EXAMPLES", "100")), deadline=None)


@more
@given(case=cases(), other=st.booleans(), made_by_an_operation=st.booleans())
def test_prepared_fake_quantization(case: Case, other: bool, made_by_an_operation: bool) -> None:
    """Output and gradient of a prepared call, for the tensor it was prepared for and for another of its shape."""
    x = case.x.contiguous()
    low, high = reference.min_max(x, case.block_size)
    made = reference.choose_qparams(low, high, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype)
    call = ready_call(x, made, block_size=case.block_size, grid=case.grid)
    given_x = case.gradient.contiguous() if other else x
    results = []
    for run in (
        lambda t: reference.fake_quantize(t, *made, block_size=case.block_size, grid=case.grid),
        call.run_with_gradient,
    ):
        leaf = given_x.detach().clone().requires_grad_()
        y = run(leaf.clone() if made_by_an_operation else leaf)
        y.backward(case.gradient)
        results.append((y.detach(), leaf.grad))
    for expected, mine in zip(*results, strict=True):
        assert_same(mine, expected)
    assert_same(call.run(given_x), results[0][0])


@pytest.mark.parametrize("numel", [16, 40, 1 << 19])
def test_an_origin_of_minus_zero(numel: int) -> None:
    """What is rounded to it is zero without a sign, as in the reference."""
    x = torch.linspace(-0.4, 1.0, numel).view(1, -1)
    made = torch.tensor([[1.0]]), torch.tensor([[-1]], dtype=torch.int32), torch.tensor([[-0.0]])
    grid = Grid(torch.int1, -1, 0, formulation="minval")
    call = ready_call(x, made, block_size=(1, numel), grid=grid)
    expected = reference.fake_quantize(x, *made, block_size=(1, numel), grid=grid)
    assert_same(call.run(x), expected)
    assert_same(call.run_with_gradient(x.clone().requires_grad_()).detach(), expected)


@pytest.mark.parametrize("formulation", ["zp", "minval"])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (0, 255), (-7, 7), (0, 1), (-8, 7), (3, 60)])
@pytest.mark.parametrize("seed", range(4))
def test_values_around_the_ends_of_the_range(seed: int, low: int, high: int, formulation: str) -> None:
    """Output and gradient of the floats next to where clipping begins, in rows long enough to look for these."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(24, generator=generator) * 100 - 50
    scale = torch.exp2(exponents).view(-1, 1)
    point = torch.randint(low, high + 1, (24, 1), generator=generator, dtype=torch.int32)
    grid = Grid(torch.int8 if low < 0 else torch.uint8, low, high, formulation)
    origin = -scale * torch.rand(24, 1, generator=generator) * 90
    counted = torch.zeros(24, 1) + low if formulation == "minval" else point.float()
    ends = torch.cat([(low - 0.5 - counted) * scale, (high + 0.5 - counted) * scale], 1)
    bits = ends.view(torch.int32).unsqueeze(-1) + torch.arange(-128, 128, dtype=torch.int32)
    x = bits.view(torch.float32).reshape(24, 512)
    if formulation == "minval":
        x = x + origin
    results = []
    for run in (reference.fake_quantize, fake_quantize):
        leaf = x.clone().requires_grad_()
        y = run(leaf, scale, point, origin, block_size=(1, 512), grid=grid)
        y.backward(torch.ones_like(x))
        results.append((y.detach(), leaf.grad))
    for expected, mine in zip(*results, strict=True):
        assert_same(mine, expected)
    assert 0 < results[0][1].mean() < 1


@more
@given(case=cases(), average=st.sampled_from([None, 0.01, 0.5, 1.0]), restart=st.booleans(), data=st.data())
def test_prepared_observation(case: Case, average: float | None, restart: bool, data: st.DataObject) -> None:
    """Running range and parameters after a prepared observation, with and without a range from before."""
    x, before = case.x.contiguous(), case.gradient.contiguous()
    low, high = reference.min_max(before, case.block_size)
    if low.numel() > ready.FEW:
        return
    running = low.clamp(max=0), high.clamp(min=0)
    made = reference.choose_qparams(low, high, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype)
    options = {
        "block_size": case.block_size,
        "grid": case.grid,
        "scheme": case.scheme,
        "scale_dtype": case.scale_dtype,
        "averaging_constant": average,
    }
    states = [[None if t is None else t.clone() for t in (*running, *made)] for _ in range(2)]
    reference.observe_running_and_fake_quantize(x, *states[0], restart=restart, quantize=False, **options)
    mine = states[1]
    ready_call(x, tuple(mine[2:]), running=(mine[0], mine[1]), **options).observe(x, restart)
    for place, (expected, found) in enumerate(zip(*states, strict=True)):
        assert_same(found, expected, zero_sign=place == 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formulation", ["zp", "minval"])
@pytest.mark.parametrize("block", [(300, 500), (1, 500), (300, 1), (1, 20)])
@pytest.mark.parametrize("threads", [1, 2])
def test_prepared_large_tensors(threads: int, block: tuple[int, int], formulation: str, dtype: torch.dtype) -> None:
    """Output and gradient of tensors that several threads share are the reference's, and hold the parameters."""
    torch.manual_seed(0)
    x, gradient = torch.randn(300, 500).to(dtype), torch.randn(300, 500).to(dtype)
    grid = Grid(torch.int8, -128, 127, formulation)
    made = reference.choose_qparams(
        *reference.min_max(x * 0.5, block), grid=grid, scheme="asymmetric", scale_dtype=None
    )
    expected = x.clone().requires_grad_()
    reference.fake_quantize(expected, *made, block_size=block, grid=grid).backward(gradient)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        call = ready_call(x, tuple(t.clone() for t in made), block_size=block, grid=grid)
        leaf = x.clone().requires_grad_()
        y = call.run_with_gradient(leaf)
        y.backward(gradient)
        assert_same(call.run(x), y.detach())
    finally:
        torch.set_num_threads(before)
    assert_same(y.detach(), reference.fake_quantize(x, *made, block_size=block, grid=grid))
    assert_same(leaf.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(300, 500), (1, 500), (1, 20)])
@pytest.mark.parametrize("average", [None, 0.01])
@pytest.mark.parametrize("threads", [1, 2])
def test_prepared_observation_of_large_tensors(
    threads: int, average: float | None, block: tuple[int, int], dtype: torch.dtype
) -> None:
    """Range, parameters and results over several tensors are the reference's, also of many blocks."""
    torch.manual_seed(1)
    grid = Grid(torch.int8, -128, 127, formulation="zp")
    tensors = [(torch.randn(300, 500) * scale).to(dtype) for scale in (1, 3, 2)]
    low, high = reference.min_max(tensors[0], block)
    made = reference.choose_qparams(low, high, grid=grid, scheme="asymmetric", scale_dtype=None)
    states = [[None if t is None else t.clone() for t in (low, high, *made)] for _ in range(2)]
    options = {"block_size": block, "grid": grid, "scheme": "asymmetric", "averaging_constant": average}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mine = states[1]
        call = ready_call(tensors[0], tuple(mine[2:]), running=(mine[0], mine[1]), **options)
        for number, x in enumerate(tensors):
            restart = number == 0
            expected = reference.observe_running_and_fake_quantize(x, *states[0], restart=restart, **options)
            assert_same(call.observe_and_run(x, restart), expected)
            for known, found in zip(*states, strict=True):
                assert_same(found, known)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("unneeded", [False, True])
@pytest.mark.parametrize("block", [(300, 500), (1, 500), (300, 1), (1, 20)])
@pytest.mark.parametrize("threads", ["1", "2", "own"])
def test_a_large_tensor_is_observed_and_quantized_in_one_call(
    threads: str, block: tuple[int, int], unneeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, gradients, ranges and parameters of a ReLU's result over some steps; by torch's threads or our own."""
    torch.manual_seed(2)
    grid = Grid(torch.uint8, 0, 255, formulation="zp")
    tensors = [torch.randn(300, 500) * scale for scale in (1, 3, 2)]
    low, high = reference.min_max(tensors[0], block)
    made = reference.choose_qparams(low, high, grid=grid, scheme="asymmetric", scale_dtype=None)
    states = [[None if t is None else t.clone() for t in (low, high, *made)] for _ in range(2)]
    options = {"block_size": block, "grid": grid, "scheme": "asymmetric", "averaging_constant": 0.2}
    if threads == "own":
        monkeypatch.setattr(threads_module, "team_runs", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if threads == "1" else 4)
    try:
        mine = states[1]
        call = ready_call(tensors[0], tuple(mine[2:]), running=(mine[0], mine[1]), **options)
        for x in tensors:
            results = []
            for run in (
                lambda t: reference.observe_running_and_fake_quantize(t, *states[0], **options),
                lambda t: call.run_with_gradient(t, unneeded, True),
            ):
                leaf = x.clone().requires_grad_()
                y = run(torch.relu(leaf - 0.1))
                (y * x).sum().backward()
                results.append((y.detach().clone(), leaf.grad))
            for expected, found in (*zip(*results, strict=True), *zip(*states, strict=True)):
                assert_same(found, expected)
    finally:
        torch.set_num_threads(before)


def test_tensors_that_are_not_prepared() -> None:
    """Empty, strided and meta tensors, many blocks to observe, and parameters of other dtypes take the general way."""
    x = torch.randn(8, 16)
    made = reference.choose_qparams(
        *reference.min_max(x, (8, 16)), grid=(grid := _grid()), scheme="symmetric", scale_dtype=None
    )
    options = {"block_size": (8, 16), "grid": grid}
    assert ready_call(x, made, **options) is not None
    assert ready_call(x.T, made, block_size=(16, 8), grid=grid) is None
    assert ready_call(torch.empty(0, 16), made, **options) is None
    assert ready_call(x.to("meta"), made, **options) is None
    many = reference.choose_qparams(*reference.min_max(x, (1, 1)), grid=grid, scheme="symmetric", scale_dtype=None)
    running = torch.zeros(8, 16), torch.zeros(8, 16)
    assert ready_call(x, many, block_size=(1, 1), grid=grid, running=running) is None
    assert ready_call(x, (made[0].double(), *made[1:]), **options) is None
    assert ready_call(x, (made[0], made[1].float(), made[2]), **options) is None


def _grid() -> Grid:
    return Grid(torch.int8, -128, 127)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_take_snapshot(dtype: torch.dtype) -> None:
    """Any changed byte of any looked-at element is seen, and no other."""
    x = torch.arange(300).to(dtype)
    snapshot = take_snapshot(x[::7])
    same = snapshot.holds
    assert same()
    x[1] += 1
    assert same()
    for place in (0, 7, 294):
        for bit in range(8 * dtype.itemsize - 1):
            x[place] ^= 1 << bit
            assert not same()
            x[place] ^= 1 << bit
    assert same()


def test_memory_of_large_results_is_used_again() -> None:
    """A result takes the memory of one that died, never of one that lives, and other sizes give it back."""
    x = torch.zeros(3, 1 << 20)
    first, second = memory.empty_like(x), memory.empty_like(x)
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    view = first[1]
    del first
    assert memory.empty_like(x).data_ptr() != address
    del view
    gc.collect()
    assert memory.empty_like(x).data_ptr() == address
    for rows in range(4, 16):
        memory.empty_like(torch.empty(rows, 1 << 20))
    assert memory.idle_bytes() <= 256 << 20


SOURCES: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda x: x,
    "view": lambda x: x.view(-1)[5:],
    "array": lambda x: x.detach().numpy(),
    "memory": torch.Tensor.untyped_storage,
    "graph": torch.sin,
}


@pytest.mark.parametrize("holder", SOURCES)
def test_memory_of_sources_is_taken_when_they_have_died(holder: str) -> None:
    """A later result of the same size takes it, and no other; nobody may hold anything that lies there."""
    memory.forget_sources()
    leaf = torch.randn(1 << 10, 1 << 9, requires_grad=True)
    source = leaf * 2
    at = source.data_ptr()
    first = memory.result_from(source)
    assert memory.result_from(leaf * 3).data_ptr() != at  # the source still lives
    held = SOURCES[holder](source)
    del source
    assert memory.result_from(leaf * 3).data_ptr() != at
    del held
    assert memory.result_from(leaf[:-1] * 3).data_ptr() != at
    second = memory.result_from(leaf)
    assert second.data_ptr() == at != first.data_ptr()
    assert (second.shape, second.stride(), second.dtype) == (leaf.shape, leaf.stride(), leaf.dtype)
    assert memory.result_from(leaf).data_ptr() != at


def test_memory_of_sources_is_held_for_a_few_results_only() -> None:
    """Whatever becomes of the other sources; what nothing has the size of is not to lie about for a whole step."""
    memory.forget_sources()
    leaf = torch.randn(1 << 18, requires_grad=True)
    source = leaf * 2
    memory.result_from(source)
    kept = weakref.ref(source.untyped_storage())
    del source
    counts = 0
    while kept() is not None:
        memory.result_from(leaf[: 1 << 17] * 2)
        counts += 1
        assert counts < 20
    assert counts > 2


@pytest.mark.parametrize("name", ["leaf", "saved", "part", "shared", "array"])
def test_memory_of_other_tensors_is_not_held(name: str) -> None:
    """Leaves belong to the user; what an operation has saved lives until the backward pass."""
    memory.forget_sources()
    leaf = torch.randn(1 << 18, requires_grad=True)
    sources: dict[str, Callable[[], torch.Tensor]] = {
        "leaf": lambda: torch.randn(1 << 18, requires_grad=True),
        "saved": leaf.exp,
        "part": lambda: (torch.cat([leaf, leaf]) * 2)[: 1 << 18],
        "shared": lambda: (leaf * 2).share_memory_(),
        "array": lambda: torch.from_numpy(np.ones(1 << 18, dtype=np.float32)).requires_grad_(),
    }
    source = sources[name]()
    kept = weakref.ref(source.untyped_storage())
    memory.result_from(source)
    del source
    assert kept() is None


def test_sources_are_forgotten_in_the_backward_pass_and_bounded() -> None:
    """Their memory is held for a few results, and no longer than until gradients are computed."""
    memory.forget_sources()
    leaf = torch.randn(1 << 18, requires_grad=True)

    def watched() -> weakref.ref[Any]:
        source = leaf * 2
        memory.result_from(source)
        return weakref.ref(source.untyped_storage())

    first = watched()
    assert first() is not None
    for other in [leaf * 2 for _ in range(20)]:
        memory.result_from(other)
    assert first() is None
    last = watched()
    assert last() is not None
    made = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
    grid = Grid(torch.int8, -128, 127, formulation="zp")
    fake_quantize(leaf.view(1, -1), *made, block_size=(1, leaf.numel()), grid=grid).sum().backward()
    assert last() is None


def test_small_pieces_share_blocks_and_never_memory() -> None:
    """What waits for the backward pass is cut from common blocks, which are idle again after their last piece."""
    gc.collect()
    pieces = [memory.lasting_bytes(size) for size in (1 << 20, 9999, 1 << 19, 3 << 20, 1 << 20, 100, 1 << 20, 1 << 20)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 16 == 0
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())
    del piece
    before = memory.idle_bytes()
    pieces.clear()
    assert memory.idle_bytes() > before


def test_a_backward_pass_gives_back_what_the_last_step_had_no_use_for() -> None:
    """Neither the backward pass before nor the forward pass after it; what one of them used is kept."""
    release_idle_memory()
    assert memory.idle_bytes() == 0
    x = torch.empty(1 << 18)

    def step(*sizes: int) -> int:
        memory.result_from(x)  # a forward pass has begun
        held = [memory.empty_like(torch.empty(size)) for size in sizes]
        memory.forget_sources()
        memory.empty_like(torch.empty(5 << 18))
        del held
        return int(memory.idle_bytes()) >> 20

    assert step(2 << 18, 3 << 18) == 2 + 3 + 5 + 1  # two of the sizes are rounded up to huge pages
    assert step(2 << 18) == 2 + 5 + 1
    assert step(2 << 18) == 2 + 5 + 1
    assert step() == 5 + 1


def test_large_results_are_like_any_other() -> None:
    """They are written by torch, saved for the backward pass, viewed, moved between dtypes and shared."""
    x = torch.randn(1 << 21, dtype=torch.bfloat16)
    y = memory.empty_like(x)
    y.copy_(x)
    assert y._base is None
    assert torch.equal(y.view(2, -1)[1], x[1 << 20 :])
    leaf = torch.ones((), requires_grad=True)
    (y.float() * leaf).sum().backward()
    assert leaf.grad is not None
    wide = memory.empty_like(x, dtype=torch.float32)
    assert (wide.shape, wide.dtype) == (x.shape, torch.float32)
    assert torch.equal(y.share_memory_(), x)


@pytest.mark.parametrize("block_size", [(1, 2048), (1, 8)], ids=["few parameters", "many"])
def test_training_steps_of_large_weights_ask_the_system_for_nothing(
    block_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, gradients and parameters take each other's memory in turn."""
    release_idle_memory()
    made: list[int] = []
    block = memory._Block
    monkeypatch.setattr(memory, "_Block", lambda size: (made.append(size), block(size))[1])
    weight, gradient = torch.randn(1024, 2048, requires_grad=True), torch.randn(1024, 2048)

    def step() -> torch.Tensor:
        y, *_ = observe_and_fake_quantize(
            weight, block_size=block_size, grid=Grid(torch.int4, -8, 7), scheme="symmetric"
        )
        return torch.autograd.grad(y, weight, gradient)[0]

    for _ in range(3):
        step()
    assert sum(made) >= 2 * weight.nbytes
    made.clear()
    for _ in range(4):
        step()
    assert made == []
    release_idle_memory()


def test_another_default_dtype_changes_nothing() -> None:
    x, grid, found = torch.randn(64, 96), Grid(torch.int4, -8, 7), []
    before = torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            found.append(observe_and_fake_quantize(x, block_size=(1, 32), grid=grid, scheme="asymmetric")[:2])
            found[-1] += min_max(x, (1, 32))
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)
