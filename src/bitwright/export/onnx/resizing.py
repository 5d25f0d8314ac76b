"""Antialiased resizing for torch's ONNX exporter, whose own translations forget the factors that a caller gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torchlib import torchs_translation

__all__ = ["ANTIALIASED", "antialiased"]

ANTIALIASED = (torch.ops.aten._upsample_bicubic2d_aa.default, torch.ops.aten._upsample_bilinear2d_aa.default)
"""Ways of resizing with ``antialias=True``."""


def antialiased(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of antialiased resizing.

    ONNX Runtime takes the factors from the sizes before and after. Where the size after is rounded, these differ from
    the factors that PyTorch was given, and pixels come from other places.

    Args:
        torchs: one of :data:`ANTIALIASED`.
        opset: version of the operator set; None for torch's choice.
    """

    def resized(
        x: Any,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        for before, after, factor in zip(x.shape[2:], output_size, (scales_h, scales_w), strict=True):
            if factor is not None and not _is_whole(before, after, factor):
                raise NotImplementedError(
                    f"antialiased resizing by a scale_factor of {factor:g}, to which the sizes are rounded, has no "
                    "operator in ONNX; give size, or recompute_scale_factor=True"
                )
        return torchs_translation(torchs, opset)(x, output_size, align_corners)

    return resized


def _is_whole(before: Any, after: Any, factor: float) -> bool:
    """Whether a factor is that of the sizes; of sizes that are not known, whole numbers are."""
    if isinstance(before, int) and isinstance(after, int):
        return after == before * factor
    return factor.is_integer()
