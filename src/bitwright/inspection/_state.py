"""What a model keeps from call to call, in buffers and attributes, so that extra runs leave no trace in it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["States", "states_preserved"]

_INTERNAL = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)


class _Slots(NamedTuple):
    """The attributes or the buffers of one module."""

    held: dict[str, Any]
    names: frozenset[str] | None
    """Which of them are looked at; None for all that are not torch's."""

    def values(self) -> dict[str, Any]:
        names = [name for name in self.held if name not in _INTERNAL] if self.names is None else self.names
        return {name: self.held[name] for name in names if name in self.held}


class _Kept(NamedTuple):
    """What was there: references, the contents of containers, and copies of tensors with their versions."""

    slots: list[tuple[_Slots, dict[str, Any]]]
    containers: list[tuple[Any, Any]]
    tensors: list[tuple[torch.Tensor, int, torch.Tensor]]


class States:
    """Takes copies of what a model keeps from call to call, and puts them back.

    That is: its buffers; the attributes of its modules; what dictionaries, lists, sets and queues in these hold; and
    the numbers of tensors in them, parameters apart. What objects of other classes keep is not known.

    Args:
        model: the model.
        like: only what this model has too: not what compression has put beside it, such as packed weights.
    """

    def __init__(self, model: nn.Module, like: nn.Module | None = None) -> None:
        own = dict((model if like is None else like).named_modules(remove_duplicate=False))
        self._slots: list[_Slots] = []
        for path, module in model.named_modules():
            twin = own.get(path)
            if twin is None:
                continue
            self._slots.append(_Slots(module._buffers, frozenset(twin._buffers)))
            if isinstance(module, type(twin)):  # others have another forward, which keeps things of its own
                self._slots.append(_Slots(vars(module), None))

    def copied(self) -> _Kept:
        """Return what is there now."""
        found = _Kept([(slots, slots.values()) for slots in self._slots], [], [])
        waiting = [value for _, values in found.slots for value in values.values()]
        seen: set[int] = set()
        for value in waiting:
            holds = isinstance(value, torch.Tensor) or type(value) in (*_CONTAINERS, tuple)
            if not holds or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                # those made in inference mode have no version and are not written to
                if not isinstance(value, nn.Parameter) and not value.is_inference():
                    found.tensors.append((value, value._version, value.detach().clone()))
                continue
            if type(value) is not tuple:
                found.containers.append((value, value.copy()))
            waiting += value.values() if isinstance(value, dict) else value
        return found

    def put_back(self, kept: _Kept) -> None:
        """Restore what was there when ``kept`` was made; what nobody wrote to is not touched."""
        for slots, values in kept.slots:
            if slots.names is None:
                for name in slots.values().keys() - values.keys():
                    del slots.held[name]
            for name, value in values.items():
                if name not in slots.held or slots.held[name] is not value:
                    slots.held[name] = value
        for container, content in kept.containers:
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(content)
        with torch.no_grad():
            for tensor, version, content in kept.tensors:
                if tensor.shape != content.shape:  # by ``buffer.data = ...``
                    tensor.data = content.clone()
                elif tensor._version != version or _differs(tensor, content):
                    tensor.copy_(content)


@contextmanager
def states_preserved(model: nn.Module, like: nn.Module | None = None) -> Iterator[None]:
    """Put what a model keeps back on exit; takes the arguments of ``States``."""
    states = States(model, like)
    kept = states.copied()
    try:
        yield
    finally:
        states.put_back(kept)


def _differs(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether a tensor has other numbers: what is written through ``tensor.data`` counts no version."""
    comparable = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return comparable and not torch.equal(tensor, content)
