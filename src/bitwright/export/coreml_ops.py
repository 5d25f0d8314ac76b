"""Operators of PyTorch that coremltools lacks, or some of whose calls, registered through its own registry."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np

from .extras import require

__all__ = ["register_missing_ops"]


@functools.cache
def register_missing_ops() -> None:
    """Register them once in a process; operators that coremltools has by now are left alone."""
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    for convert in (_alias, _diff, _new_ones):
        with contextlib.suppress(ValueError):  # it is there
            mil.register_torch_op(convert)
    mil.register_torch_op(_convolution, override=True)


def _alias(context: Any, node: Any) -> None:
    """``aten.alias``: the tensor itself, as exported graphs say it."""
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    frontend = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    (x,) = frontend._get_inputs(context, node, expected=1)
    context.add(mil.Builder.identity(x=x, name=node.name))


def _convolution(context: Any, node: Any) -> None:
    """``aten._convolution``: coremltools', but for transposed ones whose output ends behind what their input reaches.

    coremltools crops the output by the padding, less the output padding. Where that is negative, or where it crops no
    volumes, zeros behind the input carry the output further, and all of it that is too much is cut off.
    """
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    frontend = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    x, weight, bias, *numbers = frontend._get_inputs(context, node, min_expected=9)
    rank = weight.rank - 2
    sizes = (np.broadcast_to(numbers[place].val, rank) for place in (0, 1, 2, 4))
    stride, padding, dilation, more = sizes
    is_ours = (more > padding).any() or (rank == 3 and more.any())
    if not numbers[3].val or not is_ours:
        frontend._convolution(context, node)
        return
    x, weight = frontend.promote_input_dtypes([x, weight])
    behind = -(-np.maximum(more - padding, 0) // stride)
    if behind.any():
        x = mil.Builder.pad(x=x, pad=np.stack([0 * behind, behind], 1).reshape(-1))
    options = {} if bias is None else {"bias": bias}
    y = mil.Builder.conv_transpose(
        x=x, weight=weight, strides=stride, dilations=dilation, groups=numbers[5].val, pad_type="valid", **options
    )
    surplus = padding - more + behind * stride
    ends, whole = [0, 0, *(-surplus)], [True, True, *(surplus == 0)]
    begin, from_first = [0, 0, *padding], [True, True, *(padding == 0)]
    y = mil.Builder.slice_by_index(x=y, begin=begin, end=ends, begin_mask=from_first, end_mask=whole, name=node.name)
    context.add(y)


def _diff(context: Any, node: Any) -> None:
    """``torch.diff``: each element less the one before it along a dimension, ``n`` times."""
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    frontend = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    build = mil.Builder
    x, n, dim, prepend, append = frontend._get_inputs(context, node, expected=5)
    dim = dim.val % len(x.shape)
    parts = [part for part in (prepend, x, append) if part is not None]
    if len(parts) > 1:
        x = build.concat(values=parts, axis=dim)
    ends, others = [0] * len(x.shape), [axis != dim for axis in range(len(x.shape))]
    for _ in range(n.val):
        after = build.slice_by_index(
            x=x, begin=[int(not other) for other in others], end=ends, begin_mask=others, end_mask=[True] * len(ends)
        )
        before = build.slice_by_index(
            x=x, begin=ends, end=[-int(not other) for other in others], begin_mask=[True] * len(ends), end_mask=others
        )
        subtract = build.logical_xor if mil.mil.types.is_bool(x.dtype) else build.sub
        x = subtract(x=after, y=before)
    context.add(x, torch_name=node.name)


def _new_ones(context: Any, node: Any) -> None:
    """``Tensor.new_ones``: ones of a size, of the tensor's dtype where no other is given."""
    frontend = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    utils = require("coremltools.converters.mil.frontend.torch.utils", "coreml", "Export to Core ML")
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    x, size, kind, *_ = frontend._get_inputs(context, node, min_expected=3)
    dtype = mil.mil.types.builtin_to_string(x.dtype) if kind is None else utils.NUM_TO_DTYPE_STRING[kind.val]
    scalar = not isinstance(size, list) and size.val is not None and size.val.size == 0
    ones = mil.Builder.const(val=1.0) if scalar else frontend._make_fill_op(size, 1.0, f"{node.name}_filled")
    context.add(mil.Builder.cast(x=ones, dtype=dtype, name=node.name))


# The names that they are registered under.
_alias.__name__, _diff.__name__, _new_ones.__name__ = "alias", "diff", "new_ones"
