"""Positions: floats made of integers that count something, and what is computed from them alone.

A rotary or sinusoidal embedding multiplies integer positions with frequencies and takes the sine; a resize turns
them into coordinates and takes the floor. float16 holds integers only up to 2048 (bfloat16 up to 256), a phase that
is wrong by one percent of a large position is wrong by many radians, and a coordinate that crosses an integer names
another pixel. These few nodes are worth keeping in float32. They are found backwards from the functions that
need every digit, and then forwards as far as nothing else joins.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ._cleanup import CAST_OPS, dtype_of

_aten = torch.ops.aten
_NEEDS_EVERY_DIGIT: Final = frozenset(
    {_aten.sin.default, _aten.cos.default, _aten.tan.default}
    | {_aten.floor.default, _aten.ceil.default, _aten.round.default, _aten.trunc.default}
)
_LONGEST_CHAIN: Final = 64


@dataclasses.dataclass
class PositionChains:
    """Nodes that compute with positions, and the placeholders that only such nodes read."""

    nodes: set[Node] = dataclasses.field(default_factory=set)
    placeholders: set[Node] = dataclasses.field(default_factory=set)


def position_chains(graph: Graph, parameters: set[Node]) -> PositionChains:
    """Find what is computed from integer positions where digits matter.

    Args:
        graph: graph whose nodes carry ``meta["val"]``.
        parameters: placeholders of trained parameters; what depends on them is no position.
    """
    chains = PositionChains()
    for node in graph.nodes:
        end = _end_of_chain(node)
        if end is not None and end not in chains.nodes:
            chain = _chain_to(end, parameters)
            if any(_comes_from_integers(member) for member in chain):
                chains.nodes |= {member for member in chain if member.op == "call_function"}
                chains.placeholders |= {member for member in chain if member.op == "placeholder"}
    for node in graph.nodes:
        sources = _float_sources(node)
        if sources and _is_float_operator(node) and chains.nodes.issuperset(sources):
            chains.nodes.add(node)
    chains.placeholders = {node for node in chains.placeholders if chains.nodes.issuperset(node.users)}
    return chains


def _end_of_chain(node: Node) -> Node | None:
    """Return the float32 value of which every digit matters at ``node``; None when there is none."""
    if node.target in _NEEDS_EVERY_DIGIT and dtype_of(node) == torch.float32:
        return node
    to = dtype_of(node)
    if node.target in CAST_OPS and to is not None and not to.is_floating_point and not to.is_complex:
        sources = _float_sources(node)
        return sources[0] if sources and to != torch.bool else None
    return None


def _chain_to(end: Node, parameters: set[Node]) -> set[Node]:
    """Return ``end`` with everything in float32 that it is computed from; empty when parameters are among it."""
    chain: set[Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node in chain:
            continue
        if node in parameters or len(chain) >= _LONGEST_CHAIN:
            return set()
        if not (_is_float_operator(node) or node.op == "placeholder"):
            return set()
        chain.add(node)
        pending += _float_sources(node)
    return chain


def _float_sources(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if dtype_of(source) == torch.float32]


def _is_float_operator(node: Node) -> bool:
    is_operator = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_operator and dtype_of(node) == torch.float32


def _comes_from_integers(node: Node) -> bool:
    """Tell whether ``node`` makes float32 numbers out of integers: a cast, a product with integers, a range."""
    if node.op != "call_function":
        return False
    if node.target in (_aten.arange.default, _aten.arange.start, _aten.arange.start_step):
        return True
    dtypes = [dtype_of(source) for source in node.all_input_nodes]
    return any(dtype is not None and not dtype.is_floating_point and dtype != torch.bool for dtype in dtypes)
