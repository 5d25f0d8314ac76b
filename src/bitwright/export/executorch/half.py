"""Sums of values in half precision, computed in float32 between casts.

Kernels of ExecuTorch add up halves in half precision where PyTorch's add in float32 and round once: a layer norm of 256
bfloat16 values is 8 dB from exact, and a linear layer 34, where PyTorch's have 56. XNNPACK's own layers on float16 are
as exact as PyTorch's, but on processors with arithmetic of float16, where they add in it.
"""

from __future__ import annotations

import torch
from torch import fx

from bitwright.export.graph_edits import call, half_result, widen

from .graph import op_name

__all__ = ["sum_in_float32"]

_SUMS = {
    f"aten::{name}"
    for name in (
        "layer_norm", "native_layer_norm", "cumsum", "cumprod", "var", "std", "var_mean", "std_mean", "addmm", "addmv",
        "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "gelu",
    )
}  # fmt: skip
# What XNNPACK computes on float16.
_LAYERS = {
    f"aten::{name}"
    for name in ("linear", "conv1d", "conv2d", "convolution", "conv_transpose1d", "conv_transpose2d")
}  # fmt: skip


def sum_in_float32(module: fx.GraphModule) -> None:
    """Put casts around operators that add up halves, in place; each rounds its result once, as PyTorch's does.

    Args:
        module: of an exported program, before GELUs are written as arithmetic, each step of which would round.
    """
    for node in list(module.graph.nodes):
        name = op_name(node).partition(".")[0]
        value = half_result(node)
        if value is not None and (name in _SUMS or (name in _LAYERS and value.dtype == torch.bfloat16)):
            if name == "aten::linear":
                _lay_out(module.graph, node)
            widen(module.graph, node)
    module.recompile()


def _lay_out(graph: fx.Graph, layer: fx.Node) -> None:
    """Copy a transposed input into the order of its dimensions.

    A cast keeps the order in memory, and on such an input a layer becomes a product of batches, for which XNNPACK's
    passes look for a matrix.
    """
    x = layer.args[0]
    if isinstance(x, fx.Node) and x.meta["val"].ndim > 2 and not x.meta["val"].is_contiguous():
        with graph.inserting_before(layer):
            ordered = call(graph, torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)
        layer.args = (ordered, *layer.args[1:])
