"""Comparison of tensors bit for bit."""

from __future__ import annotations

import torch

_INTEGER = {2: torch.int16, 4: torch.int32}


def assert_same(mine: torch.Tensor | None, expected: torch.Tensor | None, zero_sign: bool = True) -> None:
    """Both None, or equal in shape, dtype and bits.

    All NaN count as one. ``zero_sign=False`` takes -0 for +0: torch's own minimum and maximum of the two zeros depend
    on the position of the element.
    """
    if mine is None or expected is None:
        assert mine is expected
        return
    assert mine.shape == expected.shape
    assert mine.dtype == expected.dtype
    if not mine.dtype.is_floating_point:
        assert torch.equal(mine, expected)
        return
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(mine), nan)
    zero = torch.zeros((), dtype=mine.dtype)
    a, b = torch.where(nan, zero, mine), torch.where(nan, zero, expected)
    bits = _INTEGER[mine.element_size()]
    same = (a == b) if not zero_sign else (a.view(bits) == b.view(bits))
    assert bool(same.all()), f"{mine[~same][:8]} instead of {expected[~same][:8]}"
