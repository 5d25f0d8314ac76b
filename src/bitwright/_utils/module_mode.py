"""Train and eval mode for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["module_mode"]


@contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put ``model`` in train or eval mode, and each module back as it was on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
