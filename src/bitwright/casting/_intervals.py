"""Closed intervals of integers."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """All integers from ``low`` to ``high``, both included."""

    low: int
    high: int

    @property
    def magnitude(self) -> int:
        """The largest absolute value inside."""
        return max(abs(self.low), abs(self.high))

    def within(self, other: Interval) -> bool:
        """Tell whether ``other`` holds all of this interval."""
        return other.low <= self.low and self.high <= other.high

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def meet(self, other: Interval) -> Interval:
        """Return what both hold; this interval when they exclude each other (such a program cannot run)."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Interval(low, high) if low <= high else self


def dtype_interval(dtype: torch.dtype) -> Interval:
    """Return all values of an integer or bool dtype."""
    if dtype == torch.bool:
        return Interval(0, 1)
    info = torch.iinfo(dtype)
    return Interval(info.min, info.max)
