"""Weights that simulators stand on already, seen as the states that they are.

A parametrized weight reaches its op as the output of its simulators. These functions give the program back its states,
so that a further technique can be planned on a model that was prepared, or finalized, before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from bitwright._utils.parametrization import own_parametrizations
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.program import Argument, Op, Program, StateTensor, Value, ValueKind, trace_eager

__all__ = ["FinalizedWeight", "WeightProgram", "fold_simulators", "is_unpacked", "simulator_called", "trace_weights"]

_CONVERSIONS = ("to", "_to_copy")


@dataclass(frozen=True, slots=True, eq=False)
class FinalizedWeight:
    """A weight that was finalized for a backend: its dense values are gone.

    Attributes:
        name: dotted name; in a finalized graph, which has lost it, that of the op with ``.weight``.
        uses: the arguments that read it.
    """

    name: str
    uses: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WeightProgram:
    """A program in which weights are states, whatever stands on them.

    Attributes:
        program: the program.
        stacks: by canonical name of a state, the simulators on it, the innermost first.
        finalized: weights that are beyond further compression.
    """

    program: Program
    stacks: Mapping[str, tuple[nn.Module, ...]]
    finalized: tuple[FinalizedWeight, ...]


def trace_weights(
    model: nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    every_call: bool = False,
) -> WeightProgram:
    """Return the program of a model that may have been compressed before.

    A module is traced in one eager forward, which with ``every_call`` records the later calls of a module too; the
    graph of a ``GraphModule`` is read as it is.

    Raises:
        TraceError: the model's forward raised.
    """
    if isinstance(model, fx.GraphModule):
        from bitwright.program.graph_program import build_program

        return fold_simulators(build_program(model, model), model)
    with parametrize.cached():  # one read of each weight, so that all its uses see the same tensor
        program = trace_eager(model, example_inputs, example_kwargs, every_call=every_call)
    return fold_simulators(program, model)


def fold_simulators(program: Program, model: nn.Module) -> WeightProgram:
    """Make states of the parametrized weights of ``program``, which was traced from ``model``; changes ``program``."""
    folder = _Folder(program)
    for path, module in model.named_modules():
        for attribute, chain in own_parametrizations(module).items():
            folder.fold(path, attribute, chain)
    folder.drop_inner_ops()
    known = {id(use) for weight in folder.finalized for use in weight.uses}
    lost = [
        FinalizedWeight(f"{op.name}.weight", (argument,))
        for op in program.ops
        for argument in op.arguments
        if argument.name == "weight" and is_unpacked(argument.value) and id(argument) not in known
    ]
    return WeightProgram(program, folder.stacks, (*folder.finalized, *lost))


def is_unpacked(value: Value) -> bool:
    """Whether an op of a backend unpacks the value, perhaps in another dtype: a weight that was finalized before."""
    op = value.producer
    while op is not None and op.type in _CONVERSIONS and op.arguments:
        op = op.arguments[0].value.producer
    return op is not None and str(op.target).startswith("coreai.")


def simulator_called(op: Op, model: nn.Module) -> nn.Module | None:
    """Return the simulator of a graph that ``op`` calls, None for any other op.

    Args:
        op: an op of the program of ``model``.
        model: the model.
    """
    if not isinstance(op.target, str):
        return None
    try:
        module = model.get_submodule(op.target)
    except AttributeError:  # a name that is no module's
        return None
    return module if isinstance(module, CompressionSimulatorBase) else None


class _Folder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.by_tensor = {id(state.tensor): state for state in program.states.values()}
        self.stacks: dict[str, tuple[nn.Module, ...]] = {}
        self.finalized: list[FinalizedWeight] = []
        self.inner: set[str] = set()
        self._folded: set[int] = set()

    def fold(self, path: str, attribute: str, chain: Any) -> None:
        name = f"{path}.{attribute}" if path else attribute
        inside = f"{path}.parametrizations.{attribute}" if path else f"parametrizations.{attribute}"
        original = getattr(chain, "original", None)
        ours = all(isinstance(simulator, CompressionSimulatorBase) for simulator in chain)
        if original is None or not (ours or original.numel() == 0):
            return
        value = self._value(inside, name)
        self.inner.add(inside)
        if not ours:
            self.finalized.append(FinalizedWeight(name, () if value is None else tuple(value.uses)))
            return
        state = self._state(original, name, path, attribute)
        self.stacks[state.name] = tuple(chain)
        if value is not None and value.state is not state:
            value.kind, value.state, value.producer = ValueKind.STATE, state, None
            state.uses += [use for use in value.uses if use not in state.uses]

    def _value(self, inside: str, name: str) -> Value | None:
        """Return the value that the weight's simulators produced."""
        call = self.program.calls.get(inside)
        if call is not None and call.outputs:
            return call.outputs[0]
        # A graph reads the parametrized attribute as if it were a tensor of the model.
        for op in self.program.ops:
            for argument in op.arguments:
                state = argument.value.state
                if state is not None and name in state.names:
                    return argument.value
        return None

    def _state(self, original: torch.Tensor, name: str, path: str, attribute: str) -> StateTensor:
        state = self.by_tensor.get(id(original))
        if state is None:  # the front end does not list parameters below parametrizations
            state = StateTensor((), (), original, isinstance(original, nn.Parameter))
            self.by_tensor[id(original)] = state
        if id(state) not in self._folded:
            self._folded.add(id(state))
            for old in [key for key, known in self.program.states.items() if known is state]:
                del self.program.states[old]
            state.names, state.owners = (), ()
        state.names += (name,)
        state.owners += ((path, attribute),)
        self.program.states[state.names[0]] = state
        return state

    def drop_inner_ops(self) -> None:
        """Remove what ran inside simulators from the program."""
        if not self.inner:
            return
        hidden = {id(op) for op in self.program.ops if not self.inner.isdisjoint(op.module_stack)}
        self.program.ops[:] = [op for op in self.program.ops if id(op) not in hidden]
        for state in self.program.states.values():
            state.uses[:] = [use for use in state.uses if id(use.op) not in hidden]
        for path in [path for path in self.program.calls if any(_is_within(path, root) for root in self.inner)]:
            del self.program.calls[path]


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")
