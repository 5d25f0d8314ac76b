"""The fused CPU form gives the reference's numbers bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.kernels import reference
from bitwright.kernels.grid import Grid

from .kernel_comparing import assert_same
from .kernel_strategies import Case, cases

fused = pytest.importorskip("bitwright.kernels.cpu.fused")
pool = pytest.importorskip("bitwright.kernels.cpu.threads")
more = settings(max_examples=int(os.environ.get("BITWRIGHT_EXAMPLES", "100")), deadline=None)
threads = pytest.mark.parametrize("threads", ["1", "3 in a pool", "3 in torch's team"])


@contextmanager
def thread_count(threads: str) -> Iterator[None]:
    """Let the kernels use so many threads, for tensors of any size when there are several."""
    count, in_team = int(threads[0]), "team" in threads
    if in_team and not pool.team_runs():
        pytest.skip("torch runs without OpenMP here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "thread_count", lambda: count)
        if count > 1:
            patch.setattr(pool, "GRAIN", 1)
            patch.setattr(pool, "team_runs", lambda: in_team)
        yield


@threads
@more
@given(case=cases(), own=st.booleans())
def test_observe_and_fake_quantize(threads: str, case: Case, own: bool) -> None:
    """Output, scale, zero point, minval and gradient are the reference's, also of a gradient that nobody else has."""
    results = []
    for form in (reference, fused):
        x = case.x.detach().requires_grad_()
        with thread_count(threads):
            y, *made = form.observe_and_fake_quantize(
                x, block_size=case.block_size, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype
            )
            (y * 1 if own else y).backward(case.gradient)
        assert y.dtype == x.dtype
        results.append((y.detach(), x.grad, *made))
    for place, (expected, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, expected, zero_sign=place < 2)


@threads
@more
@given(case=cases(), data=st.data())
def test_given_parameters(threads: str, case: Case, data: st.DataObject) -> None:
    """Fake-quantize, quantize and dequantize with any parameters, also such as no observer would choose."""
    low, high = reference.min_max(case.x, case.block_size)
    scale, zero_point, minval = reference.choose_qparams(
        low, high, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype
    )
    scale = scale * data.draw(st.sampled_from([1.0, 0.3, 0.0, -1.0, 1e30, float("nan"), float("inf")]))
    if zero_point is not None and data.draw(st.booleans()):
        zero_point = zero_point + torch.randint(-300, 300, zero_point.shape, dtype=torch.int32)
    if data.draw(st.booleans()):
        scale = scale.flatten()[:1]
        zero_point = None if zero_point is None else zero_point.flatten()[:1]
        minval = None if minval is None else minval.flatten()[:1]
    made = (scale, zero_point, minval)
    options = {"block_size": case.block_size, "grid": case.grid}
    grads = []
    for form in (reference, fused):
        x = case.x.detach().requires_grad_()
        with thread_count(threads):
            y = form.fake_quantize(x, *made, **options)
            y.backward(case.gradient)
        grads.append((y.detach(), x.grad))
    assert_same(grads[1][0], grads[0][0])
    assert_same(grads[1][1], grads[0][1])
    codes = reference.quantize(case.x, *made, **options)
    with thread_count(threads):
        assert_same(fused.quantize(case.x, *made, **options), codes)
        for output in (torch.float32, case.x.dtype):
            assert_same(
                fused.dequantize(codes, *made, **options, output_dtype=output),
                reference.dequantize(codes, *made, **options, output_dtype=output),
            )


@threads
@more
@given(case=cases())
def test_ranges_and_parameters(threads: str, case: Case) -> None:
    """Ranges and the parameters chosen from them are the reference's."""
    options = {"grid": case.grid, "scheme": case.scheme, "scale_dtype": case.scale_dtype}
    expected = reference.min_max(case.x, case.block_size)
    with thread_count(threads):
        mine = fused.min_max(case.x, case.block_size)
        chosen = fused.choose_qparams(*expected, **options)
    for a, b in zip((*mine, *chosen), (*expected, *reference.choose_qparams(*expected, **options)), strict=True):
        assert_same(a, b, zero_sign=False)


@threads
@more
@given(
    case=cases(),
    constant=st.sampled_from([None, 0.01, 0.5, 0.3]),
    restarts=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_running_range(threads: str, case: Case, constant: float | None, restarts: list[bool]) -> None:
    """A running range, what is chosen from it and the output are the reference's after every step."""
    low, high = reference.min_max(case.x, case.block_size)
    made = reference.choose_qparams(low, high, grid=case.grid, scheme=case.scheme, scale_dtype=case.scale_dtype)
    states = [[t if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in (low, high, *made)] for _ in range(2)]
    x = case.x
    for restart in [True, *restarts]:
        outputs = []
        for form, state in zip((reference, fused), states, strict=True):
            with thread_count(threads):
                y = form.observe_running_and_fake_quantize(
                    x, *state, block_size=case.block_size, grid=case.grid, scheme=case.scheme,
                    scale_dtype=case.scale_dtype, averaging_constant=constant, restart=restart,
                )  # fmt: skip
            outputs.append(y)
        assert_same(outputs[1], outputs[0])
        for a, b in zip(states[1], states[0], strict=True):
            assert_same(a, b, zero_sign=False)
        x = x.flip(0) * 0.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number(dtype: torch.dtype) -> None:
    """All 65,536 bit patterns pass through load, arithmetic and store as in torch."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    from bitwright.kernels import Grid

    grid = Grid(torch.float8_e5m2, -57344.0, 57344.0)
    for scale in (1.0, 3e-5, 7e-39):
        made = (torch.full((1,), scale), None, None)
        options = {"block_size": (1 << 16,), "grid": grid}
        assert_same(fused.fake_quantize(x, *made, **options), reference.fake_quantize(x, *made, **options))
        assert_same(fused.quantize(x, *made, **options), reference.quantize(x, *made, **options))
    values = torch.arange(-(1 << 31), 1 << 31, 65537 // 2 + 1, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for output in (torch.bfloat16, torch.float16):
        made = (torch.ones(1), None, None)
        mine = fused.dequantize(values, *made, block_size=tuple(values.shape), grid=grid, output_dtype=output)
        assert_same(mine, values.to(output))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formulation", ["zp", "minval"])
def test_quotients_next_to_a_tie(formulation: str, dtype: torch.dtype) -> None:
    """Where the last bit of a quotient decides about the code, it is right, for steps of any size and mantissa."""
    make = torch.Generator().manual_seed(3)
    hard = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-45, -1e-45])
    for round_ in range(150):
        bits = (2, 4, 8)[round_ % 3]
        grid = Grid(torch.int8, -(1 << bits - 1), (1 << bits - 1) - 1, formulation)
        exponent = torch.randint(-62, 62, (), generator=make) if round_ % 4 == 0 else torch.tensor(-round_ % 23)
        step = (1 + torch.rand((1, 1), generator=make)) * 2.0**exponent
        if round_ % 5 == 0:
            step = torch.nextafter(2.0 ** exponent.float(), torch.tensor(0.0)).view(1, 1)
        point = torch.randint(int(grid.quant_min), int(grid.quant_max) + 1, (1, 1), generator=make, dtype=torch.int32)
        minval = -step * 3 if formulation == "minval" else None
        ties = torch.randint(-300, 300, (2048,), generator=make) + 0.5
        x = (ties.double() * step.double().item()).float()
        x = (x.view(torch.int32) + torch.randint(-2, 3, x.shape, generator=make, dtype=torch.int32)).view(torch.float32)
        x[: len(hard)] = hard
        made = step, None if formulation == "minval" else point, minval
        results = []
        for form in (reference, fused):
            leaf = x.to(dtype).view(8, -1).requires_grad_(round_ % 2 == 0)
            y = form.fake_quantize(leaf, *made, block_size=(8, 256), grid=grid)
            if leaf.requires_grad:
                y.sum().backward()
            results.append((y.detach(), leaf.grad))
        assert_same(results[1][0], results[0][0])
        if results[0][1] is not None:
            assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_more_steps_than_half_precision_counts(dtype: torch.dtype, scheme: str) -> None:
    """65535 overflows float16, and 32767.5 rounds in both; the parameters are those of the exact number of steps."""
    low, high = -torch.linspace(0.01, 99, 5000).to(dtype), torch.linspace(9, 0.02, 5000).to(dtype)
    options = {"grid": Grid(torch.int16, -32768, 32767), "scheme": scheme}
    scale, zero_point, _ = expected = reference.choose_qparams(low, high, **options)
    for mine, theirs in zip(fused.choose_qparams(low, high, **options), expected, strict=True):
        assert_same(mine, theirs)
    span = (high - low).float() if scheme == "asymmetric" else 2 * torch.maximum(-low, high).float()
    torch.testing.assert_close(scale, span / 65535, rtol=torch.finfo(dtype).eps, atol=6e-8)
    assert -32768 <= int(zero_point.min()) <= int(zero_point.max()) <= 32767
