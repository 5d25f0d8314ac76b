"""Cross entropy for torch's ONNX exporter, whose own translation forgets the smoothing of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .integers import are_integers
from .torchlib import torchs_translation

__all__ = ["cross_entropy"]


def cross_entropy(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::cross_entropy_loss`` for labels as they are; the others are decomposed.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def loss(
        x: Any,
        target: Any,
        weight: Any = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        if label_smoothing or not are_integers(target):
            raise NotImplementedError("cross entropy of smoothed labels, or of probabilities, has no operator in ONNX")
        torchs = torchs_translation(torch.ops.aten.cross_entropy_loss.default, opset)
        return torchs(x, target, weight, reduction, ignore_index)

    return loss
