"""Patterns of ops that a user adds to those of :mod:`bitwright.planning.graph_ops`.

A pattern is a chain of ops: the op that is quantized, then what is fused behind it (a batch norm, an activation). A
class for it derives from one of the bases here, which says how the op is quantized, and is registered::

    @_AnnotationPatternRegistry.register("relu")
    class ReluPattern(NAryActPattern):
        @classmethod
        def generate_patterns(cls):
            return [OpsListPattern(["relu"])]

An op with a pattern of its own leaves the chain that it would be fused into where the configuration has something
stronger to say about it than about the op in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import fx

from bitwright._utils.registry_utils import ClassRegistryMixin
from bitwright.planning.graph_ops import ACTIVATIONS, OpRole
from bitwright.planning.slots import Slot
from bitwright.program import Op
from bitwright.program.aten_names import aten_name, canonical_name
from bitwright.quantization.spec import PerChannelGranularity

from ._annotation_utils import OpsListPattern
from ._qspec_constraints import Constraint, ShareFields, ShareObserverInstance
from ._qspec_types import FieldName, FieldValue, NodeSlot, ProvisionalQSpec, ProvisionalQSpecMap, SlotKind

__all__ = [
    "BaseAnnotationPattern",
    "ConcatPattern",
    "NAryActPattern",
    "SharedObserverModulePattern",
    "WeightedModulePattern",
    "registered_roles",
]


def _get_all_patterns_from_base_ops(
    base_ops: Iterable[str | Callable[..., object]], use_act: bool = False
) -> list[Any]:
    """Return a spelling for each op, or with ``use_act`` one for each op and activation function behind it.

    Args:
        base_ops: names, ATen ops or functions, as for ``OpsListPattern``.
        use_act: the op and what follows it are one chain.
    """
    return [
        OpsListPattern([op, *behind])
        for op in base_ops
        for behind in ([[name] for name in sorted(ACTIVATIONS)] if use_act else [[]])
    ]


class BaseAnnotationPattern(ABC):
    """Base class of patterns."""

    _patterns: ClassVar[list[Any] | None] = None

    @classmethod
    @abstractmethod
    def generate_patterns(cls) -> list[Any]:
        """Return the pattern's spellings, all of the same length: ``OpsListPattern``, or graph modules of one chain."""

    @classmethod
    def get_patterns(cls) -> list[Any]:
        """Return what ``generate_patterns`` returned the first time.

        Raises:
            RuntimeError: the spellings differ in length.
        """
        if cls.__dict__.get("_patterns") is None:
            patterns = cls.generate_patterns()
            cls._check(patterns)
            cls._patterns = patterns
        assert cls._patterns is not None
        return cls._patterns

    @classmethod
    def get_pattern_length(cls) -> int:
        """Return the number of ops in the chain.

        Raises:
            RuntimeError: there is no pattern, or their lengths differ.
        """
        patterns = cls.get_patterns()
        if not patterns:
            raise RuntimeError(f"{cls.__name__}.generate_patterns() returned nothing, so the pattern has no length.")
        return _length(patterns[0])

    @classmethod
    def match_single_pattern(cls, model: fx.GraphModule, pattern: Any) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Return the chains of ``model`` that are spelled like ``pattern``, each by its first op."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in model.graph.nodes:
            chain = _chain(node, _op_names(pattern))
            if chain:
                found[node] = chain
        return found

    @classmethod
    def _check(cls, patterns: Sequence[Any]) -> None:
        lengths = {_length(pattern) for pattern in patterns}
        if len(lengths) > 1:
            raise RuntimeError(f"All patterns of {cls.__name__} must have as many ops; got {sorted(lengths)}.")


class WeightedModulePattern(BaseAnnotationPattern):
    """An op with a weight; its first input is the activation."""


class NAryActPattern(BaseAnnotationPattern):
    """An op of activations, however many."""


class SharedObserverModulePattern(BaseAnnotationPattern):
    """An op that moves values: what it reads and returns may have one simulator."""

    @classmethod
    @abstractmethod
    def generate_qspec_sharing_constraints(cls, node: fx.Node, qspecs: ProvisionalQSpecMap) -> list[Constraint]:
        """Return what the slots of ``node`` have in common, given what the configuration says about them."""

    @classmethod
    def _check(cls, patterns: Sequence[Any]) -> None:
        super()._check(patterns)
        if any(_length(pattern) > 1 for pattern in patterns):
            raise RuntimeError(f"Patterns of {cls.__name__} must have one op: nothing is fused with an op that shares.")


class ConcatPattern(SharedObserverModulePattern):
    """Concatenation: one simulator for all, except that channels which are put side by side keep their own scales."""

    @classmethod
    def generate_patterns(cls) -> list[OpsListPattern]:
        """Return the spellings of ``cat``."""
        return [OpsListPattern(["cat"]), OpsListPattern(["concat"])]

    @classmethod
    def generate_qspec_sharing_constraints(cls, node: fx.Node, qspecs: ProvisionalQSpecMap) -> list[Constraint]:
        """Return nothing where no input is spoken about; else one simulator, or one dtype, for all slots."""
        inputs = [NodeSlot(node, SlotKind.INPUT, index) for index in range(len(node.all_input_nodes))]
        if not any(slot in qspecs for slot in inputs):
            return []
        output = NodeSlot(node, SlotKind.OUTPUT, 0)
        slots = frozenset((*inputs, output))
        stated = qspecs[output].fields.get(FieldName.GRANULARITY) if output in qspecs else None
        granularity = None if stated is None else stated.value
        if isinstance(granularity, PerChannelGranularity) and _same_axis(granularity.axis, _concat_dim(node), node):
            return [ShareFields(slots, frozenset({FieldName.DTYPE}))]
        return [ShareObserverInstance(slots)]


class _AnnotationPatternRegistry(ClassRegistryMixin):
    """The user's patterns by key; keys are op types of ``op_type_config`` too."""


def registered_roles() -> dict[str, OpRole]:
    """Return how the ops of registered patterns are quantized, by the op's name."""
    roles: dict[str, OpRole] = {}
    for key, pattern_cls in _AnnotationPatternRegistry.REGISTRY.items():
        chains = [names for pattern in pattern_cls.get_patterns() if (names := _op_names(pattern))]
        for first in dict.fromkeys(names[0] for names in chains):
            behind = {name for names in chains if names[0] == first for name in names[1:]}
            shares = issubclass(pattern_cls, SharedObserverModulePattern)
            roles[first] = OpRole(
                key,
                takes_batch_norm="batch_norm" in behind,
                takes_activation=bool(behind & ACTIVATIONS),
                shares=shares,
                inputs=(0,) if issubclass(pattern_cls, WeightedModulePattern) else None,
                sharing=_Sharing(pattern_cls) if shares else None,
            )
    return roles


class _Sharing:
    """Asks a pattern which slots of an op belong together."""

    def __init__(self, pattern_cls: type[SharedObserverModulePattern]) -> None:
        self.pattern_cls = pattern_cls

    def __call__(self, op: Op, slots: Sequence[Slot]) -> list[tuple[list[int], bool]]:
        indices = {_node_slot(op, slot): slot.index for slot in slots}
        qspecs = {_node_slot(op, slot): _provisional(slot) for slot in slots if slot.demand is not None}
        found: list[tuple[list[int], bool]] = []
        for constraint in self.pattern_cls.generate_qspec_sharing_constraints(op.handle, qspecs):
            if isinstance(constraint, ShareObserverInstance | ShareFields):
                members = sorted(indices[slot] for slot in constraint._slots if slot in indices)
                found.append((members, isinstance(constraint, ShareObserverInstance)))
        return found


def _node_slot(op: Op, slot: Slot) -> NodeSlot:
    if slot.op is None:
        return NodeSlot(op.handle, SlotKind.OUTPUT, slot.value.output_index or 0)
    names = [node.name for node in op.handle.all_input_nodes]
    return NodeSlot(op.handle, SlotKind.INPUT, names.index(slot.value.name))


def _provisional(slot: Slot) -> ProvisionalQSpec:
    assert slot.demand is not None
    spec, priority = slot.demand.spec, slot.demand.rank
    if spec is None:
        return ProvisionalQSpec(declined_by=priority)
    stated: Mapping[FieldName, Any] = {name: getattr(spec, name.value, None) for name in FieldName}
    return ProvisionalQSpec({name: FieldValue(value, priority) for name, value in stated.items()})


def _op_names(pattern: Any) -> tuple[str, ...]:
    if isinstance(pattern, OpsListPattern):
        names = pattern.names()
    else:
        names = tuple(aten_name(node.target) for node in _calls(pattern) if node.op == "call_function")
    return tuple(canonical_name(name) for name in names)


def _length(pattern: Any) -> int:
    return len(pattern.pattern) if isinstance(pattern, OpsListPattern) else len(_calls(pattern))


def _calls(pattern: Any) -> list[Any]:
    return [node for node in pattern.graph.nodes if node.op in ("call_function", "call_module")]


def _chain(node: fx.Node, names: Sequence[str]) -> tuple[fx.Node, ...]:
    """Return the chain of these names that begins with ``node``, each op the only reader of the one before."""
    chain: list[fx.Node] = []
    for name in names:
        if node.op != "call_function" or canonical_name(aten_name(node.target)) != name:
            return ()
        chain.append(node)
        if len(chain) < len(names):
            if len(node.users) != 1:
                return ()
            node = next(iter(node.users))
    return tuple(chain)


def _concat_dim(node: fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim)


def _same_axis(axis: int | None, other: int, node: fx.Node) -> bool:
    """Return whether two axes of ``node`` are the same; where its shape is not known, whether the numbers are equal."""
    value = node.meta.get("val")
    if axis is None or value is None:
        return axis == other
    rank = len(value.shape)
    return axis % rank == other % rank
