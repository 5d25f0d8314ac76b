"""Activations without elements, of which nothing can be observed: they stay in float, and one problem names them."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.program import Value

from .plan import Problem

__all__ = ["empty_activation_problems", "is_empty"]

_NAMED = 3


def is_empty(value: Value) -> bool:
    """Whether a value has no elements with the example inputs."""
    return 0 in value.shape


def empty_activation_problems(ops: Sequence[str]) -> list[Problem]:
    """Return a problem if there are outputs without elements that the configuration asks to simulate.

    Args:
        ops: names of the ops that have them.
    """
    if not ops:
        return []
    names = ", ".join(map(repr, ops[:_NAMED])) + (f" and {len(ops) - _NAMED} more" if len(ops) > _NAMED else "")
    message = (
        f"with these example inputs the results of {names} have no elements, so that nothing is known of them and they "
        "stay in float. Plan and prepare with example inputs that have some, such as a batch of size 1."
    )
    return [Problem("empty-activation", ops[0], message)]
