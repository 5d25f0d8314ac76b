"""What ExecuTorch does again and again while it lowers a program, done once."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

__all__ = ["less_repetition"]

_TRACEBACK = "torch.fx.traceback"
_SDPA = "executorch.backends.xnnpack.partition.graphs.sdpa"


@contextlib.contextmanager
def less_repetition() -> Iterator[None]:
    """Lower programs in a fraction of the time, to the same files.

    For each part of a program that XNNPACK takes, ExecuTorch captures and lowers two models of its own, the patterns of
    attention that it looks for. And each of its dozens of passes copies for every node the history of what it was made
    from, which the pass before has made longer by one entry. The patterns are kept, and histories, which nobody
    changes, are shared.
    """
    with _replaced(_SDPA, "get_graphs", _kept), _replaced(_TRACEBACK, "copy", _sharing):
        yield


@contextlib.contextmanager
def _replaced(module: str, name: str, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Put something else in the place of what a module calls by a name; nothing where it has no such name."""
    found: Any = None
    with contextlib.suppress(ImportError):
        found = importlib.import_module(module)
    before = getattr(found, name, None)
    if before is None:
        yield
        return
    setattr(found, name, stand_in(before))
    try:
        yield
    finally:
        setattr(found, name, before)


@functools.cache
def _kept(make: Callable[[], Any]) -> Callable[[], Any]:
    return functools.cache(make)


def _sharing(_: Any) -> Any:
    """What ``torch.fx.traceback`` calls of the module ``copy``; it copies histories deeply, and nothing else."""
    return SimpleNamespace(copy=copy.copy, deepcopy=list)
