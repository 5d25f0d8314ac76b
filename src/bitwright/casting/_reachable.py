"""What is connected with some nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node


def reachable(seeds: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return ``seeds`` and all that follows from them, step by step, through ``neighbours``."""
    found: set[Node] = set()
    pending = list(seeds)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += neighbours(node)
    return found
