"""Simulators on function calls of eager models.

A module that *is* one op (``nn.Linear``) gets plain forward hooks. A module that calls functions itself
(``x + y``, ``torch.matmul``) becomes a frame: while it runs, a torch function mode counts its calls by function name
and routes the planned ones through their simulators. Modules called from a frame run in an empty frame, so that
their own calls are neither counted nor touched. A thread has a stack of frames; the mode is active while any is full.

Hooks hold plain data only and find their simulators among the children of the module that is called, so that models
deep-copy and pickle.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from bitwright.errors import UnplannedCallWarning
from bitwright.planning.ops import QUANTIZER_EAGER_OPS

__all__ = [
    "CallSites",
    "CallTable",
    "attach_frame",
    "attach_input",
    "attach_output",
    "attach_shield",
]


@dataclass(slots=True)
class CallSites:
    """Simulators of one call.

    Attributes:
        arguments: ``(position, name, item in a list or None, child name of the simulator)``.
        outputs: ``(position among the output's tensors, child name of the simulator)``.
    """

    arguments: list[tuple[int, str, int | None, str]] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class CallTable:
    """The planned calls of one module.

    Attributes:
        path: module path, for messages.
        seen: calls of each function name while planning.
        sites: simulators by call name (``"add_1"``).
        warned: call names that were already reported.
    """

    path: str
    seen: dict[str, int] = field(default_factory=dict)
    sites: dict[str, CallSites] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


class _Frame:
    __slots__ = ("counts", "module", "table")

    def __init__(self, table: CallTable, module: nn.Module) -> None:
        self.table = table
        self.module = module
        self.counts: dict[str, int] = {}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame | None] = []
        self.modes: list[_InterceptMode | None] = []


_state = _ThreadState()


class _InterceptMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        frame = _state.frames[-1]
        if frame is None:
            return func(*args, **(kwargs or {}))
        base = func.__name__
        table = frame.table
        planned = table.seen.get(base)
        if planned is None:
            if base in QUANTIZER_EAGER_OPS:
                _report_unplanned(table, base)
            return func(*args, **(kwargs or {}))
        number = frame.counts.get(base, 0)
        frame.counts[base] = number + 1
        call = f"{base}_{number}" if number else base
        sites = table.sites.get(call)
        if sites is None:
            if number >= planned:
                _report_unplanned(table, call)
            return func(*args, **(kwargs or {}))
        return _run(frame.module, sites, func, list(args), dict(kwargs or {}))


def _run(module: nn.Module, sites: CallSites, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    children = module._modules
    target = args[0] if args and _works_in_place(func) else None
    for index, name, item, child in sites.arguments:
        simulate: Any = children[child]
        holder, key = _slot(args, kwargs, index, name)
        entry = holder.get(key) if isinstance(holder, dict) else holder[key]
        if item is not None and isinstance(entry, (list, tuple)):
            if item < len(entry) and isinstance(entry[item], torch.Tensor):
                changed = [*entry[:item], simulate(entry[item]), *entry[item + 1 :]]
                holder[key] = changed if isinstance(entry, list) else tuple(changed)
        elif isinstance(entry, torch.Tensor):
            holder[key] = simulate(entry)
    result = func(*args, **kwargs)
    for index, child in sites.outputs:
        result = _replace_output(result, index, children[child])
    if target is not None and result is not target:
        return target.copy_(result)  # the caller may hold `x` of `x.add_(y)` under other names
    return result


def _slot(args: list[Any], kwargs: dict[str, Any], index: int, name: str) -> tuple[Any, Any]:
    """Return the container of an argument, and its key there."""
    return (args, index) if index < len(args) else (kwargs, name)


def _works_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name.endswith("_") and not name.endswith("__")


def _replace_output(result: Any, index: int, simulate: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return simulate(result) if index == 0 else result
    if isinstance(result, (tuple, list)) and index < len(result) and isinstance(result[index], torch.Tensor):
        changed = [*result[:index], simulate(result[index]), *result[index + 1 :]]
        if hasattr(result, "_fields"):
            return type(result)(*changed)
        return tuple(changed) if isinstance(result, tuple) else changed
    return result


def _report_unplanned(table: CallTable, call: str) -> None:
    if call in table.warned:
        return
    table.warned.add(call)
    name = f"{table.path}.{call}" if table.path else call
    warnings.warn(
        f"The call {name!r} was not seen while preparing, so it runs unquantized. Prepare with example inputs that "
        "take this path, or exclude the module in the config.",
        UnplannedCallWarning,
        stacklevel=4,
    )


class _Hook:
    """A hook that knows its id, so that ids given out after unpickling do not collide with it."""

    handle_id: int = -1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.handle_id + 1)


class _InputHook(_Hook):
    def __init__(self, index: int, name: str, child: str) -> None:
        self.index, self.name, self.child = index, name, child

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        simulate: Any = module._modules[self.child]
        if self.index < len(args):
            replaced = (*args[: self.index], simulate(args[self.index]), *args[self.index + 1 :])
            return replaced, kwargs
        return args, {**kwargs, self.name: simulate(kwargs[self.name])}


class _OutputHook(_Hook):
    def __init__(self, index: int, child: str) -> None:
        self.index, self.child = index, child

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _replace_output(output, self.index, module._modules[self.child])


class _EnterFrame(_Hook):
    def __init__(self, table: CallTable) -> None:
        self.table = table

    def __call__(self, module: nn.Module, args: Any) -> None:
        mode = None if any(mode is not None for mode in _state.modes) else _InterceptMode()
        _state.frames.append(_Frame(self.table, module))
        _state.modes.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]


class _EnterShield(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        _state.frames.append(None)
        _state.modes.append(None)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _state.frames:
            return
        _state.frames.pop()
        mode = _state.modes.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def attach_input(module: nn.Module, index: int, name: str, child: str) -> RemovableHandle:
    """Route argument ``index`` (or keyword ``name``) of ``module`` through its child ``child``."""
    hook = _InputHook(index, name, child)
    return _remember(hook, module.register_forward_pre_hook(hook, with_kwargs=True))


def attach_output(module: nn.Module, index: int, child: str) -> RemovableHandle:
    """Route output ``index`` of ``module`` through its child ``child``."""
    hook = _OutputHook(index, child)
    return _remember(hook, module.register_forward_hook(hook))


def attach_frame(module: nn.Module, table: CallTable) -> list[RemovableHandle]:
    """Intercept the calls that ``module`` makes in its own forward, as ``table`` says."""
    return _attach_scope(module, _EnterFrame(table))


def attach_shield(module: nn.Module) -> list[RemovableHandle]:
    """Keep the calls made inside ``module`` from being taken for calls of the frame around it."""
    return _attach_scope(module, _EnterShield())


def _attach_scope(module: nn.Module, enter: Any) -> list[RemovableHandle]:
    leave = _Leave()
    return [
        _remember(enter, module.register_forward_pre_hook(enter, prepend=True)),
        _remember(leave, module.register_forward_hook(leave, always_call=True)),
    ]


def _remember(hook: _Hook, handle: RemovableHandle) -> RemovableHandle:
    hook.handle_id = handle.id
    return handle
