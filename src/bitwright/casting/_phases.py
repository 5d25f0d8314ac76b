"""Phases: sines and cosines of positions.

A rotary or sinusoidal embedding multiplies integer positions with frequencies and takes the sine. float16 holds
integers only up to 2048 (bfloat16 up to 256), and the error of a large phase is an error of many radians, so these
few nodes are worth keeping in float32. They are found backwards from the trigonometric functions.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ._cleanup import dtype_of

_aten = torch.ops.aten
_TRIGONOMETRIC: Final = frozenset({_aten.sin.default, _aten.cos.default, _aten.tan.default})
_LONGEST_CHAIN: Final = 64


@dataclasses.dataclass
class PhaseChains:
    """Nodes that compute phases from positions, and the placeholders that only such nodes read."""

    nodes: set[Node] = dataclasses.field(default_factory=set)
    placeholders: set[Node] = dataclasses.field(default_factory=set)


def phase_chains(graph: Graph, parameters: set[Node]) -> PhaseChains:
    """Find the chains from integer positions to trigonometric functions.

    Args:
        graph: graph whose nodes carry ``meta["val"]``.
        parameters: placeholders of trained parameters; what depends on them is no fixed phase.
    """
    chains = PhaseChains()
    for node in graph.nodes:
        if node.target in _TRIGONOMETRIC and dtype_of(node) == torch.float32:
            chain = _chain_to(node, parameters)
            if any(_comes_from_integers(member) for member in chain):
                chains.nodes |= {member for member in chain if member.op == "call_function"}
                chains.placeholders |= {member for member in chain if member.op == "placeholder"}
    chains.placeholders = {node for node in chains.placeholders if chains.nodes.issuperset(node.users)}
    return chains


def _chain_to(end: Node, parameters: set[Node]) -> set[Node]:
    """Return ``end`` with everything in float32 that it is computed from; empty when parameters are among it."""
    chain: set[Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node in chain:
            continue
        is_operator = node.op == "call_function" and isinstance(node.target, OpOverload)
        if node in parameters or not (is_operator or node.op == "placeholder") or len(chain) >= _LONGEST_CHAIN:
            return set()
        chain.add(node)
        pending += [source for source in node.all_input_nodes if dtype_of(source) == torch.float32]
    return chain


def _comes_from_integers(node: Node) -> bool:
    """Tell whether ``node`` makes float32 numbers out of integers: a cast, a product with integers, a range."""
    if node.op != "call_function":
        return False
    if node.target in (_aten.arange.default, _aten.arange.start, _aten.arange.start_step):
        return True
    dtypes = [dtype_of(source) for source in node.all_input_nodes]
    return any(dtype is not None and not dtype.is_floating_point and dtype != torch.bool for dtype in dtypes)
