"""Our own matrix products within a model's forward, which autocast would compute in half precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["full_precision"]


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrix products on ``device`` have the precision of their operands."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
