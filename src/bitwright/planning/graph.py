"""The plan of graph quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from bitwright.config.matching import ModuleRules, OpRule, resolve_module_rules
from bitwright.config.spec import CompressionTargetTensor
from bitwright.program import Op, Program
from bitwright.quantization.spec import PerBlockGranularity, PerTensorGranularity, PerTokenGranularity

from .chains import Chain, find_chains, fused_problems, rule_by_itself
from .computed_weights import computed_weight_problems, finalized_weight_problems
from .eager import PlanBuilder
from .empty_activations import empty_activation_problems
from .enclosed_weights import enclosed_weight_problems
from .graph_boundaries import apply_boundaries
from .graph_ops import OpRole
from .kv_cache import apply_kv_caches
from .left_out import left_out_rows
from .merge_specs import effective, is_stateless, with_fields
from .plan import Placement, Plan, Problem, Site
from .quantized import Resolution, resolve_activation
from .reconcile import Group, reconcile
from .redundant import without_redundant
from .shared_axes import channel_axis, keeps_axis
from .sharing import DisjointSets
from .slots import SlotTable, build_slots
from .states import decide_states, state_input_problems
from .unmatched import unmatched_problems
from .unused_keys import unused_key_problems
from .weight_views import link_views, moved_states
from .written_weights import written_weight_problems

__all__ = ["GraphDecisions", "boundary_paths", "plan_graph_quantization"]


@dataclass(frozen=True, slots=True)
class GraphDecisions:
    """The plan, and what insertion needs besides.

    Attributes:
        plan: rows, placements and problems.
        chains: the ops that are quantized as one.
        rules: which part of the configuration owns which module.
        stacks: by name of a weight, the simulators that stand on it already.
    """

    plan: Plan
    chains: list[Chain]
    rules: ModuleRules
    stacks: Mapping[str, Sequence[nn.Module]] = field(default_factory=dict)


def boundary_paths(config: Any, model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules whose boundary the configuration speaks about; the root is always known."""
    rules = resolve_module_rules(config, model)
    return tuple(path for path, rule in rules.items() if path and (rule.module_input_spec or rule.module_output_spec))


def plan_graph_quantization(
    config: Any,
    model: nn.Module,
    program: Program,
    own_roles: Mapping[str, OpRole] = MappingProxyType({}),
    stacks: Mapping[str, Sequence[nn.Module]] = MappingProxyType({}),
) -> GraphDecisions:
    """Apply a ``QuantizerConfig`` to the program of an exported graph, in time nearly linear in its size.

    Args:
        config: the quantizer's configuration.
        model: the model that ``program`` was captured from; only its module tree is read.
        program: from :func:`bitwright.program.graph.capture_graph`.
        own_roles: the user's own kinds of ops, see :func:`~bitwright.planning.chains.find_chains`.
        stacks: by name of a weight, the simulators that stand on it already.
    """
    rules = resolve_module_rules(config, model)
    link_views(program)
    chains = find_chains(program, rules, own_roles)
    builder = PlanBuilder("graph")
    ranks = {id(chain.primary): chain.rank for chain in chains}
    for decision in decide_states(program, rules, _rules_of(chains), rank_of=lambda op: ranks[id(op)]).values():
        builder.add_weight(decision, stacks.get(decision.state.name, ()))
    unread = "no output of the model depends on it"
    builder.plan.rows += left_out_rows(program, builder.plan.rows, model, unread, stacks)
    weights = {placement.state.name for placement in builder.plan.placements if placement.state is not None}
    table = build_slots(program, chains, moved_states(program, weights))
    groups = reconcile(program, chains, table)
    problems = apply_boundaries(program, rules, table, groups)
    problems += apply_kv_caches(config, program, table, groups)
    problems += empty_activation_problems(list(dict.fromkeys(table.empty)))
    problems += fused_problems(chains)
    problems += computed_weight_problems(program, _rules_of(chains), model)
    problems += finalized_weight_problems(program, _rules_of(chains))
    problems += state_input_problems(program, _rules_of(chains))
    problems += written_weight_problems(program, builder.plan.placements)
    problems += enclosed_weight_problems(program, lambda op: rule_by_itself(op, rules, own_roles), weights)
    ruled = ((chain.rule, chain.primary, chain.last) for chain in chains)
    problems += unused_key_problems(program, rules, ruled, states_told=True)
    for group in groups:
        problems += _keep_or_drop_axis(group)
    for placement, resolution in _placements(without_redundant(program, chains, table, groups), table):
        builder.add_activation(placement, resolution)
    return GraphDecisions(builder.build([*problems, *unmatched_problems(rules)]), chains, rules, stacks)


def _rules_of(chains: Sequence[Chain]) -> Callable[[Op], OpRule | None]:
    rules = {id(chain.primary): chain.rule for chain in chains}
    return lambda op: rules.get(id(op))


def _keep_or_drop_axis(group: Group) -> list[Problem]:
    """Fall back to one scale for the whole tensor where an op within the group moves the axis of the scales."""
    granularity, rank = group.spec.granularity, len(group.slots[0].value.shape)
    axes = _axes_of_scales(group.spec, rank)
    moved = [op for op in group.movers if not all(keeps_axis(op, kept) for kept in axes)]
    if not moved:
        return []
    name = group.slots[0].sites()[0].label
    by_token = isinstance(granularity, PerTokenGranularity)
    message = (
        f"{type(granularity).__name__}({'' if by_token else f'axis={granularity.axis}'}) cannot hold on both sides of "
        f"{', '.join(op.name for op in moved)}, which share one simulator: "
        f"{'one of the axes of the tokens' if by_token else 'the axis'} changes its size or its place. One scale for "
        "the whole tensor is used. "
        f"{'Use the dynamic calculator' if by_token else 'Choose an axis that these ops leave alone'}, or exclude them."
    )
    group.spec = with_fields(group.spec, granularity=PerTensorGranularity())
    return [Problem("axis-moved", name, message)]


def _axes_of_scales(spec: Any, rank: int) -> Sequence[int]:
    """Return the axes whose places have scales of their own that last from tensor to tensor."""
    if isinstance(spec.granularity, PerTokenGranularity):
        return () if is_stateless(spec) else range(rank - 1)
    axis = channel_axis(spec, rank)
    if axis is None:
        return ()
    # A blocked activation has a scale for every position along the other axes as well.
    return range(rank) if isinstance(spec.granularity, PerBlockGranularity) else (axis,)


def _placements(groups: Sequence[Group], table: SlotTable) -> list[tuple[Placement, Resolution]]:
    found: list[tuple[Placement, Resolution]] = []
    for members in _merged_by_value(groups, table):
        first = members[0]
        sites = _sites(members, table)
        if not sites or first.demand is None:
            continue
        placement = Placement(
            first.spec,
            CompressionTargetTensor.ACTIVATION,
            first.demand.rule,
            first.demand.module_path,
            sites=sites,
            note=first.note,
        )
        found.append((placement, _resolve(first.spec, sites, first.demand.rule)))
    return found


def _sites(members: Sequence[Group], table: SlotTable) -> list[Site]:
    """Return where simulators stand: a reader needs none of its own where its producer has the same one."""
    slots = sorted((slot for group in members for slot in group.slots), key=lambda slot: slot.index)
    own = {slot.index for slot in slots}
    sites: list[Site] = []
    for slot in slots:
        produced = None if slot.op is None else table.outputs.get(id(slot.value))
        if produced is None or produced not in own:
            sites += slot.sites()
    return sites


def _merged_by_value(groups: Sequence[Group], table: SlotTable) -> list[list[Group]]:
    """Put groups together that want the same of a tensor which nobody asked to simulate where it is produced."""
    sets = DisjointSets(len(groups))
    seen: dict[tuple[int, Any], int] = {}
    produced = {slot.index for group in groups for slot in group.slots if slot.op is None}
    for number, group in enumerate(groups):
        wanted = effective(group.spec)
        for slot in group.slots:
            if slot.op is None or table.outputs.get(id(slot.value)) in produced:
                continue
            sets.union(seen.setdefault((id(slot.value), wanted), number), number)
    return [[groups[i] for i in indices] for indices in sets.groups()]


def _resolve(spec: Any, sites: Sequence[Site], rule: str) -> Resolution:
    """Check the spec against every shape that the simulator will see; the first trouble counts for all."""
    resolution = Resolution(None)
    shapes: dict[tuple[int, ...], str] = {}
    for site in sites:
        shapes.setdefault(site.value.shape, site.label)
    for shape, label in shapes.items():
        resolution = resolve_activation(spec, shape, label, rule)
        if resolution.spec is None:
            return resolution
    return resolution
