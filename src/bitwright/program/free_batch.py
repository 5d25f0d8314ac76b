"""What in a graph follows the batch, found by a second capture of its model with another batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .graph_record import copy_graph

__all__ = ["FREE_BATCH", "FreeBatch", "free_batch", "graph_to_call", "write_batch_in_graph"]

FREE_BATCH = "_free_batch"
"""Attribute of a graph module with its ``FreeBatch``."""


@dataclass(frozen=True, slots=True)
class _Size:
    """An integer among the arguments of a node that grows in proportion with the batch, up to an offset."""

    node: str
    target: str
    place: int
    captured: int
    factor: int
    offset: int
    divisor: int

    @classmethod
    def between(cls, node: fx.Node, place: int, numbers: tuple[int, int], sizes: tuple[int, int]) -> _Size:
        """The one that is ``numbers`` for batches of ``sizes``."""
        slope = Fraction(numbers[1] - numbers[0], sizes[1] - sizes[0])
        offset = (numbers[0] - slope * sizes[0]) * slope.denominator
        return cls(node.name, _target(node), place, numbers[0], slope.numerator, int(offset), slope.denominator)

    def at(self, batch: int) -> int:
        return (self.factor * batch + self.offset) // self.divisor


@dataclass(frozen=True, slots=True)
class _Added:
    """An op on an argument of a node that does nothing for a batch of 1, which PyTorch leaves out there.

    Attributes:
        node: the node.
        target: what it calls.
        place: of the argument among all.
        op: ``expand`` or ``contiguous``.
        sizes: of an expanded tensor; None for the batch.
    """

    node: str
    target: str
    place: int
    op: str
    sizes: tuple[int | None, ...]

    def calling(self, value: Any, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """The op and its arguments."""
        sizes = [batch if size is None else size for size in self.sizes]
        return _NEUTRAL[self.op], (value, sizes) if self.op == "expand" else (value,)


_NEUTRAL = {"expand": torch.ops.aten.expand.default, "contiguous": torch.ops.aten.contiguous.default}
_NEUTRAL_NAMES: dict[Any, str] = {op: name for name, op in _NEUTRAL.items()}


@dataclass(frozen=True, slots=True)
class FreeBatch:
    """How a graph that was captured for one batch computes others.

    Attributes:
        input: place of an input whose dimension 0 is the batch, among all inputs.
        sizes: the constants of the graph that follow it.
        added: ops that a graph for a batch of 1 lacks; of those on one argument, the first is called first.
    """

    input: int
    sizes: tuple[_Size, ...]
    added: tuple[_Added, ...] = ()

    def batch(self, leaves: Sequence[Any]) -> int:
        """Return the batch of flattened inputs."""
        return int(leaves[self.input].shape[0])

    def applied(self, graph: fx.Graph, known: Collection[int] | None = None) -> fx.Graph | None:
        """Return a copy of a graph that reads the batch from its input; None where a node is not there any more.

        Args:
            graph: is copied.
            known: the batches that the copy may have; None where somebody else sees to that.
        """
        twin = copy_graph(graph)
        nodes = {node.name: node for node in twin.nodes}
        inputs = [node for node in twin.nodes if node.op == "placeholder"]
        changes: tuple[_Size | _Added, ...] = (*self.sizes, *self.added)
        if not all(self._has_place(nodes.get(change.node), change) for change in changes):
            return None
        if not self.sizes and not self.added:
            return twin
        made: dict[tuple[int, int, int], fx.Node] = {}
        with twin.inserting_after(inputs[-1]):
            batch = twin.call_function(torch.ops.aten.sym_size.int, (inputs[self.input], 0))
        if known is not None:
            with twin.inserting_after(batch):
                batch = twin.call_function(_known_batch, (batch, tuple(sorted(known))))
        for size in self.sizes:
            rule = size.factor, size.offset, size.divisor
            if rule not in made:
                made[rule] = _computed(twin, batch, *rule)
            _replace(nodes[size.node], size.place, made[rule])
        for added in self.added:
            node = nodes[added.node]
            op, args = added.calling(_leaves(node)[added.place], batch)
            with twin.inserting_before(node):
                _replace(node, added.place, twin.call_function(op, args))
        return twin

    def follow(self, module: fx.GraphModule) -> bool:
        """Let a module compute its sizes from the batch from now on; False if they are not in its graph."""
        if self.applied(module.graph) is None:
            return False
        module.__dict__[FREE_BATCH] = self
        module.__dict__.get("_other_batches", {}).clear()  # what held without that
        before = type(module).forward
        module.recompile()
        _run_instead(before, type(module).forward)
        return True

    def arguments(self, node: fx.Node, batch: int, value_of: Callable[[fx.Node], Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a node of the graph, as it was captured, for a batch.

        Args:
            node: the node.
            batch: the batch.
            value_of: returns the values of nodes among them.
        """
        leaves, spec = tree_flatten((node.args, node.kwargs))
        for size in self.sizes:
            if size.node == node.name:
                leaves[size.place] = size.at(batch)
        leaves = [value_of(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        for added in self.added:
            if added.node == node.name:
                op, args = added.calling(leaves[added.place], batch)
                leaves[added.place] = op(*args)
        args, kwargs = tree_unflatten(leaves, spec)
        return args, dict(kwargs)

    def agrees(self, other: FreeBatch, batch: int) -> bool:
        """Whether two have the same constants for a batch."""
        own, others = (
            {(size.node, size.place, size.at(batch)) for size in each.sizes if size.at(batch) != size.captured}
            for each in (self, other)
        )
        return own == others and (self.added == other.added or batch == 1)

    @staticmethod
    def _has_place(node: fx.Node | None, change: _Size | _Added) -> bool:
        if node is None or _target(node) != change.target or change.place >= len(_leaves(node)):
            return False
        leaf = _leaves(node)[change.place]
        if isinstance(change, _Added):
            return isinstance(leaf, fx.Node)
        return type(leaf) is int and leaf == change.captured


def _target(node: fx.Node) -> str:
    """What a node calls; a view is made a reshape where its input may have been laid out otherwise."""
    return str(node.target).replace("aten.view.default", "aten.reshape.default")


def _run_instead(before: Any, function: Any) -> None:
    """Let generated code run as other code: a call that is under way has looked it up before its hooks ran."""
    if before.__code__.co_filename.startswith("<eval_with_key>"):
        before.__globals__.update(function.__globals__)
        before.__code__ = function.__code__


def graph_to_call(module: fx.GraphModule) -> fx.Graph:
    """Return what a module computes: its graph, or a copy in which sizes follow the batch.

    A module whose graph has been changed so that they are not there any more holds for the captured batch alone.
    """
    free: FreeBatch | None = module.__dict__.get(FREE_BATCH)
    if free is None:
        return module.graph
    graph = free.applied(module.graph)
    if graph is None:
        del module.__dict__[FREE_BATCH]
        module.__dict__.pop("_other_batches", None)
        return module.graph
    return graph


def write_batch_in_graph(module: fx.GraphModule) -> None:
    """Have the graph of a copy compute the sizes that follow the batch, for ``torch.export``, which runs the graph.

    It takes the batches that were compared with the model, and no others: a size that was seen to be on a line for some
    may leave it for another. Its code is to be generated afterwards.
    """
    free: FreeBatch | None = module.__dict__.pop(FREE_BATCH, None)
    if free is None:
        return
    shapes: Mapping[tuple[Any, ...], bool] = module.__dict__.get("_other_batches", {})
    known = {came[free.input][0] for came, holds in shapes.items() if holds}
    check: Any = module._input_check
    graph = free.applied(module.graph, known | {check.shapes[free.input].dimensions[0].size})
    if graph is not None:
        module._graph = graph
        graph.owning_module = module


def _known_batch(batch: Any, known: tuple[int, ...]) -> int:
    """Return a batch that is known to be right.

    Raises:
        ValueError: it is another one, or one that varies.
    """
    if type(batch) is int and batch in known:
        return batch
    sizes = ", ".join(map(str, known))
    raise ValueError(
        f"The sizes in this graph follow the batch; they were compared with the model for batches of {sizes}, and not "
        f"for {batch}. To write one of another size, call the prepared model once with it before; for any size, pass "
        "dynamic_shapes to prepare()."
    )


def _computed(graph: fx.Graph, batch: fx.Node, factor: int, offset: int, divisor: int) -> fx.Node:
    """A node with ``(factor * batch + offset) // divisor``."""
    node = batch
    steps = ((operator.mul, factor, 1), (operator.add, offset, 0), (operator.floordiv, divisor, 1))
    for function, number, neutral in steps:
        if number != neutral:
            with graph.inserting_after(node):
                node = graph.call_function(function, (node, number))
    return node


def _leaves(node: fx.Node) -> list[Any]:
    leaves: list[Any] = tree_flatten((node.args, node.kwargs))[0]
    return leaves


def _replace(node: fx.Node, place: int, value: fx.Node) -> None:
    """Give a node another argument."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    leaves[place] = value
    node.args, node.kwargs = tree_unflatten(leaves, spec)


def free_batch(one: fx.Graph, other: fx.Graph, place: int, sizes: tuple[int, int]) -> FreeBatch | None:
    """Return what follows the batch in a graph, as another capture of its model shows; None if more than that differs.

    Args:
        one: the graph.
        other: captured with another batch.
        place: of an input that has the batch, among all inputs.
        sizes: the batches of both.
    """
    pairs = _Pairs(sizes)
    waiting = list(one.nodes)[::-1]
    for twin in other.nodes:
        if waiting and pairs.takes(waiting[-1], twin):
            waiting.pop()
        elif sizes[0] != 1 or not pairs.adds(twin):
            return None
    return None if waiting else FreeBatch(place, tuple(pairs.sizes), tuple(pairs.added))


class _Pairs:
    """Nodes of two captures that are the same, and where they differ."""

    def __init__(self, batches: tuple[int, int]) -> None:
        self.batches = batches
        self.sizes: list[_Size] = []
        self.added: list[_Added] = []
        self._own: dict[fx.Node, fx.Node] = {}
        self._neutral: dict[fx.Node, list[tuple[str, tuple[int | None, ...]]]] = {}

    def takes(self, node: fx.Node, twin: fx.Node) -> bool:
        """Whether two nodes are the same, up to sizes that follow the batch, which are noted."""
        (leaves, spec), (twins, other_spec) = (tree_flatten((each.args, each.kwargs)) for each in (node, twin))
        if (node.op, node.target) != (twin.op, twin.target) or spec != other_spec:
            return False
        sizes, added = list[_Size](), list[_Added]()
        for place, pair in enumerate(zip(leaves, twins, strict=True)):
            if all(type(leaf) is int for leaf in pair):
                if pair[0] != pair[1]:
                    sizes.append(_Size.between(node, place, pair, self.batches))
            elif not self._is_same(*pair):
                return False
            for op in self._neutral.get(pair[1], ()) if isinstance(pair[1], fx.Node) else ():
                added.append(_Added(node.name, _target(node), place, *op))
        self.sizes += sizes
        self.added += added
        self._own[twin] = node
        return True

    def adds(self, twin: fx.Node) -> bool:
        """Whether a node of the other capture alone is one that does nothing for a batch of 1."""
        name, source = _NEUTRAL_NAMES.get(twin.target), twin.args[0] if twin.args else None
        if name is None or not isinstance(source, fx.Node) or source not in self._own or twin.kwargs:
            return False
        given: Any = twin.args[1] if name == "expand" else ()
        if len(twin.args) > 2 or not all(type(size) is int for size in given):
            return False
        sizes: tuple[int | None, ...] = tuple(None if size == self.batches[1] else size for size in given)
        self._own[twin] = self._own[source]
        self._neutral[twin] = [*self._neutral.get(source, ()), (name, sizes)]
        return True

    def _is_same(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            return self._own.get(other) is one
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
