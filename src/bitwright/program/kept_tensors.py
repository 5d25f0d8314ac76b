"""Tensors that a model keeps in attributes when it is called, such as tables that it computes once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .model import Value

__all__ = ["is_constant", "kept_tensors"]


def kept_tensors(model: nn.Module) -> dict[tuple[int, str, Any], torch.Tensor]:
    """Return the attributes of modules that are tensors or dictionaries of them, and neither parameters nor buffers.

    Args:
        model: the model.

    Returns:
        Tensors by the identity of their module, the name of the attribute, and the key in a dictionary, otherwise None.
    """
    of_every_module, kept = vars(nn.Module()), {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in of_every_module:
                entries = value if type(value) is dict else {None: value}
                kept.update({(id(module), name, key): entry for key, entry in entries.items()})
    return {place: entry for place, entry in kept.items() if isinstance(entry, torch.Tensor)}


def is_constant(value: Value) -> bool:
    """Return whether a value was computed, and of buffers and constants alone.

    Args:
        value: of an eager program.
    """
    found, known = [value], {id(value)}
    for one in found:
        if one.producer is None:
            if one is value or one.state is None or one.state.is_parameter:
                return False
            continue
        before = [argument.value for argument in one.producer.arguments if id(argument.value) not in known]
        known.update(map(id, before))
        found += before
    return True
