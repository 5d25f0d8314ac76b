"""Comparisons with numbers, whose answers have to stay the same when what is compared becomes 16-bit.

Of a buffer or constant every value is known, so that a threshold between the narrowed values is found, or there is none
because two values on either side became one. Of what is computed only the format is known (see
:func:`bitwright.casting._numbers.narrow_threshold`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ._numbers import narrow_bounds, narrow_tensor, narrow_threshold
from ._operators import MOVES, bounds_results, op_name

_ORDERS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "lt": torch.lt,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
}
#: Of these the threshold itself is on the upper side.
_ABOVE: Final = frozenset({"lt", "ge"})


def threshold_of(node: Node) -> float | None:
    """Return the number with which ``node`` orders the values of a tensor; None when it does nothing such."""
    if not isinstance(node.target, OpOverload) or op_name(node) not in _ORDERS or len(node.args) < 2:
        return None
    compared, threshold = node.args[:2]
    if not isinstance(compared, Node) or isinstance(threshold, bool) or not isinstance(threshold, int | float):
        return None
    return float(threshold)


def compared_source(node: Node) -> Node:
    """Return what the values that ``node`` compares come from, seen through operators that only move them."""
    source = node.args[0]
    while isinstance(source, Node) and source.op == "call_function" and op_name(source) in MOVES:
        source = source.args[0]
    if not isinstance(source, Node):
        raise TypeError(f"{node.name} compares {node.args[0]!r}, which is no tensor.")
    return source


def is_only_compared(source: Node) -> bool:
    """Tell whether values are ordered by numbers, moved or not, and used for nothing else."""
    return all(
        threshold_of(user) is not None or (op_name(user) in MOVES and is_only_compared(user)) for user in source.users
    )


def narrow_constant(node: Node, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the stored float32 ``tensor`` that ``node`` stands for in ``dtype``."""
    return narrow_bounds(tensor, dtype) if bounds_results(node) else narrow_tensor(tensor, dtype)


def computed_threshold(node: Node, threshold: float, dtype: torch.dtype) -> float:
    """Return the number of ``dtype`` with which ``node`` compares numbers of ``dtype`` as it did with ``threshold``."""
    return narrow_threshold(threshold, dtype, above=op_name(node) in _ABOVE)


def constant_threshold(node: Node, values: torch.Tensor, narrowed: torch.Tensor) -> float | None:
    """Return a number with which ``node`` answers for ``narrowed`` as it did for ``values``; None when there is none.

    Args:
        node: a comparison for which :func:`threshold_of` returns a number.
        values: float32 values of what it compares.
        narrowed: the same in the 16-bit dtype.
    """
    threshold = threshold_of(node)
    if threshold is None:
        raise AssertionError(f"{node.name} is no comparison with a number")
    compare = _ORDERS[op_name(node)]
    answers = compare(values, threshold)
    usual = computed_threshold(node, threshold, narrowed.dtype)
    candidates = [usual]
    # The value nearest to the threshold, on the side where the threshold itself is.
    side = values >= threshold if op_name(node) in _ABOVE else values <= threshold
    if bool(side.any()):
        nearest = narrowed[side].min() if op_name(node) in _ABOVE else narrowed[side].max()
        candidates.append(float(nearest))
    else:
        candidates.append(math.inf if op_name(node) in _ABOVE else -math.inf)
    return next((one for one in candidates if torch.equal(compare(narrowed, one), answers)), None)
