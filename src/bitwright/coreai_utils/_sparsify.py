"""Pruning of the weights of a Core AI program, alone or with quantized or palettized values."""

from __future__ import annotations

from typing import Any, Final

import torch

from ._checks import bits, optional_dtype, positive
from ._grids import emit_quantized, quantize_tensor
from ._ir import Builder, Emit, working_copy
from ._palettize import N_BITS, emit_indices, palettize
from ._weights import Skipped, Weight, compress_weights
from .common import DType

_VALUE_DTYPES: Final = (DType.INT8, DType.UINT8, DType.FP8_E4M3FN, DType.FP8_E5M2)


def sparsify_weights(
    coreai_program: Any,
    target_sparsity: float | None = 0.5,
    block_size: int | None = None,
    n_m_ratio: tuple[int, int] | None = None,
    quantize_dtype: DType | None = None,
    palettize_nbits: int | None = None,
    weight_num_threshold: int = 1024,
    in_place: bool = False,
) -> Any:
    """Prune the weights of a converted program and store what is left, with a bit mask.

    Which constants are weights is said at :func:`quantize_weights`. A weight is replaced by its values that are not
    zero, a mask, and operations that put them in place. A weight with fewer than two blocks, or two groups of ``m``,
    stays as it is, with a warning.

    Args:
        coreai_program: a ``coreai.authoring.AIProgram``.
        target_sparsity: fraction of the elements (of the blocks, with ``block_size``) to set to zero, those of smallest
            magnitude, 0 to 1; None with ``n_m_ratio``. Fractions of an element are rounded down.
        block_size: prune blocks of this many consecutive output channels, by their L2 norm; None for single elements.
        n_m_ratio: ``(n, m)`` to set the n smallest of m consecutive input channels to zero; needs
            ``target_sparsity=None``.
        quantize_dtype: store the values quantized, ``INT8``, ``UINT8``, ``FP8_E4M3FN`` or ``FP8_E5M2``, with one scale.
        palettize_nbits: store the values palettized in 1, 2, 3, 4, 6 or 8 bits.
        weight_num_threshold: constants with no more elements stay as they are.
        in_place: change the program itself instead of a copy.

    Returns:
        The program with sparse weights.

    Raises:
        MissingExtraError: coreai-core or coreai-torch is not installed.
        TypeError: ``coreai_program`` is no ``AIProgram``.
        ValueError: a sparsity outside 0..1, or arguments that do not go together.

    Warns:
        ConfigMatchWarning: weights that were left as they are, and why; or there is none.
    """
    _check_pattern(target_sparsity, block_size, n_m_ratio)
    quantize_dtype = optional_dtype(quantize_dtype, _VALUE_DTYPES, "quantize_dtype")
    if palettize_nbits is not None:
        bits(palettize_nbits, N_BITS, "palettize_nbits")
        if quantize_dtype is not None:
            raise ValueError(
                "`quantize_dtype` and `palettize_nbits` cannot both be set; "
                f"got {quantize_dtype!s} and {palettize_nbits!r}."
            )
    positive(weight_num_threshold, "weight_num_threshold", minimum=0)

    def compress(weight: Weight) -> Emit:
        if n_m_ratio is not None:
            mask = _n_m_mask(weight, *n_m_ratio)
        else:
            mask = _magnitude_mask(weight, target_sparsity or 0.0, block_size or 1)
        # What is zero already needs no value either.
        mask &= weight.values != 0
        return _emitter(weight, mask, quantize_dtype, palettize_nbits)

    program = working_copy(coreai_program, in_place)
    return compress_weights(program, weight_num_threshold, compress)


def _check_pattern(target_sparsity: float | None, block_size: int | None, n_m_ratio: tuple[int, int] | None) -> None:
    if target_sparsity is None and n_m_ratio is None:
        raise ValueError("One of `target_sparsity` or `n_m_ratio` must be set; both are None.")
    if target_sparsity is not None and n_m_ratio is not None:
        raise ValueError(
            f"`target_sparsity` and `n_m_ratio` cannot both be set; got {target_sparsity!r} and {n_m_ratio!r}. "
            "target_sparsity has a default: set it to None for n_m_ratio."
        )
    if target_sparsity is not None:
        is_number = isinstance(target_sparsity, int | float) and not isinstance(target_sparsity, bool)
        if not is_number or not 0.0 <= target_sparsity <= 1.0:
            raise ValueError(f"target_sparsity must be a number from 0 to 1; got {target_sparsity!r}.")
    if block_size is not None:
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 2:
            raise ValueError(f"`block_size` must be greater than 1, as an integer; got {block_size!r}.")
        if n_m_ratio is not None:
            raise ValueError(f"block_size goes with target_sparsity, not with n_m_ratio; got {block_size!r}.")
    if n_m_ratio is not None:
        is_pair = isinstance(n_m_ratio, tuple | list) and len(n_m_ratio) == 2
        if not is_pair or not all(isinstance(entry, int) for entry in n_m_ratio):
            raise ValueError(f"n_m_ratio must be two integers (n, m); got {n_m_ratio!r}.")
        n, m = n_m_ratio
        if m < 1 or not 0 <= n <= m:
            raise ValueError(f"n_m_ratio must have 0 <= n <= m and m > 0; got {n_m_ratio!r}.")


def _magnitude_mask(weight: Weight, sparsity: float, block_size: int) -> torch.Tensor:
    """Return where the weight stays: all but the ``floor(count * sparsity)`` blocks of smallest norm."""
    rows = weight.values.movedim(weight.out_axis, 0)
    channels = rows.shape[0]
    if block_size > 1 and channels < 2 * block_size:
        raise Skipped(f"its {channels} output channels make fewer than two blocks of {block_size}")
    padded = torch.nn.functional.pad(rows.reshape(channels, -1), (0, 0, 0, -channels % block_size))
    norms = padded.double().reshape(-1, block_size, padded.shape[1]).square().sum(1)
    kept = _all_but_smallest(norms.reshape(1, -1), int(norms.numel() * sparsity)).reshape(norms.shape)
    per_channel = kept.repeat_interleave(block_size, 0)[:channels]
    return per_channel.reshape(rows.shape).movedim(0, weight.out_axis).contiguous()


def _n_m_mask(weight: Weight, n: int, m: int) -> torch.Tensor:
    """Return where the weight stays: all but the n smallest of every m consecutive input channels.

    Of a last, shorter group the same part is pruned, rounded down.
    """
    rows = weight.values.movedim(weight.in_axis, -1)
    channels = rows.shape[-1]
    if channels < 2 * m:
        raise Skipped(f"its {channels} input channels make fewer than two groups of {m}")
    whole = channels - channels % m
    magnitude = rows.abs()
    parts = [_all_but_smallest(magnitude[..., :whole].reshape(-1, m), n).reshape(*rows.shape[:-1], whole)]
    if whole < channels:
        rest = channels - whole
        tail = magnitude[..., whole:].reshape(-1, rest)
        parts.append(_all_but_smallest(tail, n * rest // m).reshape(*rows.shape[:-1], rest))
    return torch.cat(parts, -1).movedim(-1, weight.in_axis).contiguous()


def _all_but_smallest(magnitude_RN: torch.Tensor, count: int) -> torch.Tensor:
    """Return True for all but the ``count`` smallest entries of each row; equal entries go in order of position."""
    kept = torch.ones_like(magnitude_RN, dtype=torch.bool)
    smallest = magnitude_RN.sort(dim=1, stable=True).indices[:, :count]
    return kept.scatter_(1, smallest, False)


def _emitter(weight: Weight, mask: torch.Tensor, dtype: DType | None, n_bits: int | None) -> Emit:
    """Return what writes the values under ``mask``.

    Values are decoded before they are put in place: the zeros between them are zeros whatever the zero point is.
    """
    values = weight.values[mask]
    element_type = weight.element_type
    if values.numel() == 0:
        return lambda builder: builder.zeros(tuple(mask.shape), element_type)

    def place(builder: Builder, decoded: Any) -> Any:
        return builder.sparse_to_dense(decoded, builder.constant(mask, "ui1"))

    if dtype is not None:
        quantized = quantize_tensor(values, (values.numel(),), dtype, element_type)
        return lambda builder: place(builder, emit_quantized(builder, quantized, element_type))
    if n_bits is not None:
        palette = palettize(values, axis=0, n_bits=n_bits, group_size=values.numel())
        return lambda builder: place(builder, emit_indices(builder, palette, palette.lut, element_type))
    return lambda builder: place(builder, builder.constant(values, element_type))
