"""Attributes of other people's modules and classes that are something else for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Put something else in the place of an attribute; nothing where there is none.

    Args:
        owner: a module or class, or None.
        name: of its attribute.
        stand_in: called with the attribute, returns what takes its place.
    """
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, stand_in(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
