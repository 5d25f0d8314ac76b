"""Constructors that wait: what a spec builds, with some arguments already given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class PartialConstructor(Generic[_T]):
    """Calls a constructor with arguments given beforehand; later ones win.

    Arguments in ``callable_args`` are functions, called anew for every object, so that two objects never share what
    they build. Has the methods of torchao's partial constructors, so PT2E takes it in their place.

    Args:
        p: the constructor, or a ``functools.partial`` of it.
        callable_args: argument name to a function without arguments that makes the argument.
    """

    def __init__(self, p: Callable[..., _T], callable_args: dict[str, Callable[[], Any]] | None = None) -> None:
        self.p = p
        self.callable_args = dict(callable_args or {})

    def __call__(self, *args: Any, **keywords: Any) -> _T:
        """Build an object."""
        made = {name: make() for name, make in self.callable_args.items() if name not in keywords}
        return self.p(*args, **keywords, **made)

    def with_args(self, **kwargs: Any) -> PartialConstructor[_T]:
        """Return a constructor with further arguments given."""
        callables = {name: make for name, make in self.callable_args.items() if name not in kwargs}
        return PartialConstructor(partial(self.p, **kwargs), callables)

    def with_callable_args(self, **kwargs: Callable[[], Any]) -> PartialConstructor[_T]:
        """Return a constructor with further arguments that are made anew for each object."""
        return PartialConstructor(self.p, {**self.callable_args, **kwargs})

    def __repr__(self) -> str:
        return f"{self.p!r}{self.callable_args!r}"


def with_args(constructor: Callable[..., _T], **kwargs: Any) -> PartialConstructor[_T]:
    """Return ``constructor`` with some arguments given."""
    return PartialConstructor(partial(constructor, **kwargs))
