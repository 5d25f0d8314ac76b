"""Run something around a module's forward, from inside: as an attribute of the instance, not as a hook.

An instance attribute ``forward`` takes the place of the class's method. Unlike hooks it sees exceptions (``try`` and
``finally``), runs inside the hooks of others, and costs one Python call. It survives deepcopy and pickle.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["ForwardScope", "PassingScope", "in_force", "wrap_forward"]


class ForwardScope:
    """Base class: replaces ``module.forward``; subclasses define ``__call__`` and run ``self.run(*args, **kwargs)``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stood here before."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Parameters of what stood here before; ``torch.export`` names the program's inputs after them."""
        return inspect.signature(self.inner or functools.partial(type(self.module).forward, self.module))

    @property
    def __code__(self) -> types.CodeType:
        """Code of the module's own forward; ``torch.export`` reads from it where a shape comes from."""
        inner: Any = self.inner or type(self.module).forward
        code: types.CodeType = getattr(inner, "__code__", ForwardScope.run.__code__)
        return code


def wrap_forward(scope: ForwardScope) -> Callable[[], None]:
    """Put ``scope`` in place and return the function that takes it out again."""
    attributes = scope.module.__dict__
    attributes["forward"] = scope

    def undo() -> None:
        if scope.inner is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = scope.inner

    return undo


class PassingScope(ForwardScope):
    """Base class of scopes for the length of a block, see ``in_force``.

    Attributes:
        is_over: whether it does nothing any more: the block has ended, with this scope still inside of what somebody
            else has put around it, or it belongs to a copy of the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.is_over = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"is_over": True}


@contextmanager
def in_force(scope: PassingScope) -> Iterator[None]:
    """Have ``scope`` around the forward of its module, but not of copies of it."""
    undo = wrap_forward(scope)
    try:
        yield
    finally:
        scope.is_over = True
        if vars(scope.module).get("forward") is scope:  # not if somebody has put something else around it
            undo()
