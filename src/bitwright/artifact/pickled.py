"""Tensors as ``pickle`` can write them so that torch reads them again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["as_before", "as_read_by_torch"]

_UNREAD = {
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
"""Dtypes of which ``pickle.loads(pickle.dumps(tensor))`` fails; ``torch.save`` and ``copy.deepcopy`` know them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_read_by_torch(
    tensors: Mapping[str, torch.Tensor | None],
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.dtype]]:
    """Return tensors, some of them as integers of the same bytes, and the dtypes that those had.

    Args:
        tensors: by name; None stays.
    """
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None and tensor.dtype in _UNREAD}
    return _viewed(tensors, {name: _INTEGERS[dtype.itemsize] for name, dtype in dtypes.items()}), dtypes


def as_before(
    tensors: Mapping[str, torch.Tensor | None], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor | None]:
    """Return tensors as they were before :func:`as_read_by_torch`, which returned both arguments."""
    return _viewed(tensors, dtypes)


def _viewed(
    tensors: Mapping[str, torch.Tensor | None], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor | None]:
    return {
        name: tensor.view(dtypes[name]) if tensor is not None and name in dtypes else tensor
        for name, tensor in tensors.items()
    }
