"""Palettization of the weights of a Core AI program."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any, Final

import torch

from ._checks import bits, member, one_of, optional_dtype, positive
from ._grids import Quantized, emit_scaled, quantize_tensor
from ._ir import ELEMENT_TYPES, FLOAT_TYPES, Builder, Emit, working_copy
from ._weights import Skipped, Weight, compress_weights
from .common import CompressionGranularity, DType

N_BITS: Final = (1, 2, 3, 4, 6, 8)
_LUT_DTYPES: Final = (DType.INT8, DType.UINT8, DType.FP8_E4M3FN, DType.FP8_E5M2)
_GRANULARITIES: Final = (
    CompressionGranularity.PER_TENSOR,
    CompressionGranularity.PER_CHANNEL,
    CompressionGranularity.PER_GROUPED_CHANNEL,
)


@dataclasses.dataclass(frozen=True)
class Palette:
    """A palettized weight.

    Attributes:
        indices: uint8, the shape of the weight with the size of the channel axis divided by the vector length.
        lut: float32 ``[groups, 2 ** n_bits, vector length]``.
        axis: channel axis of the weight.
        n_bits: bits of an index.
        batch_axes: axes of the weight along which every index has tables of its own.
    """

    indices: torch.Tensor
    lut: torch.Tensor
    axis: int
    n_bits: int
    batch_axes: tuple[int, ...] = ()

    def spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return values of shape ``[groups, ...]`` with groups on the axes that they divide, as tables have them."""
        leading = (*self.batch_axes, self.axis)
        front = tuple(range(len(leading)))
        stack = [self.indices.shape[axis] for axis in self.batch_axes]
        ones = [1] * (self.indices.dim() - len(leading))
        groups = per_group.shape[0] // prod(stack)
        return per_group.reshape(*stack, groups, *ones, *per_group.shape[1:]).movedim(front, leading)


def palettize_weights(
    coreai_program: Any,
    lut_dtype: DType | None = None,
    n_bits: int = 4,
    granularity: CompressionGranularity = CompressionGranularity.PER_TENSOR,
    group_size: int = 32,
    cluster_dim: int = 1,
    enable_per_channel_scale: bool = False,
    weight_num_threshold: int = 1024,
    num_kmeans_workers: int = 4,
    enable_fast_kmeans_mode: bool = True,
    rounding_precision: int = 4,
    in_place: bool = False,
) -> Any:
    """Palettize the weights of a converted program: k-means look-up tables and indices of few bits.

    Which constants are weights is said at :func:`quantize_weights`. A weight is replaced by indices, tables and a
    ``coreai.lut_to_dense`` (and a ``coreai.blockwise_shift_scale`` for quantized tables and channel scales). A weight
    whose output channels ``group_size`` or ``cluster_dim`` do not divide stays as it is, with a warning.

    Args:
        coreai_program: a ``coreai.authoring.AIProgram``.
        lut_dtype: format of the table entries, ``INT8``, ``UINT8``, ``FP8_E4M3FN`` or ``FP8_E5M2``, each table with its
            own scale; None for the dtype of the weight.
        n_bits: 1, 2, 3, 4, 6 or 8. Core AI stores 3-bit indices in 4 bits.
        granularity: ``PER_TENSOR``, one table; ``PER_CHANNEL``, one for each output channel; or
            ``PER_GROUPED_CHANNEL``, one for ``group_size`` consecutive output channels. With the latter two, matrices
            that a batched product reads as one stack have tables of their own.
        group_size: output channels of a group.
        cluster_dim: consecutive output channels that share an index; 1 for scalar palettes.
        enable_per_channel_scale: divide every output channel (of every matrix of a stack) by its largest magnitude
            before clustering, and multiply after. Scalar palettes only.
        weight_num_threshold: constants with no more elements stay as they are.
        num_kmeans_workers: has no effect; clustering uses the threads of the process.
        enable_fast_kmeans_mode: cluster a histogram that follows the weights (an error within 1e-3 of the optimum)
            instead of the weights themselves.
        rounding_precision: has no effect; the fast mode needs no rounding.
        in_place: change the program itself instead of a copy.

    Returns:
        The program with palettized weights.

    Raises:
        MissingExtraError: coreai-core or coreai-torch is not installed.
        TypeError: ``coreai_program`` is no ``AIProgram``.
        ValueError: arguments out of range, or that do not go together.

    Warns:
        ConfigMatchWarning: weights that were left as they are, and why; or there is none.
    """
    lut_dtype = optional_dtype(lut_dtype, _LUT_DTYPES, "lut_dtype")
    bits(n_bits, N_BITS, "n_bits")
    granularity = member(CompressionGranularity, granularity, "granularity")
    one_of(granularity, _GRANULARITIES, "granularity", "blocks are for quantize_weights")
    for name, value in (("group_size", group_size), ("cluster_dim", cluster_dim)):
        positive(value, name)
    for name, value in (("num_kmeans_workers", num_kmeans_workers), ("rounding_precision", rounding_precision)):
        positive(value, name)
    positive(weight_num_threshold, "weight_num_threshold", minimum=0)
    if cluster_dim > 1 and enable_per_channel_scale:
        raise ValueError(f"enable_per_channel_scale goes with scalar palettes only; got cluster_dim={cluster_dim}.")
    if cluster_dim > 1 and granularity is CompressionGranularity.PER_CHANNEL:
        raise ValueError(f"Vectors of cluster_dim={cluster_dim} channels do not fit into tables for single channels.")

    def compress(weight: Weight) -> Emit:
        channels = weight.values.shape[weight.out_axis]
        groups = {"per_tensor": channels, "per_channel": 1}.get(granularity.value, group_size)
        scale = _channel_scale(weight) if enable_per_channel_scale else None
        values = weight.values if scale is None else weight.values / scale
        stack = () if granularity is CompressionGranularity.PER_TENSOR else weight.batch_axes
        palette = _given(weight, values, n_bits, groups, cluster_dim) or palettize(
            values, weight.out_axis, n_bits, groups, cluster_dim, enable_fast_kmeans_mode, stack
        )
        if lut_dtype is not None and scale is not None and palette.spread(palette.lut[:, 0, 0]).shape == scale.shape:
            palette, scale = _scaled_tables(palette, scale), None
        lut = None if lut_dtype is None else _quantize_tables(palette, lut_dtype, weight.element_type)
        return lambda builder: _emit(builder, palette, lut, scale, weight.element_type)

    program = working_copy(coreai_program, in_place)
    return compress_weights(program, weight_num_threshold, compress)


def palettize(
    values: torch.Tensor,
    axis: int,
    n_bits: int,
    group_size: int,
    cluster_dim: int = 1,
    fast: bool = True,
    batch_axes: tuple[int, ...] = (),
) -> Palette:
    """Cluster a tensor into tables for groups of channels.

    Args:
        values: float32 tensor.
        axis: channel axis.
        n_bits: bits of an index.
        group_size: consecutive channels with one table.
        cluster_dim: consecutive channels with one index.
        fast: cluster a histogram instead of the values.
        batch_axes: axes along which every index has tables of its own.

    Raises:
        Skipped: ``group_size`` or ``cluster_dim`` do not divide the channels.
    """
    from bitwright.palettization.clustering import cluster_scalar, cluster_vectors

    channels = values.shape[axis]
    if channels % group_size:
        raise Skipped(f"its {channels} output channels do not divide into groups of {group_size}")
    if group_size % cluster_dim:
        raise Skipped(f"groups of {group_size} output channels do not divide into vectors of {cluster_dim}")
    leading = (*batch_axes, axis)
    front = tuple(range(len(leading)))
    rows = values.movedim(leading, front)
    stack, rest = rows.shape[: len(batch_axes)], rows.shape[len(leading) :]
    groups = prod(stack) * (channels // group_size)
    vectors = rows.reshape(groups, group_size // cluster_dim, cluster_dim, -1).transpose(2, 3)
    points = vectors.reshape(vectors.shape[0], -1, cluster_dim)
    count = 2**n_bits
    if cluster_dim == 1:
        result = cluster_scalar(points[:, :, 0], count, mode="fast" if fast else "exact")
    else:
        result = cluster_vectors(points, count)
    indices = result.indices.reshape(*stack, channels // cluster_dim, *rest).movedim(front, leading)
    return Palette(indices.contiguous(), result.centroids.float(), axis, n_bits, batch_axes)


def _given(weight: Weight, values: torch.Tensor, n_bits: int, group_size: int, cluster_dim: int) -> Palette | None:
    """Return what a function in the place of ``weight_palettization._blockwise_compress`` says, None without one.

    Raises:
        Skipped: it returns None or fails, or ``_is_cluster_dim_valid`` there says no.
        ValueError: tables and indices do not fit the weight.
    """
    from ._utils import palettize_utils
    from .passes import weight_palettization as hooks

    axis, shape = weight.out_axis, values.shape
    operation = weight.constant.operation
    if cluster_dim > 1 and not hooks._is_cluster_dim_valid(operation, cluster_dim, axis):
        raise Skipped(f"its {shape[axis]} output channels do not divide into vectors of {cluster_dim}")
    if hooks._blockwise_compress is palettize_utils._blockwise_compress:
        return None
    blocks = [group_size if place == axis and group_size != shape[axis] else 0 for place in range(len(shape))]
    try:
        found = hooks._blockwise_compress(
            values.half().numpy(),
            mode="KMEANS",
            nbits=n_bits,
            block_sizes=blocks,
            cluster_dim=cluster_dim,
            channel_axis=axis,
            num_kmeans_workers=1,
        )
    except Exception as error:
        raise Skipped(str(error)) from error
    if found is None:
        raise Skipped("its tables are not given")
    indices, lut = torch.as_tensor(found.indices), torch.as_tensor(found.lut).float()
    axis = axis if found.vector_axis is None else found.vector_axis
    tables, expected = list(lut.shape[:-2]), list(shape)
    expected[axis] //= lut.shape[-1]
    if lut.dim() != len(shape) + 2 or list(indices.shape) != expected or lut[..., 0, 0].numel() != tables[axis]:
        raise ValueError(
            f"{weight}: indices of shape {tuple(indices.shape)} and tables of shape {tuple(lut.shape)} do not fit it."
        )
    return Palette(indices.to(torch.uint8).contiguous(), lut.reshape(-1, *lut.shape[-2:]), axis, n_bits)


def _channel_scale(weight: Weight) -> torch.Tensor:
    """Return the largest magnitude of every output channel of a stack, 1 where it is zero; the weight's rank."""
    others = [axis for axis in range(weight.values.dim()) if axis not in (*weight.batch_axes, weight.out_axis)]
    scale = weight.values.abs().amax(others, keepdim=True) if others else weight.values.abs()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _scaled_tables(palette: Palette, scale: torch.Tensor) -> Palette:
    """Multiply tables of one channel each by its scale, so that their codes are chosen with the product as rounded."""
    leading = (*palette.batch_axes, palette.axis)
    per_table = scale.movedim(leading, tuple(range(len(leading)))).reshape(-1, 1, 1)
    return dataclasses.replace(palette, lut=palette.lut * per_table)


def _quantize_tables(palette: Palette, dtype: DType, element_type: str) -> Quantized:
    """Quantize every table with a scale of its own."""
    return quantize_tensor(palette.lut, (1, *palette.lut.shape[1:]), dtype, element_type)


def emit_indices(builder: Builder, palette: Palette, lut: torch.Tensor, element_type: str) -> Any:
    """Write indices and tables, and the look-up; the result has the element type of the tables."""
    stored_bits = 4 if palette.n_bits == 3 else palette.n_bits
    missing = 2**stored_bits - lut.shape[1]
    if missing:
        lut = torch.cat([lut, lut[:, -1:].expand(-1, missing, -1)], dim=1)
    return builder.lut_to_dense(
        builder.constant(palette.indices, f"ui{stored_bits}"),
        builder.constant(palette.spread(lut), element_type),
        builder.axis(palette.axis),
    )


def _emit(
    builder: Builder, palette: Palette, lut: Quantized | None, scale: torch.Tensor | None, element_type: str
) -> Any:
    if lut is None:
        dense = emit_indices(builder, palette, palette.lut, element_type)
        return dense if scale is None else _emit_channel_scale(builder, dense, scale, element_type)
    dense = emit_indices(builder, palette, lut.codes, ELEMENT_TYPES[lut.dtype])
    per_group = dataclasses.replace(
        lut,
        scale=palette.spread(lut.scale.reshape(-1)),
        zero_point=palette.spread(lut.zero_point.reshape(-1)),
    )
    if scale is None:
        return emit_scaled(builder, per_group, dense, element_type)
    per_channel = _per_channel(per_group, scale, palette.axis)
    if float(per_channel.scale.abs().amin()) >= float(torch.finfo(FLOAT_TYPES[element_type]).smallest_normal):
        return emit_scaled(builder, per_channel, dense, element_type)
    # The product of both scales would lose digits, or be zero, where each of them is held.
    return _emit_channel_scale(builder, emit_scaled(builder, per_group, dense, element_type), scale, element_type)


def _emit_channel_scale(builder: Builder, dense: Any, scale: torch.Tensor, element_type: str) -> Any:
    zero = builder.constant(torch.zeros_like(scale), element_type)
    return builder.shift_scale(dense, builder.constant(scale, element_type), zero, zero)


def _per_channel(lut: Quantized, scale: torch.Tensor, axis: int) -> Quantized:
    """Multiply the scale of every table into the scales of its channels; codes keep their zero points."""
    repeats = scale.shape[axis] // lut.scale.shape[axis]
    zero_point = lut.zero_point.repeat_interleave(repeats, axis).expand_as(scale)
    return dataclasses.replace(lut, scale=lut.scale.repeat_interleave(repeats, axis) * scale, zero_point=zero_point)
