"""What a model asks about the sizes of its inputs, as in ``if x.shape[0] % 2 == 0:``, of which a graph has one answer.

``torch.export`` takes the branch of the example inputs where a size is ``Dim.AUTO`` or ``Dim.DYNAMIC``, and leaves the
condition to a check of its own modules.
"""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

__all__ = ["ASSUMED", "OtherBranchError", "SizeCondition", "conditions_on_sizes", "single_refused"]

ASSUMED = 2
"""The least that torch.export takes a size for that varies: it asks no condition for 0 and 1."""

_TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")
# Layers and functions are part of models; the rest of torch asks for reasons of its own, such as whether a tensor is
# contiguous, and its operators answer anew in each call.
_LAYERS_FOLDER = os.path.join(_TORCH_FOLDER, "nn", "")


class OtherBranchError(ValueError):
    """A call with sizes for which the model takes another branch than the graph has, with other results."""


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """What must be true of sizes for a graph to be what the model computes.

    Attributes:
        expression: of sympy, on the symbols of sizes.
        place: the line of code that asks, as a traceback prints it.
    """

    expression: Any
    place: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true of ``sizes``, by symbol; also where one of them is not known, or is a symbol itself."""
        names = sorted(symbol.name for symbol in self.expression.free_symbols)
        if not all(type(sizes.get(name)) is int for name in names):
            return True
        return _is_true(self.expression, tuple((name, sizes[name]) for name in names))

    def refusal(self, sizes: Mapping[str, int], names: Mapping[str, str], unasked: bool = False) -> OtherBranchError:
        """Return the error to raise where it does not hold.

        Args:
            sizes: by symbol.
            names: what to call symbols, as ``x.shape[0]``.
            unasked: the model is gone, so that nobody could tell whether its other branch computes the same.
        """
        symbols = sorted(self.expression.free_symbols, key=lambda symbol: str(symbol.name))
        shown = self.expression.xreplace({s: sympy.Symbol(names.get(s.name, s.name)) for s in symbols})
        came = ", ".join(f"{names.get(s.name, s.name)} = {sizes[s.name]}" for s in symbols)
        keep = "Where the other branch has the same results, keep the model that was prepared: it is gone. Otherwise p"
        return OtherBranchError(
            f"The graph was captured for sizes with {shown}, and came {came}. The model takes another branch then:\n"
            f"{self.place}\n{keep if unasked else 'P'}repare a model with example inputs of such sizes for these, or "
            'set execution_mode="eager" in the QuantizerConfig.'
        )


def single_refused(sizes: Mapping[str, int], names: Mapping[str, str]) -> OtherBranchError:
    """Return the error to raise where a graph is wrong for sizes of 0 or 1.

    Args:
        sizes: by symbol.
        names: what to call symbols, as ``x.shape[0]``.
    """
    came = ", ".join(f"{names.get(symbol, symbol)} = {size}" for symbol, size in sizes.items())
    return OtherBranchError(
        f"The graph computes something else than the model for inputs with {came}: torch.export takes sizes that vary "
        "for 2 or more, and forward does something else with less (such as `if x.shape[0] > 1`). Prepare a model with "
        "example inputs of such sizes for these, without dynamic_shapes for them, or set "
        'execution_mode="eager" in the QuantizerConfig.'
    )


@functools.lru_cache(maxsize=4096)
def _is_true(expression: Any, sizes: tuple[tuple[str, int], ...]) -> bool:
    known = dict(sizes)
    found = expression.xreplace({symbol: sympy.Integer(known[symbol.name]) for symbol in expression.free_symbols})
    return bool(found != sympy.false)


def conditions_on_sizes(exported: ExportedProgram) -> tuple[SizeCondition, ...]:
    """Return what the code of a model, its layers and their functions asked about sizes while it was captured."""
    values = (node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder")
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    environment: Any = next((mode.shape_env for mode in modes), None)
    found: dict[Any, SizeCondition] = {}
    for guard in () if environment is None else environment.guards:
        frame = guard.sloc.framework_loc
        if isinstance(frame, str) or frame is None or not _is_of_model(frame.filename):
            continue
        expression = environment.replace(guard.expr)
        if expression.free_symbols:
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {line}'
            found.setdefault(expression, SizeCondition(expression, place))
    return tuple(found.values())


def _is_of_model(filename: str) -> bool:
    return not filename.startswith(_TORCH_FOLDER) or filename.startswith(_LAYERS_FOLDER)
