"""Metadata of GGUF files: values in the types by which llama.cpp reads its own keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "ARCHITECTURE", "encodable", "types_of_metadata"]

ALIGNMENT, ARCHITECTURE = "general.alignment", "general.architecture"

_INTEGERS = (("UINT32", 0, 1 << 32), ("INT32", -(1 << 31), 0), ("UINT64", 0, 1 << 64), ("INT64", -(1 << 63), 0))
"""Types, in the order in which they are tried, with the first integer of each and the one behind its last. llama.cpp
refuses a key of another type than the one that it asks for, which is UINT32 for all integers of a model."""


def types_of_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the GGUF type that each value is stored in, by key.

    Args:
        metadata: text, numbers and booleans by key.

    Raises:
        ValueError: a key or a value cannot be stored, or says what readers refuse; names all of them.
    """
    types, wrong = {}, []
    for key, value in metadata.items():
        try:
            types[key] = _type_of(key, value)
        except ValueError as error:
            wrong.append(f"{key!r}: {error}")
    if wrong:
        raise ValueError("\n  ".join(["GGUF cannot hold this metadata:", *wrong]))
    return types


def encodable(text: str) -> bool:
    """Whether a text has a form in UTF-8."""
    return text == text.encode(errors="replace").decode()


def _type_of(key: Any, value: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError("the key must be a text that is not empty")
    if key == ALIGNMENT and not (type(value) is int and 0 < value < 1 << 32 and not value & (value - 1)):
        raise ValueError(f"tensors begin at multiples of it, so it must be a power of two of 32 bits, got {value!r}")
    if key == ARCHITECTURE and not (isinstance(value, str) and value):
        raise ValueError(f"it must be a text that is not empty, got {value!r}")
    if not all(encodable(text) for text in (key, value) if isinstance(text, str)):
        raise ValueError(f"files hold text in UTF-8, which has no lone surrogates, got {value!r}")
    if isinstance(value, str):
        return "STRING"
    if isinstance(value, bool | np.bool_):
        return "BOOL"
    if isinstance(value, int | np.integer):
        return _type_of_integer(int(value))
    if isinstance(value, float | np.floating):
        return _type_of_float(float(value))
    raise ValueError(f"it must be text, a number or a boolean, got {value!r}")


def _type_of_integer(value: int) -> str:
    for name, first, end in _INTEGERS:
        if first <= value < end:
            return name
    raise ValueError(f"integers have 64 bits, got {value!r}; write it as text")


def _type_of_float(value: float) -> str:
    """``FLOAT32``, but ``FLOAT64`` for what would become zero or infinite in it."""
    with np.errstate(all="ignore"):
        rounded = float(np.float32(value))
    lost = math.isfinite(value) and (math.isinf(rounded) or (rounded == 0) != (value == 0))
    return "FLOAT64" if lost else "FLOAT32"
