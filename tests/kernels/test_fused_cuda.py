"""The fused CUDA form gives the reference's numbers bit for bit: on a GPU, else in Triton's interpreter.

The interpreter needs Triton and ``TRITON_INTERPRET=1`` before Triton is imported, so these tests start a process of
their own when there is no GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from bitwright.kernels import reference, saved_as_codes
from bitwright.kernels.grid import Grid

from .kernel_comparing import assert_same
from .kernel_strategies import Case, cases

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
examples = int(os.environ.get("BITWRIGHT_EXAMPLES", "25" if INTERPRETED else "200"))
more = settings(max_examples=examples, deadline=None)
# The interpreter computes with NumPy, which warns where IEEE 754 has an answer.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
runs_here = pytest.mark.skipif(
    not (HAS_TRITON and (INTERPRETED or HAS_GPU)), reason="needs Triton, and a GPU or TRITON_INTERPRET=1"
)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the tests below run in this process")
def test_in_the_interpreter() -> None:
    """Without a GPU the tests of this file pass in Triton's interpreter."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]


def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor on the device under test."""
    return None if tensor is None else tensor.to(DEVICE)


@runs_here
@more
@given(case=cases(most=600))
def test_observe_and_fake_quantize(case: Case) -> None:
    """Output, scale, zero point, minval and gradient are the CPU reference's."""
    from bitwright.kernels.cuda import fused

    results = []
    for form, x in ((reference, case.x.detach()), (fused, case.x.detach().to(DEVICE))):
        x = x.requires_grad_()
        y, *made = form.observe_and_fake_quantize(
            x, block_size=case.block_size, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype
        )
        y.backward(case.gradient.to(x.device))
        assert x.grad is not None
        results.append([t if t is None else t.cpu() for t in (y.detach(), x.grad, *made)])
    for place, (expected, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, expected, zero_sign=place < 2)


@runs_here
@more
@given(case=cases(most=600))
def test_every_tensor_is_decoded_to_its_bits(case: Case) -> None:
    """What an operation saves of a result comes back the same from one byte per element, NaN and infinities too."""
    from bitwright.kernels.cuda import fused

    x = moved(case.x.detach()).requires_grad_()
    options = {"block_size": case.block_size, "grid": case.grid}
    for observed in (True, False):
        with saved_as_codes(minimum=1) as freed:
            if observed:
                y, *made = fused.observe_and_fake_quantize(
                    x, **options, scheme=case.scheme, scale_dtype=case.scale_dtype
                )
            else:
                y = fused.fake_quantize(x, *made, **options)
            if case.grid.quant_max - case.grid.quant_min < 2 and case.grid.is_integer:
                assert not vars(y)  # NaN would need a third code
                continue
            product = y * torch.ones_like(y).requires_grad_()
        assert freed.bytes == y.numel() * (y.itemsize - 1)
        assert_same(product.grad_fn._saved_self.detach().cpu(), y.detach().cpu())


@runs_here
def test_every_float_code() -> None:
    """All finite values of the float formats, at several scales, and NaN."""
    from bitwright.formats import decode, format_of
    from bitwright.kernels.cuda import fused

    for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"):
        fmt = format_of(name)
        values = decode(torch.arange(fmt.count).to(torch.uint8), fmt)
        values = torch.cat([values[torch.isfinite(values)], torch.tensor([torch.nan])])
        grid = Grid(fmt.dtype, fmt.minimum, fmt.maximum)
        for scale in (1.0, 0.3, 2.0**-30):
            made = (torch.tensor([scale], device=DEVICE), None, None)
            x = (values * scale).to(DEVICE).requires_grad_()
            with saved_as_codes(minimum=1):
                y = fused.fake_quantize(x, *made, block_size=tuple(x.shape), grid=grid)
                product = y * torch.ones_like(y).requires_grad_()
            assert vars(y)
            assert_same(product.grad_fn._saved_self.detach().cpu(), values * scale)


@runs_here
@more
@given(case=cases(most=600))
def test_parts(case: Case) -> None:
    """Ranges, parameters, fake-quantize, quantize and dequantize are the CPU reference's."""
    from bitwright.kernels.cuda import fused

    x = moved(case.x)
    options = {"grid": case.grid, "scheme": case.scheme, "scale_dtype": case.scale_dtype}
    low, high = reference.min_max(case.x, case.block_size)
    made = reference.choose_qparams(low, high, **options)
    mine = (*fused.min_max(x, case.block_size), *fused.choose_qparams(moved(low), moved(high), **options))
    for a, b in zip(mine, (low, high, *made), strict=True):
        assert_same(a if a is None else a.cpu(), b, zero_sign=False)
    given_ = tuple(moved(t) for t in made)
    where = {"block_size": case.block_size, "grid": case.grid}
    assert_same(fused.fake_quantize(x, *given_, **where).cpu(), reference.fake_quantize(case.x, *made, **where))
    codes = reference.quantize(case.x, *made, **where)
    assert_same(fused.quantize(x, *given_, **where).cpu(), codes)
    values = fused.dequantize(moved(codes), *given_, **where, output_dtype=case.x.dtype)
    assert_same(values.cpu(), reference.dequantize(codes, *made, **where, output_dtype=case.x.dtype))


@runs_here
@more
@given(case=cases(most=600))
def test_running_range(case: Case) -> None:
    """Running ranges, averaged and extreme, are the CPU reference's."""
    from bitwright.kernels.cuda import fused

    low, high = reference.min_max(case.x, case.block_size)
    options = {"grid": case.grid, "scheme": case.scheme, "scale_dtype": case.scale_dtype}
    made = reference.choose_qparams(low, high, **options)
    for constant, kept in itertools.product((None, 0.01), {low.dtype, torch.float32}):
        ranges = low.to(kept), high.to(kept)  # float32 where a model is trained under autocast
        state = [t if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in (*ranges, *made)]
        other = [t if t is None else t.clone().to(DEVICE) for t in state]
        x = case.x
        for restart in (True, False):
            more_options = {"averaging_constant": constant, "restart": restart, "block_size": case.block_size}
            y = reference.observe_running_and_fake_quantize(x, *state, **options, **more_options)
            mine = fused.observe_running_and_fake_quantize(moved(x), *other, **options, **more_options)
            assert_same(mine.cpu(), y)
            for a, b in zip(other, state, strict=True):
                assert_same(a if a is None else a.cpu(), b, zero_sign=False)
            x = x.flip(0) * 0.7


@runs_here
@more
@given(case=cases(most=600))
def test_prepared_calls(case: Case) -> None:
    """A prepared call gives what ``fused`` gives, with and without a gradient, codes and a running range."""
    from bitwright.kernels.cuda import fused, ready

    x, gradient = moved(case.x.detach().contiguous()), moved(case.gradient.contiguous())
    low, high = fused.min_max(x, case.block_size)
    how = {"block_size": case.block_size, "grid": case.grid}
    options = {"scheme": case.scheme, "scale_dtype": case.scale_dtype}
    made = fused.choose_qparams(low, high, grid=case.grid, **options)
    if ready.suits(x, made, **how):
        call = ready.ReadyCall(x, made, **how)
        for t in (x, gradient):
            expected, mine = t.clone().requires_grad_(), t.clone().requires_grad_()
            wanted, y = fused.fake_quantize(expected, *made, **how), call.run_with_gradient(mine)
            assert_same(call.run(t).cpu(), wanted.detach().cpu())
            assert_same(y.detach().cpu(), wanted.detach().cpu())
            assert_same(*(torch.autograd.grad(r, s, gradient)[0].cpu() for r, s in ((y, mine), (wanted, expected))))
            with saved_as_codes(minimum=1):
                y = call.run_with_gradient(mine)
                product = y * torch.ones_like(y).requires_grad_()
            assert_same(product.grad_fn._saved_self.detach().cpu(), wanted.detach().cpu())
    for constant, kept in itertools.product((None, 0.01), {low.dtype, torch.float32}):
        state = [t if t is None else t.clone() for t in (low.to(kept), high.to(kept), *made)]
        other = [t if t is None else t.clone() for t in state]
        if not ready.suits(x, tuple(other[2:]), **how, running=tuple(other[:2])):
            continue
        call = ready.ReadyCall(
            x, tuple(other[2:]), **how, running=tuple(other[:2]), averaging_constant=constant, **options
        )
        for step, restart in enumerate((False, kept == x.dtype, False)):
            now = x.flip(0) * 0.7**step
            y = fused.observe_running_and_fake_quantize(
                now, *state, **how, averaging_constant=constant, restart=restart, quantize=step < 2, **options
            )
            if step == 0:
                mine = call.run_with_gradient(now.clone().requires_grad_(), observed=True, restart=restart).detach()
            elif step == 1:
                mine = call.observe_and_run(now, restart)
            else:
                call.observe(now, restart)
                mine = now
            assert_same(mine.cpu(), y.cpu())
            for a, b in zip(other, state, strict=True):
                assert_same(a if a is None else a.cpu(), b if b is None else b.cpu(), zero_sign=False)


@runs_here
@more
@given(case=cases(most=600))
def test_prepared_weights(case: Case) -> None:
    """A prepared call for a weight, observed or not, gives what ``fused`` gives, and advances versions."""
    from bitwright.kernels.cuda import fused, ready
    from bitwright.kernels.many import FollowingCall

    x, gradient = moved(case.x.detach().contiguous()), moved(case.gradient.contiguous())
    how = {"block_size": case.block_size, "grid": case.grid}
    options = {"scheme": case.scheme, "scale_dtype": case.scale_dtype}
    y, *expected = fused.observe_and_fake_quantize(x.requires_grad_(), **how, **options)
    made = tuple(t if t is None else torch.zeros_like(t) for t in expected)
    if not ready.suits(x, made, **how, **options):
        return
    call = FollowingCall(x, ready.ReadyCall(x, made, **how, **options), made)
    before = made[0]._version
    mine = call.run(x)
    assert made[0]._version > before
    assert_same(mine.detach().cpu(), y.detach().cpu())
    for a, b in zip(made, expected, strict=True):
        assert_same(a if a is None else a.cpu(), b if b is None else b.cpu(), zero_sign=False)
    wanted = torch.autograd.grad(y, x, gradient)[0].cpu()
    assert_same(torch.autograd.grad(mine, x, gradient)[0].cpu(), wanted)
    with torch.no_grad():
        values, mask, backward = call.run_masked(x)
        assert_same(values.cpu(), y.cpu())
        assert_same(backward(gradient.clone(), mask, True).cpu(), wanted)
        assert_same(call.again(x).cpu(), y.cpu())
    frozen = FollowingCall(x, ready.ReadyCall(x, made, **how), ())
    assert_same(frozen.run(x).detach().cpu(), y.detach().cpu())
