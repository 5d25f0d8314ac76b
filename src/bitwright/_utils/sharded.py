"""Simulators on tensors that are spread over several processes (DTensor)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_sharded", "may_change_unseen", "on_whole", "whole", "write"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing what defines it."""
    return type(tensor).__name__ == "DTensor"


def whole(tensor: Any) -> torch.Tensor:
    """Return a tensor with all its elements; processes that hold parts of it must all ask."""
    full: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def write(tensor: Any, value: torch.Tensor) -> None:
    """Give ``tensor`` the values of one that every process has; each writes its part."""
    tensor.copy_(_placed(value, tensor) if is_sharded(tensor) else value)


def _placed(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a tensor that every process has with the placements of the DTensor ``like``; where these are sums, whole.

    A sum of simulated parts would not be the simulation of the sum.
    """
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    placements = [Replicate() if place.is_partial() else place for place in like.placements]
    placed: torch.Tensor = DTensor.from_local(value, like.device_mesh, everywhere, run_check=False).redistribute(
        placements=placements
    )
    return placed


def may_change_unseen() -> bool:
    """Return whether a parameter may have other values at the same address with the same version.

    FSDP gathers the parts of a parameter into one tensor anew for every forward, and keeps its version counter as it
    was, so that autograd does not take that for a change (``torch.autograd._unsafe_preserve_version_counter``).
    """
    in_use = "torch.distributed.fsdp" in sys.modules and torch.distributed.is_available()
    return in_use and torch.distributed.is_initialized()


def on_whole(simulate: Callable[[torch.Tensor], torch.Tensor], tensor: Any) -> torch.Tensor:
    """Simulate the whole of a DTensor and return this process's part of the result.

    Every process computes with all elements, so that parameters are those of the whole tensor whatever the granularity
    and the placement. Gradients flow back to the parts.
    """
    return _placed(simulate(tensor.full_tensor()), tensor)
