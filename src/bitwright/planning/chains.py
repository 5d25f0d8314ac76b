"""Chains of ops that are quantized as one: op, batch norm, activation; each with the rule that applies to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bitwright.config.matching import ConfigLevel, ModuleRule, ModuleRules, OpLevel, OpRule, resolve_op_rule
from bitwright.program import Op, Program, Value
from bitwright.program.aten_names import canonical_name

from .graph_ops import ACTIVATIONS, OpRole, role_of
from .plan import Problem

__all__ = ["Chain", "find_chains", "fused_problems", "rule_by_itself"]


@dataclass(eq=False, slots=True)
class Chain:
    """An op that is quantized, with what is fused behind it; nothing is simulated in between.

    Attributes:
        ops: the op itself, then a batch norm, then an activation, as far as they are there.
        role: what is known about the op itself.
        key: kind of the chain (``"conv_bn_act"``).
        rule: what the configuration says about the op itself; it holds for the whole chain.
        overridden: rules that name only a later op of the chain; they have no effect.
        rank: place among all chains of the program, the strongest first. Rules by name are stronger than rules by
            type and those stronger than the global one; within each, op names, op types and defaults in this order;
            then longer chains, modules that entries claim first (those of later entries, later modules of one entry,
            parents before children), earlier ops.
    """

    ops: tuple[Op, ...]
    role: OpRole
    key: str
    rule: OpRule
    overridden: tuple[OpRule, ...] = ()
    rank: int = 0

    @property
    def primary(self) -> Op:
        """The op that the chain is named after."""
        return self.ops[0]

    @property
    def last(self) -> Op:
        """The op whose output leaves the chain."""
        return self.ops[-1]

    @property
    def batch_norm(self) -> Op | None:
        """The batch norm of the chain."""
        return self.ops[1] if len(self.ops) > 1 and canonical_name(self.ops[1].type) == "batch_norm" else None


def find_chains(
    program: Program, rules: ModuleRules, own_roles: Mapping[str, OpRole] = MappingProxyType({})
) -> list[Chain]:
    """Return the chains of a graph program in order of execution, ranked. Takes time linear in the number of ops.

    Args:
        program: the program.
        rules: which part of the configuration owns which module.
        own_roles: the user's roles by canonical op name. Such an op stays out of the chain in front of it where the
            configuration has something stronger to say about it than about that chain.
    """
    outputs = {id(value) for value in program.outputs}
    covered: set[int] = set()
    chains: list[Chain] = []
    for op in program.ops:
        role = own_roles.get(canonical_name(op.type)) or role_of(op)
        if role is None or id(op) in covered or not op.outputs or _makes_weight(op):
            continue
        ops = _look_ahead(op, role, outputs)
        for number, later in enumerate(ops[1:], 1):
            if canonical_name(later.type) in own_roles and _strength(later, rules) < _strength(op, rules):
                ops = ops[:number]
                break
        covered.update(map(id, ops))
        key = _key(role, ops)
        rule = _resolve(op, rules, role.pattern, key)
        inner = tuple(found for later in ops[1:] if (found := _resolve(later, rules)).level is not OpLevel.DEFAULT)
        chains.append(Chain(ops, role, key, rule, inner))
    _rank(chains)
    return chains


def fused_problems(chains: Sequence[Chain]) -> list[Problem]:
    """Return a problem for each op key of the configuration that only names ops which are part of another."""
    effective = {chain.rule.describe() for chain in chains}
    found: dict[str, list[str]] = {}
    for chain in chains:
        for rule in chain.overridden:
            if rule.describe() not in effective:
                found.setdefault(rule.describe(), []).append(chain.primary.name)
    return [
        Problem(
            "fused-op",
            key,
            f"has no effect: every op that it names is fused with the op in front of it ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}), whose configuration holds for both. Configure that op.",
        )
        for key, names in found.items()
    ]


def rule_by_itself(op: Op, rules: ModuleRules, own_roles: Mapping[str, OpRole] = MappingProxyType({})) -> OpRule | None:
    """Return what the configuration says about an op that is part of no chain, None where it is not quantized."""
    role = own_roles.get(canonical_name(op.type)) or role_of(op)
    return None if role is None else _resolve(op, rules, role.pattern)


def _makes_weight(op: Op) -> bool:
    """True for a cut through a parameter (``w.chunk(3)``) whose pieces are weights of further ops."""
    return any(output.view is not None and output.view.is_operand for output in op.outputs)


def _resolve(op: Op, rules: ModuleRules, *further: str) -> OpRule:
    spellings = dict.fromkeys((op.type, *op.aliases, *further))
    return resolve_op_rule(rules[op.module_path], op.name, tuple(spellings))


def _strength(op: Op, rules: ModuleRules) -> tuple[int, int]:
    rule = _resolve(op, rules)
    return (rule.module_rule.level, rule.level)


def _look_ahead(op: Op, role: OpRole, outputs: set[int]) -> tuple[Op, ...]:
    ops = [op]
    if role.takes_batch_norm:
        follower = _only_user(ops[-1], outputs)
        if follower is not None and canonical_name(follower.type) == "batch_norm":
            ops.append(follower)
    if role.takes_activation:
        follower = _only_user(ops[-1], outputs)
        if follower is not None and canonical_name(follower.type) in ACTIVATIONS:
            ops.append(follower)
    return tuple(ops)


def _only_user(op: Op, outputs: set[int]) -> Op | None:
    """Return the one op that reads the one output of ``op`` as its first argument, None if others do too."""
    if len(op.outputs) != 1:
        return None
    value: Value = op.outputs[0]
    if len(value.uses) != 1 or id(value) in outputs or value.uses[0].index != 0:
        return None
    return value.uses[0].op


def _key(role: OpRole, ops: Sequence[Op]) -> str:
    parts = [role.pattern]
    for op in ops[1:]:
        parts.append("bn" if canonical_name(op.type) == "batch_norm" else "act")
    return "_".join(parts)


def _rank(chains: list[Chain]) -> None:
    order = sorted(
        range(len(chains)),
        key=lambda i: (
            chains[i].rule.module_rule.level,
            chains[i].rule.level,
            -len(chains[i].ops),
            _module_order(chains[i].rule.module_rule),
            i,
        ),
    )
    for rank, i in enumerate(order):
        chains[i].rank = rank


def _module_order(rule: ModuleRule) -> int:
    """Return the place of a module among those of its section; all that the global part owns are equal."""
    return 0 if rule.level is ConfigLevel.GLOBAL else rule.priority
