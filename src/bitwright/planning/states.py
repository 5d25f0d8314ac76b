"""From configuration to one decision per state tensor; shared by all techniques and both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bitwright.config.matching import ModuleRules, OpRule, lookup_spec
from bitwright.config.spec_dicts import ALL_TENSORS
from bitwright.program import Op, Program, StateTensor

from .ops import state_keys
from .plan import Problem, Severity
from .weight_views import state_read_by

__all__ = ["StateDecision", "decide_states", "state_input_problems", "unquantizable_problems"]

_STRONGEST = -1


@dataclass(eq=False, slots=True)
class StateDecision:
    """What the configuration says about one parameter or buffer.

    Attributes:
        state: the tensor.
        spec: the spec that was found, None for "leave alone".
        found: False where no key of the configuration speaks about this tensor.
        rule: the part of the configuration that decided.
        module_path: the module whose configuration decided.
        priority: smaller is stronger.
    """

    state: StateTensor
    spec: Any
    found: bool
    rule: str
    module_path: str
    priority: int

    @property
    def by_module(self) -> bool:
        """True where a ``module_state_spec`` decided."""
        return self.priority == _STRONGEST


def decide_states(
    program: Program,
    rules: ModuleRules,
    op_rule_of: Callable[[Op], OpRule | None],
    keys_of: Callable[[StateTensor, Op], tuple[str, ...]] = state_keys,
    rank_of: Callable[[Op], int] | None = None,
) -> dict[str, StateDecision]:
    """Return a decision for each floating-point state that a recognised op consumes, by canonical name.

    A weight may have been cast, transposed or cut before it reaches the op.

    ``module_state_spec`` of any owner (strongest rule first) beats op specs. Among ops, the strongest module rule
    decides, equally strong ones by the last call. ``op_rule_of`` returns None for an op that is not recognised, and
    ``keys_of`` the keys under which a state's spec is looked up in an op's rule. ``rank_of`` gives the strength of
    each recognised op, smaller for stronger, where that of its module's rule is not all there is to it.
    """
    decisions: dict[str, StateDecision] = {}
    owned: dict[str, StateDecision | None] = {}
    for op in program.ops:
        op_rule = op_rule_of(op)
        for state in _states_of(op):
            if state.name not in owned:
                owned[state.name] = _module_state_decision(state, rules)
            decision = owned[state.name]
            if decision is not None:
                decisions[state.name] = decision
            elif op_rule is not None:
                rank = op_rule.module_rule.priority if rank_of is None else rank_of(op)
                _keep_stronger(decisions, _op_decision(state, op, op_rule, keys_of(state, op), rank))
    return decisions


def _states_of(op: Op) -> list[StateTensor]:
    found = {id(state): state for argument in op.arguments if (state := state_read_by(argument)) is not None}
    return [s for s in found.values() if s.tensor.is_floating_point() and s.tensor.numel() > 1]


def _module_state_decision(state: StateTensor, rules: ModuleRules) -> StateDecision | None:
    owners = [(rules[path], path) for path, _ in state.owners if path in rules]
    for rule, path in sorted(owners, key=lambda entry: entry[0].priority):
        own = tuple(attribute for owner, attribute in state.owners if owner == path)
        match = lookup_spec(rule.module_state_spec, own)
        if match.found:
            described = f"{rule.describe()}.module_state_spec[{match.key!r}]"
            return StateDecision(state, match.spec, True, described, path, _STRONGEST)
    return None


def _op_decision(state: StateTensor, op: Op, op_rule: OpRule, keys: tuple[str, ...], rank: int) -> StateDecision:
    match = lookup_spec(op_rule.op_state_spec, keys)
    described = f"{op_rule.describe()}.op_state_spec"
    if match.found:
        described += f"[{match.key!r}]"
    return StateDecision(state, match.spec, match.found, described, op.module_path, rank)


def _keep_stronger(decisions: dict[str, StateDecision], new: StateDecision) -> None:
    known = decisions.get(new.state.name)
    if known is None or (new.found and not known.found) or (new.found and new.priority <= known.priority):
        decisions[new.state.name] = new


def unquantizable_problems(program: Program, op_rule_of: Callable[[Op], OpRule | None]) -> list[Problem]:
    """Return a problem for each state that a key of ``op_state_spec`` names although it holds no real numbers."""
    problems: dict[str, Problem] = {}
    for op, op_rule in _recognised(program, op_rule_of):
        states = [argument.value.state for argument in op.arguments if argument.value.state is not None]
        for state in states:
            if state.tensor.is_floating_point():
                continue
            match = lookup_spec(op_rule.op_state_spec, state.attributes)
            if match.spec is not None and match.key != ALL_TENSORS:
                message = (
                    f"Config is attempting to set state {state.name!r}, which is of dtype {state.tensor.dtype}: only "
                    "floating-point tensors are quantized, so it stays as it is. Remove the key."
                )
                where = f"{op_rule.describe()}.op_state_spec[{match.key!r}]"
                problems[state.name] = Problem("not-quantizable", where, message)
    return list(problems.values())


def _recognised(program: Program, op_rule_of: Callable[[Op], OpRule | None]) -> Iterator[tuple[Op, OpRule]]:
    for op in program.ops:
        op_rule = op_rule_of(op)
        if op_rule is not None:
            yield op, op_rule


def state_input_problems(program: Program, op_rule_of: Callable[[Op], OpRule | None]) -> list[Problem]:
    """Return a problem for each position in an ``op_input_spec`` at which the op reads a parameter or buffer."""
    problems: dict[str, Problem] = {}
    for op, op_rule in _recognised(program, op_rule_of):
        for argument in op.arguments:
            position = argument.index if argument.item is None else argument.item
            match = lookup_spec(op_rule.op_input_spec, (position,))
            state = argument.value.state
            if state is None or match.spec is None or match.key == ALL_TENSORS:
                continue
            if not state.tensor.is_floating_point():  # counters, which batch norms advance: no numbers to quantize
                continue
            where = f"{op_rule.describe()}.op_input_spec[{match.key!r}]"
            message = (
                f"Config is attempting to set op_input_spec for {state.name!r}, a parameter or buffer that {op.name} "
                "reads there; op_input_spec speaks about activations. Use op_state_spec."
            )
            problems[where] = Problem("state-as-input", where, message, Severity.ERROR)
    return list(problems.values())
