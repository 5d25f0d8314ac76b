"""Saved tensors as codes: the same bits after decoding, a quarter of the memory, and never a wrong gradient."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from bitwright import kernels
from bitwright.kernels import Grid, dispatch, reference, saved, saved_as_codes

from .kernel_comparing import assert_same
from .kernel_strategies import Case, cases

fused = pytest.importorskip("bitwright.kernels.cpu.fused")
signs = pytest.importorskip("bitwright.kernels.cpu.signs")

INT8 = Grid(torch.int8, -128, 127)


@settings(max_examples=150, deadline=None)
@given(case=cases(most=1500))
def test_every_tensor_is_decoded_to_its_bits_or_refused(case: Case) -> None:
    """Whatever was fake-quantized comes back the same; only what is not finite may be refused."""
    options = {"block_size": case.block_size, "grid": case.grid}
    y, *made = reference.observe_and_fake_quantize(case.x, scheme=case.scheme, scale_dtype=case.scale_dtype, **options)
    codes = fused.encode(y, *made, **options)
    if codes is None:
        # A bfloat16 or half result may also overflow, or lose codes where steps are below its precision.
        assert not bool(torch.isfinite(y).all()) or not bool(torch.isfinite(made[0]).all())
        return
    assert codes.dtype == torch.uint8
    assert codes.numel() == y.numel()
    assert_same(fused.decode(codes, y.to("meta"), *made, **options), y)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_every_float_code(name: str) -> None:
    """All finite values of a float format, at several scales."""
    from bitwright.formats import decode, format_of

    fmt = format_of(name)
    values = decode(torch.arange(fmt.count).to(torch.uint8), fmt)
    values = values[torch.isfinite(values)]
    grid = Grid(fmt.dtype, fmt.minimum, fmt.maximum)
    for scale in (1.0, 0.3, 2.0**-30):
        made = (torch.tensor([scale]), None, None)
        options = {"block_size": tuple(values.shape), "grid": grid}
        y = values * scale
        codes = fused.encode(y, *made, **options)
        assert codes is not None
        assert_same(fused.decode(codes, y.to("meta"), *made, **options), y)


class Layers(torch.nn.Module):
    """Fake-quantized weights and activations through linear, convolution and matmul, with views and a residual add."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(64, 64, dtype=dtype)
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def q(t: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
            return kernels.observe_and_fake_quantize(t, block_size=block, grid=INT8, scheme="asymmetric")[0]

        a = q(x, tuple(x.shape))
        h = torch.nn.functional.linear(a, q(self.linear.weight, (1, 64)), self.linear.bias)
        h = q(torch.relu(h), tuple(h.shape)) + a
        image = q(h, tuple(h.shape)).view(-1, 4, 16, 16)
        image = torch.nn.functional.conv2d(image, q(self.conv.weight, (1, 4, 3, 3)), self.conv.bias, padding=1)
        image = q(image, tuple(image.shape))
        return (image @ image.mT).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits(dtype: torch.dtype) -> None:
    """A small network of every kind of consumer."""
    results = []
    for codes in (False, True):
        model = Layers(dtype)
        x = torch.randn(32, 16, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        if codes:
            with saved_as_codes(minimum=1):
                y = model(x)
        else:
            y = model(x)
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for mine, expected in zip(results[1], results[0], strict=True):
        assert_same(mine, expected)


def _held(layers: int, codes: bool) -> int:
    """Bytes that a chain of linear layers with fake-quantized activations holds for the backward pass."""
    sizes: dict[int, int] = {}

    def seen(kept: Any) -> None:
        for t in kept:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

    weight = torch.randn(128, 128, requires_grad=True)
    h = torch.randn(512, 128, requires_grad=True)
    context = saved_as_codes() if codes else torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with context:
        for _ in range(layers):
            made = (torch.tensor([[0.05]]), torch.zeros(1, 1, dtype=torch.int32), None)
            h = kernels.fake_quantize(h, *made, block_size=tuple(h.shape), grid=INT8) @ weight
    node = h.grad_fn
    while node is not None:
        for name in ("_raw_saved_self", "_raw_saved_mat2"):
            raw = getattr(node, name, None)
            if raw is not None:
                data = raw.data
                if isinstance(data, torch.Tensor):
                    seen([data])
                elif isinstance(data, tuple):
                    seen(data[:1])
                else:
                    seen([data.substitute.data if hasattr(data, "substitute") else data.saved])
        node = node.next_functions[0][0] if node.next_functions else None
    return sum(sizes.values())


def test_a_quarter_of_the_memory() -> None:
    """What a linear layer keeps of its fake-quantized input shrinks to one byte per element."""
    weight = 128 * 128 * 4
    assert _held(4, codes=False) == 4 * 512 * 128 * 4 + weight
    assert _held(4, codes=True) == 4 * 512 * 128 + weight


def _relu_case(form: str, x: torch.Tensor, codes: bool, in_place: bool) -> tuple[list[torch.Tensor], bool]:
    """Two gradients of a ReLU before a fake quantizer and another reader; whether its result outlives the forward."""
    before = kernels.set_form(form)
    try:
        with saved_as_codes() if codes else contextlib.nullcontext():
            relu = torch.relu_ if in_place else torch.relu
            r = relu(x * 1)
            made = (torch.tensor([0.02]), torch.tensor([-128], dtype=torch.int32), None)
            y = kernels.fake_quantize(r, *made, block_size=tuple(x.shape), grid=INT8)
            total = y.float().nan_to_num().sum() + (r[0] * 0.3).float().nan_to_num().sum()
        storage = r.untyped_storage()
        del r, y
        kept = torch._C._storage_Use_Count(storage._cdata) > 1  # type: ignore[attr-defined]
        return [torch.autograd.grad(total, x, retain_graph=keep)[0] for keep in (True, False)], kept
    finally:
        kernels.set_form(before)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1 << 17), (3, 5, 211, 97)])
def test_a_relu_before_a_fake_quantizer_keeps_signs_only(
    shape: tuple[int, ...], dtype: torch.dtype, codes: bool, in_place: bool
) -> None:
    """Its result, which nobody reads any more, is freed; gradients are the same bits for every reader."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    x.view(-1)[::7] = 0.0
    x.view(-1)[3:6] = torch.tensor([math.nan, math.inf, -0.0])
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    mine, kept = _relu_case("auto", x, codes, in_place)
    expected, kept_before = _relu_case("reference", x, codes, in_place)
    assert not kept
    assert kept_before
    for first, second in zip(mine, expected, strict=True):
        assert_same(first, second)


def test_signs_are_read_in_the_backward_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second fake quantizer of the same result finds what the first one did, and makes no tensor of it."""
    relu, made = importlib.import_module("bitwright.kernels.cpu.relu"), []
    read = relu._in_place_of
    monkeypatch.setattr(relu, "_in_place_of", lambda *given: made.append(given) or read(*given))
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(6), requires_grad=True)
    total = torch.zeros(())
    with saved_as_codes():
        r = torch.relu(x)
        for scale in (0.02, 0.05):
            y = kernels.fake_quantize(r, torch.tensor([scale]), None, None, block_size=(1 << 18,), grid=INT8)
            total = total + y.sum()
    assert not made
    (gradient,) = torch.autograd.grad(total, x)
    assert len(made) == 1
    assert not gradient[x.detach() <= 0].any()
    assert gradient[(x.detach() > 0) & (x.detach() < 2)].eq(2).all()


def _through_relu(x: torch.Tensor, form: str, hooked: bool, shared: bool, turned: bool) -> list[torch.Tensor]:
    """Gradients of and behind a ReLU before a fake quantizer, some of them held by somebody."""
    before, held = kernels.set_form(form), []
    try:
        r, other = torch.relu(x * 1), torch.zeros_like(x, requires_grad=True)
        made = (torch.tensor([0.02]), torch.tensor([-128], dtype=torch.int32), None)
        y = kernels.fake_quantize(r, *made, block_size=tuple(x.shape), grid=INT8)
        if hooked:
            r.register_hook(held.append)
            y.register_hook(held.append)
        y = y + other if shared else y
        y = y.T.contiguous() if turned else y
        found = torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), (x, other), allow_unused=True
        )
        return [g for g in (*found, *held) if g is not None]
    finally:
        kernels.set_form(before)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_somebody_holds_pass_a_relu_unchanged(hooked: bool, shared: bool, turned: bool) -> None:
    """The ReLU's gradient takes the memory of none that is still read."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(7), requires_grad=True)
    mine = _through_relu(x, "auto", hooked, shared, turned)
    for first, second in zip(mine, _through_relu(x, "reference", hooked, shared, turned), strict=True):
        assert torch.equal(first, second)


def test_signs_are_zeros_and_ones_to_other_operations() -> None:
    """Whoever reads what the ReLU has saved gets a tensor that it can compute with."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(8), requires_grad=True)
    r = torch.relu(x)
    kernels.fake_quantize(r, torch.tensor([0.02]), None, None, block_size=(1 << 18,), grid=INT8)
    assert torch.equal(r.grad_fn._saved_result + 0, (x > 0).float())


def test_a_gradient_of_nobody_else_takes_no_memory_behind_a_relu() -> None:
    """What the fake quantizer hands on is what the operation before the ReLU is given."""
    given: list[int] = []
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(9), requires_grad=True)
    u = x * 1
    y = kernels.fake_quantize(torch.relu(u), torch.tensor([0.5]), None, None, block_size=(1 << 18,), grid=INT8)
    u.register_hook(lambda g: given.append(g.data_ptr()))
    z = y * 2
    y.register_hook(lambda g: given.append(g.data_ptr()))
    z.sum().backward()
    assert given[0] == given[1]


def test_a_second_derivative_through_a_relu_that_keeps_signs() -> None:
    """The graph of the gradient does not end where the signs are read."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5), requires_grad=True)
    with saved_as_codes():
        r = torch.relu(x)
        y = kernels.fake_quantize(r, torch.tensor([0.02]), None, None, block_size=(1 << 18,), grid=INT8)
    alive = r.detach() > 0
    (first,) = torch.autograd.grad((r * y).sum() + (r * r).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    inside = y.detach() < 127 * 0.02 - 0.005
    assert torch.equal(second[alive & inside], torch.full_like(second[alive & inside], 4.0))
    assert not second[~alive].any()


def test_hooks_of_others_on_a_relu_stay() -> None:
    """Who replaces saved tensors, as a checkpoint does, sees the ReLU's result and gives it back."""
    seen: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        seen.append(saved)
        return saved

    x = torch.randn(1 << 18, requires_grad=True)
    with saved_as_codes(), torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        r = torch.relu(x)
        y = kernels.fake_quantize(r, torch.tensor([0.1]), None, None, block_size=(1 << 18,), grid=INT8)
    y.sum().backward()
    assert any(torch.equal(saved, r) for saved in seen if saved.dtype == r.dtype)


def test_a_relu_changed_before_the_fake_quantizer_is_still_an_error() -> None:
    """Signs are not taken of a result that is no longer what the ReLU made."""
    x = torch.randn(1 << 18, requires_grad=True)
    with saved_as_codes():
        r = torch.relu(x)
        with torch.no_grad():
            r.add_(1)
        y = kernels.fake_quantize(r, torch.tensor([0.1]), None, None, block_size=(1 << 18,), grid=INT8)
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        y.sum().backward()


def test_tensors_with_nan_are_kept() -> None:
    """What has no code is saved as it is, and the gradient has its NaN where it had it."""
    gradients = []
    for codes in (False, True):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
        x[3, 5] = math.nan
        w = torch.ones(64, 64, requires_grad=True)
        x.requires_grad_()
        made = (torch.tensor([[0.1]]), None, None)
        with saved_as_codes(minimum=1) if codes else torch.enable_grad():
            y = kernels.fake_quantize(x, *made, block_size=(64, 64), grid=INT8) @ w
        y.sum().backward()
        gradients.append(w.grad)
    assert_same(gradients[1], gradients[0])


@pytest.mark.parametrize("shape", [(4, 8, 16), (40, 7), (8, 1 << 15)])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("formulation", ["zp", "minval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_written_with_the_result(
    dtype: torch.dtype, formulation: str, observed: bool, shape: tuple[int, ...]
) -> None:
    """From the second call on the bytes come with the result: same output, same gradients, the same bits decoded."""
    ready = importlib.import_module("bitwright.kernels.cpu.ready")
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) - 0.4).to(dtype)
    grid = Grid(torch.int8, -100, 127, formulation)
    running = (x.amin().view(1) / 2, x.amax().view(1) / 2)
    made = torch.tensor([0.031]), torch.tensor([9], dtype=torch.int32), torch.tensor([-2.9])
    options = {"averaging_constant": 0.1, "scheme": "asymmetric"} if observed else {}
    call = ready.ReadyCall(x, made, shape, grid, running if observed else None, **options)
    kept: list[Any] = []
    results = []
    for codes in (False, True, True):
        state = [t.clone() for t in (*running, *made)]
        leaf = torch.relu(x.clone().requires_grad_())
        leaf.retain_grad()
        with saved_as_codes(minimum=1) if codes else contextlib.nullcontext():
            y = call.run_with_gradient(leaf, observed=observed)
            if codes:
                dispatch.note_codes(y, made, call)
                kept.append(saved.pack(y))
                parameters = [t.clone() for t in made]
                for t in made:
                    t.zero_()
                assert_same(saved._unpack(kept[-1]), y.detach())
                for t, before in zip(made, parameters, strict=True):
                    t.copy_(before)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), leaf.grad, *(t.clone() for t in (*running, *made))))
        for t, before in zip((*running, *made), state, strict=True):
            t.copy_(before)
    for other in results[1:]:
        for expected, mine in zip(results[0], other, strict=True):
            assert_same(mine, expected)
    written = [type(k.substitute) is saved.WrittenCodes for k in kept]
    assert written == [False, math.prod(shape) % 16 == 0]


def test_results_that_nothing_saves_are_rarely_marked() -> None:
    """A residual's quantizer has nobody who keeps its result; once somebody does, every result is marked again."""
    ready = importlib.import_module("bitwright.kernels.cpu.ready")
    x = torch.randn(64, 60, requires_grad=True)  # no whole vectors, so that no codes are written with the result
    made = torch.tensor([0.05]), torch.tensor([0], dtype=torch.int32), None
    call = ready.ReadyCall(x.detach(), made, (64, 60), INT8)

    def marked() -> bool:
        y = call.run_with_gradient(x)
        dispatch.note_codes(y, made, call)
        if saving:
            (y * y).sum()
        return bool(vars(y))

    with saved_as_codes(minimum=1):
        saving = False
        assert [marked() for _ in range(64)] == [True] * 8 + ([False] * 7 + [True]) * 7
        saving = True
        assert [marked() for _ in range(40)] == [False] * 7 + [True] * 33


@pytest.mark.parametrize("scale", [0.05, 2.0**-70])
def test_what_has_no_byte_is_not_marked(scale: float) -> None:
    """NaN, and scales for which the short formulas do not hold."""
    ready = importlib.import_module("bitwright.kernels.cpu.ready")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    x[60, 5] = math.nan if scale == 0.05 else 1.0
    call = ready.ReadyCall(x, (torch.tensor([scale]), torch.tensor([0], dtype=torch.int32), None), (64, 64), INT8)
    call.encode_from_now_on()
    with saved_as_codes(minimum=1):
        y = call.run_with_gradient(x.clone().requires_grad_())
        assert not vars(y)
        x[60, 5] = 0
        marked = vars(call.run_with_gradient(x.clone().requires_grad_()))
    assert bool(marked) == (scale == 0.05)
    expected = reference.fake_quantize(x[:60], torch.tensor([scale]), None, None, block_size=(60, 64), grid=INT8)
    assert_same(y.detach()[:60], expected)


def test_parameters_may_change_before_the_backward_pass() -> None:
    """The codes are decoded with the parameters they were made with."""
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    scale = torch.tensor([[0.1]])
    with saved_as_codes(minimum=1):
        q = kernels.fake_quantize(x, scale, None, None, block_size=(64, 64), grid=INT8)
        y = q @ w
        scale.mul_(3)
    expected = q.detach().T @ torch.ones(64, 64)
    y.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, expected)


def test_a_result_changed_in_place_is_kept_as_it_is() -> None:
    """A mark holds only for the values it was made for."""
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    with saved_as_codes(minimum=1):
        q = kernels.fake_quantize(x, torch.tensor([[0.1]]), None, None, block_size=(64, 64), grid=INT8)
        q.mul_(0.77)
        y = q @ w
    y.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, q.detach().T @ torch.ones(64, 64))


def test_a_result_changed_after_it_was_saved() -> None:
    """What the next operation saves is what it is now."""
    x = torch.randn(64, 64, requires_grad=True)
    w, v = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with saved_as_codes(minimum=1):
        q = kernels.fake_quantize(x, torch.tensor([[0.1]]), None, None, block_size=(64, 64), grid=INT8)
        before = q.detach().clone()
        y = q @ w
        q.mul_(0.77)
        z = q @ v
    (y + z).sum().backward()
    for gradient, values in ((w.grad, before), (v.grad, q.detach())):
        assert gradient is not None
        assert torch.equal(gradient, values.T @ torch.ones(64, 64))


def test_changing_a_saved_tensor_is_still_an_error() -> None:
    """Autograd's check of in-place changes is not lost."""
    a = torch.randn(8, 8, requires_grad=True)
    b = torch.randn(8, 8)
    with saved_as_codes(minimum=1):
        y = (a * 1) * b
        b.add_(1)
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        y.sum().backward()


def test_outside_of_the_context_nothing_is_marked() -> None:
    """The mark costs nothing where it is not wanted."""
    x = torch.randn(64, 64, requires_grad=True)
    assert not vars(kernels.fake_quantize(x, torch.ones(1), None, None, block_size=(64, 64), grid=INT8))
    with saved_as_codes(minimum=1 << 20):
        assert not vars(kernels.fake_quantize(x, torch.ones(1), None, None, block_size=(64, 64), grid=INT8))


def test_results_that_are_saved_do_not_hold_themselves() -> None:
    """An operation that saves its own result does not make a cycle that keeps it in memory."""
    x = torch.randn(64, 64, requires_grad=True)
    with saved_as_codes(minimum=1):
        y = kernels.fake_quantize(x, torch.ones(1), None, None, block_size=(64, 64), grid=INT8).tanh()
    gone = weakref.ref(y)
    del y
    assert gone() is None


@pytest.mark.parametrize(
    "hooks", [torch.autograd.graph.save_on_cpu, torch.autograd.graph.allow_mutation_on_saved_tensors]
)
def test_unshared_gradients_are_known_wherever_they_are_first_asked_for(hooks: Callable[[], Any]) -> None:
    """Hooks that somebody has on saved tensors neither stop the question nor change the answer."""
    expected = signs._unshared()
    assert expected
    signs._unshared.cache_clear()
    with hooks(), torch.inference_mode():
        signs.Signs.prepare()
    assert signs._unshared() == expected


def _modulus(y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(y.view(-1, 2)).abs()


def _negated_part(y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(y.view(-1, 2)).conj().imag ** 2


@pytest.mark.parametrize("read", [_modulus, _negated_part])
def test_views_that_read_elements_otherwise(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Complex numbers, or elements with another sign, are kept as they are saved."""
    made = torch.tensor([0.05]), torch.tensor([0], dtype=torch.int32), None
    gradients = []
    for context in (contextlib.nullcontext(), saved_as_codes(16)):
        x = torch.linspace(-3, 4, 64).requires_grad_()
        with context:
            y = kernels.fake_quantize(x, *made, block_size=(64,), grid=INT8)
            read(y).sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)


def test_results_are_copied_and_written_to_files() -> None:
    """A copy of a marked result, in a file too, bears no mark that means anything; the result keeps its own."""
    x = torch.linspace(-3, 4, 64)
    with saved_as_codes(16):
        y = kernels.fake_quantize(x, torch.tensor([0.05]), None, None, block_size=(64,), grid=INT8)
        saved.mark(y, saved.Substitute(y._version))
        file = io.BytesIO()
        torch.save({"y": y}, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=True)["y"], copy.deepcopy(y)):
            assert torch.equal(other, y)
            weight = torch.ones(64, requires_grad=True)
            (other * 2 * weight).sum().backward()
            assert torch.equal(weight.grad, y * 2)


@pytest.mark.parametrize("made_in", [torch.inference_mode, contextlib.nullcontext])
def test_parameters_made_in_inference_mode(made_in: Callable[[], Any]) -> None:
    """They have no versions; the result is kept as it is."""
    with made_in():
        scale = torch.tensor([0.05])
    x = torch.linspace(-3, 4, 64).requires_grad_()
    with saved_as_codes(16) as freed:
        y = kernels.fake_quantize(x * 1, scale, None, None, block_size=(64,), grid=INT8)
        (y * y).sum().backward()
    assert_same(x.grad, 2 * y.detach())
    assert bool(freed.bytes) == (made_in is contextlib.nullcontext)
