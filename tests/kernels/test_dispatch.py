"""Which form of a kernel runs, and that it does not matter for the result."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright import kernels
from bitwright.kernels import Grid, reference
from bitwright.kernels.operators import decompositions, exported_fake_quantize

from .kernel_comparing import assert_same

fused = pytest.importorskip("bitwright.kernels.cpu.fused")

INT8 = Grid(torch.int8, -128, 127)
MADE = (torch.tensor([[0.02]]), torch.tensor([[3]], dtype=torch.int32), torch.tensor([[-2.5]]))


def simple(x: torch.Tensor) -> torch.Tensor:
    """A per-tensor int8 fake quantizer."""
    return kernels.fake_quantize(x, *MADE, block_size=tuple(x.shape), grid=INT8)


def observed(x: torch.Tensor) -> torch.Tensor:
    """A per-row int8 fake quantizer that observes."""
    return kernels.observe_and_fake_quantize(x, block_size=(1, x.shape[1]), grid=INT8, scheme="symmetric")[0]


@pytest.fixture
def reference_form() -> Iterator[None]:
    """Plain torch everywhere."""
    before = kernels.set_form("reference")
    yield
    kernels.set_form(before)


def test_plain_tensors_take_the_fused_form() -> None:
    """CPU tensors of the three float dtypes, parameters too."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.form_of(torch.ones(2, dtype=dtype)) is fused
    assert kernels.form_of(torch.nn.Parameter(torch.ones(2))) is fused


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, dtype=torch.float64),
        torch.empty(0, 3),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
        torch._neg_view(torch.ones(2)),
    ],
    ids=["float64", "empty", "meta", "sparse", "subclass", "negated view"],
)
def test_others_take_the_reference(x: torch.Tensor) -> None:
    """What the fused form would read wrongly, or not at all."""
    assert kernels.form_of(x) is reference


def test_set_form(reference_form: None) -> None:
    """The process can be told to use the reference."""
    assert kernels.form_of(torch.ones(2)) is reference
    with pytest.raises(ValueError, match="'fast'"):
        kernels.set_form("fast")


def test_results_may_be_changed_in_place(reference_form: None) -> None:
    """As an in-place activation does; the reference's result is otherwise a view, which autograd protects."""
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_()
    y = torch.relu_(kernels.fake_quantize(x, *MADE, block_size=tuple(x.shape), grid=INT8))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (y > 0).float())


def test_float64_and_negated_views_are_right() -> None:
    """Tensors outside the fused form give what the reference gives."""
    x = torch.linspace(-3, 3, 31).view(1, 31)
    assert_same(simple(torch._neg_view(x)), simple(-x))
    assert torch.equal(simple(x.double()), simple(x).double())


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_tensors_stay_empty(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """No crash, and a gradient of the right shape."""
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    for block in (shape, tuple(1 for _ in shape)):
        y, *made = kernels.observe_and_fake_quantize(x, block_size=block, grid=INT8, scheme="asymmetric")
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert all(bool(t.isfinite().all()) for t in made)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("call", [simple, observed])
def test_torch_compile_has_no_graph_break(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The reference is traced whole, with its gradient, and gives the same numbers."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    gradient = torch.randn(4, 24)
    results = []
    for function in (call, compiled):
        x = torch.linspace(-4, 4, 96).view(4, 24).requires_grad_()
        y = function(x)
        y.backward(gradient)
        results.append((y.detach(), x.grad))
    for mine, expected in zip(results[1], results[0], strict=True):
        assert_same(mine, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_sees_one_operator(strict: bool) -> None:
    """The exported program holds bitwright::fake_quantize, computes the same, and decomposes into plain torch."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return simple(x * 2)

    x = torch.linspace(-4, 4, 48).view(2, 24)
    program = torch.export.export(Model(), (x,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("bitwright.fake_quantize.default") == 1
    assert len(targets) == 2
    assert_same(program.module()(x), simple(x * 2))
    plain = program.run_decompositions(decompositions())
    assert not any("bitwright" in str(node.target) for node in plain.graph.nodes)
    assert_same(plain.module()(x), simple(x * 2))


def test_exported_operator_has_a_gradient() -> None:
    """Training through an exported program gives the reference's gradient."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return simple(x)

    x = torch.linspace(-4, 4, 48).view(2, 24)
    module = torch.export.export(Model(), (x,), strict=False).module()
    gradients = []
    for function in (module, lambda t: reference.fake_quantize(t, *MADE, block_size=(2, 24), grid=INT8)):
        leaf = x.clone().requires_grad_()
        function(leaf).backward(torch.arange(48.0).view(2, 24))
        gradients.append(leaf.grad)
    assert_same(*gradients)


def test_operator_passes_torchs_own_checks() -> None:
    """Schema, fake implementation and autograd registration are consistent."""
    x = torch.randn(2, 6, requires_grad=True)
    arguments = (x, *MADE, [2, 6], "int8", -128.0, 127.0, "zp")
    torch.library.opcheck(torch.ops.bitwright.fake_quantize.default, arguments)


def test_fake_tensors() -> None:
    """Shapes and dtypes without data."""
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(4, 6, dtype=torch.bfloat16))
        y, scale, zero_point, _ = kernels.observe_and_fake_quantize(x, block_size=(1, 6), grid=INT8, scheme="symmetric")
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    assert scale.shape == (4, 1)
    assert zero_point is not None
    assert zero_point.dtype == torch.int32


def test_dispatch_modes_see_plain_operations() -> None:
    """A mode that records operations records the reference's."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 5)
    with Recorder():
        y = simple(x)
    assert any("aten.round" in name for name in seen)
    assert_same(y, simple(x))


def test_function_transforms() -> None:
    """torch.func.grad and vmap run the reference."""
    x = torch.linspace(-4, 4, 24).view(4, 6)
    gradient = torch.func.grad(lambda t: simple(t).sum())(x)
    leaf = x.clone().requires_grad_()
    simple(leaf).sum().backward()
    assert_same(gradient, leaf.grad)
    with torch.no_grad():
        mapped = torch.func.vmap(lambda t: kernels.fake_quantize(t, *MADE, block_size=(6,), grid=INT8))(x)
    assert_same(mapped, simple(x))


def test_second_derivative() -> None:
    """The gradient of the gradient passes where the gradient does."""
    x = torch.linspace(-4, 4, 24).view(4, 6).requires_grad_()
    gradient = torch.randn(4, 6, requires_grad=True)
    (first,) = torch.autograd.grad(simple(x), x, gradient, create_graph=True)
    (second,) = torch.autograd.grad(first, gradient, torch.ones(4, 6))
    inside = reference.inside_range(x.detach(), *MADE, block_size=(4, 6), grid=INT8)
    assert_same(second, inside.float())


def test_gradient_in_other_strides() -> None:
    """A transposed or expanded gradient is read in the order of its elements."""
    x = torch.randn(5, 7, requires_grad=True)
    for gradient in (torch.randn(7, 5).T, torch.ones(()).expand(5, 7)):
        (mine,) = torch.autograd.grad(simple(x), x, gradient)
        inside = reference.inside_range(x.detach(), *MADE, block_size=(5, 7), grid=INT8)
        assert_same(mine, (gradient * inside).contiguous())


def test_channels_last_keeps_its_strides() -> None:
    """A dense tensor in another order is not copied into the contiguous one."""
    x = torch.randn(2, 5, 4, 3).to(memory_format=torch.channels_last)
    y, *_ = kernels.observe_and_fake_quantize(x, block_size=(2, 1, 4, 3), grid=INT8, scheme="symmetric")
    assert y.stride() == x.stride()


def test_saved_tensors_take_one_bit_per_element() -> None:
    """Nothing but the mask is kept for the backward pass."""
    saved: list[torch.Tensor] = []
    x = torch.randn(64, 1024, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        observed(x)
    assert sum(t.nbytes for t in saved) == 64 * 1024 // 8


def test_the_input_is_not_kept() -> None:
    """A fake-quantized activation does not hold its input."""
    x = torch.randn(4, 6, requires_grad=True) * 1
    y = simple(x)
    gone = weakref.ref(x)
    del x
    assert gone() is None
    y.sum().backward()


ONE, TWO, FOUR = torch.ones(1), torch.ones(2, 1), torch.ones(4, 1)


@pytest.mark.parametrize(
    ("made", "block_size", "formulation", "message"),
    [
        ((ONE, None, None), (3, 6), "zp", "A block of 3 does not divide dimension 0"),
        ((ONE, None, None), (24,), "zp", "one entry per dimension"),
        ((TWO, None, None), (1, 6), "zp", r"scale of shape \(2, 1\) does not fit blocks of shape \(4, 1\)"),
        ((FOUR, ONE.int(), None), (1, 6), "zp", r"zero_point of shape \(1,\) does not fit a scale of shape \(4, 1\)"),
        ((ONE, None, TWO), (4, 6), "minval", r"minval of shape \(2, 1\) does not fit a scale of shape \(1,\)"),
        ((ONE, None, None), (4, 6), "minval", "needs minval"),
    ],
)
@pytest.mark.parametrize("form", [reference, fused])
def test_errors_are_the_same_in_both_forms(
    form: Any, made: tuple[Any, ...], block_size: tuple[int, ...], formulation: str, message: str
) -> None:
    """Wrong parameters raise ValueError with the place; memory beyond them is never read."""
    grid = Grid(torch.int8, -128, 127, formulation)
    codes = torch.ones(4, 6)
    for call in (form.fake_quantize, form.quantize, form.dequantize):
        with pytest.raises(ValueError, match=message):
            call(codes, *made, block_size=block_size, grid=grid)


def test_parameters_in_other_dtypes_and_strides() -> None:
    """Half-precision scales, int64 zero points and expanded parameters are read by value."""
    x = torch.randn(4, 6)
    scale, zero_point = torch.tensor([[0.5], [0.25], [1.0], [2.0]]), torch.tensor([[1], [2], [3], [4]])
    options = {"block_size": (1, 6), "grid": INT8}
    expected = kernels.fake_quantize(x, scale, zero_point.int(), None, **options)
    assert_same(kernels.fake_quantize(x, scale.half(), zero_point, None, **options), expected)
    wide = scale.repeat(1, 2)[:, :1]
    assert_same(kernels.fake_quantize(x, wide, zero_point.int(), None, **options), expected)
    same = torch.tensor([[0.5]]).expand(4, 1)
    plain = kernels.fake_quantize(x, same.contiguous(), None, None, **options)
    assert_same(kernels.fake_quantize(x, same, None, None, **options), plain)


def test_zero_points_between_codes() -> None:
    """A learned zero point need not be whole; where the codes end, its fraction counts."""
    x = torch.linspace(-100, 100, 24).view(4, 6)
    made = (torch.tensor([0.1]), torch.tensor([0.25]), None)
    options = {"block_size": (4, 6), "grid": INT8}
    y = kernels.fake_quantize(x, *made, **options)
    assert_same(y, reference.fake_quantize(x, *made, **options))
    assert not torch.equal(y, kernels.fake_quantize(x, made[0], None, None, **options))


def test_schemes_are_checked() -> None:
    """Unknown schemes, scale dtypes and combinations."""
    low, high = torch.tensor([-1.0]), torch.tensor([1.0])
    fp8 = Grid(torch.float8_e4m3fn, -448.0, 448.0)
    for grid, scheme, scale_dtype, message in (
        (INT8, "symetric", None, "'symetric'"),
        (fp8, "asymmetric", None, "has no zero point"),
        (INT8, "symmetric", torch.float8_e8m0fnu, "is for FP8 and FP4"),
        (fp8, "symmetric", torch.float16, "must be None or"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.int8, -129, 127), "outside that of 'int8'"),
        ((torch.int8, 5, 5), "is empty"),
        ((torch.int8, -128, 127, "zero"), "'zero'"),
        ((torch.float8_e8m0fnu, 0.0, 1.0), "format for scales"),
        ((torch.float32, 0.0, 1.0), "No number format"),
    ],
)
def test_grid_is_checked(arguments: tuple[Any, ...], message: str) -> None:
    """A grid that no format holds is an error."""
    with pytest.raises(ValueError, match=message):
        Grid(*arguments)


def test_grid_copies_do_not_share_native_memory() -> None:
    """Copies compare equal, hash equal and work after the original is gone."""
    grid = Grid(torch.int4, -8, 7)
    x = torch.linspace(-1, 1, 32).view(4, 8)
    options = {"block_size": (4, 8), "scheme": "symmetric"}
    expected = kernels.observe_and_fake_quantize(x, grid=grid, **options)[0]
    copies = [copy.copy(grid), copy.deepcopy(grid), pickle.loads(pickle.dumps(grid))]
    del grid
    for other in copies:
        assert other == copies[0]
        assert hash(other) == hash(copies[0])
        assert_same(kernels.observe_and_fake_quantize(x, grid=other, **options)[0], expected)


def test_running_range_of_another_shape_is_an_error() -> None:
    """The message names the shapes and the remedy."""
    x = torch.randn(4, 6)
    state = [
        torch.zeros(2, 1),
        torch.zeros(2, 1),
        torch.ones(4, 1),
        torch.zeros(4, 1, dtype=torch.int32),
        torch.ones(4, 1),
    ]
    with pytest.raises(ValueError, match=r"running_min has shape \(2, 1\).*\(4, 1\).*Reset the observer"):
        kernels.observe_running_and_fake_quantize(x, *state, block_size=(1, 6), grid=INT8, scheme="symmetric")


@pytest.mark.parametrize(
    "state",
    [
        [
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            torch.ones(1, 1, dtype=torch.bfloat16),
            torch.zeros(1, 1).int(),
            torch.ones(1, 1),
        ],
        [torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1).long(), torch.ones(1, 1)],
        [torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1).int(), None],
        [torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), None, None],
    ],
)
def test_state_of_other_dtypes_is_written_by_value(state: list[torch.Tensor | None]) -> None:
    """An observer's buffers may have other dtypes, or be missing; their neighbours in memory are left alone."""
    x = torch.randn(4, 6)
    scale = reference.choose_qparams(*reference.min_max(x, (4, 6)), grid=INT8, scheme="symmetric")[0]
    kernels.observe_running_and_fake_quantize(x, *state, block_size=(4, 6), grid=INT8, scheme="symmetric", restart=True)
    assert state[2] is not None
    assert_same(state[2], scale.to(state[2].dtype))


@pytest.mark.parametrize("form", ["auto", "reference"])
def test_state_of_another_shape_takes_as_many_entries(form: str, reference_form: None) -> None:
    """Parameters are counted, as everywhere; one entry for several blocks is refused before anything is written."""
    kernels.set_form(form)
    x = torch.linspace(-3, 4, 24).reshape(4, 6)
    options = {"block_size": (1, 6), "grid": INT8, "scheme": "symmetric"}
    low, high = torch.zeros(4, 1), torch.zeros(4, 1)
    made = torch.ones(4), torch.zeros(4).int(), torch.ones(4)
    y = kernels.observe_running_and_fake_quantize(x, low, high, *made, **options)
    expected, *chosen = reference.observe_and_fake_quantize(x, **options)
    assert_same(y, expected)
    assert all(torch.equal(kept, new.reshape(4)) for kept, new in zip(made, chosen, strict=True))
    with pytest.raises(ValueError, match=r"shape \(1,\) cannot hold what is chosen for blocks of shape \(4, 1\)"):
        kernels.observe_running_and_fake_quantize(2 * x, low, high, torch.ones(1), *made[1:], **options)
    assert torch.equal(low, x.amin(1, keepdim=True).clamp_max(0))


def test_versions_notice_what_kernels_write() -> None:
    """A change of the state is a change for autograd and for caches."""
    for form in (reference, fused):
        state = [torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1).int(), torch.ones(1, 1)]
        form.observe_running_and_fake_quantize(
            torch.randn(4, 6), *state, block_size=(4, 6), grid=INT8, scheme="symmetric", restart=True
        )
        assert all(t._version > 0 for t in state)


def test_observing_without_quantizing_returns_the_input() -> None:
    """Only the state changes."""
    x = torch.randn(4, 6)
    state = [
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, 1),
    ]
    same = kernels.observe_running_and_fake_quantize(
        x, *state, block_size=(4, 6), grid=INT8, scheme="symmetric", restart=True, quantize=False
    )
    assert same is x
    assert state[1].item() == max(x.max().item(), 0.0)


def large() -> torch.Tensor:
    """A tensor that is worth several threads."""
    return torch.randn(64, 1 << 13, generator=torch.Generator().manual_seed(1))


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    """One thread and many give the same bits, for parts of any size."""
    x = large()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append((observed(x), simple(x), *kernels.min_max(x, (64, 1)), *kernels.min_max(x, tuple(x.shape))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_same(a, b)


def test_many_python_threads_at_once() -> None:
    """Callers in several threads, as in autograd and data loading, do not disturb each other."""
    x = large()
    expected = observed(x)
    wrong = []

    def work() -> None:
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            y = observed(leaf)
            y.backward(torch.ones_like(y))
            if not torch.equal(y, expected):
                wrong.append(y)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert not wrong


def _digest(y: torch.Tensor) -> str:
    # Without torch, whose own threads do not survive a fork.
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()


def _in_child(x: torch.Tensor, queue: Any) -> None:
    queue.put(_digest(observed(x)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_after_a_fork() -> None:
    """A child of a process that has used its threads starts its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    x = large()
    try:
        expected = _digest(observed(x))
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(x, queue), daemon=True)
        child.start()
        child.join(timeout=60)
        assert child.exitcode == 0
        assert queue.get() == expected
    finally:
        torch.set_num_threads(before)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that fake-quantizes what it yields."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return observed(large() + index)


def test_in_data_loader_workers() -> None:
    """Workers of a DataLoader may call the kernels."""
    observed(large())
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2)
    for index, y in enumerate(loader):
        assert_same(y, observed(large() + index))


def test_large_results_keep_shape_and_strides() -> None:
    """The advice about pages changes nothing about a tensor."""
    from bitwright.kernels.cpu import memory

    x = torch.empty(3, 1 << 19).T
    y = memory.empty_like(x)
    assert y.nbytes >= memory.LARGE
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    y.fill_(2.0)
    assert float(y.sum()) == 2.0 * x.numel()


def test_the_exported_operator_takes_zero_points_between_the_codes() -> None:
    x, scale, zero_point = torch.linspace(-10, 10, 64), torch.tensor([0.05]), torch.tensor([0.6])
    options = {"block_size": (64,), "grid": Grid(torch.int8, -128, 127)}
    found = exported_fake_quantize(x, scale, zero_point, None, *options.values())
    assert torch.equal(found, reference.fake_quantize(x, scale, zero_point, None, **options))


def test_ranges_of_different_shapes_are_refused() -> None:
    grid = Grid(torch.int8, -128, 127)
    with pytest.raises(ValueError, match="one entry per block"):
        kernels.choose_qparams(-torch.ones(4), torch.ones(1), grid=grid, scheme="symmetric")


@pytest.mark.parametrize(
    ("module", "variable", "value", "remedy"),
    [
        ("dispatch", "BITWRIGHT_KERNELS", "referense", "one of ('auto', 'reference')"),
        ("cpu.memory", "BITWRIGHT_IDLE_MEGABYTES", "1.5", "a whole number of MiB"),
        ("cpu.memory", "BITWRIGHT_IDLE_MEGABYTES", "-1", "a whole number of MiB"),
        ("cpu.team", "BITWRIGHT_THREADS", "Own", "one of ('team', 'own')"),
    ],
)
def test_settings_that_are_none_are_said(
    module: str, variable: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable, the value and what may stand there; one that is empty is not set."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} must be {re.escape(remedy)}.*{value!r}"):
        _settled_anew(module)
    monkeypatch.setenv(variable, "")
    _settled_anew(module)


def _settled_anew(name: str) -> None:
    """Read a module's settings once more, in a copy of it."""
    spec = importlib.util.find_spec(f"bitwright.kernels.{name}")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name == "cpu.team":
        module._parallel()
