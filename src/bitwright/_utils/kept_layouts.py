"""What a finalized model's weights were packed as, kept on the modules that owned them, for those who count bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = [
    "finalized_for",
    "finalized_words",
    "keep_layout",
    "kept_layouts",
    "mark_activation",
    "mark_finalized",
    "stands_for_activation",
]

_LAYOUTS, _ACTIVATION, _TARGET = "_bitwright_layouts", "_bitwright_activation", "_bitwright_target"
_TITLES = {"coreai": "Core AI", "coreml": "Core ML"}


def keep_layout(owner: nn.Module, attribute: str, layout: Any) -> None:
    """Remember the layout of the tensor that ``owner.<attribute>`` was compressed to."""
    owner.__dict__.setdefault(_LAYOUTS, {})[attribute] = layout


def kept_layouts(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield module path, attribute and layout of every tensor that was remembered."""
    for path, module in model.named_modules():
        for attribute, layout in module.__dict__.get(_LAYOUTS, {}).items():
            yield path, attribute, layout


def mark_activation(module: nn.Module) -> nn.Module:
    """Remember that a module took the place of an activation's simulator; its buffers are no model state."""
    module.__dict__[_ACTIVATION] = True
    return module


def stands_for_activation(module: nn.Module) -> bool:
    """Return whether :func:`mark_activation` was called on ``module``."""
    return bool(module.__dict__.get(_ACTIVATION, False))


def mark_finalized(model: nn.Module, target: str) -> None:
    """Remember what a model was finalized for; that target alone can read it."""
    model.__dict__[_TARGET] = target


def finalized_for(model: nn.Module) -> str | None:
    """Return what a model, or a part of it, was finalized for; None for a model that is in no target's form."""
    return next((module.__dict__[_TARGET] for module in model.modules() if _TARGET in module.__dict__), None)


def finalized_words(target: str) -> str:
    """Return the first sentence of an error about a model that was finalized for another target than was asked for."""
    return f"This model was finalized for {_TITLES[target]}, whose form no other target reads."
