"""Dynamic sizes that a model takes and its captured program does not: refused, for files do not check them."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.experimental import _config
from torch.utils._pytree import tree_flatten, tree_unflatten

from bitwright.errors import BitwrightWarning
from bitwright.export.decomposing import decomposed
from bitwright.program.float_graph import same_numbers, varied
from bitwright.program.input_check import InputCheck
from bitwright.program.input_shapes import shapes_by_input
from bitwright.program.protect import preserved_state
from bitwright.program.size_conditions import OtherBranchError

__all__ = ["LeftOut", "for_asked_sizes", "left_out_words", "sizes_left_out"]

_AROUND = 32
"""How far from the example's size others are tried."""
_LARGEST = 4096
"""No larger sizes are tried."""
_COMPARED = 8
"""How many sizes that a program does not seem to hold for are compared with the model."""
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
    dynamic_shapes: Any = None,
) -> tuple[torch.export.ExportedProgram, list[LeftOut]]:
    """Return a program, and what is left out of it; as :func:`sizes_left_out`.

    PyTorch takes every size that is computed from others for one that is not 0 or 1, if it is not in the example. Where
    that leaves sizes out, it is asked to leave that open.

    Args:
        capture: makes the program.
        model: that it is made of.
        args: positional inputs.
        kwargs: keyword inputs.
        dynamic_shapes: that were asked for.
    """
    program = capture()
    left_out = sizes_left_out(program, model, args, kwargs, dynamic_shapes)
    if left_out:
        open_to_both = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with contextlib.suppress(Exception), open_to_both:
            other = capture()
            if not sizes_left_out(other, model, args, kwargs, dynamic_shapes):
                return other, []
    return program, left_out


def sizes_left_out(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any = None,
) -> list[LeftOut]:
    """Return sizes between those that a program holds for, or around the only one, which the model takes.

    A branch on ``x.shape[0] % 2`` is there in the form that the example inputs took, and ``tensor_split`` makes equal
    parts of every size. Where a size is a ``Dim`` torch.export refuses that; of ``Dim.DYNAMIC`` and ``Dim.AUTO`` it
    leaves guards beside the program. Where no others are left out than those that the model itself fails for, or those
    for which the program computes what the model does all the same, there are none. Where the range has become
    narrower only, or one far from the example's is left out, there are none either, and a warning says so.

    Args:
        program: captured with dynamic shapes from ``model``.
        model: called, and left as it was.
        args: positional inputs.
        kwargs: keyword inputs.
        dynamic_shapes: that were asked for; of ``Dim.DYNAMIC(min=4)`` the program does not tell the least size.
    """
    sizes = list(_sizes(program))
    if not sizes:
        return []
    env = sizes[0].value.node.shape_env
    known = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"  # by releases of torch
    hints: dict[Any, Any] = dict(getattr(env, known))
    places = {symbol: size for size in reversed(sizes) for symbol in size.value.node.expr.free_symbols}
    trial = _Trial(program, model, sizes, args, kwargs)
    found: dict[Any, LeftOut] = {}
    narrower: dict[Any, str] = {}
    ranges = dict(_asked_ranges(model, args, kwargs, dynamic_shapes))
    for guard in (*_assumed(env.guards), *_asked_before(model, sizes), *(_bounds(sizes) if dynamic_shapes else ())):
        if not guard.symbols.issubset(places) or not guard.symbols.issubset(hints):
            continue
        for symbol in guard.symbols.difference(found):
            size, bounds = places[symbol], env.bound_sympy(symbol)
            no_more = guard.is_range and not guard.is_checked
            missed = [] if no_more else _missed(guard.condition, symbol, hints, bounds)
            if missed and trial.leaves_out(guard, [{**hints, symbol: sympy.Integer(size)} for size in missed]):
                example, other = (size.at({**hints, symbol: number}) for number in (hints[symbol], missed[0]))
                found[symbol] = LeftOut(size.name, example, other, str(guard))
            elif not missed and len(guard.symbols) == 1 and symbol not in narrower:
                beyond = _beyond(guard, symbol, int(hints[symbol]), bounds)
                least, most = ranges.get(size.place, (2, _LARGEST))
                is_asked = beyond is not None and least <= size.at({**hints, symbol: beyond}) <= most
                if is_asked and trial.leaves_out(guard, [{**hints, symbol: sympy.Integer(beyond)}]):
                    narrower[symbol] = f"{size.name} (not {size.at({**hints, symbol: beyond})}: it assumes {guard})"
    if narrower and not found:
        warnings.warn(_narrower_words(narrower.values()), BitwrightWarning, stacklevel=2)
    return list(found.values())


def _asked_ranges(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Iterator[tuple[tuple[int, int], tuple[Any, Any]]]:
    """Yield the least and the largest sizes that were asked for, by the number of the input and the dimension."""
    if not dynamic_shapes:
        return
    shapes = shapes_by_input(model, args, kwargs, dynamic_shapes)
    inputs: Any = args
    if isinstance(shapes, Mapping):
        inputs = inspect.signature(model.forward).bind(*args, **dict(kwargs or {})).arguments
    numbers = {id(leaf): number for number, leaf in enumerate(tree_flatten((args, dict(kwargs or {})))[0])}
    pairs = [(inputs, shapes)]
    for value, shape in pairs:
        if isinstance(value, torch.Tensor):
            axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
            for axis, size in axes:
                least, most = getattr(size, "min", None), getattr(size, "max", None)
                yield (numbers[id(value)], axis), (2 if least is None else least, _LARGEST if most is None else most)
        elif isinstance(shape, Mapping) and isinstance(value, Mapping):
            pairs += [(value[key], one) for key, one in shape.items() if key in value]
        elif isinstance(shape, list | tuple) and isinstance(value, list | tuple):
            pairs += list(zip(value, shape, strict=False))


def _narrower_words(places: Iterable[str]) -> str:
    return (
        f"The program holds for a narrower range of sizes than dynamic_shapes has: {', '.join(places)}. For others, "
        "which files do not refuse, it computes what the model does for sizes such as the example's. Give "
        "dynamic_shapes the range that holds, as torch.export.Dim.DYNAMIC(min=4) does, or write the model without that "
        "condition."
    )


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

    @property
    def place(self) -> tuple[int, int]:
        """The number of the input, and the dimension."""
        return self.leaf, self.axis

    def at(self, values: Mapping[Any, Any]) -> int:
        """The size, for those that symbols stand for."""
        return int(self.value.node.expr.subs(values))


@dataclass(frozen=True, slots=True)
class _Guard:
    """What a program assumes of sizes, and the line of the model that asks it, if any.

    Attributes:
        condition: of PyTorch's symbols.
        place: that line.
        is_checked: whether the model is a graph that refuses other sizes itself.
    """

    condition: Any
    place: str
    is_checked: bool = False

    @property
    def symbols(self) -> Any:
        """The sizes."""
        return self.condition.free_symbols

    @property
    def is_range(self) -> bool:
        """Whether it only bounds sums and multiples of sizes."""
        ordered = sympy.StrictGreaterThan | sympy.GreaterThan | sympy.StrictLessThan | sympy.LessThan
        return isinstance(self.condition, ordered) and all(
            side.is_polynomial(*self.symbols) for side in self.condition.args
        )

    def __str__(self) -> str:
        (shown, *_) = sorted(self.symbols, key=str)
        return f"{self.condition.subs(shown, sympy.Symbol('n'))}{self.place}"


def _sizes(program: torch.export.ExportedProgram) -> Iterator[_Size]:
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for number, name in enumerate(program.graph_signature.user_inputs):
        value = placeholders[name].meta.get("val") if name in placeholders else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
                yield _Size(number, name, axis, size)


def _assumed(guards: Any) -> Iterator[_Guard]:
    """Conditions that the model asks, or torch for more than one operator."""
    for guard in {one.expr: one for one in guards}.values():
        frame = getattr(guard.sloc, "framework_loc", None)
        file, line = getattr(frame, "filename", ""), getattr(frame, "lineno", 0)
        if file.endswith(_OF_ONE_OPERATOR):
            continue
        of_torch = not file or file.startswith(os.path.dirname(torch.__file__))
        yield _Guard(guard.expr, "" if of_torch else f" in {os.path.basename(file)}, line {line}")


def _bounds(sizes: list[_Size]) -> Iterator[_Guard]:
    """The least and the largest of each size, which is all that torch.onnx leaves of a condition."""
    for size in sizes:
        symbol = size.value.node.expr
        if symbol.is_Symbol:
            bounds = size.value.node.shape_env.bound_sympy(symbol)
            yield _Guard(sympy.GreaterThan(symbol, bounds.lower), "")
            yield _Guard(sympy.LessThan(symbol, bounds.upper), "")


def _asked_before(model: nn.Module, sizes: list[_Size]) -> Iterator[_Guard]:
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
            asked = condition.expression.subs(known, simultaneous=True)
            yield _Guard(asked, f" in\n{condition.place}\n", is_checked=True)


def _missed(guard: Any, symbol: Any, example: Mapping[Any, Any], asked: Any) -> list[int]:
    """Sizes, the nearest first, for which a condition fails though it holds for others beyond, or holds for no others.

    Sizes of 0 and 1 are not asked for: of them programs assume things that files do not.
    """
    own = int(example[symbol])
    around = ([own + step * away for away in range(1, _AROUND + 1)] for step in (1, -1))
    ways = [[size for size in way if size >= 2 and asked.lower <= size <= asked.upper] for way in around]
    values = {size: {**example, symbol: sympy.Integer(size)} for way in ways for size in way}
    fails = {size: guard.xreplace(value) == sympy.false for size, value in values.items()}
    near = [way[0] for way in ways if way]
    found = []
    if near and all(fails[size] for size in near):
        found = [size for size in fails if fails[size]]
    else:
        for way in ways:
            last = next((size for size in reversed(way) if not fails[size]), None)
            if last is not None:
                found += [size for size in way[: way.index(last)] if fails[size]]
    return sorted(found, key=lambda size: (abs(size - own), -size))


def _beyond(guard: _Guard, symbol: Any, example: int, asked: Any) -> int | None:
    """The size nearest to the example's for which a condition fails from there on, or far away; None if there is none.

    Torch notes no range that ``dynamic_shapes`` has already.
    """
    bounds = {int(number) + step for number in guard.condition.atoms(sympy.Integer) for step in (-1, 0, 1)}
    bounds.update(range(example - _AROUND, example + _AROUND + 1))
    for size in sorted(bounds, key=lambda size: abs(size - example)):
        is_asked = 2 <= size <= _LARGEST and (not guard.is_checked or asked.lower <= size <= asked.upper)
        if is_asked and guard.condition.xreplace({symbol: sympy.Integer(size)}) == sympy.false:
            return size
    return None


class _Trial:
    """A program and its model, called with inputs of other sizes."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        sizes: list[_Size],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._program, self._model, self._sizes = program, model, sizes
        self._leaves, self._structure = tree_flatten((args, dict(kwargs or {})))
        self._module: Any = None

    def leaves_out(self, guard: _Guard, tried: list[dict[Any, Any]]) -> bool:
        """Whether the model takes sizes, and the program does not compute what it does.

        Args:
            guard: what the program assumes, and does not hold for these sizes.
            tried: what symbols stand for, in the order of trying; the model must take the first.
        """
        try:
            self._call(self._model, tried[0], self._leaves)
        except OtherBranchError:  # a graph says so of the model it was made of
            return True
        except Exception:  # whatever the model raises; a graph, out of the range that it was captured for
            return guard.is_checked and guard.is_range
        return not guard.is_checked and not all(map(self._agrees, tried[:_COMPARED]))

    def _agrees(self, values: dict[Any, Any]) -> bool:
        """Whether program and model have the same results, or the model has none."""
        leaves = varied(self._leaves)
        if leaves is None:
            return False
        try:
            expected = self._call(self._model, values, leaves)
        except Exception:  # whatever the model raises
            return not self._takes(values)
        with contextlib.suppress(Exception):  # constants for other sizes, or an operator that cannot be run
            return same_numbers(self._call(self._written(), values, leaves), expected)
        return False

    def _takes(self, values: dict[Any, Any]) -> bool:
        with contextlib.suppress(Exception):
            self._call(self._model, values, self._leaves)
            return True
        return False

    def _written(self) -> nn.Module:
        """The program as converters take it, of small operators, without its checks of sizes."""
        if self._module is None:
            self._module = decomposed(self._program).module(check_guards=False)
            self._module._forward_pre_hooks.clear()
        written: nn.Module = self._module
        return written

    def _call(self, called: nn.Module, values: Mapping[Any, Any], inputs: Sequence[Any]) -> Any:
        leaves = list(inputs)
        for size in self._sizes:
            length, leaf = size.at(values), leaves[size.leaf]
            places = torch.arange(length, device=leaf.device) % leaf.shape[size.axis]
            leaves[size.leaf] = leaf.index_select(size.axis, places)
        args, kwargs = tree_unflatten(leaves, self._structure)
        with preserved_state(self._model):
            return called(*args, **kwargs)
