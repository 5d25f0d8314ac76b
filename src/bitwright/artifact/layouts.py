"""Layouts: what a stored tensor is, apart from its numbers. They are the schema of the manifest.

A layout fixes the name, shape and dtype of every part that is stored beside it, so that a file can be checked before
its bytes are used, and the size of a compressed tensor is known before it exists.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal, Self, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitwright.formats import NumberFormat, format_of, packed_size
from bitwright.kernels import Grid, block_counts
from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationGranularity,
)

__all__ = [
    "ActivationLayout",
    "DenseLayout",
    "FloatName",
    "Layout",
    "PalettizedLayout",
    "PartShape",
    "QuantizedLayout",
    "ScaleName",
    "TensorLayout",
    "dtype_name",
    "dtype_of",
]

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip

_MAX_NUMEL = 1 << 44

_MAX_RANK = 16

_Size = Annotated[int, Field(ge=0, le=_MAX_NUMEL)]
_Axis = Annotated[int, Field(ge=-_MAX_RANK, lt=_MAX_RANK)]
_BlockLength = Annotated[int, Field(ge=1, le=_MAX_NUMEL)]
_BlockLengths = Annotated[tuple[_BlockLength | Literal[-1], ...], Field(min_length=1, max_length=_MAX_RANK)]
Shape: TypeAlias = Annotated[tuple[_Size, ...], Field(max_length=_MAX_RANK)]
FloatName: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
ScaleName: TypeAlias = Literal["float32", "float16", "bfloat16", "float8_e8m0fnu"]
PartShape: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one stored part."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a manifest calls ``name``."""
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest, such as ``"float32"``.

    Raises:
        ValueError: tensors of this dtype cannot be stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"Tensors of dtype {dtype} cannot be stored; known are {', '.join(_DTYPES)}.")
    return name


class _Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TensorLayout(_Schema):
    """What all layouts have.

    Attributes:
        shape: sizes of the decoded tensor.
        kept: for a sparse tensor, the number of entries that a mask keeps; the others decode to zero. None: no mask.
    """

    shape: Shape
    kept: _Size | None = None

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.numel > _MAX_NUMEL:
            raise ValueError(f"shape {self.shape} has too many elements")
        if self.kept is not None and self.kept > self.numel:
            raise ValueError(f"kept={self.kept} exceeds the {self.numel} elements of shape {self.shape}")
        return self

    @property
    def numel(self) -> int:
        """Number of elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    @abstractmethod
    def decoded_dtype(self) -> torch.dtype:
        """The dtype of the decoded tensor."""

    @abstractmethod
    def parts(self) -> dict[str, PartShape]:
        """Return shape and dtype of every stored part by name."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts().values())

    @property
    def nbits(self) -> int:
        """Bits of all parts, without those that fill up the last bytes of bit streams."""
        return 8 * self.nbytes - sum(-count * bits % 8 for count, bits in self._streams())

    def _streams(self) -> list[tuple[int, int]]:
        """Return number of codes and bits of a code of every part that is a bit stream."""
        return [] if self.kept is None else [(self.numel, 1)]

    def _stored(self, shape: tuple[int, ...]) -> int:
        """Return the number of codes where there is one for each element of ``shape``."""
        return math.prod(shape) if self.kept is None else self.kept

    def _mask(self) -> dict[str, PartShape]:
        return {} if self.kept is None else {"mask": ((packed_size(self.numel, 1),), torch.uint8)}

    def _elements(self, shape: tuple[int, ...], bits: int, whole: torch.dtype) -> PartShape:
        """Shape and dtype of one code per element: ``whole`` for 8 bits, else a bit stream."""
        count = self._stored(shape)
        if bits == 8:
            return (shape if self.kept is None else (count,)), whole
        return (packed_size(count, bits),), torch.uint8


class DenseLayout(TensorLayout):
    """A tensor as it is, or, with a mask, its kept entries.

    Attributes:
        dtype: name of the dtype.
    """

    kind: Literal["dense"] = "dense"
    dtype: str

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.dtype not in _DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        return self

    @property
    def decoded_dtype(self) -> torch.dtype:
        """The dtype that the values are stored in."""
        return _DTYPES[self.dtype]

    def parts(self) -> dict[str, PartShape]:
        """Return the parts: ``values``, and ``mask`` if entries are dropped."""
        shape = self.shape if self.kept is None else (self.kept,)
        return {"values": (shape, self.decoded_dtype), **self._mask()}


class QuantizedLayout(TensorLayout):
    """Codes of a number format with a scale for every block.

    Attributes:
        dtype: name of the decoded dtype.
        format: name of the number format, as in ``bitwright.formats``.
        quant_min: smallest code (integers) or value (float formats) in use.
        quant_max: largest one.
        formulation: ``"zp"`` or ``"minval"``, see ``bitwright.kernels.Grid``.
        block_size: shape of one block.
        scale_dtype: how scales (and minvals) are stored; ``"float8_e8m0fnu"`` for powers of two.
        zero_point: the zero point of all blocks; None if each block has its own, or none is used.
    """

    kind: Literal["quantized"] = "quantized"
    dtype: FloatName
    format: str
    quant_min: int | float
    quant_max: int | float
    formulation: Literal["zp", "minval"]
    block_size: Shape
    scale_dtype: ScaleName
    zero_point: int | None = None

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        grid, _ = self.grid, self.counts
        if self.zero_point is not None:
            if not grid.is_integer or self.formulation == "minval":
                raise ValueError("only integers in the 'zp' formulation have a zero point")
            if not self.quant_min <= self.zero_point <= self.quant_max:
                raise ValueError(f"zero_point {self.zero_point} lies outside the codes")
        if grid.is_integer != (type(self.quant_min) is int) or grid.is_integer != (type(self.quant_max) is int):
            raise ValueError("quant_min and quant_max are ints for integer formats and floats for others")
        if self.formulation == "minval" and self.scale_dtype == "float8_e8m0fnu":
            raise ValueError("the 'minval' formulation has no power-of-two scales")
        return self

    @property
    def number_format(self) -> NumberFormat:
        """The number format of the codes."""
        return format_of(self.format)

    @property
    def grid(self) -> Grid:
        """The codes, as kernels take them."""
        return Grid(self.number_format.dtype, self.quant_min, self.quant_max, self.formulation)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks along each dimension: the shape of the scale."""
        return block_counts(self.shape, self.block_size)

    @property
    def decoded_dtype(self) -> torch.dtype:
        """The floating-point dtype that codes decode to."""
        return _DTYPES[self.dtype]

    @property
    def has_zero_points(self) -> bool:
        """Whether each block has a zero point of its own."""
        return self.grid.is_integer and self.formulation == "zp" and self.zero_point is None

    def parts(self) -> dict[str, PartShape]:
        """Return the parts: ``codes`` and ``scale``, and what the formulation and a mask add."""
        fmt, counts = self.number_format, self.counts
        parts = {"codes": self._elements(self.shape, fmt.bits, fmt.storage)}
        power_of_two = self.scale_dtype == "float8_e8m0fnu"
        parts["scale"] = counts, (torch.uint8 if power_of_two else _DTYPES[self.scale_dtype])
        if self.has_zero_points:
            parts["zero_point"] = (packed_size(math.prod(counts), fmt.bits),), torch.uint8
        if self.formulation == "minval" and self.grid.is_integer:
            parts["minval"] = counts, _DTYPES[self.scale_dtype]
        return parts | self._mask()

    def _streams(self) -> list[tuple[int, int]]:
        bits = self.number_format.bits
        zero_points = [(math.prod(self.counts), bits)] if self.has_zero_points else []
        return [(self._stored(self.shape), bits), *zero_points, *super()._streams()]


class PalettizedLayout(TensorLayout):
    """Indices into look-up tables, one table for every group of elements.

    Attributes:
        n_bits: bits of an index.
        vector_size: elements of one table entry; vectors run along ``vector_axis``.
        vector_axis: the dimension that vectors run along.
        groups: number of tables along each dimension of the indices.
        lut: layout of all tables together, shape ``(*groups, entries, vector_size)``.
        channel_axis: the dimension of which each index has a factor; None for no factors.
    """

    kind: Literal["palettized"] = "palettized"
    n_bits: Annotated[int, Field(ge=1, le=8)]
    vector_size: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    vector_axis: Annotated[int, Field(ge=0)] = 0
    groups: Shape
    lut: Annotated[DenseLayout | QuantizedLayout, Field(discriminator="kind")]
    channel_axis: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if (
            self.lut.shape[:-2] != self.groups
            or self.lut.shape[-1:] != (self.vector_size,)
            or self.lut.kept is not None
        ):
            raise ValueError(f"look-up tables of shape {self.lut.shape} do not fit groups {self.groups}")
        if not 1 <= self.entries <= 1 << self.n_bits:
            raise ValueError(f"tables of {self.entries} entries do not fit indices of {self.n_bits} bits")
        if not self.lut.decoded_dtype.is_floating_point or self.lut.decoded_dtype.itemsize < 2:
            raise ValueError(f"look-up tables must decode to floating point, not {self.lut.decoded_dtype}")
        for name, axis in (("vector_axis", self.vector_axis), ("channel_axis", self.channel_axis or 0)):
            if self.shape and axis >= len(self.shape):
                raise ValueError(f"{name} {axis} is no dimension of shape {self.shape}")
        sizes = zip(self.index_shape, self.groups, strict=True)
        block_counts(self.index_shape, tuple(size // count if count else 0 for size, count in sizes))
        if self.kept is not None and self.vector_size > 1:
            raise ValueError("vectors cannot be masked")
        return self

    @property
    def entries(self) -> int:
        """Entries of each table."""
        return self.lut.shape[-2]

    @property
    def index_shape(self) -> tuple[int, ...]:
        """Shape of the indices: the tensor's, with ``vector_axis`` divided by ``vector_size``."""
        if self.vector_size == 1:
            return self.shape
        size = self.shape[self.vector_axis]
        if size % self.vector_size:
            raise ValueError(f"vectors of {self.vector_size} do not divide axis {self.vector_axis} of {self.shape}")
        return (*self.shape[: self.vector_axis], size // self.vector_size, *self.shape[self.vector_axis + 1 :])

    @property
    def decoded_dtype(self) -> torch.dtype:
        """The dtype that the look-up tables decode to."""
        return self.lut.decoded_dtype

    def parts(self) -> dict[str, PartShape]:
        """Return the parts: ``indices``, those of the tables as ``lut.…``, factors of channels and mask."""
        parts = {"indices": self._elements(self.index_shape, self.n_bits, torch.uint8)}
        parts |= {f"lut.{name}": part for name, part in self.lut.parts().items()}
        if self.channel_axis is not None:
            parts["channel_scale"] = (self.shape[self.channel_axis],), self.decoded_dtype
        return parts | self._mask()

    def _streams(self) -> list[tuple[int, int]]:
        return [(self._stored(self.index_shape), self.n_bits), *self.lut._streams(), *super()._streams()]


Layout: TypeAlias = Annotated[DenseLayout | QuantizedLayout | PalettizedLayout, Field(discriminator="kind")]


class ActivationLayout(_Schema):
    """How one activation is quantized.

    Attributes:
        format: name of the number format.
        quant_min: smallest code or value in use.
        quant_max: largest one.
        formulation: ``"zp"`` or ``"minval"``.
        scheme: ``"symmetric"``, ``"asymmetric"`` or ``"symmetric_with_clipping"``.
        granularity: ``"per_tensor"``, ``"per_channel"``, ``"per_block"``, ``"per_token"`` or a registered key.
        axis: channel axis, negative from the end; None where there is none.
        block_size: block length of ``"per_block"`` along ``axis``, or one for each dimension, -1 for a whole one; else
            None.
        dynamic: the parameters are computed from each tensor at run time, so none are stored.
        scale_dtype: ``"float8_e8m0fnu"`` for power-of-two scales, else ``"float32"``.
        counts: shape of the stored parameters.
    """

    format: str
    quant_min: int | float
    quant_max: int | float
    formulation: Literal["zp", "minval"]
    scheme: Literal["symmetric", "asymmetric", "symmetric_with_clipping"]
    granularity: str
    axis: _Axis | None = None
    block_size: _BlockLength | _BlockLengths | None = None
    dynamic: bool = False
    scale_dtype: Literal["float32", "float8_e8m0fnu"] = "float32"
    counts: Shape = ()

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        self.grid  # noqa: B018 - building it checks format, range and formulation
        return self

    @model_validator(mode="after")
    def _check_granularity(self) -> Self:
        known = QuantizationGranularity.REGISTRY
        if self.granularity not in known:
            raise ValueError(
                f"unknown granularity {self.granularity!r}; known are {', '.join(known)}, and what "
                "QuantizationGranularity.register adds: import the module that does"
            )
        kind = known[self.granularity]
        if (self.block_size is None) == issubclass(kind, PerBlockGranularity):
            raise ValueError(f"granularity {self.granularity!r} does not go with block_size {self.block_size!r}")
        if kind in (PerTensorGranularity, PerTokenGranularity) and self.axis is not None:
            raise ValueError(f"granularity {self.granularity!r} has no axis, got {self.axis}")
        if not self.dynamic and isinstance(self.block_size, tuple) and len(self.block_size) != len(self.counts):
            raise ValueError(f"block_size {self.block_size} does not fit parameters of shape {self.counts}")
        return self

    @property
    def grid(self) -> Grid:
        """The codes, as kernels take them."""
        return Grid(format_of(self.format).dtype, self.quant_min, self.quant_max, self.formulation)

    def parts(self) -> dict[str, PartShape]:
        """Return shape and dtype of every stored part by name."""
        if self.dynamic:
            return {}
        parts: dict[str, PartShape] = {"scale": (self.counts, torch.float32)}
        if self.grid.is_integer and self.formulation == "zp":
            parts["zero_point"] = self.counts, torch.int32
        elif self.grid.is_integer:
            parts["minval"] = self.counts, torch.float32
        return parts
