"""Numbers moved into 16-bit formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.casting._numbers import (
    fits_scalar,
    fits_tensor,
    loses_precision,
    narrow_bound,
    narrow_bounds,
    narrow_scalar,
    narrow_tensor,
    narrow_threshold,
    smallest,
)

INF = float("inf")


def test_smallest_numbers() -> None:
    assert smallest(torch.float16) == 2.0**-24
    assert smallest(torch.bfloat16) == 2.0**-133


@pytest.mark.parametrize(
    ("value", "expected"),
    [(65504.0, True), (65505.0, False), (-70000.0, False), (9.9e37, False), (1e38, True), (INF, True), (-INF, True)],
)
def test_what_fits_float16(value: float, expected: bool) -> None:
    """In range, infinite, or so large that it stands for infinity."""
    assert fits_scalar(value, torch.float16) is expected
    assert fits_tensor(torch.tensor([1.0, value]), torch.float16) is expected


def test_not_a_number_fits() -> None:
    assert fits_scalar(math.nan, torch.float16)
    assert math.isnan(narrow_scalar(math.nan, torch.float16))
    assert fits_tensor(torch.tensor([math.nan]), torch.float16)


def test_everything_finite_fits_bfloat16() -> None:
    assert fits_scalar(9.9e37, torch.bfloat16)
    assert narrow_scalar(3.4e38, torch.bfloat16) == torch.finfo(torch.bfloat16).max


@given(st.floats(-65504, 65504))
def test_scalars_round_as_numpy_rounds_and_never_vanish(value: float) -> None:
    rounded = float(np.float16(value))
    expected = math.copysign(2.0**-24, value) if rounded == 0 and value != 0 else rounded
    assert narrow_scalar(value, torch.float16) == expected


@given(st.floats(-3, 3) | st.floats(0.999, 1.001) | st.floats(-1.001, -0.999))
def test_bounds_are_one_only_for_one(value: float) -> None:
    """And otherwise as scalars, at most one step away."""
    for dtype in (torch.float16, torch.bfloat16):
        bound, nearest = narrow_bound(value, dtype), narrow_scalar(value, dtype)
        assert (abs(bound) == 1.0) == (abs(value) == 1.0)
        assert (abs(bound) < 1.0) == (abs(value) < 1.0)
        assert bound == nearest or (abs(nearest) == 1.0 and abs(bound - nearest) <= torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bounds_of_several_elements_are_one_only_for_one(dtype: torch.dtype) -> None:
    """Each takes the next number on its own side of 1 or -1; what stands elsewhere is rounded, and zero stays zero."""
    eps = torch.finfo(dtype).eps
    tensor = torch.tensor([1.0, 0.99999, 1.00001, -1.0, -0.99999, -1.00001, 0.0, -INF, math.nan, 1e-30, 0.3])
    narrow = narrow_bounds(tensor.view(1, 11), dtype)
    assert narrow.shape == (1, 11)
    assert narrow.dtype == dtype
    below, above = 1 - eps / 2, 1 + eps
    assert narrow[0, :8].tolist() == [1.0, below, above, -1.0, -below, -above, 0.0, -INF]
    assert narrow[0, 8].isnan()
    assert narrow[0, 9:].tolist() == [narrow_scalar(1e-30, dtype), narrow_scalar(float(tensor[10]), dtype)]


@given(st.floats(-65504, 65504), st.booleans())
def test_thresholds_part_the_numbers_as_the_exact_value_does(value: float, above: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        threshold = narrow_threshold(value, dtype, above=above)
        around = torch.tensor(threshold, dtype=dtype)
        infinity = torch.tensor(INF, dtype=dtype)
        for x in (torch.nextafter(around, -infinity), around, torch.nextafter(around, infinity)):
            number = float(x)
            assert (number < threshold) == (number < value) if above else (number > threshold) == (number > value)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_tensors_are_narrowed_as_scalars_are(values: list[float]) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        kept = [v for v in values if fits_scalar(v, dtype)]
        tensor = torch.tensor(kept)
        before = tensor.clone()
        narrow = narrow_tensor(tensor, dtype)
        assert narrow.dtype == dtype
        assert narrow.double().tolist() == [narrow_scalar(v, dtype) for v in tensor.tolist()]
        assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("tensor", "dtype", "expected"),
    [
        (torch.randn(64), torch.float16, False),
        (torch.randn(64) * 1e-3, torch.float16, False),
        (torch.rand(64) * 1e-7 + 1e-8, torch.float16, True),
        (torch.rand(64) * 1e-7 + 1e-8, torch.bfloat16, False),
        (torch.tensor([1.0, 1e-9]), torch.float16, False),
        (torch.zeros(3), torch.float16, False),
        (torch.tensor([1.0, -INF]), torch.float16, False),
        (torch.empty(0), torch.float16, False),
    ],
)
def test_precision_lost_below_the_normal_numbers(tensor: torch.Tensor, dtype: torch.dtype, expected: bool) -> None:
    assert loses_precision(tensor, dtype) is expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_lies_beyond_thresholds_that_the_format_does_not_hold(dtype: torch.dtype, sign: int) -> None:
    """It stands for the largest number of float32; infinities stay beyond both."""
    limit, exact_limit = float(torch.finfo(dtype).max), float(torch.finfo(torch.float32).max)
    below = float(torch.nextafter(torch.tensor(limit, dtype=dtype), torch.tensor(0.0, dtype=dtype)))
    for above in (True, False):
        compare = torch.lt if above else torch.le
        exact = torch.tensor([sign * one for one in (math.inf, exact_limit, below, 0.0)])
        narrow = torch.tensor([sign * one for one in (math.inf, limit, below, 0.0)], dtype=dtype)
        for value in (1.0001 * limit if dtype == torch.float16 else limit + 1e36, exact_limit, 1e39):
            threshold = narrow_threshold(sign * value, dtype, above=above)
            assert torch.equal(compare(narrow, threshold), compare(exact, sign * value))
