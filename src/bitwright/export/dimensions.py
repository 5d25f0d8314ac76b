"""Numbers for the dimensions of a window, as operators take them: one for all, or one for each."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["for_each_dimension"]


def for_each_dimension(numbers: Sequence[int] | int, dims: int) -> list[int]:
    """Return a number for each of ``dims`` dimensions.

    Args:
        numbers: one for all dimensions, by itself or in a sequence, or one for each.
        dims: how many dimensions there are.
    """
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * (dims // len(given))
