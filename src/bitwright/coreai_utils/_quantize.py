"""Quantization of the weights of a Core AI program."""

from __future__ import annotations

from typing import Any, Final

from ._checks import member, one_of, optional_dtype, positive
from ._grids import emit_quantized, quantize_tensor
from ._ir import Emit, working_copy
from ._weights import Skipped, Weight, compress_weights
from .common import CompressionGranularity, DType, QScheme

_DATA_DTYPES: Final = tuple(dtype for dtype in DType if dtype is not DType.FP8_E8M0FNU)
_FP8: Final = (DType.FP8_E4M3FN, DType.FP8_E5M2)
_GRANULARITIES: Final = (
    CompressionGranularity.PER_TENSOR,
    CompressionGranularity.PER_CHANNEL,
    CompressionGranularity.PER_BLOCK,
)
_FP4_BLOCK: Final = 32


def quantize_weights(
    coreai_program: Any,
    dtype: DType,
    qscheme: QScheme = QScheme.SYMMETRIC,
    granularity: CompressionGranularity = CompressionGranularity.PER_CHANNEL,
    block_size: int = 32,
    weight_num_threshold: int = 1024,
    scale_dtype: DType | None = None,
    in_place: bool = False,
) -> Any:
    """Quantize the weights of a converted program.

    Weights are float constants with more than ``weight_num_threshold`` elements that only matrix products,
    convolutions, gathers and transposes read, directly or through a reshape (or anyone, from 1e8 elements on). They are
    replaced by codes, scales and a ``coreai.blockwise_shift_scale`` that decodes them. A weight that ``block_size``
    does not divide stays as it is, with a warning. A log warning names other constants of that size and their readers.

    Args:
        coreai_program: a ``coreai.authoring.AIProgram``.
        dtype: format of the codes, anything but ``DType.FP8_E8M0FNU``.
        qscheme: range of the codes; float formats take ``SYMMETRIC`` only.
        granularity: ``PER_TENSOR``; ``PER_CHANNEL``, one scale for each output channel; or ``PER_BLOCK``, one scale for
            ``block_size`` input channels of each output channel. Matrices that a batched product reads as one stack
            have scales of their own.
        block_size: input channels of a block. FP4 takes 32.
        weight_num_threshold: constants with no more elements stay as they are.
        scale_dtype: None for float32 scales, or ``DType.FP8_E8M0FNU`` for powers of two (FP8 only; FP4 has them
            anyway).
        in_place: change the program itself instead of a copy.

    Returns:
        The program with quantized weights.

    Raises:
        MissingExtraError: coreai-core or coreai-torch is not installed.
        TypeError: ``coreai_program`` is no ``AIProgram``.
        ValueError: arguments that do not go together, as said above.

    Warns:
        ConfigMatchWarning: weights that were left as they are, and why; or there is none.
    """
    dtype = member(DType, dtype, "dtype")
    qscheme = member(QScheme, qscheme, "qscheme")
    granularity = member(CompressionGranularity, granularity, "granularity")
    if dtype not in _DATA_DTYPES:
        raise ValueError(f"Unsupported weight dtype DType.{dtype.name}: it is a format for scales.")
    one_of(granularity, _GRANULARITIES, "granularity", "grouped channels are for palettize_weights")
    positive(block_size, "block_size")
    positive(weight_num_threshold, "weight_num_threshold", minimum=0)
    scale_dtype = optional_dtype(scale_dtype, (DType.FP8_E8M0FNU,), "scale_dtype")
    _check_float_format(dtype, qscheme, granularity, block_size, scale_dtype)
    if dtype is DType.FP4_E2M1FN:
        scale_dtype = DType.FP8_E8M0FNU

    def compress(weight: Weight) -> Emit:
        blocks = _block_shape(weight, granularity, block_size)
        quantized = quantize_tensor(weight.values, blocks, dtype, weight.element_type, qscheme, scale_dtype)
        return lambda builder: emit_quantized(builder, quantized, weight.element_type)

    program = working_copy(coreai_program, in_place)
    return compress_weights(program, weight_num_threshold, compress)


def _check_float_format(
    dtype: DType, qscheme: QScheme, granularity: CompressionGranularity, block_size: int, scale_dtype: DType | None
) -> None:
    if not dtype.is_int() and qscheme is not QScheme.SYMMETRIC:
        raise ValueError(
            f"Asymmetric quantization to DType.{dtype.name} is not supported, because the format has no zero point: "
            f"use QScheme.SYMMETRIC, got QScheme.{qscheme.name}."
        )
    if scale_dtype is not None and dtype not in _FP8:
        kind = "integer" if dtype.is_int() else "FP4"
        raise ValueError(
            f"scale_dtype must be None for {kind} dtype DType.{dtype.name}; it is for FP8_E4M3FN and FP8_E5M2."
        )
    is_mx = granularity is CompressionGranularity.PER_BLOCK and block_size == _FP4_BLOCK
    if dtype is DType.FP4_E2M1FN and not is_mx:
        raise ValueError(
            f"DType.FP4_E2M1FN requires granularity PER_BLOCK and block_size {_FP4_BLOCK}; "
            f"got {granularity.name} and {block_size}."
        )


def _block_shape(weight: Weight, granularity: CompressionGranularity, block_size: int) -> tuple[int, ...]:
    shape = weight.values.shape
    if granularity is CompressionGranularity.PER_TENSOR:
        return tuple(shape)
    per_axis = dict.fromkeys((*weight.batch_axes, weight.out_axis), 1)
    if granularity is CompressionGranularity.PER_CHANNEL:
        return tuple(per_axis.get(axis, size) for axis, size in enumerate(shape))
    if shape[weight.in_axis] % block_size or weight.out_axis == weight.in_axis:
        raise Skipped(f"its {shape[weight.in_axis]} input channels do not divide into blocks of {block_size}")
    per_axis[weight.in_axis] = block_size
    return tuple(per_axis.get(axis, size) for axis, size in enumerate(shape))
