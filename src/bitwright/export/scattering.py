"""``torch.scatter_reduce``, which ExecuTorch and coreai-torch lack, written with operators that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .lacking import scanned

__all__ = ["reduced_at_places"]

_COMBINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "prod": (torch.mul, torch.prod),
    "amax": (torch.maximum, torch.amax),
    "amin": (torch.minimum, torch.amin),
}
"""How to reduce two values, and all along a dimension."""


def reduced_at_places(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Reduce the values that go to one place, with what is there or without it.

    Sums and averages are additions at places. The others are reduced among themselves first and written once to each
    place, since writes to the same place have no order.
    """
    if not x.dim():
        one = reduced_at_places(x.reshape(1), 0, index.reshape(1), src.reshape(1), reduce, include_self=include_self)
        return one.reshape([])
    src = _within(src, index)
    if reduce in _COMBINED:
        return _combined(x, dim % x.dim(), index, src, reduce, include_self)
    if not include_self:
        x = torch.where(_count(x, dim, index) > 0, torch.zeros_like(x), x)
    total = x.scatter_add(dim, index, src)
    if reduce == "sum":
        return total
    count = (_count(x, dim, index) + int(include_self)).clamp(min=1).to(x.dtype)
    return total / count if x.dtype.is_floating_point else torch.div(total, count, rounding_mode="floor")


def _within(src: Tensor, index: Tensor) -> Tensor:
    """Return the values that have a place: there may be more of them than places in each dimension."""
    for dim, (size, places) in enumerate(zip(src.shape, index.shape, strict=True)):
        if not (isinstance(size, int) and size == places):
            src = src.narrow(dim, 0, places)
    return src


def _count(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """How many values go to each place."""
    zeros = torch.zeros_like(x, dtype=torch.int32)
    return zeros.scatter_add(dim, index, torch.ones_like(index, dtype=torch.int32))


def _combined(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
    length, size = index.shape[dim], x.shape[dim]
    if isinstance(length, int) and not length:
        return x.clone()
    combine, _ = _COMBINED[reduce]
    before = torch.ones_like(x) if include_self and reduce == "prod" else x
    if isinstance(length, int):
        places, values = _in_order(index, src, dim, combine, size)
        before = torch.cat([before, before.narrow(dim, 0, 1)], dim)  # with a place for values that are not the last
        reduced = before.scatter(dim, places, values).narrow(dim, 0, size)
    else:
        reduced = before.scatter(dim, index, _in_pairs(index, src, dim, reduce))
    return combine(reduced, x) if include_self else reduced


def _in_order(
    index: Tensor, src: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor], size: int
) -> tuple[Tensor, Tensor]:
    """Reduce the values in the order of their places, and number the last ones of each; the others go behind all."""
    length = index.shape[dim]

    def joined(place: Tensor, value: Tensor, later_place: Tensor, later: Tensor) -> list[Tensor]:
        return [later_place, torch.where(place == later_place, combine(value, later), later)]

    places, order = torch.topk(index, length, dim, largest=False)
    _, values = scanned(joined, [places, src.gather(dim, order)], dim)
    goes_on = places.narrow(dim, 1, length - 1) == places.narrow(dim, 0, length - 1)
    places = torch.cat([places.narrow(dim, 0, length - 1).masked_fill(goes_on, size), places.narrow(dim, -1, 1)], dim)
    return places, values


def _in_pairs(index: Tensor, src: Tensor, dim: int, reduce: str) -> Tensor:
    """Reduce for each value all that go to the same place, so that those of a place are equal."""
    _, of_all = _COMBINED[reduce]
    own, others = src.unsqueeze(dim + 1), src.unsqueeze(dim)
    neutral = torch.ones_like(own) if reduce == "prod" else own
    return of_all(torch.where(index.unsqueeze(dim + 1) == index.unsqueeze(dim), others, neutral), dim + 1)
