"""Parts of :mod:`bitwright.casting` under the names that code written for coreai-opt's internals imports."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from bitwright.casting._cleanup import cleanup_casts, dtype_of
from bitwright.casting._ignored import IgnoredOps, ignore_rule
from bitwright.casting._index_ops import build_unsafe_to_cast_nodes
from bitwright.casting._int_pass import build_castable_int16_nodes, build_user_reachable_nodes
from bitwright.casting._numbers import fits_scalar, fits_tensor, narrow_scalar, narrow_tensor
from bitwright.casting._operators import op_name
from bitwright.casting._retype import insert_cast_after

__all__ = [
    "anchor_int16_reshape_inputs",
    "build_castable_int16_nodes",
    "build_unsafe_to_cast_nodes",
    "build_user_reachable_nodes",
    "cast_scalar_to_fp16",
    "cast_tensor_to_fp16",
    "check_tensor_overflow_fp16",
    "classify_float_args",
    "cleanup_casts",
    "insert_cast_after",
    "is_ignored_op",
]

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_RESHAPES: Final = frozenset(
    {"_unsafe_view", "cat", "expand", "flatten", "permute", "reshape", "select", "slice", "split", "squeeze"}
    | {"stack", "transpose", "unflatten", "unsqueeze", "view"}
)


def cast_scalar_to_fp16(value: float) -> float | None:
    """Return ``value`` as float16 holds it; None when it exceeds the range without standing for infinity."""
    return narrow_scalar(value, torch.float16) if fits_scalar(value, torch.float16) else None


def cast_tensor_to_fp16(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in float16; entries that are not zero stay so."""
    return narrow_tensor(tensor, torch.float16)


def check_tensor_overflow_fp16(tensor: torch.Tensor) -> bool:
    """Tell whether a float32 ``tensor`` holds finite values that float16 cannot."""
    return tensor.dtype == torch.float32 and not fits_tensor(tensor, torch.float16)


def is_ignored_op(node: Node, ignored_ops: IgnoredOps) -> bool:
    """Tell whether ``ignored_ops`` names the operator of ``node``."""
    return ignore_rule(ignored_ops)(node)


def classify_float_args(node: Node) -> tuple[bool, bool]:
    """Tell whether ``node`` reads a float tensor, and whether float16 cannot hold one of its arguments."""
    dtypes = [dtype_of(source) for source in node.all_input_nodes]
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    overflow = any(isinstance(leaf, float) and not fits_scalar(leaf, torch.float16) for leaf in leaves)
    return any(dtype in _FLOATS for dtype in dtypes), torch.float32 in dtypes or overflow


def anchor_int16_reshape_inputs(graph: Graph, pass_inserted: set[Node]) -> int:
    """Put an explicit int16 cast between arithmetic and the reshapes that read it; return how many.

    A converter that infers the dtype of a reshape from the last cast needs this; coreai-torch 0.4.3 does not.
    """
    count = 0
    for node in list(graph.nodes):
        if not _is_reshape(node) or dtype_of(node) != torch.int16:
            continue
        for source in node.all_input_nodes:
            if source.op != "call_function" or _is_reshape(source) or dtype_of(source) != torch.int16:
                continue
            if source.target == torch.ops.aten._to_copy.default:
                continue
            with graph.inserting_before(node):
                anchor = graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": torch.int16})
            anchor.meta["val"] = source.meta["val"]
            pass_inserted.add(anchor)
            node.replace_input_with(source, anchor)
            count += 1
    return count


def _is_reshape(node: Node) -> bool:
    return op_name(node) in _RESHAPES
