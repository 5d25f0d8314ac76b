"""Many tensors at once give what each gives alone, bit for bit: results, gradients, parameters, versions."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.kernels import Grid, Task, fake_quantize_many, reference, saved_as_codes, set_form

from .kernel_comparing import assert_same
from .kernel_strategies import Case, cases

more = settings(max_examples=int(os.environ.get("BITWRIGHT_EXAMPLES", "60")), deadline=None)
INT8 = Grid(torch.int8, -128, 127)


def parameters(case: Case) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Parameters for the gradient's range, so that the tensor is clipped here and there."""
    low, high = reference.min_max(case.gradient, case.block_size)
    return reference.choose_qparams(low, high, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype)


def copied(made: Any) -> tuple[Any, ...]:
    return tuple(None if t is None else t.clone() for t in made)


def expected(case: Case, made: Any, observed: bool, gradient: bool) -> tuple[Any, ...]:
    """What the reference makes of it: result, gradient, parameters."""
    leaf = case.x.detach().clone().requires_grad_(gradient)
    options: dict[str, Any] = {"block_size": case.block_size, "grid": case.grid}
    if observed:
        y, *made = reference.observe_and_fake_quantize(
            leaf, scheme=case.scheme, scale_dtype=case.scale_dtype, **options
        )
    else:
        y = reference.fake_quantize(leaf, *made, **options)
    if gradient:
        y.backward(case.gradient)
    return y.detach(), leaf.grad, *made


@more
@given(data=st.data(), drawn=st.lists(st.tuples(cases(1500), st.booleans(), st.booleans()), max_size=5))
def test_as_the_reference(data: st.DataObject, drawn: list[tuple[Case, bool, bool]]) -> None:
    """Lists of tensors of several shapes, dtypes, strides, grids and schemes, empty lists among them."""
    mades = [parameters(case) for case, _, _ in drawn]
    wanted = [expected(case, made, *how) for (case, *how), made in zip(drawn, mades, strict=True)]
    kept = [copied(made) for made in mades]
    tasks = [
        Task(made, case.block_size, case.grid, case.scheme if observed else None, case.scale_dtype)
        for (case, observed, _), made in zip(drawn, kept, strict=True)
    ]
    leaves = [case.x.detach().clone().requires_grad_(gradient) for case, _, gradient in drawn]
    if data.draw(st.booleans(), label="one by one"):
        results = [task.run(leaf) for task, leaf in zip(tasks, leaves, strict=True)]
        alone = fake_quantize_many(leaves, tasks)
        results = [other if y is None else y for y, other in zip(results, alone, strict=True)]
    else:
        results = fake_quantize_many(leaves, tasks)
    assert len(results) == len(drawn)
    for place, (case, _, gradient) in enumerate(drawn):
        assert results[place].requires_grad == gradient
        if gradient:
            results[place].backward(case.gradient)
        found = results[place].detach(), leaves[place].grad, *kept[place]
        for what, (mine, right) in enumerate(zip(found, wanted[place], strict=True)):
            assert_same(mine, right, zero_sign=what < 2)  # the minval of zeros may have either sign


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 255, 256, 257, 65535, 65536, 65537, 200_000])
@pytest.mark.parametrize("gradient", [False, True])
def test_sizes(numel: int, gradient: bool) -> None:
    """Tensors without elements, at the edges of vectors, and at the size from which on each goes alone."""
    x = torch.linspace(-3, 3, numel).requires_grad_(gradient)
    other = torch.linspace(-1, 1, 40).requires_grad_(gradient)
    made = torch.tensor(0.02), torch.tensor(3, dtype=torch.int32), torch.tensor(-1.0)
    tasks = [Task(made, (numel,), INT8), Task(made, (40,), INT8)]
    found = fake_quantize_many([x, other], tasks)
    for y, given_x in zip(found, (x, other), strict=True):
        right = reference.fake_quantize(given_x, *made, block_size=tuple(given_x.shape), grid=INT8)
        assert_same(y.detach(), right.detach())
        if gradient:
            direction = torch.randn(given_x.shape)
            (mine,) = torch.autograd.grad(y, given_x, direction)
            assert_same(mine, torch.autograd.grad(right, given_x, direction)[0])


def observing(x: torch.Tensor) -> Task:
    """A task that observes each row."""
    shape = (x.shape[0], 1)
    made = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
    return Task(made, (1, x.shape[1]), INT8, "asymmetric")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int) -> None:
    """The same bits, with more work than one thread takes."""
    torch.manual_seed(0)
    xs = [torch.randn(rows, 251) for rows in (1, 200, 3, 90, 250, 17) * 6]
    tasks = [observing(x) for x in xs]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = fake_quantize_many(xs, tasks)
    finally:
        torch.set_num_threads(before)
    for x, y, task in zip(xs, found, tasks, strict=True):
        right, *made = reference.observe_and_fake_quantize(x, block_size=(1, 251), grid=INT8, scheme="asymmetric")
        assert_same(y, right)
        for mine, wanted in zip(task.made, made, strict=True):
            assert_same(mine, wanted)


def test_parameters_that_are_written_have_new_versions() -> None:
    """And only these: what is cached by version notices."""
    xs = [torch.randn(4, 16) for _ in range(3)]
    tasks = [observing(xs[0]), Task(observing(xs[1]).made, (1, 16), INT8), observing(xs[2])]
    before = [[t._version for t in task.made if t is not None] for task in tasks]
    tasks[1].made[0].fill_(1.0)
    fake_quantize_many(xs, tasks)
    after = [[t._version for t in task.made if t is not None] for task in tasks]
    assert after[0] == [version + 1 for version in before[0]]
    assert after[1] == [before[1][0] + 1, *before[1][1:]]
    assert after[2] == [version + 1 for version in before[2]]


def test_backward_by_halves() -> None:
    """One backward at a time, in any order; what is unused gets no gradient; second derivatives exist."""
    xs = [torch.randn(4, 16).requires_grad_() for _ in range(3)]
    first, second, _ = fake_quantize_many(xs, [observing(x) for x in xs])
    second.sum().backward()
    assert xs[0].grad is None
    assert torch.equal(xs[1].grad, torch.ones(4, 16))
    (direction,) = torch.autograd.grad(first.pow(2).sum(), xs[0], create_graph=True)
    direction.sum().backward()
    assert torch.equal(xs[0].grad, torch.full((4, 16), 2.0))
    assert xs[2].grad is None


def test_a_result_may_be_changed_in_place() -> None:
    """Clipped or not, it is a tensor of its own."""
    xs = [torch.tensor([[0.1, 0.2]]).requires_grad_(), torch.tensor([[0.1, 9.0]]).requires_grad_()]
    made = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), torch.tensor(-0.1)
    tasks = [Task(made, (1, 2), Grid(torch.int4, -8, 7)) for _ in xs]
    for x, y in zip(xs, fake_quantize_many(xs, tasks), strict=True):
        y.mul_(2).sum().backward()
        assert not y._is_view() or y._base is None
        assert torch.equal(x.grad, torch.tensor([[2.0, 2.0 * (x[0, 1].item() < 1)]]))


def test_a_task_follows_its_tensor() -> None:
    """Other shapes, strides and dtypes, and parameters whose memory has moved."""
    made = torch.tensor(0.02), torch.tensor(3, dtype=torch.int32), torch.tensor(-1.0)
    task = Task(made, (4, 16), INT8)
    x = torch.randn(4, 16)
    for given_x in (x, x.t().contiguous().t(), x.half(), x[:, ::1], x.repeat(1, 2)[:, ::2]):
        right = reference.fake_quantize(given_x, *made, block_size=(4, 16), grid=INT8)
        assert_same(fake_quantize_many([given_x], [task])[0], right)
    made[0].data = torch.tensor(0.5)
    assert_same(task.run(x), reference.fake_quantize(x, *made, block_size=(4, 16), grid=INT8))


def test_a_task_of_several_threads_at_any_moment() -> None:
    """Between any two instructions, another thread may quantize a tensor of another kind by the same task."""
    made = torch.tensor(0.02), torch.tensor(3, dtype=torch.int32), torch.tensor(-1.0)
    task = Task(made, (4, 16), INT8)
    x = torch.randn(4, 16)
    kinds = x, x.bfloat16()
    right = [reference.fake_quantize(kind, *made, block_size=(4, 16), grid=INT8) for kind in kinds]

    def interleave(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not Task._prepared.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":  # nothing is traced in here
            assert_same(task.run(kinds[1]), right[1])
        return interleave

    task.run(kinds[1])
    before = sys.gettrace()
    sys.settrace(interleave)
    try:
        y = task.run(kinds[0])
    finally:
        sys.settrace(before)
    assert_same(y, right[0])


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("shape", [(384, 384), (2, 131072), (131072,)])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors(threads: int, shape: tuple[int, ...], observed: bool) -> None:
    """Per row, whose pass over memory is one, in blocks of a row, and whole."""
    torch.manual_seed(0)
    x, gradient = torch.randn(shape), torch.randn(shape)
    blocks = {(1,) * (len(shape) - 1) + (length,) for length in (shape[-1], 64)} | {shape}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for block_size in blocks:
            case = Case(x, gradient, block_size, INT8, "symmetric", None)
            made = parameters(case)
            wanted = [expected(case, made, observed, wants) for wants in (False, True)]
            kept = copied(made)
            task = Task(kept, block_size, INT8, "symmetric" if observed else None)
            for wants, right in zip((False, True), wanted, strict=True):
                leaf = x.clone().requires_grad_(wants)
                versions = [t._version for t in kept]
                y = task.run(leaf)
                if wants:
                    y.backward(gradient)
                for found, known in zip((y.detach(), leaf.grad, *kept), right, strict=True):
                    assert found is known is None or torch.equal(found, known)
                assert [t._version > old for t, old in zip(kept, versions, strict=True)] == [observed] * 3
    finally:
        torch.set_num_threads(before)


def test_a_scale_for_several_blocks_is_not_chosen() -> None:
    made = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
    for x in (torch.randn(4, 16), torch.randn(4, 1 << 17)):
        with pytest.raises(ValueError, match="One scale cannot hold what is chosen for 4 blocks"):
            Task(made, (1, x.shape[1]), INT8, "symmetric").run(x)


def test_forms() -> None:
    """Under ``torch.compile``, in a dispatch mode and by the reference: the same numbers, and no compiled code."""
    x = torch.randn(4, 16)
    right = reference.observe_and_fake_quantize(x, block_size=(1, 16), grid=INT8, scheme="asymmetric")[0]
    compiled = torch.compile(lambda t: fake_quantize_many([t], [observing(x)])[0], backend="eager", fullgraph=True)
    assert_same(compiled(x), right)
    before = set_form("reference")
    try:
        assert_same(fake_quantize_many([x], [observing(x)])[0], right)
    finally:
        set_form(before)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x) if hasattr(mode, "from_tensor") else torch.empty(4, 16)
        assert fake_quantize_many([fake], [observing(fake)])[0].shape == (4, 16)


def test_codes_of_what_is_saved() -> None:
    """Results are marked for ``saved_as_codes``; gradients are the same bits."""
    weights = [torch.randn(64, 64) for _ in range(3)]
    x = torch.randn(8, 64)
    gradients = []
    for scope in (False, True):
        leaves = [w.clone().requires_grad_() for w in weights]
        with saved_as_codes() if scope else torch.enable_grad():
            y = x
            for w in fake_quantize_many(leaves, [observing(w) for w in leaves]):
                assert hasattr(w, "_bitwright_codes") == scope
                y = y @ w
        y.sum().backward()
        gradients.append([w.grad for w in leaves])
    for plain, coded in zip(*gradients, strict=True):
        assert_same(coded, plain)


def test_refusals() -> None:
    """Lists of different lengths, schemes that do not go with the format, blocks that do not fit."""
    x = torch.randn(4, 16)
    with pytest.raises(ValueError, match="1 tensors and 0 tasks"):
        fake_quantize_many([x], [])
    with pytest.raises(ValueError, match="no zero point"):
        Task((torch.ones(1), None, None), (4, 16), Grid(torch.float8_e4m3fn, -448.0, 448.0), "asymmetric")
    made = torch.ones(3), torch.zeros(3, dtype=torch.int32), torch.zeros(3)
    with pytest.raises(ValueError, match="does not fit"):
        fake_quantize_many([x], [Task(made, (1, 16), INT8)])
    one = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with pytest.raises(ValueError, match="4 blocks"):
        fake_quantize_many([x], [Task(one, (1, 16), INT8, "symmetric")])
