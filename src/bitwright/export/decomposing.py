"""``ExportedProgram.run_decompositions`` in less than half of the time."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._export import utils
from torch._guards import detect_fake_mode
from torch.export import _unlift, decomp_utils, exported_program

from bitwright._utils.replacing import replaced

__all__ = ["decomposed", "quick_decompositions"]


def decomposed(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]] | None = None
) -> torch.export.ExportedProgram:
    """Return a program that calls others in the place of some operators.

    Args:
        program: not changed.
        table: decompositions by overload; None for torch's own, to its core operators.
    """
    _forget_pending_symbols(program)
    with quick_decompositions():
        written: torch.export.ExportedProgram = program.run_decompositions(table if table is None else dict(table))
    return written


def _forget_pending_symbols(program: torch.export.ExportedProgram) -> None:
    """Drop symbols of values that an earlier converter asked the program's fake tensors for and left lying.

    Whatever runs next would be held to return them.
    """
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


@contextlib.contextmanager
def quick_decompositions() -> Iterator[None]:
    """Have ``run_decompositions``, which converters call too, do once what it does again and again.

    To know which operators PyTorch makes of others it looks into some forty namespaces, and asks the dispatcher for all
    such operators of all namespaces in each of them. And it puts functions of its own in the place of each of them for
    each backend, 12,000 times, where the type annotations of a local function, made anew each time, take a third of the
    time; ``typing`` keeps them.

    Nor does it trace the checks of sizes that ``ExportedProgram.module`` puts in front of a program: no converter has
    them, and they may name inputs that :func:`~bitwright.export.signatures.drop_constants` has taken away.
    """
    with (
        replaced(exported_program, "_collect_all_valid_cia_ops", _listing_once),
        replaced(decomp_utils, "_collect_all_valid_cia_ops", _listing_once),
        replaced(torch._ops, "Callable", lambda _: typing.Callable),
        replaced(_unlift, "_ok_to_generate_guards_fn", lambda _: _never),
    ):
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


def _never() -> bool:
    return False
