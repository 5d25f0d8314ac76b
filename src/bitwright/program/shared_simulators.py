"""Simulators that stand under several names in a module, one for each place in its graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["part_where_states_differ"]


def part_where_states_differ(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Give names of one simulator copies of it where a state holds other values under them.

    Which places share a simulator depends on the example inputs (``quantization._graph.apart``); without this, what is
    loaded for the last name would hold for all. Other children, which a model may have tied itself, stay as they are.

    Args:
        module: parent of the simulators.
        state_dict: what is going to be loaded; changed in nothing.
        prefix: what stands before the names of the simulators there.
    """
    names: dict[Any, list[str]] = {}
    for name, child in module._modules.items():
        if hasattr(child, "note_places"):
            names.setdefault(child, []).append(name)
    shared = {simulator: under for simulator, under in names.items() if len(under) > 1}
    if not shared:
        return
    entries: dict[str, dict[str, Any]] = {name: {} for under in shared.values() for name in under}
    for key, value in state_dict.items():
        name, _, rest = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and name in entries:
            entries[name][rest] = value
    for simulator, under in shared.items():
        parts: list[list[str]] = []
        for name in under:
            part = next((part for part in parts if _same(entries[part[0]], entries[name])), None)
            if part is None:
                parts.append([name])
            else:
                part.append(name)
        if len(parts) == 1:
            continue
        for part in parts:
            own = simulator if part is parts[0] else copy.deepcopy(simulator)
            own.note_places(len(part))
            for name in part:
                module._modules[name] = own


def _same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether entries are equal; what is not there stands for what is."""
    return all(_equal(value, others.get(key, value)) for key, value in some.items())


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other.to(one.device))
