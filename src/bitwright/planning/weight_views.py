"""Weights that reach their op through a cast, a transposition or a cut: ``x @ w.T``, ``linear(x, w.float())``."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from bitwright.program import Argument, Op, Program, StateTensor, StateView, Value
from bitwright.program.aten_names import canonical_name

from .graph_ops import only_moves
from .ops import operand_axes
from .shared_axes import swapped_dimensions

__all__ = ["link_views", "moved_states", "state_read_by"]

_CASTS = frozenset(
    {"to", "_to_copy", "type", "type_as", "float", "half", "bfloat16", "double", "detach", "alias", "contiguous"}
)
_CUTS = frozenset({"split", "chunk", "narrow", "slice", "__getitem__"})
_REVERSING = frozenset({"numpy_T", "T", "t"})
_SWAPPING = frozenset({"mT", "adjoint"})


def link_views(program: Program) -> None:
    """Set :attr:`Value.view` and :attr:`StateTensor.views` throughout ``program``, anew at every call."""
    for state in program.states.values():
        state.views.clear()
    for op in program.ops:
        for output in op.outputs:
            output.view = None
    for op in program.ops:
        for output in op.outputs:
            output.view = _view(op, output)
        for argument in op.arguments:
            if argument.value.view is not None:
                argument.value.view.state.views.append(argument)
    for op in reversed(program.ops):
        for output in op.outputs:
            if output.view is not None:
                output.view.is_operand = any(map(_is_operand, output.uses))


def state_read_by(argument: Argument) -> StateTensor | None:
    """Return the state that an op reads here as it is, cast, or as a weight that was transposed or cut before."""
    value = argument.value
    if value.state is not None:
        return value.state
    if value.view is not None and (value.view.is_cast or operand_axes(argument) is not None):
        return value.view.state
    return None


def moved_states(program: Program, names: AbstractSet[str]) -> set[int]:
    """Return by ``id`` the values that hold numbers of the states called ``names``: these, and their views and cuts."""
    found: set[int] = set()
    for op in program.ops:
        for argument in op.arguments:
            if argument.value.state is not None and argument.value.state.name in names:
                found.add(id(argument.value))
        moves = only_moves(op) or canonical_name(op.type) == "flatten"
        if moves and op.arguments and id(op.arguments[0].value) in found:
            found.update(map(id, op.outputs))
    return found


def _is_operand(use: Argument) -> bool:
    if operand_axes(use) is not None:
        return True
    return any(output.view is not None and output.view.is_operand for output in use.op.outputs)


def _view(op: Op, output: Value) -> StateView | None:
    if not op.arguments or op.arguments[0].index != 0:
        return None
    source = _source(op.arguments[0].value)
    if source is None or not output.dtype.is_floating_point:
        return None
    kind = canonical_name(op.type)
    if kind in _CASTS and len(output.shape) == len(source.axes):
        return StateView(source.state, source.axes, source.is_cast)
    if not source.axes:
        return None
    resized = kind in ("squeeze", "unsqueeze")
    axes = _axes_with_ones(op, kind, source) if resized else _axes_after(op, kind, source.axes)
    if axes is None or len(axes) != len(output.shape):
        return None
    return StateView(source.state, axes, False)


def _source(value: Value) -> StateView | None:
    state = value.state
    if state is None:
        return value.view
    if not state.is_parameter or not state.tensor.is_floating_point():
        return None
    return StateView(state, tuple(range(state.tensor.ndim)), True)


def _axes_with_ones(op: Op, kind: str, source: StateView) -> tuple[int, ...] | None:
    """Return the axes when one of size 1 goes or comes back; None where there is no such axis."""
    dim, rank = op.literals.get("dim"), len(source.axes)
    sizes = source.state.tensor.shape
    if not isinstance(dim, int):
        return None
    if kind == "squeeze":
        place = dim % rank
        return None if sizes[source.axes[place]] != 1 else (*source.axes[:place], *source.axes[place + 1 :])
    gone = next((axis for axis, size in enumerate(sizes) if size == 1 and axis not in source.axes), None)
    place = dim % (rank + 1)
    return None if gone is None else (*source.axes[:place], gone, *source.axes[place:])


def _axes_after(op: Op, kind: str, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the parameter's axes in the order that ``op`` leaves them in; None for an op of another kind."""
    rank = len(axes)
    if kind in _CUTS:
        return axes
    if kind in _REVERSING:
        return axes[::-1]
    if kind in _SWAPPING and rank >= 2:
        return (*axes[:-2], axes[-1], axes[-2])
    swapped = swapped_dimensions(op, rank)
    if swapped is not None:
        first, second = swapped
        order = list(axes)
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    if kind == "permute" and len(op.literals.get("dims", ())) == rank:
        return tuple(axes[int(d) % rank] for d in op.literals["dims"])
    return None
