"""Checks of arguments: all before the program is touched, in the words of the caller."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import TypeVar

from .common import DType

_E = TypeVar("_E", bound=enum.Enum)


def member(kind: type[_E], value: object, name: str) -> _E:
    """Return ``value`` as a member of an enumeration; its string value is taken too.

    Raises:
        ValueError: it is none.
    """
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"{kind.__name__}.{entry.name}" for entry in kind)
        raise ValueError(f"Invalid {name} {value!r}: it must be one of {choices}.") from None


def one_of(value: _E, choices: Collection[_E], name: str, reason: str = "") -> None:
    """Check that an enumeration member is among ``choices``.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        listed = ", ".join(f"{type(value).__name__}.{entry.name}" for entry in choices)
        because = f" ({reason})" if reason else ""
        got = f"{type(value).__name__}.{value.name}"
        raise ValueError(f"Invalid {name} {got}: it must be one of {listed}{because}.")


def positive(value: object, name: str, minimum: int = 1) -> int:
    """Return ``value`` when it is an integer of at least ``minimum``.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}; got {value!r}.")
    return value


def bits(value: object, choices: Collection[int], name: str) -> int:
    """Return ``value`` when it is among ``choices``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value not in choices:
        raise ValueError(f"Invalid {name} {value!r}: it must be one of {', '.join(map(str, choices))}.")
    return value


def optional_dtype(value: object, choices: Collection[DType], name: str) -> DType | None:
    """Return ``value`` as a ``DType`` among ``choices``, or None.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    dtype = member(DType, value, name)
    one_of(dtype, choices, name)
    return dtype
