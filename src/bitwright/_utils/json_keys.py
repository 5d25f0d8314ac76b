"""JSON objects that name a key twice, which the standard library reads without a word."""

from __future__ import annotations

from typing import Any

__all__ = ["without_duplicates"]


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse objects that name a key twice: which one counts is up to the reader. An ``object_pairs_hook``.

    Raises:
        ValueError: a key stands there twice.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return content
