"""Parameters of tests that go through all pairs, triples, ... of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def each_value(*axes: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """Parameters for the product of some lists of values, of which `make test` takes few: each value occurs there.

    The others are left to `make test-all`.

    Args:
        axes: values, or values by name.
    """
    named = _named(axes)
    longest = max(map(len, named))
    return _parameters(named, {tuple(row % len(axis) for axis in named) for row in range(longest)})


def each_pair(*axes: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """The same, of which `make test` takes more: any two values of two lists occur together there.

    Args:
        axes: values, or values by name.
    """
    named = _named(axes)
    rows = {
        places: {frozenset(pair) for pair in itertools.combinations(enumerate(places), 2)}
        for places in itertools.product(*(range(len(axis)) for axis in named))
    }
    missing, quick = set().union(*rows.values()), set()
    while missing:
        best = max(rows, key=lambda places: len(rows[places] & missing))
        quick.add(best)
        missing -= rows[best]
    return _parameters(named, quick)


def _named(axes: Iterable[Iterable[Any] | Mapping[str, Any]]) -> list[list[tuple[str, Any]]]:
    return [list(axis.items()) if isinstance(axis, Mapping) else [(_name(v), v) for v in axis] for axis in axes]


def _parameters(named: list[list[tuple[str, Any]]], quick: set[tuple[int, ...]]) -> list[Any]:
    return [
        pytest.param(
            *(axis[place][1] for axis, place in zip(named, places, strict=True)),
            id="-".join(axis[place][0] for axis, place in zip(named, places, strict=True)),
            marks=[] if places in quick else [pytest.mark.slow],
        )
        for places in itertools.product(*(range(len(axis)) for axis in named))
    ]


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
