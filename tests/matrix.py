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
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(_name(v), v) for v in axis] for axis in axes]
    longest = max(map(len, named))
    quick = {tuple(row % len(axis) for axis in named) for row in range(longest)}
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
