"""Rows of the plan for weights that nothing was decided about, so that none is left dense in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from bitwright.config.spec import CompressionSimulatorBase
from bitwright.program import Argument, Program, StateTensor

from .packed_sizes import bytes_under
from .plan import PlanRow
from .simulated_states import simulator_called

__all__ = ["left_out_rows"]

_NAMED = 3


def left_out_rows(
    program: Program,
    rows: Sequence[PlanRow],
    model: nn.Module,
    unread: str,
    stacks: Mapping[str, Sequence[nn.Module]] = MappingProxyType({}),
) -> list[PlanRow]:
    """Return a row for each parameter that has none, but for vectors, whatever their shape.

    Args:
        program: the program, with views linked.
        rows: the rows that there are.
        model: the model that ``program`` was made from.
        unread: what is said of parameters that no op reads.
        stacks: by canonical name of a weight, the simulators that stand on it already.
    """
    known = {row.tensor for row in rows}
    inside = set(_parameters_of_simulators(model))
    left = [
        state
        for state in program.states.values()
        if state.is_parameter and _is_matrix(state) and state.name not in known and id(state.tensor) not in inside
    ]
    enclosed = {
        name: f"read inside {place}" for place, op in program.enclosed for name in map(_state_name, op.arguments)
    }
    found = []
    for state in left:
        calls = (simulator_called(use.op, model) for use in state.uses)
        below = [simulator for simulator in dict.fromkeys(calls) if simulator is not None]
        note = _standing(below) if below else _readers(state) or enclosed.get(state.name, unread)
        found.append(_row(state, note, (*stacks.get(state.name, ()), *below)))
    return found


def _state_name(argument: Argument) -> str:
    return "" if argument.value.state is None else argument.value.state.name


def _parameters_of_simulators(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, CompressionSimulatorBase):
            yield from map(id, module.parameters())


def _is_matrix(state: StateTensor) -> bool:
    return sum(size > 1 for size in state.tensor.shape) >= 2


def _standing(simulators: Sequence[nn.Module]) -> str:
    named = ", ".join(type(simulator).__name__.lstrip("_") for simulator in simulators)
    return f"left alone: {named} of the graph stands on it"


def _readers(state: StateTensor) -> str:
    types = list(dict.fromkeys(use.op.type for use in (*state.uses, *state.views)))
    if not types:
        return ""
    named = ", ".join(types[:_NAMED]) + (", ..." if len(types) > _NAMED else "")
    return f"read by {named}: left alone unless a module_state_spec names it"


def _row(state: StateTensor, note: str, stack: Sequence[nn.Module]) -> PlanRow:
    tensor = state.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    dense, packed = tensor.numel() * tensor.element_size(), bytes_under(stack, tensor)
    shape = tuple(tensor.shape)
    return PlanRow(state.name, "weight", shape, dtype, None, "", dense_bytes=dense, compressed_bytes=packed, note=note)
