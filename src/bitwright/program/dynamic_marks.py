"""What a failed ``torch.export`` leaves on its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["inputs_unmarked"]


@contextmanager
def inputs_unmarked(*inputs: Any) -> Iterator[None]:
    """Leave example inputs as they were, also where a capture fails.

    torch.export marks the dynamic dimensions on the tensors themselves. Where it fails the marks stay, and no later
    capture of the same tensors with fixed shapes succeeds.

    Args:
        inputs: example inputs, in whatever containers.
    """
    before = [(leaf, set(vars(leaf))) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    try:
        yield
    finally:
        for tensor, names in before:
            for name in set(vars(tensor)) - names:
                delattr(tensor, name)
