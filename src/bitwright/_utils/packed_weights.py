"""Weights of which nothing is held but packed codes: how they are told, and what nobody may do with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from bitwright.errors import BitwrightError

__all__ = ["PackedWeight", "PackedWeightError", "is_packed", "refuse_merge", "refuse_write"]


class PackedWeight(nn.Module):
    """Base of the modules that hold a weight's codes and return what they decode to, whatever they are called with."""


class PackedWeightError(BitwrightError, RuntimeError):
    """A packed weight was to be changed, and has no numbers of its own that could be."""


def is_packed(simulators: Iterable[Any] | None) -> bool:
    """Whether a weight is packed.

    Args:
        simulators: what stands on it, None for nothing.
    """
    return simulators is not None and any(isinstance(simulator, PackedWeight) for simulator in simulators)


def refuse_write(what: str) -> NoReturn:
    """Raise :class:`PackedWeightError` about a write to ``what``, a packed weight in words."""
    raise PackedWeightError(
        f"{what} cannot be written to: what it reads as is decoded anew each time, and its packed codes are all there "
        "is of it. Fill a float model, as in Artifact.from_model(packed).load_into(float_model), and write there."
    )


def refuse_merge(what: str) -> NoReturn:
    """Raise :class:`PackedWeightError` about an adapter for ``what``, a packed weight in words."""
    raise PackedWeightError(
        f"An adapter cannot be merged into packed weights, and {what} is one. Fill a float model, as in "
        "Artifact.from_model(packed).load_into(float_model), put the adapter on it, and merge it there."
    )
