"""What Python makes of a size while ``torch.export`` captures a model.

The windows of Swin transformers count their images as ``int(windows / (height * width / side / side))``, which is a
constant otherwise. OpenAI's Whisper passes ``length > 1`` for a flag, which is refused otherwise.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.nn import functional
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat

from bitwright._utils.plain_flags import attention, attention_with_plain_flag

__all__ = ["python_on_sizes"]

_OF_NO_MODEL = frozenset((*sys.stdlib_module_names, "bitwright", "numpy", "sympy", "torch"))
_MISSING = object()


class _KeepsSizes(type):
    """Stands for ``int`` wherever that is called, or compared with a class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return _whole(args[0])
        return int(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, int)

    def __eq__(cls, other: object) -> bool:
        return other is int or other is cls

    def __hash__(cls) -> int:
        return hash(int)


class _Int(int, metaclass=_KeepsSizes):
    """``int``, but for sizes that ``torch.export`` does not know."""


@contextlib.contextmanager
def python_on_sizes(model: nn.Module) -> Iterator[None]:
    """Let ``int`` of a size be a size, and a comparison of sizes a flag of attention, in the code of a model.

    Quotients of sizes that are whole numbers for all sizes are taken for these, and are rounded otherwise.

    Args:
        model: whose classes, and the functions that they call, see other functions meanwhile; not another ``int`` where
            they ask whether something ``is int``.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for module in _modules_of(model):
        names = vars(module)
        if "int" not in names and not _asks_what_int_is(module):
            changed.append((names, "int", _Int))
        changed += [(names, name, attention_with_plain_flag) for name, value in names.items() if value is attention]
    changed.append((vars(functional), attention.__name__, attention_with_plain_flag))
    before = [names.get(name, _MISSING) for names, name, _ in changed]
    for names, name, stand_in in changed:
        names[name] = stand_in
    try:
        yield
    finally:
        for (names, name, _), value in zip(changed, before, strict=True):
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value


def _whole(size: torch.SymInt | torch.SymFloat) -> Any:
    if isinstance(size, torch.SymInt):
        return size
    node = size.node
    exact = sympy.cancel(_as_quotients(node.expr))
    if not (exact.is_integer and exact.is_nonnegative) or node.hint is None:
        return torch.sym_int(size)  # type: ignore[no-untyped-call]
    return node.shape_env.create_symintnode(exact, hint=int(node.hint))


def _as_quotients(expression: Any) -> Any:
    """An expression on sizes, in exact numbers where its constants are whole."""
    if expression.is_Float:
        return sympy.Integer(int(expression)) if float(expression).is_integer() else expression
    parts = [_as_quotients(part) for part in expression.args]
    if isinstance(expression, ToFloat):
        return parts[0]
    if isinstance(expression, FloatTrueDiv | IntTrueDiv):
        return parts[0] / parts[1]
    return expression.func(*parts) if parts else expression


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules of a model's classes, and of the functions that are known there."""
    found = dict.fromkeys(name for part in model.modules() for name in _homes(type(part)))
    modules = []
    for name in (names := list(found)):
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _OF_NO_MODEL:
            continue
        modules.append(module)
        functions = [value for value in vars(module).values() if inspect.isfunction(value)]
        new = {one.__module__ for one in functions if isinstance(one.__module__, str)}.difference(found)
        found.update(dict.fromkeys(new))
        names += sorted(new)
    return modules


def _homes(cls: type) -> list[str]:
    return [one.__module__ for one in cls.__mro__]


def _asks_what_int_is(module: ModuleType) -> bool:
    """Whether a function of a Python module compares something with ``int`` by ``is``; not as it builds a layer."""
    values = list(vars(module).values())
    classes = [vars(value) for value in values if inspect.isclass(value)]
    methods = [method for members in classes for name, method in members.items() if name != "__init__"]
    functions = [function for value in values + methods if inspect.isfunction(function := _function_in(value))]
    codes = [function.__code__ for function in functions if function.__module__ == module.__name__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if "int" not in code.co_names:
            continue
        steps = list(dis.get_instructions(code))
        if any(one.argval == "int" and other.opname == "IS_OP" for one, other in itertools.pairwise(steps)):
            return True
    return False


def _function_in(value: Any) -> Any:
    """What a property, a static or class method, or a decorated function calls."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return inspect.unwrap(value) if inspect.isfunction(value) else value
