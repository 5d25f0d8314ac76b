"""What a model keeps from call to call, in buffers and attributes, so that extra runs leave no trace in it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = ["States", "attribute_tensors_preserved", "contents", "refill", "states_preserved"]

_INTERNAL = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)


def contents(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the containers in a model's attributes, inner ones too, and those attributes, each with a copy of it."""
    found = _reachable(vars(module) for module in model.modules())
    return [(value, value.copy()) for value in found if type(value) in _CONTAINERS]


def refill(container: Any, content: Any) -> None:
    """Give a dictionary, list, set or queue the content of ``content``."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(content)


def _reachable(values: Iterable[Any]) -> list[Any]:
    """Tensors and containers, tuples among them, that are among some values or in containers there, each once."""
    found, waiting = dict[int, Any](), list(values)
    for value in waiting:
        is_container = type(value) in (*_CONTAINERS, tuple)
        if id(value) not in found and (is_container or isinstance(value, torch.Tensor)):
            found[id(value)] = value
            if is_container:
                waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


_Copy = tuple[torch.Tensor, int, torch.Tensor]
"""A tensor, its version, and a copy of it."""


def _copies(values: Iterable[Any]) -> Iterator[_Copy]:
    """Copy the tensors among some values but for parameters, and those that hold nothing yet."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        # those made in inference mode have no version and are not written to
        if not (isinstance(value, nn.Parameter) or nn.parameter.is_lazy(value) or value.is_inference()):
            yield value, value._version, value.detach().clone()


def _rewrite(copies: Iterable[_Copy]) -> None:
    """Give tensors that were written to the numbers of their copies."""
    with torch.no_grad():
        for tensor, version, content in copies:
            if tensor.shape != content.shape:  # by ``buffer.data = ...``
                tensor.data = content.clone()
            elif tensor._version != version or _differs(tensor, content):
                tensor.copy_(content)


@contextmanager
def attribute_tensors_preserved(model: nn.Module) -> Iterator[None]:
    """Put the numbers of plain tensors in a model's attributes, and in containers there, back on exit.

    Parameters and buffers are left as the block leaves them.
    """
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    reached = _reachable(vars(module) for module in model.modules())
    copies = list(_copies(value for value in reached if id(value) not in registered))
    try:
        yield
    finally:
        _rewrite(copies)


class _Slots(NamedTuple):
    """The attributes or the buffers of one module."""

    module: nn.Module
    held: dict[str, Any]
    names: frozenset[str] | None
    """Which of them are looked at; None for all that are not torch's."""

    def values(self) -> dict[str, Any]:
        names = [name for name in self.held if name not in _INTERNAL] if self.names is None else self.names
        return {name: self.held[name] for name in names if name in self.held}


class _Kept(NamedTuple):
    """What was there: references, the contents of containers, and copies of tensors with their versions."""

    slots: list[tuple[_Slots, dict[str, Any], frozenset[str] | None]]
    """With them the names that the module had registered, None of one that had yet to make its parameters."""
    containers: list[tuple[Any, Any]]
    tensors: list[_Copy]


class States:
    """Takes copies of what a model keeps from call to call, and puts them back.

    That is: its buffers; the attributes of its modules; what dictionaries, lists, sets and queues in these hold; and
    the numbers of tensors in them, parameters apart. What objects of other classes keep is not known. A module that
    has registered parameters, buffers or modules in the meantime was built by its first call, and stays so: its
    attributes say that it is.

    Args:
        model: the model.
        like: only what this model has too: not what compression has put beside it, such as packed weights.
        without: modules whose states are let go on, with what is in them.
    """

    def __init__(self, model: nn.Module, like: nn.Module | None = None, without: Iterable[nn.Module] = ()) -> None:
        own = dict((model if like is None else like).named_modules(remove_duplicate=False))
        free = {id(module) for root in without for module in root.modules()}
        self._slots: list[_Slots] = []
        for path, module in model.named_modules():
            twin = own.get(path)
            if twin is None or id(module) in free:
                continue
            self._slots.append(_Slots(module, module._buffers, _names(twin._buffers)))
            if isinstance(module, type(twin)):  # others have another forward, which keeps things of its own
                self._slots.append(_Slots(module, vars(module), None))

    def copied(self) -> _Kept:
        """Return what is there now."""
        found = _Kept([(slots, slots.values(), _registered(slots.module)) for slots in self._slots], [], [])
        reached = _reachable(value for _, values, _ in found.slots for value in values.values())
        found.containers.extend((value, value.copy()) for value in reached if type(value) in _CONTAINERS)
        found.tensors.extend(_copies(reached))
        return found

    def put_back(self, kept: _Kept, but: Collection[int] = ()) -> None:
        """Restore what was there when ``kept`` was made; what nobody wrote to is not touched.

        Args:
            kept: what ``copied`` returned.
            but: the ``id`` of modules whose attributes are left as they are.
        """
        left = set[int]()
        for slots, values, registered in kept.slots:
            if slots.names is None:
                if id(slots.module) in but or registered is None or _registered(slots.module) != registered:
                    left.update(map(id, _reachable(values.values())))
                    continue
                for name in slots.values().keys() - values.keys():
                    del slots.held[name]
            for name, value in values.items():
                if name not in slots.held or slots.held[name] is not value:
                    slots.held[name] = value
        for container, content in kept.containers:
            if id(container) not in left:
                refill(container, content)
        _rewrite(copy for copy in kept.tensors if id(copy[0]) not in left)


@contextmanager
def states_preserved(
    model: nn.Module,
    like: nn.Module | None = None,
    without: Iterable[nn.Module] = (),
    but: Collection[int] = (),
) -> Iterator[None]:
    """Put what a model keeps back on exit; takes the arguments of ``States`` and of its ``put_back``."""
    states = States(model, like, without)
    kept = states.copied()
    try:
        yield
    finally:
        states.put_back(kept, but)


def _registered(module: nn.Module) -> frozenset[str] | None:
    """Names of a module's parameters, buffers and children; None while a lazy one has not made its parameters."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return None
    return _names(module._parameters) | _names(module._buffers) | _names(module._modules)


def _names(registered: Any) -> frozenset[str]:
    """Names in a dictionary of a module, also those that ours hides; one of a scripted module is iterated by number."""
    return frozenset(dict.keys(registered) if isinstance(registered, dict) else registered.keys())


def _differs(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether a tensor has other numbers than before: what is written through ``tensor.data`` counts no version."""
    comparable = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not comparable or torch.equal(tensor, content):
        return False
    return not bool(torch.isclose(tensor, content, rtol=0.0, atol=0.0, equal_nan=True).all())
