"""Dynamic sizes that a model takes and its captured program does not: refused, for files do not check them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.experimental import _config
from torch.utils._pytree import tree_flatten, tree_unflatten

from bitwright.program.input_check import InputCheck
from bitwright.program.protect import preserved_state
from bitwright.program.size_conditions import OtherBranchError

__all__ = ["LeftOut", "for_asked_sizes", "left_out_words", "sizes_left_out"]

_AROUND = 32
"""How far from the example's size others are tried."""
_OF_ONE_OPERATOR = "_meta_registrations.py"
"""Where PyTorch computes the shapes that an operator's results have; files have that operator, for all sizes."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A size that a model takes, and its program does not.

    Attributes:
        place: the input and its dimension.
        example: the size of the example input.
        size: the one that is left out.
        condition: what the program assumes, of PyTorch's symbols.
    """

    place: str
    example: int
    size: int
    condition: str

    def __str__(self) -> str:
        return f"{self.place} ({self.example} in the example, but not {self.size}: it assumes {self.condition})"


def left_out_words(sizes: list[LeftOut]) -> str:
    """Say what a program does not hold for, and what to do."""
    return (
        f"The program holds for fewer sizes than dynamic_shapes has: {', '.join(map(str, sizes))}. The model takes "
        "these too, by another branch or in parts of other sizes, which no file has. Give dynamic_shapes the sizes "
        "that the program holds for, such as 2 * torch.export.Dim('n') for even ones; leave such a size out, which "
        "makes it the example's; or write the model without that condition, such as narrow in place of tensor_split."
    )


def for_asked_sizes(
    capture: Callable[[], torch.export.ExportedProgram],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> tuple[torch.export.ExportedProgram, list[LeftOut]]:
    """Return a program, and what is left out of it; as :func:`sizes_left_out`.

    PyTorch takes every size that is computed from others for one that is not 0 or 1, if it is not in the example. Where
    that leaves sizes out, it is asked to leave that open.

    Args:
        capture: makes the program.
        model: that it is made of.
        args: positional inputs.
        kwargs: keyword inputs.
    """
    program = capture()
    left_out = sizes_left_out(program, model, args, kwargs)
    if left_out:
        open_to_both = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with contextlib.suppress(Exception), open_to_both:
            other = capture()
            if not sizes_left_out(other, model, args, kwargs):
                return other, []
    return program, left_out


def sizes_left_out(
    program: torch.export.ExportedProgram, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> list[LeftOut]:
    """Return sizes between those that a program holds for, or around the only one, which the model takes.

    A branch on ``x.shape[0] % 2`` is there in the form that the example inputs took, and ``tensor_split`` makes equal
    parts of every size. Where a size is a ``Dim`` torch.export refuses that; of ``Dim.DYNAMIC`` and ``Dim.AUTO`` it
    leaves guards beside the program. Where no others are left out than those that the model itself fails for, and
    where the range has become narrower only, there are none.

    Args:
        program: captured with dynamic shapes from ``model``.
        model: called, and left as it was.
        args: positional inputs.
        kwargs: keyword inputs.
    """
    sizes = list(_sizes(program))
    if not sizes:
        return []
    env = sizes[0].value.node.shape_env
    known = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"  # by releases of torch
    hints: dict[Any, Any] = dict(getattr(env, known))
    places = {symbol: size for size in reversed(sizes) for symbol in size.value.node.expr.free_symbols}
    found: dict[Any, LeftOut] = {}
    for guard, where in (*_assumed(env.guards), *_asked_before(model, sizes)):
        if not guard.free_symbols.issubset(places) or not guard.free_symbols.issubset(hints):
            continue
        for symbol in guard.free_symbols.difference(found):
            missed = _missed(guard, symbol, hints, env.bound_sympy(symbol))
            if missed is not None and _runs(model, sizes, args, kwargs, {**hints, symbol: sympy.Integer(missed)}):
                size = places[symbol]
                example, other = (int(size.value.node.expr.subs({**hints, symbol: n})) for n in (hints[symbol], missed))
                condition = f"{guard.subs(symbol, sympy.Symbol('n'))}{where}"
                found[symbol] = LeftOut(size.name, example, other, condition)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Size:
    """A dynamic size: the number of its input among the leaves, its dimension, and what the program has there."""

    leaf: int
    input: str
    axis: int
    value: torch.SymInt

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return f"dimension {self.axis} of the input {self.input!r}"


def _sizes(program: torch.export.ExportedProgram) -> Iterator[_Size]:
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for number, name in enumerate(program.graph_signature.user_inputs):
        value = placeholders[name].meta.get("val") if name in placeholders else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
                yield _Size(number, name, axis, size)


def _assumed(guards: Any) -> Iterator[tuple[Any, str]]:
    """Conditions that are more than bounds, and the line of the model that each comes from, if any."""
    for guard in {one.expr: one for one in guards}.values():
        frame = getattr(guard.sloc, "framework_loc", None)
        file, line = getattr(frame, "filename", ""), getattr(frame, "lineno", 0)
        if file.endswith(_OF_ONE_OPERATOR) or _is_range(guard.expr):
            continue
        of_torch = not file or file.startswith(os.path.dirname(torch.__file__))
        yield guard.expr, "" if of_torch else f" in {os.path.basename(file)}, line {line}"


def _asked_before(model: nn.Module, sizes: list[_Size]) -> Iterator[tuple[Any, str]]:
    """Conditions of a model that was captured before: a graph checks them in each call, its code has no branch."""
    check = getattr(model, "_input_check", None)
    if not isinstance(check, InputCheck):
        return
    placed = {(size.input, size.axis): size.value.node.expr for size in sizes}
    symbols: dict[str, Any] = {}
    for shape in check.shapes:
        for axis, dimension in enumerate(shape.dimensions or ()):
            if dimension.symbol and (shape.name, axis) in placed:
                symbols.setdefault(dimension.symbol, placed[shape.name, axis])
    for condition in check.conditions:
        if all(symbol.name in symbols for symbol in condition.expression.free_symbols):
            known = {symbol: symbols[symbol.name] for symbol in condition.expression.free_symbols}
            yield condition.expression.subs(known, simultaneous=True), f" in\n{condition.place}\n"


def _is_range(guard: Any) -> bool:
    """Whether a condition only bounds sums and multiples of sizes."""
    ordered = isinstance(guard, sympy.StrictGreaterThan | sympy.GreaterThan | sympy.StrictLessThan | sympy.LessThan)
    return ordered and all(side.is_polynomial(*guard.free_symbols) for side in guard.args)


def _missed(guard: Any, symbol: Any, example: Mapping[Any, Any], asked: Any) -> int | None:
    """The nearest size for which a condition fails though it is between sizes for which it holds, or all others fail.

    Sizes of 0 and 1 are not asked for: of them programs assume things that files do not.
    """
    own = int(example[symbol])
    around = ([own + step * away for away in range(1, _AROUND + 1)] for step in (1, -1))
    ways = [[size for size in way if size >= 2 and asked.lower <= size <= asked.upper] for way in around]
    values = {size: {**example, symbol: sympy.Integer(size)} for way in ways for size in way}
    fails = {size: guard.xreplace(value) == sympy.false for size, value in values.items()}
    near = [way[0] for way in ways if way]
    if near and all(fails[size] for size in near):
        return near[0]
    for way in ways:
        last = next((size for size in reversed(way) if not fails[size]), None)
        for size in way[: way.index(last)] if last is not None else ():
            if fails[size]:
                return size
    return None


def _runs(
    model: nn.Module,
    sizes: list[_Size],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    values: Mapping[Any, Any],
) -> bool:
    """Whether a model takes inputs with other sizes, of what they hold; a graph says so of the model it was made of."""
    leaves, structure = tree_flatten((args, dict(kwargs or {})))
    with contextlib.suppress(Exception), preserved_state(model):
        for size in sizes:
            length, leaf = int(size.value.node.expr.xreplace(values)), leaves[size.leaf]
            places = torch.arange(length, device=leaf.device) % leaf.shape[size.axis]
            leaves[size.leaf] = leaf.index_select(size.axis, places)
        other_args, other_kwargs = tree_unflatten(leaves, structure)
        with contextlib.suppress(OtherBranchError):
            model(*other_args, **other_kwargs)
        return True
    return False
