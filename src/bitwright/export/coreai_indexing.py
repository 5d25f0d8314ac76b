"""Reads and writes at indices that coreai-torch translates wrongly, written with operators that it translates right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gather", "index", "index_put", "scatter", "scatter_add", "scatter_number"]

_aten = torch.ops.aten


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Reads at the places of masks, which coreai-torch takes for numbers: by the numbers of the places."""
    if not any(index is not None and _is_mask(index) for index in indices):
        return NotImplemented
    numbered: list[Tensor | None] = []
    for index in indices:
        numbered += torch.nonzero(index).unbind(1) if index is not None and _is_mask(index) else [index]
    return _aten.index.Tensor(x, numbered)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Writes at the places of a mask, or at numbered places.

    coreai-torch broadcasts values by wrong shapes, and its runtime ends the process where it then reads past an end, as
    it does for numbers that count from the end.
    """
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    masks = [dim for dim, index in given.items() if _is_mask(index)]
    values = values.to(x.dtype)
    if masks and len(given) == 1:
        return _write_at_mask(x, masks[0], given[masks[0]].bool(), values, accumulate)
    if not given or masks:
        return NotImplemented
    return _write_at_numbers(x, given, values, accumulate)


def _write_at_mask(x: Tensor, first: int, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """Writes at a mask of dimensions from ``first`` on: what does not depend on the place, or a value for each."""
    behind = x.dim() - first - mask.dim()
    before = values.dim() - behind - 1  # values may have a dimension for the places, and then some before it
    if before >= 0 and not (isinstance(values.shape[before], int) and values.shape[before] == 1):
        return _write_each_at_mask(x, first, mask, values, accumulate)
    if before >= 0:
        values = values.reshape([*values.shape[:before], *[1] * mask.dim(), *values.shape[before + 1 :]])
    mask = mask.reshape([*mask.shape, *[1] * behind])
    return torch.where(mask, x + values if accumulate else values, x)


def _write_each_at_mask(x: Tensor, first: int, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """Writes one value after the other: the masked dimensions come first for it, as the places do in ``values``."""
    covered = range(first, first + mask.dim())
    order = [*covered, *(dim for dim in range(x.dim()) if dim not in covered)]
    moved = x.permute(order)
    before, behind = list(moved.shape[mask.dim() : mask.dim() + first]), list(moved.shape[mask.dim() + first :])
    values = values.expand([*before, values.shape[-len(behind) - 1], *behind]).movedim(first, 0).contiguous()
    at = mask.reshape([*mask.shape, *[1] * (first + len(behind))]).expand(moved.shape)
    written = torch.masked_scatter(torch.zeros_like(moved) if accumulate else moved, at, values)
    written = written.permute([order.index(dim) for dim in range(x.dim())])
    return x + written if accumulate else written


def _write_at_numbers(x: Tensor, given: dict[int, Tensor], values: Tensor, accumulate: bool) -> Tensor:
    """Writes at numbered places of one dimension, or of several that are made one for it."""
    dims = list(given)
    places = list(torch.broadcast_shapes(*(index.shape for index in given.values())))  # type: ignore[no-untyped-call]
    indices = [_from_the_start(index, x.shape[dim]).expand(places) for dim, index in given.items()]
    kept = [dim for dim in range(x.dim()) if dim not in given]
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0  # where PyTorch has the places in the result
    sizes = [x.shape[dim] for dim in kept]
    values = values.expand([*sizes[:first], *places, *sizes[first:]])
    number = indices[0]
    for dim, index in zip(dims[1:], indices[1:], strict=True):
        number = number * x.shape[dim] + index
    order = [*kept[:first], *dims, *kept[first:]]
    moved = x.permute(order)
    flat = moved.reshape([*sizes[:first], math.prod(x.shape[dim] for dim in dims), *sizes[first:]])
    values = values.reshape([*sizes[:first], number.numel(), *sizes[first:]])
    number = number.reshape([*[1] * first, number.numel(), *[1] * len(sizes[first:])]).expand(values.shape)
    if accumulate:
        written = torch.scatter(flat, first, number, values, reduce="add")
    else:
        written = torch.scatter(flat, first, number, values)
    return written.reshape(moved.shape).permute([order.index(dim) for dim in range(x.dim())])


def _from_the_start(index: Tensor, size: int) -> Tensor:
    """Numbers of places, those that count from the end made others."""
    return torch.where(index < 0, index + size, index)


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``torch.gather`` with fewer places than elements in another dimension, which coreai-torch refuses."""
    others = [one for one in range(x.dim()) if one != dim % x.dim() and _is_less(index.shape[one], x.shape[one])]
    for one in others:
        x = x.narrow(one, 0, index.shape[one])
    return _aten.gather(x, dim, index) if others else NotImplemented


def _is_less(size: Any, other: Any) -> bool:
    return isinstance(size, int) and isinstance(other, int) and size < other


def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor, **reduce: Any) -> Any:
    """``torch.scatter`` with fewer places than values or elements, which coreai-torch refuses; none end the process.

    A tensor without dimensions is one with a single place.
    """
    if not x.dim():
        return _aten.scatter(x.reshape(1), 0, index.reshape(-1), src.reshape(-1), **reduce).reshape([])
    dims = range(index.dim())
    if any(isinstance(size, int) and size == 0 for size in index.shape):
        return _aten.alias.default(x)
    if any(_is_less(index.shape[one], src.shape[one]) for one in dims):
        for one in dims:
            src = src.narrow(one, 0, index.shape[one])
        return _aten.scatter(x, dim, index, src, **reduce)
    for one in dims:
        if one != dim % x.dim() and _is_less(size := index.shape[one], x.shape[one]):
            written = _aten.scatter(x.narrow(one, 0, size), dim, index, src, **reduce)
            return torch.slice_scatter(x, written, one, 0, size)
    return NotImplemented


def scatter_number(x: Tensor, dim: int, index: Tensor, value: float, **reduce: Any) -> Any:
    """One number at places; with a dynamic size, what coreai-torch makes of it ends the process."""
    number = torch.full([], value, dtype=x.dtype, device=x.device)
    return _aten.scatter(x, dim, index, number.expand(index.shape), **reduce)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Sums at indices: a scatter that adds."""
    return torch.scatter(x, dim, index, src, reduce="add")


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
