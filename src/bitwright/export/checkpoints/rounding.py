"""What the rounding of scales does to weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from bitwright.artifact import QuantizedTensor

from .integers import signed_codes, spread

__all__ = ["lost_by_rounding", "warn_of_losses"]

_logger = logging.getLogger(__name__)

_SHOWN = 3


def lost_by_rounding(tensor: QuantizedTensor, dtype: torch.dtype) -> str | None:
    """Say how many entries move by more than half a step of their code when scales and minvals are rounded.

    That is more than quantization itself moves them. In half precision scales of 6e-5 and more lose less; smaller ones
    lose digits, and below 3e-8 they become 0. In bfloat16 all lose less.

    Args:
        tensor: what is stored.
        dtype: of the stored scales and minvals.

    Returns:
        words such as "3 of 64 weights move by more than half a step, 2 become 0"; None if no entry moves so far, as in
        blocks of zeros, whatever their scales.
    """
    scale, minval = tensor.scale(), tensor.minval()
    moves = (scale.to(dtype).float() - scale).abs()
    shifts = torch.zeros_like(scale) if minval is None else (minval.to(dtype).float() - minval).abs()
    if not bool((moves > scale * 2.0**-9).any() or (shifts > scale / 4).any()):
        return None  # no code is more than 256 scales away
    block = tensor.layout.block_size
    steps = _steps(tensor)
    far = spread(moves / scale, block) * steps + spread(shifts / scale, block) > _half_steps(tensor, steps)
    if not bool(far.any()):
        return None
    empty = scale.to(dtype) == 0
    if minval is not None:
        empty &= minval.to(dtype) == 0
    gone = (tensor.decode() != 0) & spread(empty, block)
    return f"{int(far.sum())} of {far.numel()} weights move by more than half a step, {int(gone.sum())} become 0"


def warn_of_losses(losses: Mapping[str, str], remedy: str) -> None:
    """Log what :func:`lost_by_rounding` said, by the names of weights, and what to do about it."""
    if losses:
        shown = [f"{name!r} ({loss})" for name, loss in list(losses.items())[:_SHOWN]]
        more = f" and {len(losses) - _SHOWN} more" if len(losses) > _SHOWN else ""
        _logger.warning(
            "The scales of some weights are too small for the type that they are stored in: %s%s. %s",
            ", ".join(shown),
            more,
            remedy,
        )


def _steps(tensor: QuantizedTensor) -> torch.Tensor:
    """Number of scales that each entry is away from zero, or from the minval."""
    if tensor.layout.number_format.kind == "float":
        return tensor.codes().float().abs()
    if tensor.layout.formulation == "minval":
        return tensor.codes().float() - float(tensor.layout.quant_min)
    signed = signed_codes(tensor)
    return (signed.codes.float() - spread(signed.zero_point, tensor.layout.block_size).float()).abs()


def _half_steps(tensor: QuantizedTensor, steps: torch.Tensor) -> torch.Tensor:
    """Half the distance to the next code, in scales: a half for integers, a share of the code itself for floats."""
    fmt = tensor.layout.number_format
    return torch.full_like(steps, 0.5) if fmt.kind == "int" else steps * 2.0**-4
