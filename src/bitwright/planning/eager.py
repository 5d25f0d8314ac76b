"""The plan of eager quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from bitwright.common import CompressionType
from bitwright.config.matching import ModuleRules, OpRule, resolve_module_rules, resolve_op_rule
from bitwright.config.spec import CompressionTargetTensor
from bitwright.program import Op, Program

from .computed_weights import computed_weight_problems, finalized_weight_problems
from .eager_activations import empty_activations, request_activations
from .empty_activations import empty_activation_problems
from .enclosed_weights import enclosed_weight_problems
from .left_out import left_out_rows
from .looked_up_weights import looked_up_problems
from .ops import eager_op_key
from .packed_sizes import bytes_under, has_zero, masked_bytes, quantized_bytes
from .plan import Placement, Plan, PlanRow, Problem
from .quantized import Resolution, resolve_activation, resolve_weight
from .scripted_modules import scripted_module_problems
from .stacking import kinds_on, stacking_problem
from .states import StateDecision, decide_states, unquantizable_problems
from .unmatched import unmatched_problems
from .unused_keys import unused_key_problems
from .weight_views import link_views
from .written_weights import written_weight_problems

__all__ = ["PlanBuilder", "plan_eager_quantization"]


def plan_eager_quantization(
    config: Any, model: nn.Module, program: Program, stacks: Mapping[str, Sequence[nn.Module]] = MappingProxyType({})
) -> Plan:
    """Apply a ``QuantizerConfig`` to a traced program.

    Args:
        config: the quantizer's configuration.
        model: the model that ``program`` was traced from; only its module tree is read.
        program: from :func:`bitwright.program.trace_eager`.
        stacks: by canonical name of a weight, the simulators that stand on it already.
    """
    rules = resolve_module_rules(config, model)
    op_rules = OpRules(rules)
    link_views(program)
    builder = PlanBuilder("eager")
    for decision in decide_states(program, rules, op_rules).values():
        builder.add_weight(decision, stacks.get(decision.state.name, ()))
    for site, spec, rule, path in request_activations(program, rules, op_rules):
        value = site.value
        resolution = resolve_activation(spec, value.shape, site.label, rule)
        builder.add_activation(
            Placement(spec, CompressionTargetTensor.ACTIVATION, rule, path, sites=[site]), resolution
        )
    builder.plan.rows += left_out_rows(
        program, builder.plan.rows, model, "no call of the model reads it with these inputs", stacks
    )
    problems = [
        *scripted_module_problems(model, rules),
        *unquantizable_problems(program, op_rules),
        *computed_weight_problems(program, op_rules, model),
        *finalized_weight_problems(program, op_rules),
    ]
    problems += written_weight_problems(program, builder.plan.placements)
    problems += looked_up_problems(program, builder.plan.placements)
    weights = {placement.state.name for placement in builder.plan.placements if placement.state is not None}
    problems += enclosed_weight_problems(program, op_rules, weights)
    problems += empty_activation_problems(empty_activations(program, rules, op_rules))
    ruled = ((found, op, op) for op in program.ops if (found := op_rules(op)) is not None)
    problems += unused_key_problems(program, rules, ruled)
    return builder.build([*problems, *unmatched_problems(rules)])


class OpRules:
    """Rule of each recognised op, found once."""

    def __init__(self, rules: ModuleRules) -> None:
        self._rules = rules
        self._found: dict[int, OpRule | None] = {}

    def __call__(self, op: Op) -> OpRule | None:
        """Return the rule of ``op``, None where quantization does not know the op."""
        if id(op) not in self._found:
            key = eager_op_key(op.type)
            types = dict.fromkeys((key, op.type)) if key is not None else {}
            self._found[id(op)] = (
                resolve_op_rule(self._rules[op.module_path], op.name, tuple(types)) if key is not None else None
            )
        return self._found[id(op)]


class PlanBuilder:
    """Collects rows, placements and problems; numbers the groups."""

    def __init__(self, mode: str) -> None:
        self.plan = Plan(mode, [], [], [])

    def add_weight(self, decision: StateDecision, stack: Sequence[nn.Module] = ()) -> None:
        """Resolve what was decided about a state, on which ``stack`` stands already, and add its row."""
        state = decision.state
        if not decision.found and (state.tensor.ndim < 2 or not state.is_parameter):
            return  # biases and buffers that nobody asked about
        resolution = _resolve(decision, stack)
        note = resolution.note
        if not decision.found:
            note = f"no key of op_state_spec names {' or '.join(map(repr, state.attributes))}"
        shape = tuple(state.tensor.shape)
        dense = state.tensor.numel() * state.tensor.element_size()
        packed, group = bytes_under(stack, state.tensor), -1
        spec = resolution.spec or decision.spec
        placement = Placement(
            spec, CompressionTargetTensor.WEIGHT, decision.rule, decision.module_path, state, note=note
        )
        if resolution.spec is not None:
            packed = quantized_bytes(resolution.spec, shape, resolution.block_size, state.tensor.dtype)
            packed += masked_bytes(stack, state.tensor.numel(), resolution.spec)
            group = self._place(placement)
        self._note(resolution, placement)
        dtype = str(state.tensor.dtype).removeprefix("torch.")
        self.plan.rows.append(
            PlanRow(
                state.name, "weight", shape, dtype, resolution.spec, decision.rule, group, resolution.block_size, dense,
                packed, note, CompressionType.PRUNING in kinds_on(stack), state.is_linear,
            )
        )  # fmt: skip

    def add_activation(self, placement: Placement, resolution: Resolution) -> None:
        """Add a row for each site of a simulator on activations."""
        self._note(resolution, placement)
        if resolution.spec is None:
            return
        placement.spec = resolution.spec
        group = self._place(placement)
        for site in placement.sites:
            value = site.value
            dtype = str(value.dtype).removeprefix("torch.")
            self.plan.rows.append(
                PlanRow(
                    site.label, "activation", value.shape, dtype, resolution.spec, placement.rule, group,
                    resolution.block_size, note=placement.note,
                )
            )  # fmt: skip

    def build(self, problems: list[Problem]) -> Plan:
        """Return the plan with ``problems`` found elsewhere added."""
        self.plan.problems.extend(problems)
        return self.plan

    def _place(self, placement: Placement) -> int:
        self.plan.placements.append(placement)
        return len(self.plan.placements) - 1

    def _note(self, resolution: Resolution, placement: Placement) -> None:
        if resolution.problem is not None:
            self.plan.problems.append(resolution.problem)
        if resolution.unfit:
            self.plan.unfit.append(placement)


def _resolve(decision: StateDecision, stack: Sequence[nn.Module]) -> Resolution:
    if decision.spec is None:
        return Resolution(None)
    problem = stacking_problem(decision.state.name, stack, CompressionType.QUANTIZATION, decision.rule)
    if problem is None:
        resolution = resolve_weight(decision.spec, decision.state, decision.rule, by_module=decision.by_module)
        spec = resolution.spec
        if spec is None or CompressionType.PRUNING not in kinds_on(stack):
            return resolution
        zero = has_zero(spec.dtype, spec.qformulation)
        return resolution if zero else replace(resolution, problem=resolution.problem or _zeros_lost(decision))
    if decision.by_module:  # asked for by name
        return Resolution(None, problem=problem)
    return Resolution(None, note=f"left alone: {', '.join(kinds_on(stack))} already stands on it")


def _zeros_lost(decision: StateDecision) -> Problem:
    message = (
        f"the grid that {decision.rule} asks for has no zero, so what was pruned becomes small numbers and is stored "
        "in full. Use qformulation='zp', or prune after quantizing."
    )
    return Problem("zeros", decision.state.name, message)
