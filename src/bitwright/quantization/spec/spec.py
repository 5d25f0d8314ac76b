"""The spec of quantization: what is done to one tensor."""

from __future__ import annotations

import math
from inspect import get_annotations
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    computed_field,
    field_validator,
    model_validator,
)

from bitwright.common import CompressionType
from bitwright.config.spec import CompressionSpec
from bitwright.formats import format_of, quant_range, storage_dtype

from ._fields import DtypeField, RegisteredClass, ScaleDtypeField, dtype_name, dtype_named
from .fake_quantize import FakeQuantizeImplBase
from .granularity import PerChannelGranularity, PerTensorGranularity, QuantizationGranularity
from .qformulation import QuantizationFormulation
from .qparams_calculator import QParamsCalculatorBase, StatelessQParamsCalculatorBase
from .qscheme import QuantizationScheme
from .range_calculator import RangeCalculatorBase

__all__ = ["QuantizationSpec", "default_activation_quantization_spec", "default_weight_quantization_spec"]

_E8M0 = torch.float8_e8m0fnu
_FP4 = torch.float4_e2m1fn_x2


class QuantizationSpec(CompressionSpec):
    """How one tensor is quantized. All fields have defaults; frozen, hashable, and equal when all fields are.

    A subclass may add fields; they are handed to the constructors of the range calculator, the qparams calculator and
    the fake quantizer as keywords.

    Attributes:
        dtype: quantized format: ``int1`` to ``int8``, ``uint1`` to ``uint8``, ``float8_e4m3fn``, ``float8_e5m2``,
            ``float4_e2m1fn_x2``, as torch dtype or its bare name.
        qscheme: how a range is laid over the codes: ``"symmetric"``, ``"asymmetric"``, or
            ``"symmetric_with_clipping"``; float formats take ``"symmetric"``.
        qformulation: how codes and values are related: ``"zp"`` or ``"minval"``; float formats take ``"zp"``.
        granularity: which elements share parameters; a granularity or a mapping such as
            ``{"type": "per_channel", "axis": 0}``.
        fake_quantize_cls: simulator: a registered class or its key, ``"default"``.
        qparam_calculator_cls: finds the parameters from ranges: ``"static"``, ``"dynamic"``, ``"moving_average"``,
            ``"global_minmax"``, or ``"default"``, which is static for weights and a moving average for activations.
        range_calculator_cls: finds the range of one tensor: ``"minmax"``.
        float_range: ``[min, max]``; a side that is not None replaces what is measured. ``min <= 0 <= max``.
        scale_dtype: ``float8_e8m0fnu`` for power-of-two scales (OCP Microscaling Formats 1.0), for FP8 and FP4 only;
            FP4 always has it.
        averaging_constant: weight of a further tensor in the moving average, in (0, 1]; None for the calculator's
            own default of 0.01. Calculators that average nothing leave it unused.

    ``n_bits``, ``target_dtype``, ``quant_min`` and ``quant_max`` follow from ``dtype`` and ``qscheme``. They are taken
    as ``model_dump()`` writes them, and set nothing.

    Raises:
        pydantic.ValidationError: unknown field, a value that is not as above, two that do not go together, or a
            ``n_bits``, ``quant_min`` ... other than the one that follows.

    Example:
        >>> spec = QuantizationSpec(dtype="int4", granularity={"type": "per_block", "axis": 1, "block_size": 32})
        >>> spec.n_bits, spec.quant_min, spec.quant_max
        (4, -8, 7)
    """

    dtype: DtypeField = Field(default="int8", validate_default=True)
    qscheme: QuantizationScheme = QuantizationScheme.SYMMETRIC
    qformulation: QuantizationFormulation = QuantizationFormulation.ZP
    granularity: Annotated[QuantizationGranularity, BeforeValidator(QuantizationGranularity.maybe_build_from_dict)] = (
        Field(default_factory=PerTensorGranularity)
    )
    fake_quantize_cls: Annotated[Any, RegisteredClass(FakeQuantizeImplBase)] = Field(
        default="default", validate_default=True
    )
    qparam_calculator_cls: Annotated[Any, RegisteredClass(QParamsCalculatorBase)] = Field(
        default="default", validate_default=True
    )
    range_calculator_cls: Annotated[Any, RegisteredClass(RangeCalculatorBase)] = Field(
        default="minmax", validate_default=True
    )
    float_range: list[float | None] = Field(default=[None, None])
    scale_dtype: ScaleDtypeField | None = None
    averaging_constant: float | None = Field(default=None, gt=0, le=1)

    _compression_type: CompressionType = PrivateAttr(default=CompressionType.QUANTIZATION)

    SUPPORTED_DTYPES: ClassVar[set[torch.dtype]] = {
        *(getattr(torch, f"{sign}int{bits}") for bits in range(1, 9) for sign in ("", "u")),
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        _FP4,
    }

    @field_validator("dtype", mode="after")
    @classmethod
    def _check_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        if dtype not in cls.SUPPORTED_DTYPES:
            allowed = ", ".join(sorted(str(supported) for supported in cls.SUPPORTED_DTYPES))
            raise ValueError(f"Unsupported dtype: {dtype}. Allowed dtypes: {allowed}")
        return dtype

    @field_validator("float_range", mode="before")
    @classmethod
    def _check_float_range(cls, data: Any) -> list[float | None]:
        if not isinstance(data, list | tuple):
            raise ValueError(f"float_range must be a list or tuple [min, max], got {data!r}.")
        if len(data) != 2:
            raise ValueError(f"float_range must have length 2, got {data!r}.")
        for bound in data:
            if isinstance(bound, bool) or not isinstance(bound, int | float | None):
                raise ValueError(f"float_range entries must be ints, floats or None, got {bound!r}.")
            if bound is not None and not _is_finite(bound):
                raise ValueError(
                    f"float_range entries must be finite, got {bound!r}; None leaves a side to observation."
                )
        low, high = (None if bound is None else float(bound) for bound in data)
        if low is not None and high is not None and not low < high:
            raise ValueError(f"float_range [min, max] needs min < max, got {data!r}.")
        if low is not None and not low <= 0:
            raise ValueError(f"float_range min must be at most 0, so that 0 is representable; got {low!r}.")
        if high is not None and not high >= 0:
            raise ValueError(f"float_range max must be at least 0, so that 0 is representable; got {high!r}.")
        return [low, high]

    @model_validator(mode="before")
    @classmethod
    def _give_fp4_its_scale_dtype(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("scale_dtype") is not None:
            return data
        dtype = data.get("dtype")
        dtype = dtype_named(dtype) if isinstance(dtype, str) else dtype
        return {**data, "scale_dtype": _E8M0} if dtype == _FP4 else data

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_other_computed_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        spec = handler(data)
        if not isinstance(data, dict):
            return spec
        computed = QuantizationSpec.model_computed_fields.keys()
        given = {key: _as_computed(key, data[key]) for key in computed if data.get(key) is not None}
        other = [key for key, value in given.items() if value != getattr(spec, key)]
        if not other:
            return spec
        meant = spec._with_computed(given)
        if meant is not None and given.keys() == computed:  # the dump of another spec, whose fields were edited since
            return spec
        meant = meant or spec._with_computed({key: given[key] for key in other})
        found = "; ".join(f"{key}={getattr(spec, key)!r}, not {data[key]!r}" for key in other)
        remedy = (
            "leave them out, as no dtype has these values; float_range limits the values that are represented"
            if meant is None
            else f"write dtype={dtype_name(meant.dtype)!r}, qscheme={meant.qscheme.value!r} instead"
        )
        raise ValueError(
            f"dtype={dtype_name(spec.dtype)!r} with qscheme={spec.qscheme.value!r} has {found}. What follows from "
            f"dtype and qscheme cannot be set: {remedy}."
        )

    def _with_computed(self, values: dict[str, Any]) -> Self | None:
        """Return a copy with the nearest dtype and qscheme that have these computed values; None if there are none."""
        copies = [
            self.model_copy(update={"dtype": dtype, "qscheme": qscheme})
            for dtype in self.SUPPORTED_DTYPES
            for qscheme in _schemes_of(dtype)
        ]
        found = [copy for copy in copies if all(getattr(copy, key) == value for key, value in values.items())]
        return min(found, key=self._distance, default=None)

    def _distance(self, other: Self) -> tuple[bool | str, ...]:
        same = (
            other.qscheme == self.qscheme,
            other.n_bits == self.n_bits,
            other.dtype.is_floating_point == self.dtype.is_floating_point,
            other.dtype.is_signed == self.dtype.is_signed,
        )
        return (*(not equal for equal in same), str(other.dtype))

    @model_validator(mode="after")
    def _check_float_format(self) -> Self:
        if not self.dtype.is_floating_point:
            return self
        if self.qscheme != QuantizationScheme.SYMMETRIC:
            raise ValueError(
                f"FP quantization (dtype={self.dtype}) requires symmetric quantization scheme, got "
                f"qscheme={self.qscheme.value!r}. Valid option: 'symmetric'."
            )
        if self.qformulation != QuantizationFormulation.ZP:
            raise ValueError(
                f"FP quantization (dtype={self.dtype}) requires zero-point quantization formulation, got "
                f"qformulation={self.qformulation.value!r}. Valid option: 'zp'."
            )
        return self

    @model_validator(mode="after")
    def _check_scale_dtype(self) -> Self:
        if self.scale_dtype not in (None, _E8M0):
            raise ValueError(
                f"Unsupported scale_dtype: {self.scale_dtype}. Only None or torch.float8_e8m0fnu are supported."
            )
        if self.scale_dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"scale_dtype must be None for dtype={self.dtype}, got scale_dtype={self.scale_dtype}; power-of-two "
                "scales are for FP8 and FP4."
            )
        return self

    @model_validator(mode="after")
    def _check_clipping(self) -> Self:
        if self.qscheme != QuantizationScheme.SYMMETRIC_WITH_CLIPPING:
            return self
        if issubclass(self.qparam_calculator_cls, StatelessQParamsCalculatorBase):
            raise ValueError(
                "SYMMETRIC_WITH_CLIPPING is not supported with a dynamic qparam_calculator_cls. Use qscheme "
                "'symmetric' or 'asymmetric'."
            )
        if self.qscheme not in _schemes_of(self.dtype):
            raise ValueError(
                "qscheme 'symmetric_with_clipping' leaves int1 only the code 0. Use qscheme 'symmetric' or "
                "'asymmetric', or at least 2 bits."
            )
        return self

    @model_validator(mode="after")
    def _check_learned(self) -> Self:
        learns = getattr(self.fake_quantize_cls, "calculator_cls", None) is not None
        if learns and issubclass(self.qparam_calculator_cls, StatelessQParamsCalculatorBase):
            raise ValueError(
                f"{self.fake_quantize_cls.__name__} learns one range for "
                "all tensors, and a dynamic qparam_calculator_cls measures a new one for each. Leave out one of them."
            )
        return self

    def __hash__(self) -> int:
        return hash((type(self), *(_hashable(getattr(self, name)) for name in type(self).model_fields)))

    def get_extra_args(self) -> dict[str, Any]:
        """Return the fields that a subclass adds, or declares anew, with their values."""
        added = type(self).model_fields.keys() - QuantizationSpec.model_fields.keys()
        derived = type(self).__mro__[: type(self).__mro__.index(QuantizationSpec)]
        if any("averaging_constant" in get_annotations(base) for base in derived):
            added |= {"averaging_constant"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in added}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values (strings, numbers, lists, mappings), fit for JSON and YAML."""
        return self.model_dump(mode="json", exclude=set(type(self).model_computed_fields))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the spec that ``to_dict`` or ``model_dump`` wrote; ``data`` stays as it is.

        Raises:
            pydantic.ValidationError: as the constructor.
        """
        return cls.model_validate(data)

    @classmethod
    def get_n_bits_from_dtype(cls, dtype: torch.dtype | str) -> int:
        """Return the bits of one code of a format.

        Raises:
            ValueError: no such dtype.
        """
        return _bits(dtype_named(dtype) if isinstance(dtype, str) else dtype)

    @classmethod
    def get_target_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a tensor that holds one code per element: int8 or uint8 below a byte, FP8 for FP4."""
        return storage_dtype(dtype) if dtype in cls.SUPPORTED_DTYPES else dtype

    @classmethod
    def get_quant_range(cls, dtype: torch.dtype, qscheme: QuantizationScheme | str) -> tuple[int | float, int | float]:
        """Return the smallest and the largest code: ints for integers, floats for float formats.

        Raises:
            ValueError: no such format.
        """
        return quant_range(dtype, clip_symmetric=qscheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING)

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def n_bits(self) -> int:
        """Bits of one code."""
        return self.get_n_bits_from_dtype(self.dtype)

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def target_dtype(self) -> DtypeField:
        """Dtype of a tensor that holds one code per element."""
        return self.get_target_dtype(self.dtype)

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def _quant_range(self) -> tuple[int | float, int | float]:
        return self.get_quant_range(self.dtype, self.qscheme)

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def quant_min(self) -> int | float:
        """Smallest code."""
        return self._quant_range[0]

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def quant_max(self) -> int | float:
        """Largest code."""
        return self._quant_range[1]


def _schemes_of(dtype: torch.dtype) -> list[QuantizationScheme]:
    """Return the schemes that a format can have."""
    if dtype.is_floating_point:
        return [QuantizationScheme.SYMMETRIC]
    clipping = QuantizationScheme.SYMMETRIC_WITH_CLIPPING
    return [scheme for scheme in QuantizationScheme if scheme != clipping or dtype != dtype_named("int1")]


def _as_computed(key: str, value: Any) -> Any:
    """Return what a dump holds for a computed field as the field's own type."""
    if key == "target_dtype" and isinstance(value, str):
        return dtype_named(value)
    return tuple(value) if isinstance(value, list) else value


def _bits(dtype: torch.dtype) -> int:
    try:
        return format_of(dtype).bits
    except ValueError:
        return dtype.itemsize * 8


def _is_finite(number: float) -> bool:
    """Return whether a float can hold ``number``, or it is NaN; integers can be too large."""
    try:
        return not math.isinf(number)
    except OverflowError:
        return False


def _hashable(value: Any) -> Any:
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    return value


def default_weight_quantization_spec() -> QuantizationSpec:
    """Return int8, symmetric, one scale per index of dimension 0, range of the weight as it is."""
    return QuantizationSpec(granularity=PerChannelGranularity(axis=0), qparam_calculator_cls="static")


def default_activation_quantization_spec() -> QuantizationSpec:
    """Return int8, symmetric, one scale for the tensor, moving average of the range."""
    return QuantizationSpec(granularity=PerTensorGranularity(), qparam_calculator_cls="moving_average")
