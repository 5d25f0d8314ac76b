"""Unpacking and dequantizing as few plain torch ops, for programs that are exported or compiled."""

from __future__ import annotations

import math

import torch

from bitwright import kernels
from bitwright.formats import unpack
from bitwright.kernels import Grid, reference

__all__ = ["dequantize", "unpack_codes"]


def unpack_codes(packed: torch.Tensor, bits: int, count: int, signed: bool) -> torch.Tensor:
    """``bitwright.formats.unpack``; without writes into slices while a program is traced."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
        return unpack(packed, bits, count, signed)
    group = 8 // math.gcd(8, bits)
    width = group * bits // 8
    missing = -(-count // group) * width - packed.numel()
    rows = (torch.nn.functional.pad(packed, (0, missing)) if missing else packed).view(-1, width)
    top = 8 - bits
    columns = []
    for code in range(group):
        byte, shift = divmod(code * bits, 8)
        column = rows[:, byte] << (top - shift) if shift <= top else rows[:, byte] >> (shift - top)
        if shift > top:
            column = column | (rows[:, byte + 1] << (8 - (shift - top)))
        columns.append(column)
    flat = torch.stack(columns, 1).view(-1) if group > 1 else columns[0]
    flat = flat[:count] if flat.numel() != count else flat
    mask = 0xFF & ~((1 << top) - 1)
    if signed and torch._C._get_tracing_state() is not None:  # TorchScript has no view of another dtype
        sign = 1 << (bits - 1)
        return (((flat >> top).to(torch.int16) ^ sign) - sign).to(torch.int8)
    # The code stands in the top bits, so that the shift back down also extends its sign.
    return (flat & mask).view(torch.int8) >> top if signed else flat >> top


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """``bitwright.kernels.dequantize``; its reference form while a program is traced."""
    form = reference.dequantize if torch.compiler.is_compiling() else kernels.dequantize
    return form(codes, scale, zero_point, minval, block_size=block_size, grid=grid, output_dtype=output_dtype)
