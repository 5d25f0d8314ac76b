"""Dynamic inputs of convolutions that views have turned, copied into the order of their dimensions.

ExecuTorch compares the strides of such an input with its sizes, and keeps a dynamic batch from the sizes for which they
would be those of another order: the largest that was asked for, or all but the example's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from bitwright.export.graph_edits import call

from .graph import DEQUANTIZE, QUANTIZE, op_name

__all__ = ["turn_dynamic_inputs"]

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset(
    (
        *(_aten.conv1d.default, _aten.conv1d.padding, _aten.conv2d.default, _aten.conv2d.padding),
        *(_aten.conv_transpose1d.default, _aten.conv_transpose2d.input, _aten.convolution.default),
    )
)


def turn_dynamic_inputs(program: ExportedProgram) -> None:
    """Copy inputs of convolutions that have dynamic sizes and lie in another order than that of their dimensions.

    Args:
        program: changed in place; a copy stands in front of what quantizes the input.
    """
    for node in list(program.graph.nodes):
        if node.target not in _CONVOLUTIONS or not _is_turned(node.args[0].meta["val"]):
            continue
        reader, source = node, node.args[0]
        while op_name(source) in (QUANTIZE, DEQUANTIZE) and len(source.users) == 1:
            reader, source = source, source.args[0]
        with program.graph.inserting_before(reader):
            copied = call(program.graph, _aten.clone.default, source, memory_format=torch.contiguous_format)
        reader.replace_input_with(source, copied)


def _is_turned(value: torch.Tensor) -> bool:
    """Whether a tensor with dynamic sizes has strides in another order than its dimensions, by their examples."""
    if all(isinstance(size, int) for size in value.shape):
        return False
    strides = [_example(stride) for size, stride in zip(value.shape, value.stride(), strict=True) if _example(size) > 1]
    return strides != sorted(strides, reverse=True)


def _example(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)
