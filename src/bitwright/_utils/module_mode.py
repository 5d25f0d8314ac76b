"""Train and eval mode for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["has_modes", "module_mode"]


def has_modes(model: nn.Module) -> bool:
    """Return whether ``train()`` and ``eval()`` work: ``torch.export`` replaces them on the modules that it returns."""
    replaced = vars(model).get("train")
    return not getattr(replaced, "__module__", "").startswith("torch.export")


@contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put ``model`` in train or eval mode, and each module back as it was on exit."""
    modes = [(module, module.training) for module in model.modules()]
    _switch(model, training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def _switch(model: nn.Module, training: bool) -> None:
    """Modules of ``torch.export`` refuse: their ops have no mode any more, but simulators inside them have."""
    if has_modes(model):
        model.train(training)
        return
    model.training = training
    for child in model.children():
        child.train(training)
