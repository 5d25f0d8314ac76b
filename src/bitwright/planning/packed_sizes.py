"""Bytes of weights in the packed artifact, told from specs and simulators before anything is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bitwright.common import CompressionType
from bitwright.formats import packed_size
from bitwright.quantization.spec import QuantizationScheme, QuantizationSpec
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .stacking import kinds_on

__all__ = ["bytes_under", "has_zero", "masked_bytes", "quantized_bytes", "stored_bytes", "table_bytes"]


def quantized_bytes(
    spec: QuantizationSpec, shape: tuple[int, ...], block_size: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Return the bytes of a quantized weight: codes, scales, and offsets where the scheme has them.

    Scales and minvals take the bytes of the weight's dtype, at most 4, or 1 as powers of two; zero points take the bits
    of a code. Scales of a range that is fixed on both sides are computed in float32 and take 4 bytes.
    """
    parameters = _parameter_bytes(spec, spec.n_bits, spec.qformulation, _blocks(shape, block_size), dtype)
    return _code_bytes(math.prod(shape), spec.n_bits) + parameters


def table_bytes(spec: QuantizationSpec | None, tables: int, entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of a palette's look-up tables.

    Args:
        spec: how the entries are quantized, with one scale in float32 for each table; None for entries in ``dtype``.
        tables: number of tables.
        entries: numbers in one of them.
        dtype: of the weight.
    """
    if spec is None:
        return tables * entries * dtype.itemsize
    return quantized_bytes(spec, (tables, entries), (1, entries), torch.float32)


def stored_bytes(numel: int, bits: float, kept: int | None, overhead: int = 0, *, needs_mask: bool = False) -> int:
    """Return the bytes of a weight, with its mask where that is smaller.

    Args:
        numel: its entries.
        bits: bits of one entry.
        kept: entries that a mask keeps; None without a mask, which takes a bit per entry.
        overhead: bytes of tables and scales.
        needs_mask: whether the entries in full have no zeros for what a mask removes, as those of a palette.
    """
    whole = -(-int(numel * bits) // 8)
    if kept is not None:
        sparse = -(-int(kept * bits) // 8) + -(-numel // 8)
        whole = sparse if needs_mask and kept < numel else min(whole, sparse)
    return whole + overhead


def bytes_under(stack: Sequence[nn.Module], tensor: torch.Tensor, kept: int | None = None) -> int:
    """Return the bytes of a weight that ``stack`` stands on.

    Args:
        stack: the simulators on it.
        tensor: the weight.
        kept: entries that a mask keeps which is to come; by default those of the mask in the stack, if there is one.
    """
    numel = tensor.numel()
    pruned_last = kept is not None or CompressionType.PRUNING in kinds_on(stack)[-1:]
    kept = _kept(stack, numel) if kept is None else kept
    for simulator in stack:
        if isinstance(simulator, FakeQuantizeImplBase):
            shape = tuple(tensor.shape)
            blocks = _blocks(shape, simulator.get_block_size(shape))
            grid, n_bits = simulator.qparams_calculator, simulator.n_bits
            zero = has_zero(grid.dtype, simulator.qformulation)
            tables = _parameter_bytes(grid, n_bits, simulator.qformulation, blocks, tensor.dtype)
            return stored_bytes(numel, n_bits, kept if zero or pruned_last else None, tables, needs_mask=not zero)
        palette: Any = simulator
        if hasattr(palette, "table_bytes"):
            if palette.cluster_dim > 1 and kept not in (None, numel):
                break  # a vector cannot be zero in part
            bits = palette.n_bits / palette.cluster_dim
            return stored_bytes(numel, bits, kept, palette.table_bytes, needs_mask=True)
    return stored_bytes(numel, 8.0 * tensor.element_size(), kept)


def masked_bytes(stack: Sequence[nn.Module], numel: int, spec: QuantizationSpec) -> int:
    """Return the change in bytes that a mask below quantized codes brings: the mask, less the removed codes."""
    if not has_zero(spec.dtype, spec.qformulation):
        return 0
    return stored_bytes(numel, spec.n_bits, _kept(stack, numel)) - stored_bytes(numel, spec.n_bits, None)


def has_zero(dtype: torch.dtype, formulation: str) -> bool:
    """Return whether a grid holds zero for every range.

    One that starts at a minimum does not. Even where both sides are as long, the middle is zero for some scales only:
    ``7 * (m / 7)`` is not always ``m``. Such weights may turn out smaller than counted.
    """
    return dtype.is_floating_point or formulation != "minval"


def _kept(stack: Sequence[nn.Module], numel: int) -> int | None:
    pruners: list[Any] = [s for s, kind in zip(stack, kinds_on(stack), strict=True) if kind is CompressionType.PRUNING]
    masks = [pruner.mask for pruner in pruners if pruner.mask.numel() == numel]
    own = [mask for palette in stack if (mask := getattr(palette, "_sparsity_mask", None)) is not None]
    masks = masks or own
    return int(torch.count_nonzero(masks[-1])) if masks else None


def _blocks(shape: Sequence[int], block_size: Sequence[int]) -> int:
    return math.prod(size // block if block else 1 for size, block in zip(shape, block_size, strict=True))


def _parameter_bytes(grid: Any, n_bits: int, formulation: str, blocks: int, dtype: torch.dtype) -> int:
    """Return the bytes of scales and offsets; ``grid`` is a spec or a simulator's calculator."""
    float_bytes = 4 if None not in grid.float_range else min(dtype.itemsize, 4)
    scales = blocks * (1 if grid.scale_dtype is not None else float_bytes)
    if grid.dtype.is_floating_point:
        return scales
    if formulation == "minval":
        return scales + blocks * float_bytes
    return scales + (_code_bytes(blocks, n_bits) if grid.qscheme == QuantizationScheme.ASYMMETRIC else 0)


def _code_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes; those of simulated formats of more than eight bits take whole bytes."""
    return count * bits // 8 if bits > 8 else packed_size(count, bits)
