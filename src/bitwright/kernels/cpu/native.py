"""What the compiled loops read besides tensors: the grid as a table of words, codes for dtypes and schemes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bitwright.formats import format_of
from bitwright.kernels.grid import Grid

from .arithmetic import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["DTYPES", "NativeGrid", "address_of", "addresses_read", "native_grid", "scheme_code"]

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_SYMMETRIC, _ASYMMETRIC, _POWER_OF_TWO = 0, 1, 2
_LARGEST_EXPONENT = {torch.float4_e2m1fn_x2: 2, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


@dataclass(frozen=True, slots=True)
class NativeGrid:
    """A grid as the loops read it.

    Attributes:
        address: address of ``words``.
        integer: whether the codes are integers.
        minval: whether the formulation is the one with a minval.
        words: ``integer, minval, quant_min, quant_max, smallest exponent, anchor``; the range as float32 bits, the last
            two as ``arithmetic.code_of_float`` takes them.
    """

    address: int
    integer: bool
    minval: bool
    words: npt.NDArray[np.int32]


def native_grid(grid: Grid) -> NativeGrid:
    """Return the grid's table, made once and kept with the grid."""
    kept = grid._native
    if kept is None:
        kept = _make(grid)
        object.__setattr__(grid, "_native", kept)
    result: NativeGrid = kept
    return result


def _make(grid: Grid) -> NativeGrid:
    fmt = format_of(grid.dtype)
    integer, minval = fmt.kind == "int", fmt.kind == "int" and grid.formulation == "minval"
    words = np.array(
        [integer, minval, 0, 0, (128 - fmt.bias) << 23, (23 - fmt.mantissa_bits) << 23], dtype=np.int64
    ).astype(np.int32)
    words[2:4] = np.array([grid.quant_min, grid.quant_max], dtype=np.float32).view(np.int32)
    return NativeGrid(words.ctypes.data, integer, minval, words)


def addresses_read(
    grid: NativeGrid, made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
) -> tuple[int, int, int]:
    """Return the addresses of scale, zero point and minval as the loops take them: 0 for what the grid does not use."""
    scale, zero_point, minval = made
    points = zero_point if grid.integer and not grid.minval else None
    origins = minval if grid.minval else None
    return scale.data_ptr(), 0 if points is None else points.data_ptr(), 0 if origins is None else origins.data_ptr()


def scheme_code(grid: Grid, scheme: str, scale_dtype: torch.dtype | None) -> int:
    """Return the code that ``arithmetic.choose`` takes for a scheme that has been checked."""
    if scale_dtype is not None:
        return _POWER_OF_TWO + _LARGEST_EXPONENT[grid.dtype]
    return _ASYMMETRIC if scheme == "asymmetric" else _SYMMETRIC


def address_of(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's memory, or 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
