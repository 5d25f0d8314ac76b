"""The spec of palettization: how one weight is replaced by indices into palettes."""

from __future__ import annotations

from numbers import Real
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PositiveInt,
    PrivateAttr,
    field_serializer,
    field_validator,
    model_validator,
)

from bitwright.common import CompressionType
from bitwright.config.spec import CompressionSpec
from bitwright.quantization.spec import PerTensorGranularity as _QuantizePerTensor
from bitwright.quantization.spec import QuantizationFormulation, QuantizationSpec

from .granularity import PalettizationGranularity, PerTensorGranularity
from .training_strategy import DefaultTrainingSpec, TrainingStrategySpec

__all__ = ["PalettizationSpec", "default_weight_palettization_spec"]

_SUPPORTED_LUT_DTYPES = {
    torch.int8,
    torch.uint8,
    torch.int4,  # type: ignore[attr-defined]
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


def _whole_number(value: Any) -> Any:
    """Return ``value`` as an int if it is a whole number of another type, such as ``4.0``; a bool is none."""
    if isinstance(value, int) or not isinstance(value, Real):
        return value
    number = float(value)
    return int(number) if number.is_integer() else value


class PalettizationSpec(CompressionSpec):
    """How one weight is palettized. Frozen, hashable, and equal when all fields are.

    Attributes:
        n_bits: bits of an index, 1 to 8; a palette has ``2 ** n_bits`` entries.
        lut_qspec: how the palettes themselves are quantized, None for not: int8, uint8, int4, FP8, with the
            granularity per tensor (which means: for each palette) and the formulation ``"zp"``.
        granularity: which part of a weight has a palette of its own; a granularity or a mapping such as
            ``{"type": "per_grouped_channel", "group_size": 16}``.
        cluster_dim: entries of the weight that one index stands for; neighbours along dimension 0. More than 1 wants
            ``enable_fast_kmeans_mode=False`` in the module's config.
        enable_per_channel_scale: divide each output channel by its largest magnitude before clustering.
        sparsity_detection_threshold: a weight of which at least this share is zero, and not nothing, keeps its zeros:
            palettes are made for the other entries, and what is stored is a mask and their indices. In [0, 1]; None
            leaves it to pruning. Not with ``cluster_dim > 1``.
        training_strategy_spec: how gradients reach the weight in training: ``{"type": "default"}`` (they do not),
            ``"ste"`` (straight through) or ``"dkm"`` (differentiable k-means).

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest), or a bad value.

    Example:
        >>> spec = PalettizationSpec(n_bits=2, granularity={"type": "per_grouped_channel", "group_size": 8})
        >>> spec.describe()
        '2 bit palette per_grouped_channel(None, 8)'
    """

    n_bits: Annotated[int, Field(ge=1, le=8, strict=True), BeforeValidator(_whole_number)] = 4
    lut_qspec: QuantizationSpec | None = None
    granularity: Annotated[
        PalettizationGranularity, BeforeValidator(PalettizationGranularity.maybe_build_from_dict)
    ] = Field(default_factory=PerTensorGranularity)
    cluster_dim: PositiveInt = 1
    enable_per_channel_scale: bool = False
    training_strategy_spec: Annotated[
        TrainingStrategySpec, BeforeValidator(TrainingStrategySpec.maybe_build_from_dict)
    ] = Field(default_factory=DefaultTrainingSpec)
    sparsity_detection_threshold: Annotated[float | None, Field(ge=0.0, le=1.0)] = None

    _compression_type: CompressionType = PrivateAttr(default=CompressionType.PALETTIZATION)

    @model_validator(mode="before")
    @classmethod
    def _take_later_name(cls, data: Any) -> Any:
        """coreai-opt after 0.3 calls the strategy ``training_strategy_config``."""
        if isinstance(data, dict) and "training_strategy_config" in data:
            data = {"training_strategy_spec" if key == "training_strategy_config" else key: data[key] for key in data}
        return data

    @property
    def training_strategy_config(self) -> TrainingStrategySpec:
        """The training strategy, by the name that coreai-opt gives it after 0.3."""
        return self.training_strategy_spec

    @field_validator("lut_qspec", mode="after")
    @classmethod
    def _check_lut(cls, spec: QuantizationSpec | None) -> QuantizationSpec | None:
        if spec is None:
            return None
        if spec.dtype not in _SUPPORTED_LUT_DTYPES:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _SUPPORTED_LUT_DTYPES))
            raise ValueError(f"lut_qspec.dtype must be one of {names}; got {spec.dtype}.")
        if not isinstance(spec.granularity, _QuantizePerTensor):
            raise ValueError(
                f"lut_qspec.granularity must be PerTensorGranularity, got {spec.granularity!r}; each palette gets a "
                "scale of its own."
            )
        if spec.qformulation is QuantizationFormulation.MINVAL:
            raise ValueError("lut_qspec.qformulation=MINVAL is not supported for palettes; use 'zp'.")
        if not spec.dtype.is_floating_point and spec.scale_dtype is not None:
            raise ValueError(f"lut_qspec.scale_dtype must be None for integer tables, got {spec.scale_dtype}.")
        return spec

    @field_serializer("lut_qspec", when_used="json-unless-none")
    def _write_lut(self, spec: QuantizationSpec) -> dict[str, Any]:
        return spec.to_dict()

    def model_dump_preserve_objects(self) -> dict[str, Any]:
        """Return the fields by name, with specs and granularities as objects and the rest as in ``model_dump``."""
        dumped = self.model_dump()
        objects = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: obj if isinstance(obj, BaseModel) else dumped[name] for name, obj in objects.items()}

    def describe(self) -> str:
        """Return the spec in a few words, for tables."""
        words = [f"{self.n_bits} bit palette", self.granularity.describe()]
        words += [f"vectors of {self.cluster_dim}"] if self.cluster_dim > 1 else []
        words += ["channel scale"] if self.enable_per_channel_scale else []
        if self.lut_qspec is not None:
            words.append(f"{str(self.lut_qspec.dtype).removeprefix('torch.')} entries")
        strategy = type(self.training_strategy_spec).registry_key()
        if self.sparsity_detection_threshold is not None:
            words.append(f"zeros kept from {self.sparsity_detection_threshold:.0%}")
        words += [strategy] if strategy != "default" else []
        return " ".join(words)


def default_weight_palettization_spec() -> PalettizationSpec:
    """Return 4 bit, one palette for the weight, scalar, without scale or quantized palette."""
    return PalettizationSpec()
