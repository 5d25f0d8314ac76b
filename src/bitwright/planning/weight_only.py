"""The plan of a technique that compresses weights only; palettization and pruning fill in what is theirs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bitwright.common import CompressionType
from bitwright.config.matching import ModuleRules, OpRule, lookup_spec, resolve_module_rules, resolve_op_rule
from bitwright.config.spec import CompressionSpec, CompressionTargetTensor
from bitwright.config.spec_dicts import spec_dict_is_active
from bitwright.program import Op, StateTensor

from .computed_weights import computed_weight_problems
from .enclosed_weights import enclosed_weight_problems
from .left_out import left_out_rows
from .looked_up_weights import looked_up_problems
from .ops import ROLE_NAMED_OPS, AxisConflictError, WeightAxes, default_weight_axes
from .packed_sizes import bytes_under
from .plan import Placement, Plan, PlanRow, Problem, Severity
from .scripted_modules import scripted_module_problems
from .simulated_states import FinalizedWeight, WeightProgram
from .stacking import finite_range, kinds_on, stacking_problem, storage_problem
from .states import StateDecision, decide_states
from .unmatched import unmatched_problems
from .weight_views import link_views
from .written_weights import written_weight_problems

__all__ = ["WeightRequest", "WeightResolution", "WeightTechnique", "plan_weights"]

_ATTENTION = "multi_head_attention_forward"


@dataclass(frozen=True, slots=True, eq=False)
class WeightRequest:
    """What is known about one weight when its spec is resolved.

    Attributes:
        state: the weight.
        rule: the part of the configuration that asks, for people.
        axes: default axes of the ops that consume it; None where no op has any.
        stack: the simulators that stand on it already, the innermost first.
        module_config: the module config that decided.
    """

    state: StateTensor
    rule: str
    axes: WeightAxes | None
    stack: tuple[nn.Module, ...]
    module_config: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the weight."""
        return tuple(self.state.tensor.shape)


@dataclass(frozen=True, slots=True)
class WeightResolution:
    """Outcome for one weight.

    Attributes:
        spec: what can be built, with axes filled in; None where the weight stays as it is.
        block_size: shape of one unit that has parameters of its own, empty where not applicable.
        stored_bytes: bytes in the packed artifact.
        note: why, where that is not obvious.
        problems: what cannot be applied as written.
    """

    spec: CompressionSpec | None
    block_size: tuple[int, ...] = ()
    stored_bytes: int = 0
    note: str = ""
    problems: list[Problem] = field(default_factory=list)


class WeightTechnique(ABC):
    """What palettization and pruning do in their own way while planning.

    Attributes:
        kind: the technique.
        ops: function name to ``op_type_config`` key.
    """

    kind: CompressionType
    ops: Mapping[str, str]

    @abstractmethod
    def resolve(self, spec: Any, request: WeightRequest) -> WeightResolution:
        """Fill in what a spec leaves to the op, and check that it fits the weight."""

    def key_of(self, op: Op) -> str | None:
        """Return the ``op_type_config`` key of ``op``, None for an op that the technique does not know."""
        return next((self.ops[name] for name in (op.type, *op.aliases) if name in self.ops), None)


def plan_weights(config: Any, model: nn.Module, traced: WeightProgram, technique: WeightTechnique) -> Plan:
    """Apply the configuration of a weight-only compressor to a traced program.

    Args:
        config: the compressor's configuration.
        model: the model that ``traced`` was made from; only its module tree is read.
        traced: from :func:`bitwright.planning.simulated_states.trace_weights`.
        technique: what is particular.
    """
    rules = resolve_module_rules(config, model)
    op_rules = _OpRules(rules, technique)
    link_views(traced.program)
    builder = _Builder(traced, rules, technique)
    for decision in decide_states(traced.program, rules, op_rules, weight_keys).values():
        builder.add(decision)
    for weight in traced.finalized:
        builder.refuse_finalized(weight, op_rules)
    unread = "no call of the model reads it with these inputs"
    builder.plan.rows += left_out_rows(traced.program, builder.plan.rows, model, unread, traced.stacks)
    builder.plan.problems += scripted_module_problems(model, rules)
    builder.plan.problems += written_weight_problems(traced.program, builder.plan.placements)
    builder.plan.problems += looked_up_problems(traced.program, builder.plan.placements)
    placed = {placement.name for placement in builder.plan.placements}
    builder.plan.problems += computed_weight_problems(traced.program, op_rules, model, placed)
    builder.plan.problems += enclosed_weight_problems(traced.program, op_rules, placed, weight_keys)
    builder.plan.problems += unmatched_problems(rules)
    if not builder.plan.placements and not builder.plan.problems and _asks_for_something(config):
        builder.plan.problems.append(_nothing_found(config, technique))
    return builder.plan


def _asks_for_something(config: Any) -> bool:
    """Whether any part of the configuration has a spec for weights."""
    parts = (config.global_config, *config.module_type_configs.values(), *config.module_name_configs.values())
    ops = (op for part in parts for op in (part, *part.op_type_config.values(), *part.op_name_config.values()))
    return any(map(spec_dict_is_active, (*(op.op_state_spec for op in ops), *(p.module_state_spec for p in parts))))


def _nothing_found(config: Any, technique: WeightTechnique) -> Problem:
    message = (
        f"the model has no weight for {technique.kind.value}: none is read by one of the ops "
        f"{', '.join(sorted(set(technique.ops.values())))} with a spec for its name, so the model stays as it is. "
        "Weights of other ops can be named in the module_state_spec of a module config."
    )
    return Problem("nothing-to-compress", type(config).__name__, message)


def weight_keys(state: StateTensor, op: Op) -> tuple[str, ...]:
    """Return the keys under which a weight's spec is looked up: its local names, and ``"weight"`` for those of RNNs."""
    keys = state.attributes
    if op.type in ROLE_NAMED_OPS and op.type != _ATTENTION and state.tensor.ndim >= 2 and "weight" not in keys:
        return ("weight", *keys)
    return keys


class _OpRules:
    """Rule of each op that the technique knows, found once."""

    def __init__(self, rules: ModuleRules, technique: WeightTechnique) -> None:
        self._rules = rules
        self._technique = technique
        self._found: dict[int, OpRule | None] = {}

    def __call__(self, op: Op) -> OpRule | None:
        if id(op) not in self._found:
            key = self._technique.key_of(op)
            types = tuple(dict.fromkeys((key, op.type, *op.aliases))) if key is not None else ()
            self._found[id(op)] = (
                resolve_op_rule(self._rules[op.module_path], op.name, types) if key is not None else None
            )
        return self._found[id(op)]


class _Builder:
    """Collects rows, placements and problems; numbers the groups."""

    def __init__(self, traced: WeightProgram, rules: ModuleRules, technique: WeightTechnique) -> None:
        self.plan = Plan(traced.program.mode, [], [], [])
        self._traced = traced
        self._rules = rules
        self._technique = technique

    def add(self, decision: StateDecision) -> None:
        """Resolve what was decided about a weight and add its row."""
        state = decision.state
        if not decision.found and state.tensor.ndim < 2:
            return  # biases and norms that nobody asked about
        stack = self._traced.stacks.get(state.name, ())
        resolution = WeightResolution(None, note=_reason(decision))
        if decision.spec is not None:
            resolution = self._resolve(decision, stack)
        self.plan.problems += resolution.problems
        group = self._place(decision, resolution)
        dense = state.tensor.numel() * state.tensor.element_size()
        packed = bytes_under(stack, state.tensor) if resolution.spec is None else resolution.stored_bytes
        note = "; ".join(filter(None, (resolution.note, _describe_stack(stack))))
        dtype = str(state.tensor.dtype).removeprefix("torch.")
        self.plan.rows.append(
            PlanRow(
                state.name, "weight", tuple(state.tensor.shape), dtype, resolution.spec, decision.rule, group,
                resolution.block_size, dense, packed, note, CompressionType.PRUNING in kinds_on(stack), state.is_linear,
            )
        )  # fmt: skip

    def refuse_finalized(self, weight: FinalizedWeight, op_rules: _OpRules) -> None:
        """Add a problem if the configuration asks for a weight whose dense values are gone."""
        attribute = weight.name.rpartition(".")[2]
        for use in weight.uses:
            rule = op_rules(use.op)
            match = None if rule is None else lookup_spec(rule.op_state_spec, (attribute,))
            if rule is not None and match is not None and match.spec is not None:
                message = (
                    f"{self._technique.kind.value} asked for by {rule.describe()}, but the weight was finalized for a "
                    "backend before, so its values are gone. Finalize once, after the last technique (use "
                    "backend=ExportBackend._TORCH in between), or exclude the weight with None."
                )
                self.plan.problems.append(Problem("order", weight.name, message, Severity.ERROR))
                return

    def _resolve(self, decision: StateDecision, stack: tuple[nn.Module, ...]) -> WeightResolution:
        state, rule = decision.state, decision.rule
        problem = stacking_problem(state.name, stack, self._technique.kind, rule)
        problem = problem or storage_problem(state.name, state.tensor, rule)
        if problem is not None:
            return WeightResolution(None, problems=[problem])
        problem = _check_values(state, rule)
        if problem is not None and problem.severity is Severity.ERROR:
            return WeightResolution(None, problems=[problem])
        try:
            axes = default_weight_axes(state)
        except AxisConflictError:
            axes = None  # an error only where the spec needs a default
        config = self._rules[decision.module_path].config
        resolution = self._technique.resolve(decision.spec, WeightRequest(state, rule, axes, stack, config))
        if problem is not None:
            resolution.problems.insert(0, problem)
        return resolution

    def _place(self, decision: StateDecision, resolution: WeightResolution) -> int:
        if resolution.spec is None:
            return -1
        self.plan.placements.append(
            Placement(
                resolution.spec,
                CompressionTargetTensor.WEIGHT,
                decision.rule,
                decision.module_path,
                decision.state,
                note=resolution.note,
            )
        )
        return len(self.plan.placements) - 1


def _reason(decision: StateDecision) -> str:
    if decision.found:
        return ""
    return f"no key of op_state_spec names {' or '.join(map(repr, decision.state.attributes))}"


def _describe_stack(stack: Sequence[nn.Module]) -> str:
    return "on top of " + ", ".join(type(simulator).__name__.lstrip("_") for simulator in stack) if stack else ""


def _check_values(state: StateTensor, rule: str) -> Problem | None:
    """Return a problem for a weight with entries that are not finite, or that are all equal."""
    low, high = finite_range(state.tensor)
    if not (math.isfinite(low) and math.isfinite(high)):
        return Problem(
            "not-finite",
            state.name,
            f"the weight of shape {tuple(state.tensor.shape)} has NaN or infinite entries, so it cannot be compressed "
            f"({rule}). Repair it, or exclude it with None.",
            Severity.ERROR,
        )
    if low == high and state.tensor.numel() > 1:
        return Problem(
            "constant-weight",
            state.name,
            f"all {state.tensor.numel()} entries equal {low:g}, so there is nothing to choose between ({rule}). Was "
            "the weight trained and loaded? Exclude it with None if it is meant to be constant.",
        )
    return None
