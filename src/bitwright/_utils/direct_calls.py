"""Calls of modules without what ``nn.Module`` does around a forward, where that comes to nothing.

Between the operations of a model little is in a cache, and the dictionaries of hooks that ``nn.Module`` looks at before
each forward cost more than what a simulator does to a small tensor. A module that has a :class:`Shortcut` knows whether
it has hooks; what concerns every module is asked once per forward of the model, by ``caller``.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from bitwright.kernels import Task

__all__ = ["Call", "Caller", "DirectlyCalled", "Shortcut", "TaskOf", "caller", "pass_last", "pass_through"]

# Takes the module, the tensor, and whether nobody needs the tensor afterwards; None where the forward must decide.
Call = Callable[[Any, torch.Tensor, bool], torch.Tensor | None]
# Takes the module and the tensor; None where the forward must decide.
TaskOf = Callable[[Any, torch.Tensor], Task | None]
# Takes a module and its argument.
Caller = Callable[[Any, Any], Any]

# Smaller tensors are not worth the question whether somebody else holds them.
_WORTH_ASKING = 1 << 14
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_call_of_modules = nn.Module.__call__
_get_tracing_state = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled


class Shortcut:
    """Holds a module's short way through its forward; copies and pickles of it are empty.

    Attributes:
        call: the short way, None if there is none.
        direct: whether ``ask`` has found that it may also stand for a call of the module.
        task: says what the short way would do to a tensor, for those who do it for many at once; None if there is none.
    """

    __slots__ = ("call", "direct", "task")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.task: TaskOf | None = None
        self.direct = False

    def ask(self, module: DirectlyCalled) -> bool:
        """Return whether a call of the module is its forward and nothing else; asked until it is."""
        own, kind = module.__dict__, type(module)
        self.direct = kind.forward is kind._direct_forward and not any(own.get(name) for name in _HOOKS)
        return self.direct

    def __reduce__(self) -> tuple[type[Shortcut], tuple[()]]:
        return Shortcut, ()

    def __deepcopy__(self, memo: Any) -> Shortcut:
        return Shortcut()


class DirectlyCalled(nn.Module):
    """A module with a shortcut.

    Registering a hook sees to it that the module is called as any other; setting an attribute takes the shortcut away.
    """

    #: The ``forward`` that does no more than going the short way or the long one.
    _direct_forward: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self._shortcut = Shortcut()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "training":  # the one attribute that shortcuts look at themselves
            self._forget_shortcut()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._forget_shortcut()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See ``nn.Module``."""
        super().add_module(name, module)
        self._forget_shortcut()

    def _forget_shortcut(self) -> None:
        shortcut = self.__dict__.get("_shortcut")
        if shortcut is not None:
            shortcut.call = shortcut.task = None

    def _go_long_way(self, tensor: torch.Tensor, unneeded: bool) -> torch.Tensor:
        """Map ``tensor`` in any case; ``unneeded`` as for ``Call``."""
        raise NotImplementedError

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """See ``nn.Module``."""
        self._shortcut.direct = False
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """See ``nn.Module``."""
        self._shortcut.direct = False
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """See ``nn.Module``."""
        self._shortcut.direct = False
        return super().register_backward_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """See ``nn.Module``."""
        self._shortcut.direct = False
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """See ``nn.Module``."""
        self._shortcut.direct = False
        return super().register_full_backward_pre_hook(*args, **kwargs)


def caller(last: bool = False) -> Caller:
    """Return the function by which modules are called in a forward that begins now.

    Args:
        last: the function is told to be the last that needs its argument: the caller holds it in one local variable,
            and never reads that again. Otherwise it makes no difference who holds the argument.
    """
    if (
        is_compiling()
        or nn.Module.__call__ is not _call_of_modules
        or _get_tracing_state() is not None
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    ):
        return _call_module
    return pass_last if last else pass_through


def _call_module(module: Any, x: Any) -> Any:
    return module(x)


def pass_through(module: Any, x: Any) -> Any:
    """Call a module, by its shortcut if it has one."""
    own = module.__dict__
    shortcut = own.get("_shortcut")
    if shortcut is None or not (shortcut.direct or shortcut.ask(module)) or "forward" in own:
        return module(x)
    y = None if shortcut.call is None else shortcut.call(module, x, False)
    return module._go_long_way(x, False) if y is None else y


def pass_last(module: Any, x: Any) -> Any:
    """``pass_through`` for an argument that the calling function holds in one local variable and reads no more."""
    own = module.__dict__
    shortcut = own.get("_shortcut")
    if shortcut is None or not (shortcut.direct or shortcut.ask(module)) or "forward" in own:
        return module(x)
    unneeded = (
        type(x) is torch.Tensor
        and x.requires_grad
        and x.numel() >= _WORTH_ASKING
        and _grad_enabled()
        and getrefcount(x) == _ALONE
        and x._use_count() == 1  # type: ignore[attr-defined]
    )
    y = None if shortcut.call is None else shortcut.call(module, x, unneeded)
    return module._go_long_way(x, unneeded) if y is None else y


def _count_alone() -> int:
    """The references that ``pass_last`` counts to an object that nobody but its caller holds."""

    def count(module: Any, x: Any) -> int:
        return getrefcount(x)

    def hold() -> int:
        x = object()
        return count(None, x)

    return hold()


_ALONE = _count_alone() if hasattr(torch.Tensor, "_use_count") else -1
