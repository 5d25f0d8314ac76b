"""Batch norms that coreai-torch does not translate as they are: without parameters, or by statistics of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph_edits import call

__all__ = ["NORMS_IN_ARITHMETIC", "give_parameters"]

_aten = torch.ops.aten


def give_parameters(graph: fx.Graph) -> None:
    """Give batch norms without a weight ones, and those without a bias zeros, in place.

    coreai-torch gives them a number, and then looks for the number's dimensions.
    """
    for node in graph.find_nodes(op="call_function", target=_aten._native_batch_norm_legit_no_training.default):
        channels = node.args[3].meta["val"].shape
        for place, value in ((1, 1.0), (2, 0.0)):
            if node.args[place] is None:
                with graph.inserting_before(node):
                    filled = call(graph, _aten.full.default, list(channels), value, dtype=torch.float32)
                node.update_arg(place, filled)


def _by_statistics_of_the_batch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``aten._native_batch_norm_legit.no_stats`` computes: in float32, with the variance of the whole batch."""
    dims, shape = [0, *range(2, x.ndim)], [-1, *[1] * (x.ndim - 2)]
    wide = x.float()
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    y = centred * inverse
    if weight is not None:
        y = y * weight.float().view(shape)
    if bias is not None:
        y = y + bias.float().view(shape)
    return y.to(x.dtype), mean.flatten(), inverse.flatten()


NORMS_IN_ARITHMETIC: dict[Any, Any] = {_aten._native_batch_norm_legit.no_stats: _by_statistics_of_the_batch}
"""Decompositions of batch norms that have no statistics, which PyTorch takes from the batch in eval mode too."""
