"""Which tensors hold numbers that stand for minus infinity in front of a softmax."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor

__all__ = ["SENTINEL", "holds_mask"]

SENTINEL = -1e4
"""A number at most this large may mean "masked"."""


def holds_mask(tensor: torch.Tensor) -> bool:
    """Whether the lowest number is that of the dtype or minus infinity, or all that are not 0 are sentinels.

    False for tensors whose numbers cannot be read.
    """
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2 or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return False
    with torch._C.DisableTorchFunction():
        numbers = tensor.detach()
        lowest = torch.amin(numbers)
        if lowest <= 0.5 * torch.finfo(tensor.dtype).min:
            return True
        return bool(lowest <= SENTINEL) and bool(((numbers == 0) | (numbers <= SENTINEL)).all())
