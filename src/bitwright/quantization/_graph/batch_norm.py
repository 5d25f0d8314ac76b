"""Batch norm behind a convolution or linear layer, folded into it while the folded weight is fake-quantized.

In evaluation the layer computes with ``W' = W * s`` and ``b' = (b - mean) * s + beta``, where
``s = gamma / sqrt(var + eps)``, exactly as after finalization, when ``W'`` and ``b'`` are constants. In training the
simulator still sees ``W'``, but the batch's own statistics count: the scale is taken out again, the output normalised
(R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", 2018, section 3.2.2). The layer is
linear in each output channel's weight, so the simulated weight is divided by ``s``, not the output, which is larger.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from bitwright.kernels import channel_scales
from bitwright.kernels.dispatch import is_plain_torch

__all__ = [
    "BiasFold",
    "FoldLayout",
    "OutputFold",
    "WeightFold",
    "WeightUnfold",
    "captured_momentum",
    "channels_of",
    "cumulative_averages_shown",
    "is_recomputing",
    "normalised_by_batch",
]

_CUMULATIVE = math.nan


@dataclass(frozen=True, slots=True)
class FoldLayout:
    """How a scale per output channel lies over a layer's weight and output.

    Attributes:
        eps: added to the variance.
        weight_shape: shape that the scale takes to be multiplied with the weight.
        split_shape: shape that the weight takes for that (grouped transposed convolutions), None for its own.
    """

    eps: float
    weight_shape: tuple[int, ...]
    split_shape: tuple[int, ...] | None = None

    @classmethod
    def of_layer(cls, weight: torch.Size, transposed: bool, groups: int, eps: float) -> FoldLayout:
        """Return the layout for a weight of shape (out, in, ...), or (in, out / groups, ...) where ``transposed``."""
        if not transposed:
            return cls(eps, (-1, *[1] * (len(weight) - 1)))
        kernel = [1] * (len(weight) - 2)
        if groups == 1:
            return cls(eps, (1, -1, *kernel))
        return cls(eps, (groups, 1, weight[1], *kernel), (groups, weight[0] // groups, *weight[1:]))

    @property
    def is_by_rows(self) -> bool:
        """Whether the output channel is the weight's first dimension."""
        return self.weight_shape[0] == -1

    def scale(self, gamma: torch.Tensor | None, var: torch.Tensor) -> torch.Tensor:
        """Return ``s``, one number per channel."""
        return _scale(gamma, self.deviation(var))

    def deviation(self, var: torch.Tensor) -> torch.Tensor:
        """Return ``sqrt(var + eps)``, in float32 at least: a small ``eps`` is 0 in half precision."""
        return torch.sqrt(_widened(var) + self.eps)

    @staticmethod
    def divisible_scale(gamma: torch.Tensor | None, deviation: torch.Tensor) -> torch.Tensor:
        """Return ``s``, with ``1 / deviation`` where gamma is 0: the weight can be divided by it again."""
        scale = _scale(gamma, deviation)
        if gamma is None or _is_nonzero(scale):
            return scale
        return torch.where(scale == 0, _scale(None, deviation), scale)

    def apply(
        self,
        operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        weight: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``operation`` of a weight and the scale of its output channels, in the weight's shape and dtype."""
        scale = scale.reshape(self.weight_shape)
        if self.split_shape is None:
            return operation(weight, scale).to(weight.dtype)
        return operation(weight.reshape(self.split_shape), scale).reshape(weight.shape).to(weight.dtype)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scale(gamma: torch.Tensor | None, deviation: torch.Tensor) -> torch.Tensor:
    return 1.0 / deviation if gamma is None else gamma / deviation


def _is_nonzero(scale: torch.Tensor) -> bool:
    """Whether no number is 0, where asking takes less time than the operations that it saves."""
    plain = not torch.compiler.is_compiling() and scale.is_cpu and type(scale) is torch.Tensor and is_plain_torch()
    return plain and bool(scale.detach().all())


class _Folding(NamedTuple):
    """What a weight was folded with and to."""

    scale: torch.Tensor
    gamma: torch.Tensor | None
    weight: torch.Tensor
    folded: weakref.ref[torch.Tensor]


class _FoldInUse:
    """How a weight was folded, until the same forward takes the scale out again. Copies are empty."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[_Folding, int] | None = None

    def keep(self, scale: torch.Tensor, gamma: torch.Tensor | None, weight: torch.Tensor, folded: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._kept = _Folding(scale, gamma, weight, weakref.ref(folded)), get_ident()

    def seen(self, gamma: torch.Tensor | None) -> _Folding | None:
        """Return what was made of ``gamma`` on this thread."""
        if torch.compiler.is_compiling() or self._kept is None:
            return None
        folding, thread = self._kept
        return folding if folding.gamma is gamma and thread == get_ident() else None

    def take(self, gamma: torch.Tensor | None) -> _Folding | None:
        """``seen``, once."""
        folding = self.seen(gamma)
        if not torch.compiler.is_compiling():
            self._kept = None
        return folding

    def __reduce__(self) -> tuple[type[_FoldInUse], tuple[()]]:
        return _FoldInUse, ()


class _Fold(nn.Module):
    def __init__(self, layout: FoldLayout) -> None:
        super().__init__()
        self.layout = layout
        self._seen: torch.Tensor | None = None

    def _deviation(self, var: torch.Tensor) -> torch.Tensor:
        """Return the deviation before this step's batch; a recomputed forward must fold as the first one did."""
        if torch.compiler.is_compiling():
            return self.layout.deviation(var)
        if self._seen is None or not is_recomputing():
            self._seen = self.layout.deviation(var.detach())
        return self._seen


class WeightFold(_Fold):
    """Multiplies a weight with the scale of the batch norm behind it.

    Args:
        layout: where the scale lies.
        target: dotted name of the weight.
    """

    def __init__(self, layout: FoldLayout, target: str) -> None:
        super().__init__(layout)
        self.target = target
        self.in_use = _FoldInUse()

    def forward(self, weight: torch.Tensor, gamma: torch.Tensor | None, var: torch.Tensor) -> torch.Tensor:
        """Return ``W'``, in training with a scale that it can be divided by later."""
        layout = self.layout
        if not self.training:
            return layout.apply(torch.mul, weight, layout.scale(gamma, var))
        scale = layout.divisible_scale(gamma, self._deviation(var))
        at_once = layout.is_by_rows and channel_scales.suits(weight, scale)
        folded = channel_scales.scaled(weight, scale) if at_once else layout.apply(torch.mul, weight, scale)
        self.in_use.keep(scale, gamma, weight, folded)
        return folded


class WeightUnfold(_Fold):
    """Takes the scale out of a folded and simulated weight again, in training.

    Args:
        folding: what folded the weight.
    """

    def __init__(self, folding: WeightFold) -> None:
        super().__init__(folding.layout)
        self.in_use = folding.in_use

    def forward(self, weight: torch.Tensor, gamma: torch.Tensor | None, var: torch.Tensor) -> torch.Tensor:
        """Return the simulated ``W'``, in training divided by the scale."""
        if not self.training:
            return weight
        folding = self.in_use.take(gamma)
        scale = self.layout.divisible_scale(gamma, self._deviation(var)) if folding is None else folding.scale
        if self.layout.is_by_rows and channel_scales.suits(weight, scale):
            return channel_scales.divided(weight, scale)
        return self.layout.apply(torch.div, weight, scale)

    def at_once(
        self, simulator: Any, folded: torch.Tensor, gamma: torch.Tensor | None, var: torch.Tensor
    ) -> torch.Tensor | None:
        """Return ``self(simulator(folded), gamma, var)``, with one gradient of the same bits; or None.

        Args:
            simulator: stands on the folded weight.
            folded: what ``WeightFold`` returned.
            gamma: gain of the batch norm.
            var: its variance.
        """
        folding = self.in_use.seen(gamma) if self.training else None
        if folding is None or folding.folded() is not folded or not self.layout.is_by_rows:
            return None
        if self._forward_hooks or self._forward_pre_hooks or not channel_scales.suits(folding.weight, folding.scale):
            return None
        task = simulator.task_for(folded)
        y = None if task is None else channel_scales.unfolded(task, folded.detach(), folding.weight, folding.scale)
        if y is not None:
            self.in_use.take(gamma)
        return y


class BiasFold(_Fold):
    """The bias of a layer that its batch norm is folded into.

    Args:
        layout: where the scale lies.
        target: dotted name of the bias, which the layer may not have had before.
        dtype: of the layer's weight, which a layer without bias computes in.
    """

    def __init__(self, layout: FoldLayout, target: str, dtype: torch.dtype) -> None:
        super().__init__(layout)
        self.target = target
        self.like_weight: torch.Tensor
        self.register_buffer("like_weight", torch.empty(0, dtype=dtype), persistent=False)  # casts reach it

    def forward(
        self,
        bias: torch.Tensor | None,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return ``b'``; in training the bias as it is."""
        if self.training:
            return bias
        shift = -mean if bias is None else _widened(bias) - mean
        folded = shift * self.layout.scale(gamma, var)
        folded = folded if beta is None else folded + beta
        return folded.to(self.like_weight.dtype if bias is None else bias.dtype)


class OutputFold(nn.Module):
    """What is left of a batch norm behind the layer that it is folded into.

    Args:
        eps: added to the variance.
        momentum: weight of the batch in the running statistics, None for the mean over all batches.
    """

    def __init__(self, eps: float, momentum: float | None) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum

    def forward(
        self,
        y: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        batches: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``y``, in training normalised by the batch."""
        if not self.training:
            return y
        return normalised_by_batch(y, gamma, beta, mean, var, batches, self.momentum, self.eps)


def is_recomputing() -> bool:
    """Whether this forward runs within a backward, which is how gradient checkpointing computes it again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def normalised_by_batch(
    y: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    batches: torch.Tensor | None,
    momentum: float | None,
    eps: float,
) -> torch.Tensor:
    """Return ``y`` of shape (N, C, ...) normalised by its own statistics, which the running ones take in.

    A recomputed batch counts once. Without ``momentum`` every batch counts the same, as in ``torch.nn.BatchNorm2d``.
    """
    if is_recomputing():
        mean, var = mean.clone(), var.clone()
    elif batches is not None:
        batches.add_(1)
    if momentum is None:
        momentum = 0.0 if batches is None else 1.0 / float(batches)
    return nn.functional.batch_norm(y, mean, var, gamma, beta, True, momentum, eps)


@contextmanager
def cumulative_averages_shown(model: nn.Module) -> Iterator[None]:
    """Let a captured graph show which batch norms have ``momentum=None``; :func:`captured_momentum` reads it.

    Otherwise evaluation would show a momentum of 0, and training one computed from the number of batches, which
    ``torch.export`` refuses.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
    ]
    for norm in norms:
        norm.momentum = _CUMULATIVE
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


def captured_momentum(momentum: float) -> float | None:
    """Return the momentum that a captured batch norm has, None for the mean over all batches."""
    return None if math.isnan(momentum) else float(momentum)


def channels_of(weight: torch.Size, transposed: bool, groups: int) -> int:
    """Return the number of output channels of a layer."""
    return weight[1] * groups if transposed else weight[0]
