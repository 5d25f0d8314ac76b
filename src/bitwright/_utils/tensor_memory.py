"""Which memory a tensor lies in."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["memory_of"]


def memory_of(leaf: Any) -> int | None:
    """Return what tells the memory of a tensor from all other that is in use, None where it has none of its own."""
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return leaf.untyped_storage()._cdata if leaf.numel() else None
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses that hold other tensors
        return None
