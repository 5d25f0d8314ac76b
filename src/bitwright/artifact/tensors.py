"""Compressed tensors: a layout and its numbers, with the way back to the dense tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch

from bitwright.formats import decode
from bitwright.kernels.packed import PackedMatrix

from .errors import ArtifactError
from .layouts import DenseLayout, PalettizedLayout, QuantizedLayout, TensorLayout, dtype_name
from .pickled import as_before, as_read_by_torch
from .tracing import dequantize, unpack_codes

__all__ = ["CompressedTensor", "DenseTensor", "PalettizedTensor", "QuantizedTensor", "build_tensor", "recast"]

_LayoutT = TypeVar("_LayoutT", bound=TensorLayout)


@dataclass(frozen=True, eq=False)
class CompressedTensor(ABC, Generic[_LayoutT]):
    """A tensor as compression left it. Immutable; do not write into its parts.

    Attributes:
        layout: what it is.
        parts: its numbers; names, shapes and dtypes are those of ``layout.parts()``.

    Raises:
        ArtifactError: the parts are not those that the layout asks for.
    """

    layout: _LayoutT
    parts: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        wanted = self.layout.parts()
        if wanted.keys() != self.parts.keys():
            raise ArtifactError(f"{type(self).__name__} has the parts {sorted(wanted)}, got {sorted(self.parts)}.")
        for name, (shape, dtype) in wanted.items():
            part = self.parts[name]
            if tuple(part.shape) != shape or part.dtype != dtype:
                raise ArtifactError(
                    f"The part {name!r} must have shape {shape} and dtype {dtype}, "
                    f"got {tuple(part.shape)} and {part.dtype}."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold."""
        parts, dtypes = as_read_by_torch(self.parts)
        return {**self.__dict__, "parts": parts, "_dtypes": dtypes} if dtypes else dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what :meth:`__getstate__` returned."""
        dtypes = state.get("_dtypes", {})
        kept = {key: value for key, value in state.items() if key != "_dtypes"}
        self.__dict__.update(kept, parts=as_before(state["parts"], dtypes) if dtypes else state["parts"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the decoded tensor."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded tensor."""
        return self.layout.decoded_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, in memory and on disk."""
        return self.layout.nbytes

    @property
    def is_sparse(self) -> bool:
        """Whether a mask tells which entries are stored."""
        return self.layout.kept is not None

    def to(self, device: torch.device | str) -> Self:
        """Return the tensor with its parts on ``device``."""
        return type(self)(self.layout, {name: part.to(device) for name, part in self.parts.items()})

    def copied(self) -> Self:
        """Return the tensor with copies of its parts on the CPU."""
        return type(self)(self.layout, {name: part.to("cpu", copy=True) for name, part in self.parts.items()})

    def mask(self) -> torch.Tensor | None:
        """Return which entries are kept, as bool in the tensor's shape; None if all are."""
        if not self.is_sparse:
            return None
        return unpack_codes(self.parts["mask"], 1, self.layout.numel, signed=False).bool().view(self.shape)

    @abstractmethod
    def decode(self) -> torch.Tensor:
        """Return the dense tensor: exactly what the prepared model computed."""

    @abstractmethod
    def check_values(self) -> None:
        """Check what the layout cannot say: codes and indices in range, scales finite and positive.

        Raises:
            ArtifactError: a value is out of range.
        """

    def _check_mask(self) -> None:
        mask = self.mask()
        if mask is not None and int(mask.sum()) != self.layout.kept:
            raise ArtifactError(f"The mask keeps {int(mask.sum())} entries, but {self.layout.kept} are stored.")

    def _spread(self, elements: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Put one element per kept entry into its place; zeros elsewhere."""
        mask = self.mask()
        if mask is None:
            return elements.view(shape)
        dense = torch.zeros(shape, dtype=elements.dtype, device=elements.device)
        dense[mask] = elements
        return dense

    def _zero_dropped(self, dense: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        return dense if mask is None else dense.masked_fill(~mask, 0)


class DenseTensor(CompressedTensor[DenseLayout]):
    """A tensor as it is, or the entries of it that a mask keeps."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> DenseTensor:
        """Store ``tensor`` uncompressed.

        Raises:
            ValueError: tensors of this dtype cannot be stored.
        """
        layout = DenseLayout(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
        return cls(layout, {"values": tensor.detach().contiguous()})

    def decode(self) -> torch.Tensor:
        """Return the values, with zeros where the mask drops entries."""
        return self._spread(self.parts["values"], self.shape)

    def check_values(self) -> None:
        """Check that the mask keeps as many entries as are stored; see the base class."""
        self._check_mask()


class QuantizedTensor(CompressedTensor[QuantizedLayout]):
    """Packed codes with scales, and zero points or minvals."""

    def codes(self) -> torch.Tensor:
        """Return one code per element in the tensor's shape: ``int8`` or ``uint8``, FP8, or FP4 values as float32."""
        return self._spread(self.stored_codes(), self.shape)

    def stored_codes(self) -> torch.Tensor:
        """Return the codes of the kept entries, like ``codes`` but without the entries that the mask drops."""
        fmt, layout = self.layout.number_format, self.layout
        codes = self.parts["codes"]
        if fmt.bits == 8:
            return codes
        count = layout.numel if layout.kept is None else layout.kept
        codes = unpack_codes(codes, fmt.bits, count, signed=fmt.signed and fmt.kind == "int")
        return decode(codes, fmt) if fmt.kind == "float" else codes

    def scale(self) -> torch.Tensor:
        """Return the scales as float32, one for every block."""
        scale = self.parts["scale"]
        return decode(scale, "float8_e8m0fnu") if self.layout.scale_dtype == "float8_e8m0fnu" else scale.float()

    def zero_point(self) -> torch.Tensor | None:
        """Return the zero points as int32, one for every block; None for other formulations and float formats."""
        layout = self.layout
        if layout.has_zero_points:
            fmt, count = layout.number_format, self.parts["scale"].numel()
            points = unpack_codes(self.parts["zero_point"], fmt.bits, count, signed=fmt.signed)
            return points.to(torch.int32).view(layout.counts)
        if layout.zero_point is None:
            return None
        return torch.full(layout.counts, layout.zero_point, dtype=torch.int32, device=self.parts["scale"].device)

    def minval(self) -> torch.Tensor | None:
        """Return the minvals as float32, one for every block; None for the ``"zp"`` formulation and float formats."""
        minval = self.parts.get("minval")
        return None if minval is None else minval.float()

    def matrix(self) -> PackedMatrix | None:
        """Return the tensor in the form that is decoded in one pass over its bytes, None if it does not fit that."""
        layout = self.layout
        fmt = layout.number_format
        blocks = PackedMatrix.blocks_of(self.shape, layout.block_size, fmt.bits)
        if blocks is None or fmt.kind != "int" or self.is_sparse:
            return None
        flip = 1 << (fmt.bits - 1) if fmt.signed else 0
        origins, points = self.minval(), self.zero_point() if layout.has_zero_points else None
        subtracted = layout.quant_min if origins is not None else layout.zero_point or 0
        return PackedMatrix(
            self.parts["codes"].contiguous(), fmt.bits, flip, flip + int(subtracted), self.scale().contiguous(), points,
            None if origins is None else origins.contiguous(), self.shape, *blocks,
        )  # fmt: skip

    def decode(self) -> torch.Tensor:
        """Return the numbers that the codes stand for, with zeros where the mask drops entries."""
        matrix = None if torch.compiler.is_compiling() else self.matrix()
        if matrix is not None and matrix.runs_to(self.dtype):
            return matrix.decode(self.dtype)
        dense = dequantize(
            self.codes(),
            self.scale(),
            None if self.layout.zero_point == 0 else self.zero_point(),
            self.minval(),
            block_size=self.layout.block_size,
            grid=self.layout.grid,
            output_dtype=self.dtype,
        )
        return self._zero_dropped(dense)

    def check_values(self) -> None:
        """Check mask, scales, minvals, zero points and codes; see the base class."""
        self._check_mask()
        layout, scale = self.layout, self.scale()
        if scale.numel() and not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ArtifactError("A scale is not a positive finite number.")
        minval = self.minval()
        if minval is not None and not bool(torch.isfinite(minval).all()):
            raise ArtifactError("A minval is not a finite number.")
        if layout.has_zero_points:
            _check_range("zero point", self.zero_point(), layout.quant_min, layout.quant_max)
        fmt = layout.number_format
        if fmt.kind == "float" and fmt.bits == 8 and bool(torch.isnan(self.parts["codes"].float()).any()):
            raise ArtifactError("A code stands for no number.")
        if (layout.quant_min, layout.quant_max) != (fmt.minimum, fmt.maximum) or fmt.has_infinity:
            _check_range("code", self.stored_codes(), layout.quant_min, layout.quant_max)


class PalettizedTensor(CompressedTensor[PalettizedLayout]):
    """Packed indices into look-up tables, which may be quantized themselves, and a factor for each channel."""

    def indices(self) -> torch.Tensor:
        """Return the indices as ``uint8`` in the shape ``layout.index_shape``."""
        return self._spread(self.stored_indices(), self.layout.index_shape)

    def stored_indices(self) -> torch.Tensor:
        """Return the indices of the kept entries, like ``indices`` but without those that the mask drops."""
        layout, indices = self.layout, self.parts["indices"]
        if layout.n_bits == 8:
            return indices
        count = layout.numel // layout.vector_size if layout.kept is None else layout.kept
        return unpack_codes(indices, layout.n_bits, count, signed=False)

    @property
    def lut(self) -> DenseTensor | QuantizedTensor:
        """The look-up tables, shape ``(*groups, entries, vector_size)``."""
        parts = {name.removeprefix("lut."): part for name, part in self.parts.items() if name.startswith("lut.")}
        tensor = build_tensor(self.layout.lut, parts)
        assert isinstance(tensor, DenseTensor | QuantizedTensor)
        return tensor

    def channel_scale(self) -> torch.Tensor | None:
        """Return the factors of channels in the shape in which they broadcast against the tensor; None for none."""
        axis, factors = self.layout.channel_axis, self.parts.get("channel_scale")
        if axis is None or factors is None:
            return None
        return factors.view([-1 if dim == axis else 1 for dim in range(len(self.shape))])

    def decode(self) -> torch.Tensor:
        """Return the entries that the indices select, times the factors of their channels."""
        layout = self.layout
        indices = self.indices().long()
        tables = self.lut.decode().reshape(-1, layout.vector_size)
        group = _group_numbers(layout.index_shape, layout.groups, indices.device)
        values = tables[indices if group is None else indices + group * layout.entries]
        axis = layout.vector_axis
        values = values.squeeze(-1) if layout.vector_size == 1 else values.movedim(-1, axis + 1)
        values = values.reshape(layout.shape)
        factors = self.channel_scale()
        if factors is not None:
            values = values * factors
        return self._zero_dropped(values)

    def check_values(self) -> None:
        """Check mask, look-up tables, indices and factors; see the base class."""
        self._check_mask()
        self.lut.check_values()
        if not bool(torch.isfinite(self.lut.decode()).all()):
            raise ArtifactError("A look-up table holds a value that is not finite.")
        if self.layout.entries < 1 << self.layout.n_bits:
            _check_range("index", self.stored_indices(), 0, self.layout.entries - 1)
        factors = self.parts.get("channel_scale")
        if factors is not None and not bool(torch.isfinite(factors).all()):
            raise ArtifactError("A channel scale is not a finite number.")


def build_tensor(layout: TensorLayout, parts: Mapping[str, torch.Tensor]) -> CompressedTensor[TensorLayout]:
    """Return the compressed tensor of the class that belongs to ``layout``.

    Raises:
        ArtifactError: the parts are not those that the layout asks for.
    """
    return _CLASSES[type(layout)](layout, parts)


def recast(tensor: CompressedTensor[Any], dtype: torch.dtype) -> CompressedTensor[Any]:
    """Return a tensor whose codes decode to ``dtype``; the numbers may differ from cast ones by a rounding."""
    if tensor.dtype == dtype:
        return tensor
    parts, changed = dict(tensor.parts), {"dtype": dtype_name(dtype)}
    if isinstance(tensor, PalettizedTensor):
        lut = recast(tensor.lut, dtype)
        parts |= {f"lut.{name}": part for name, part in lut.parts.items()}
        return PalettizedTensor(
            tensor.layout.model_copy(update={"lut": lut.layout}),
            {name: part.to(dtype) if name == "channel_scale" else part for name, part in parts.items()},
        )
    if isinstance(tensor, DenseTensor):
        parts["values"] = parts["values"].to(dtype)
    return build_tensor(tensor.layout.model_copy(update=changed), parts)


_CLASSES: dict[type[TensorLayout], type[CompressedTensor]] = {  # type: ignore[type-arg]
    DenseLayout: DenseTensor,
    QuantizedLayout: QuantizedTensor,
    PalettizedLayout: PalettizedTensor,
}


def _group_numbers(shape: tuple[int, ...], groups: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """Number of the table that each index refers to, broadcastable to ``shape``; None if there is but one."""
    if all(count == 1 for count in groups):
        return None
    number = torch.zeros([1] * len(shape), dtype=torch.long, device=device)
    for dim, (size, count) in enumerate(zip(shape, groups, strict=True)):
        if count > 1:
            along = torch.arange(size, device=device) // (size // count)
            number = number * count + along.view([-1 if d == dim else 1 for d in range(len(shape))])
    return number


def _check_range(what: str, values: torch.Tensor | None, low: float, high: float) -> None:
    if values is None or values.numel() == 0:
        return
    least, most = (float(v) for v in torch.aminmax(values.float()))
    if least < low or most > high:
        raise ArtifactError(f"A {what} lies outside [{low}, {high}]: they run from {least} to {most}.")
