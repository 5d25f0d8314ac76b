"""Parameters and buffers that a model goes over in its own forward, as they are without simulators.

Once a model is prepared, ``parameters()`` yields the dense tensor of a simulated weight, after the module's others, and
``buffers()`` and ``state_dict()`` the simulators' own states too; in a finalized model an empty tensor stands for the
weight. A forward that adds up its weights would compute something else each time. While it runs, its modules list what
they did before, and a weight reads as its attribute does. Everybody else sees the model as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from bitwright.config.spec import CompressionSimulatorBase

from .forward_scope import ForwardScope, wrap_forward
from .kept_layouts import stands_for_activation
from .parametrization import order_before, own_parametrizations

__all__ = ["LISTINGS", "asks_for_states", "is_listed_by_torch", "list_own_states"]

LISTINGS = ("named_parameters", "named_buffers", "state_dict", "get_parameter", "get_buffer")
"""Methods of a module that hand out its states; ``parameters`` and ``buffers`` call the first two."""
_NAMES = frozenset({*LISTINGS, "parameters", "buffers"})
_MARKS = ("_bitwright_", "_COREML_")  # buffers that preparing and finalizing put beside the model's


def is_listed_by_torch(module: nn.Module, method: str) -> bool:
    """Whether a module has a method of :data:`LISTINGS` from ``nn.Module``, and nothing stands before it."""
    return getattr(type(module), method) is getattr(nn.Module, method) and method not in module.__dict__


def list_own_states(modules: Iterable[nn.Module], readers: Iterable[nn.Module]) -> list[Callable[[], Any]]:
    """Let modules list their states as they were before simulators came, while a reader runs.

    Args:
        modules: whose states are asked for.
        readers: whose forwards ask for them.

    Returns:
        The functions that undo it.
    """
    undo: list[Callable[[], Any]] = []
    for module in modules:
        for method in LISTINGS:
            if is_listed_by_torch(module, method):
                module.__dict__[method] = _Listing(module, method)
                undo.append(partial(module.__dict__.pop, method, None))
    return undo + [wrap_forward(_ReaderScope(reader)) for reader in readers]


def asks_for_states(module: nn.Module) -> bool:
    """Whether a module's forward, or a function that it calls, asks a module for states by name.

    Read from the code, for models that no forward was traced of: of the forward, the methods and properties of its
    class, the functions of its file, and what these have around them as decorators.
    """
    members = {
        name: member
        for cls in reversed(type(module).__mro__)
        if cls is not nn.Module
        for name, member in vars(cls).items()
    }
    seen: set[FunctionType] = set()
    waiting = [members.get("forward")]
    while waiting:
        function = _function_of(waiting.pop())
        if function is None or function in seen:
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if not _NAMES.isdisjoint(names):
            return True
        waiting += [members[name] for name in names if name in members]
        waiting += _functions_around(function, names)
    return False


def _function_of(member: Any) -> FunctionType | None:
    """The function behind an attribute of a class, if there is one."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property | partialmethod):
        member = member.func
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return member if isinstance(member, FunctionType) else None


def _functions_around(function: FunctionType, names: Iterable[str]) -> list[Any]:
    """Those that a decorator wraps, and those of the same file that a function names."""
    found = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    beside = (function.__globals__.get(name) for name in names)
    return found + [one for one in beside if isinstance(one, FunctionType) and one.__module__ == function.__module__]


def _names_in(code: CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names, *(name for part in inner for name in _names_in(part))}


class _Readers(threading.local):
    """How many forwards that read states run in this thread."""

    running = 0


_readers = _Readers()


class _ReaderScope(ForwardScope):
    """Says that a forward that reads states is running."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _readers.running += 1
        try:
            return self.run(*args, **kwargs)
        finally:
            _readers.running -= 1


class _Listing:
    """Stands before a method of a module's class, as an attribute of the instance."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.module = module
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _readers.running:
            return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
        listing: Callable[..., Any] = _OWN[self.method]
        return listing(self.module, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The method that it stands before; ``torch.compile`` asks which one that is."""
        method: Callable[..., Any] = getattr(type(self.module), self.method)
        return method


def _named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    return _members(module, prefix, recurse, remove_duplicate, parameters=True)


def _named_buffers(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    return _members(module, prefix, recurse, remove_duplicate, parameters=False)


def _state_dict(
    module: nn.Module, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = OrderedDict() if destination is None else destination
    for path, part in _own_modules(module, set(), remove_duplicate=False):
        names = {name: parameter for parameter in (True, False) for name in _own_names(part, parameter)}
        for name in names:
            if name not in part._non_persistent_buffers_set:
                tensor = getattr(part, name)
                found[f"{prefix}{path}{name}"] = tensor if keep_vars else tensor.detach()
    return found


def _state_named(module: nn.Module, target: str) -> torch.Tensor:
    path, _, name = target.rpartition(".")
    state: torch.Tensor = getattr(module.get_submodule(path), name)
    return state


_OWN: dict[str, Callable[..., Any]] = {
    "named_parameters": _named_parameters, "named_buffers": _named_buffers, "state_dict": _state_dict,
    "get_parameter": _state_named, "get_buffer": _state_named,
}  # fmt: skip


def _members(
    module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool, *, parameters: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[tuple[int, ...]] = set()
    parts = _own_modules(module, set(), remove_duplicate) if recurse else [("", module)]
    for path, part in parts:
        for name in _own_names(part, parameters):
            key = _identity(part, name)
            if key not in seen:
                yield f"{prefix}{'.' if prefix else ''}{path}{name}", getattr(part, name)
            if remove_duplicate:
                seen.add(key)


def _own_modules(
    module: nn.Module, seen: set[nn.Module], remove_duplicate: bool, path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules without simulators and what took their places, each with the beginning of its names."""
    if module in seen:
        return
    if remove_duplicate:
        seen.add(module)
    yield path, module
    simulated = set(order_before(module))
    for name, child in module._modules.items():
        if name == "parametrizations" and simulated:
            for attribute, chain in child._modules.items() if child is not None else ():
                if attribute not in simulated and chain is not None:
                    yield from _own_modules(chain, seen, remove_duplicate, f"{path}{name}.{attribute}.")
        elif child is not None and not isinstance(child, CompressionSimulatorBase) and not stands_for_activation(child):
            yield from _own_modules(child, seen, remove_duplicate, f"{path}{name}.")


def _own_names(module: nn.Module, parameters: bool) -> list[str]:
    """Names of a module's own parameters or buffers, in the order that they had before simulators came."""
    names = [*order_before(module), *module._parameters, *module._buffers]
    return [
        name
        for name in dict.fromkeys(names)
        if not name.startswith(_MARKS)
        and (tensor := _stored(module, name)) is not None
        and isinstance(tensor, nn.Parameter) == parameters
    ]


def _identity(module: nn.Module, name: str) -> tuple[int, ...]:
    """What tied weights have in common: the tensor, or what computes it, for finalized ones have no tensor."""
    chain = own_parametrizations(module).get(name)
    return (id(_stored(module, name)),) if chain is None else tuple(map(id, chain._modules.values()))


def _stored(module: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor behind a name: what stands under simulators, or in their place; None where there is none."""
    chain = own_parametrizations(module).get(name)
    if chain is not None:
        original: torch.Tensor | None = getattr(chain, "original", None)
        return original
    slot = module._parameters if name in module._parameters else module._buffers
    return slot.get(name)
