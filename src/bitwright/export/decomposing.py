"""``ExportedProgram.run_decompositions`` in half of the time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._export import utils
from torch.export import decomp_utils, exported_program

from bitwright._utils.replacing import replaced

__all__ = ["decomposed", "operators_listed_once"]


def decomposed(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]] | None = None
) -> torch.export.ExportedProgram:
    """Return a program that calls others in the place of some operators.

    Args:
        program: not changed.
        table: decompositions by overload; None for torch's own, to its core operators.
    """
    with operators_listed_once():
        written: torch.export.ExportedProgram = program.run_decompositions(table if table is None else dict(table))
    return written


@contextlib.contextmanager
def operators_listed_once() -> Iterator[None]:
    """Have ``run_decompositions``, which converters call too, list the dispatcher's operators once at each look.

    To know which operators PyTorch makes of others it looks into some forty namespaces, and asks for all such operators
    of all namespaces in each of them, to have them there. That took 0.4 of the 0.6 to 1.0 s that small programs take.
    """
    with contextlib.ExitStack() as stack:
        for module in (exported_program, decomp_utils):
            stack.enter_context(replaced(module, "_collect_all_valid_cia_ops", _listing_once))
        yield


@functools.cache
def _listing_once(collect: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    def collected() -> set[Any]:
        getattr(utils, "_materialize_cpp_cia_ops", _nothing)()
        with replaced(utils, "_materialize_cpp_cia_ops", lambda _: _nothing):
            return collect()

    return collected


def _nothing() -> None:
    pass
