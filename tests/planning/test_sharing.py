"""Union-find against a slow definition by repeated merging."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bitwright.planning.sharing import DisjointSets

PAIRS = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=30)


def merged(count: int, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Groups by merging lists until nothing changes."""
    groups = [{item} for item in range(count)]
    for a, b in pairs:
        joined = [group for group in groups if a in group or b in group]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return sorted(sorted(group) for group in groups)


@given(PAIRS)
def test_groups_are_those_of_repeated_merging(pairs: list[tuple[int, int]]) -> None:
    """Every order of unions gives the same groups, in order of their first items."""
    sets = DisjointSets(15)
    for a, b in pairs:
        sets.union(a, b)
    assert sets.groups() == merged(15, pairs)
    assert all(sets.find(a) == sets.find(b) for a, b in pairs)


@given(st.lists(st.integers(0, 9), max_size=6))
def test_union_all_joins_everything(items: list[int]) -> None:
    """All items named together are in one group."""
    sets = DisjointSets(10)
    sets.union_all(items)
    assert len({sets.find(item) for item in items}) <= 1


def test_long_chains_stay_flat() -> None:
    """A chain of a hundred thousand unions ends well within the recursion limit and in one group."""
    sets = DisjointSets(100_000)
    for item in range(99_999):
        sets.union(item, item + 1)
    assert len(sets.groups()) == 1
