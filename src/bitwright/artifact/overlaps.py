"""Tensors of a model that stand in the same memory without being one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

__all__ = ["overlapping_tensors"]


def overlapping_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str, bool]]:
    """Yield the names of tensors that share elements, and whether they are the same elements in the same order.

    Not every pair: each tensor comes with the one before it that reaches furthest. One tensor under several names is
    none.
    """
    storages: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.numel():
            storages.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(id(tensor), (name, tensor))
    for tensors in storages.values():
        furthest: tuple[str, torch.Tensor] | None = None
        for name, tensor in sorted(tensors.values(), key=lambda entry: entry[1].data_ptr()):
            if furthest is not None and tensor.data_ptr() < _end(furthest[1]):
                first = furthest[1]
                if _share_elements(first, tensor):
                    yield furthest[0], name, _view(first) == _view(tensor)
            if furthest is None or _end(tensor) > _end(furthest[1]):
                furthest = name, tensor


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors whose stretches of one storage overlap do, as far as their dtypes let that be told."""
    if first.dtype != second.dtype or (first.is_contiguous() and second.is_contiguous()):
        return True
    taken = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.bool)
    taken.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), second.storage_offset()).any())
