"""Settings from environment variables; one that is empty is not set."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["chosen", "idle_megabytes"]


def chosen(name: str, choices: Sequence[str]) -> str:
    """Return the value of a variable, or the first of the choices where it is not set.

    Raises:
        ValueError: it is none of the choices.
    """
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"The environment variable {name} must be one of {tuple(choices)}, got {value!r}.")
    return value


def idle_megabytes() -> int:
    """Return how many MiB the CPU kernels may keep for later results: ``BITWRIGHT_IDLE_MEGABYTES``, or else 256.

    Raises:
        ValueError: it is no whole number of at least 0.
    """
    value = os.environ.get("BITWRIGHT_IDLE_MEGABYTES", "").strip() or "256"
    if not (value.isascii() and value.isdigit()):
        raise ValueError(
            "The environment variable BITWRIGHT_IDLE_MEGABYTES must be a whole number of MiB, 0 or more, got "
            f"{value!r}."
        )
    return int(value)
