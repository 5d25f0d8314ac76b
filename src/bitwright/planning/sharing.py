"""Disjoint sets: who shares parameters with whom."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["DisjointSets"]


class DisjointSets:
    """Union-find over ``0 .. n - 1`` with union by size and path halving (Tarjan and van Leeuwen 1984).

    Example:
        >>> sets = DisjointSets(4)
        >>> sets.union(0, 2)
        >>> sets.groups()
        [[0, 2], [1], [3]]
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._size = [1] * count

    def find(self, item: int) -> int:
        """Return the representative of the set that ``item`` is in."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(self, first: int, second: int) -> None:
        """Make the sets of two items one."""
        a, b = self.find(first), self.find(second)
        if a == b:
            return
        if self._size[a] < self._size[b]:
            a, b = b, a
        self._parent[b] = a
        self._size[a] += self._size[b]

    def union_all(self, items: Iterable[int]) -> None:
        """Make the sets of all items one."""
        entries = list(items)
        for other in entries[1:]:
            self.union(entries[0], other)

    def groups(self) -> list[list[int]]:
        """Return the sets, each in ascending order, ordered by their first items."""
        found: dict[int, list[int]] = {}
        for item in range(len(self._parent)):
            found.setdefault(self.find(item), []).append(item)
        return list(found.values())
