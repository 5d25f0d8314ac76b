"""Simulators on tensors that are spread over several processes (DTensor)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_sharded", "on_whole"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing what defines it."""
    return type(tensor).__name__ == "DTensor"


def on_whole(simulate: Callable[[torch.Tensor], torch.Tensor], tensor: Any) -> torch.Tensor:
    """Simulate the whole of a DTensor and return this process's part of the result.

    Every process computes with all elements, so that parameters are those of the whole tensor whatever the granularity
    and the placement. Gradients flow back to the parts.
    """
    from torch.distributed.tensor import DTensor, Replicate

    whole = simulate(tensor.full_tensor())
    everywhere = [Replicate()] * tensor.device_mesh.ndim
    placed: torch.Tensor = DTensor.from_local(whole, tensor.device_mesh, everywhere, run_check=False).redistribute(
        placements=tensor.placements
    )
    return placed
