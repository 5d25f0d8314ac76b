"""Attributes whose names cannot stand behind a dot, as of ``nn.ModuleDict({"class": ...})``, in generated code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from keyword import iskeyword

from torch.fx import graph

from bitwright._utils.replacing import replaced

__all__ = ["keywords_read"]


@contextlib.contextmanager
def keywords_read() -> Iterator[None]:
    """Have the code that ``torch.fx`` generates meanwhile read them by ``getattr``.

    It writes ``self.d.class`` for Python's keywords, and quotes, line breaks and backslashes in names as they are.
    """
    with replaced(graph, "_format_target", lambda _: _read):
        yield


def _read(base: str, target: str) -> str:
    """Return code that reads the attribute at a dotted path."""
    for step in target.split("."):
        plain = step.isidentifier() and not iskeyword(step)
        base = f"{base}.{step}" if plain else f"getattr({base}, {json.dumps(step, ensure_ascii=False)})"
    return base
