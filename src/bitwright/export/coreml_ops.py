"""Operators of PyTorch that coremltools lacks, registered through its own registry."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from .extras import require

__all__ = ["register_missing_ops"]


@functools.cache
def register_missing_ops() -> None:
    """Register them once in a process; those that coremltools has by now are left alone."""
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    for convert in (_alias, _diff, _new_ones):
        with contextlib.suppress(ValueError):  # it is there
            mil.register_torch_op(convert)


def _alias(context: Any, node: Any) -> None:
    """``aten.alias``: the tensor itself, as exported graphs say it."""
    mil = require("coremltools.converters.mil", "coreml", "Export to Core ML")
    frontend = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    (x,) = frontend._get_inputs(context, node, expected=1)
    context.add(mil.Builder.identity(x=x, name=node.name))


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
