"""Positions: floats made of integers that count something, and what is computed from them alone.

A rotary or sinusoidal embedding multiplies integer positions with frequencies and takes the sine; a resize turns
them into coordinates and takes the floor. float16 holds integers only up to 2048 (bfloat16 up to 256), a phase that
is wrong by one percent of a large position is wrong by many radians, and a coordinate that crosses an integer names
another pixel, and a comparison or a remainder answers for a neighbour. These few nodes are worth keeping in float32.
They are found backwards from the functions that need every digit, and then forwards as far as nothing else joins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Final

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ._arguments import written_arguments, written_in_place
from ._cleanup import CAST_OPS, dtype_of
from ._numbers import STANDS_FOR_INFINITY
from ._operators import op_name, promoted_integers, scalars
from ._reachable import reachable

_aten = torch.ops.aten
_NEEDS_EVERY_DIGIT: Final = frozenset(
    {_aten.sin.default, _aten.cos.default, _aten.tan.default}
    | {_aten.floor.default, _aten.ceil.default, _aten.round.default, _aten.trunc.default}
)
#: Operators whose answer jumps between neighbouring operands. Activations go through them too, so that only what is
#: made of integers alone counts as a position there.
_DECIDES: Final = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "floor_divide", "searchsorted", "bucketize"}
)
_COUNTS: Final = frozenset({"cumsum", "sum"})
_MATRIX_PRODUCTS: Final = frozenset({"mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "einsum", "convolution"})
_LONGEST_CHAIN: Final = 64
#: Both 16-bit formats hold every number of these dtypes.
_EXACT_IN_16_BITS: Final = (torch.bool, torch.uint8, torch.int8)


@dataclasses.dataclass
class PositionChains:
    """Nodes that compute with positions, and placeholders that they read: buffers, and what nothing else reads."""

    nodes: set[Node] = dataclasses.field(default_factory=set)
    placeholders: set[Node] = dataclasses.field(default_factory=set)


def position_chains(graph: Graph, parameters: set[Node], buffers: set[Node]) -> PositionChains:
    """Find what is computed from integer positions where digits matter.

    Args:
        graph: graph whose nodes carry ``meta["val"]``.
        parameters: placeholders of trained parameters; what depends on them is no position.
        buffers: placeholders of buffers and constants that are no masks.
    """
    chains = PositionChains()
    # What a written tensor is made of would have it computed in float32 too, and then written to in 16 bits.
    written = reachable(written_in_place(graph), lambda node: [one for one in node.args[:1] if isinstance(one, Node)])
    for node in graph.nodes:
        found = [_chain_to(end, parameters) for end in _ends_of_chains(node)]
        exact = [chain for chain in found if _is_exact(chain, buffers) and written.isdisjoint(chain)]
        if _decides(node):
            found = exact
            is_position = _has_wide_integers(node) or any(_has_wide_integers(member) for member in _joined(exact))
        else:
            is_position = any(_comes_from_integers(member) for member in _joined(found))
        if is_position or any(_counts_truths(chain) for chain in exact):
            members = {node, *_joined(found)}
            chains.nodes |= {member for member in members if member.op == "call_function"}
            chains.placeholders |= {member for member in members if member.op == "placeholder"}
    for node in graph.nodes:
        sources = _float_sources(node)
        if sources and chains.nodes.issuperset(sources) and _goes_on(node):
            chains.nodes.add(node)
    chains.placeholders = {
        node
        for node in chains.placeholders
        if chains.nodes.issuperset(node.users) or (node in buffers and node not in written)
    }
    return chains


def _ends_of_chains(node: Node) -> list[Node]:
    """Return the float32 values of which every digit matters at ``node``."""
    if node.target in _NEEDS_EVERY_DIGIT and dtype_of(node) == torch.float32:
        return [node]
    return _float_sources(node) if _casts_to_integers(node) or _decides(node) else []


def _casts_to_integers(node: Node) -> bool:
    return node.target in CAST_OPS and _is_integer(dtype_of(node))


def _decides(node: Node) -> bool:
    """Tell whether ``node`` compares, divides to whole numbers, or finds a place (``argmax``, ``searchsorted``)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target in CAST_OPS:
        return False
    rounds = op_name(node) == "div" and node.target._overloadname.endswith("_mode")
    return bool(_float_sources(node)) and (op_name(node) in _DECIDES or rounds or _is_integer(dtype_of(node)))


def _goes_on(node: Node) -> bool:
    """Tell whether ``node`` stays in float32 when all the floats that it reads do."""
    if _casts_to_integers(node) or _decides(node):
        return True
    # Such a number becomes the largest of the 16-bit format as a scalar, but an infinity when a tensor is narrowed.
    masks = _holds_mask_number(node) and not written_arguments(node)
    return _is_float_operator(node) and not masks


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


def _joined(chains: list[set[Node]]) -> set[Node]:
    return set().union(*chains)


def _is_exact(chain: set[Node], buffers: set[Node]) -> bool:
    """Tell whether ``chain`` is computed from integers, buffers and scalars alone, and is neither mask nor layer."""
    return bool(chain) and all(
        member in buffers
        if member.op == "placeholder"
        else not _holds_mask_number(member) and op_name(member) not in _MATRIX_PRODUCTS
        for member in chain
    )


def _holds_mask_number(node: Node) -> bool:
    return any(math.isfinite(value) and abs(value) >= STANDS_FOR_INFINITY for _, value in scalars(node))


def _float_sources(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if dtype_of(source) == torch.float32]


def _is_float_operator(node: Node) -> bool:
    is_operator = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_operator and dtype_of(node) == torch.float32


def _is_integer(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _comes_from_integers(node: Node) -> bool:
    """Tell whether ``node`` makes float32 numbers out of integers: a cast, a product with integers, a range."""
    return _is_range(node) or (node.op == "call_function" and any(map(_is_integer, _source_dtypes(node))))


def _has_wide_integers(node: Node) -> bool:
    """Tell the same without indices, and without integers that need no more digits than 16-bit formats have."""
    return _is_range(node) or any(dtype_of(source) not in _EXACT_IN_16_BITS for source in promoted_integers(node))


def _is_range(node: Node) -> bool:
    return node.target in (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)


def _counts_truths(chain: set[Node]) -> bool:
    """Tell whether ``chain`` adds up what was a mask: its sums need more digits than its entries."""
    truths = any(dtype in _EXACT_IN_16_BITS for member in chain for dtype in _source_dtypes(member))
    return truths and any(op_name(member) in _COUNTS for member in chain)


def _source_dtypes(node: Node) -> Iterable[torch.dtype | None]:
    return (dtype_of(source) for source in node.all_input_nodes)
