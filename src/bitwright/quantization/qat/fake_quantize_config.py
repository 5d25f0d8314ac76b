"""torchao's fake-quantize configs: the same arguments, checks and properties, and the way to specs and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from bitwright import _torchao
from bitwright.config.spec import CompressionTargetTensor
from bitwright.formats import format_of
from bitwright.quantization.spec import (
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationComponentFactory,
    QuantizationFormulation,
    QuantizationScheme,
    QuantizationSpec,
    StatelessQParamsCalculatorBase,
)
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from bitwright.quantization.spec.learned import LearnedQParamsCalculatorBase

from ._torchao_terms import (
    integer_dtype,
    own_granularity,
    read_granularity,
    read_mapping_type,
    read_zero_point_domain,
    torchao_granularity,
)
from .intx import Float8QuantizationSpec, IntxQuantizationSpec

__all__ = ["FakeQuantizeConfig", "FakeQuantizeConfigBase", "Float8FakeQuantizeConfig", "IntxFakeQuantizeConfig"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FIELDS = (
    "dtype",
    "granularity",
    "mapping_type",
    "scale_precision",
    "zero_point_precision",
    "zero_point_domain",
    "is_dynamic",
    "range_learning",
    "eps",
)
_READ: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "dtype": integer_dtype,
        "granularity": partial(read_granularity, group_size=None),
        "mapping_type": partial(read_mapping_type, is_symmetric=None),
        "zero_point_domain": read_zero_point_domain,
    }
)
_FLOAT8_FIELDS = ("dtype", "granularity", "hp_value_lb", "hp_value_ub")


class FakeQuantizeConfigBase:
    """Base of fake-quantize configs; two of one kind are equal if their arguments are."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FakeQuantizeConfigBase) or self._fields != other._fields:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self._fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"

    def to_spec(self) -> QuantizationSpec:
        """Return the spec with the same numbers."""
        raise NotImplementedError

    def target(self) -> CompressionTargetTensor:
        """Return what the granularity is meant for: per token means activations, anything else weights."""
        raise NotImplementedError

    def build(self, target: CompressionTargetTensor | str | None = None) -> FakeQuantizeImplBase:
        """Return a simulator that fake-quantizes as torchao's quantizer for this config does.

        A tensor whose size is no multiple of the group size, which torchao fails on with an ``AssertionError``, passes
        through in float, and a warning in the log says so.

        Args:
            target: ``"weight"`` or ``"activation"``; None for what ``target()`` says.
        """
        chosen = self.target() if target is None else CompressionTargetTensor(target)
        return QuantizationComponentFactory.create_fake_quantizer(self.to_spec(), chosen)


class FakeQuantizeConfig(FakeQuantizeConfigBase):
    """How to fake-quantize to an integer; interchangeable with torchao's ``IntxFakeQuantizeConfig``.

    Args:
        dtype: ``torch.int1`` to ``int8``, ``uint1`` to ``uint8``, or torchao's ``TorchAODType``.
        granularity: ``"per_token"``, ``"per_channel"``, ``"per_group"`` (with ``group_size``); torchao's
            ``PerToken()``, ``PerAxis(0)``, ``PerGroup(n)``; or Bitwright's own granularities that say the same.
        mapping_type: torchao's ``MappingType``, or its name; symmetric if neither it nor ``is_symmetric`` is given.
        scale_precision: dtype of scales; None for that of the tensor. Learned scales and zero points are kept in
            float32, in which small steps of an optimizer are not lost, and rounded in each forward.
        zero_point_precision: dtype of zero points. Zero points of an asymmetric per-channel or per-group config are
            floating point numbers first, and an integer precision cuts off their fraction, as in torchao.
        zero_point_domain: torchao's ``ZeroPointDomain``, or its name: ``INT``, ``FLOAT`` or ``NONE``. Without effect
            per token, where zero points are integers.
        is_dynamic: parameters from each tensor; False takes those of the first one.
        range_learning: scale and zero point are parameters, which begin with those of the first tensor.
        eps: smallest scale; None for 1e-6 (asymmetric per channel or group) or the smallest normal number.
        group_size: size of a group, in place of ``granularity``.
        is_symmetric: in place of ``mapping_type``.

    Raises:
        ValueError: an unknown value, or two arguments that do not go together; both are named.

    Attributes are those of torchao: ``granularity``, ``mapping_type`` and ``zero_point_domain`` hold torchao's objects.
    """

    _fields = _FIELDS

    dtype: torch.dtype
    granularity: Any
    mapping_type: Any
    scale_precision: torch.dtype | None
    zero_point_precision: torch.dtype
    zero_point_domain: Any
    is_dynamic: bool
    range_learning: bool
    eps: float | None

    def __init__(
        self,
        dtype: Any,
        granularity: Any = None,
        mapping_type: Any = None,
        scale_precision: torch.dtype | None = torch.float32,
        zero_point_precision: torch.dtype = torch.int32,
        zero_point_domain: Any = "INT",
        is_dynamic: bool = True,
        range_learning: bool = False,
        eps: float | None = None,
        *,
        group_size: int | None = None,
        is_symmetric: bool | None = None,
    ) -> None:
        self.dtype = dtype
        self.granularity = read_granularity(granularity, group_size)
        self.mapping_type = read_mapping_type(mapping_type, is_symmetric)
        self.scale_precision = scale_precision
        self.zero_point_precision = zero_point_precision
        self.zero_point_domain = zero_point_domain
        self.is_dynamic = is_dynamic
        self.range_learning = range_learning
        self.eps = eps
        self._check()

    def _check(self) -> None:
        if self.is_dynamic and self.range_learning:
            raise ValueError(
                "`is_dynamic` is not compatible with `range_learning`: a range that is learned is not taken from each "
                "tensor. Set is_dynamic=False."
            )
        scale = self.scale_precision
        if scale is not None and not (isinstance(scale, torch.dtype) and scale.is_floating_point):
            raise ValueError(f"`scale_precision` must be a floating point torch.dtype or None, got {scale!r}.")
        if not isinstance(self.zero_point_precision, torch.dtype):
            raise ValueError(f"`zero_point_precision` must be a torch.dtype, got {self.zero_point_precision!r}.")
        per_token = type(self.granularity).__name__ == "PerToken"
        if self.zero_point_domain.name == "NONE" and not self.is_symmetric and not per_token:
            raise ValueError(
                "`zero_point_domain` NONE conflicts with `mapping_type` ASYMMETRIC, whose range needs a zero point. "
                "Use ZeroPointDomain.FLOAT or INT, or is_symmetric=True."
            )
        if self.range_learning and not self.is_symmetric and not self.zero_point_precision.is_floating_point:
            raise ValueError(
                f"`range_learning` with `mapping_type` ASYMMETRIC learns the zero point, which `zero_point_precision` "
                f"{self.zero_point_precision} does not allow. Set zero_point_precision=torch.float32."
            )
        if self.eps is not None and not (isinstance(self.eps, float | int) and self.eps > 0):
            raise ValueError(f"`eps` must be a positive number or None, got {self.eps!r}.")

    @property
    def group_size(self) -> int:
        """Size of a group.

        Raises:
            ValueError: the granularity is not per group.
        """
        if type(self.granularity).__name__ != "PerGroup":
            raise ValueError(f"`group_size` is undefined for {self.granularity} granularity")
        size: int = self.granularity.group_size
        return size

    @property
    def is_symmetric(self) -> bool:
        """Whether the mapping is symmetric."""
        return bool(self.mapping_type.name == "SYMMETRIC")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, in any spelling; ``group_size`` and ``is_symmetric`` set granularity and mapping type.

        Raises:
            ValueError: an unknown value.
        """
        if name == "group_size":
            name, value = "granularity", read_granularity(None, value)
        elif name == "is_symmetric":
            name, value = "mapping_type", read_mapping_type(None, value)
        elif name in _READ:
            value = _READ[name](value)
        super().__setattr__(name, value)

    def target(self) -> CompressionTargetTensor:
        """Return ACTIVATION for per token, WEIGHT for anything else."""
        per_token = type(self.granularity).__name__ == "PerToken"
        return CompressionTargetTensor.ACTIVATION if per_token else CompressionTargetTensor.WEIGHT

    def to_spec(self) -> IntxQuantizationSpec:
        """Return the spec with the same numbers, for use in a ``QuantizerConfig``."""
        self._check()
        return IntxQuantizationSpec(
            dtype=self.dtype,
            qscheme="symmetric" if self.is_symmetric else "asymmetric",
            granularity=own_granularity(self.granularity),
            scale_precision=self.scale_precision,
            zero_point_precision=self.zero_point_precision,
            zero_point_domain=self.zero_point_domain.name,
            is_dynamic=self.is_dynamic,
            range_learning=self.range_learning,
            eps=self.eps,
        )

    @classmethod
    def from_spec(cls, spec: QuantizationSpec) -> FakeQuantizeConfig:
        """Return the config for a spec.

        A spec that ``to_spec`` made comes back equal. Of another spec, dtype, scheme, granularity, formulation
        (``minval`` becomes the FLOAT domain) and the kind of calculator carry over.

        Raises:
            ValueError: the spec says something that the config cannot; the field is named.
        """
        if isinstance(spec, IntxQuantizationSpec):
            names = (
                "scale_precision",
                "zero_point_precision",
                "zero_point_domain",
                "is_dynamic",
                "range_learning",
                "eps",
            )
            extra: dict[str, Any] = {name: getattr(spec, name) for name in names}
        else:
            extra = _plain_extra(spec)
        granularity = torchao_granularity(spec.granularity)
        return cls(spec.dtype, granularity, is_symmetric=spec.qscheme != QuantizationScheme.ASYMMETRIC, **extra)

    @classmethod
    def from_torchao(cls, config: Any) -> FakeQuantizeConfig:
        """Return the config that a torchao ``IntxFakeQuantizeConfig`` (or the older ``FakeQuantizeConfig``) is.

        Raises:
            TypeError: ``config`` is something else.
        """
        _require_fields(config, _FIELDS, "IntxFakeQuantizeConfig")
        return cls(**{name: getattr(config, name) for name in _FIELDS})

    def to_torchao(self) -> Any:
        """Return torchao's ``IntxFakeQuantizeConfig`` with the same attributes."""
        return _torchao.qat_config_class("IntxFakeQuantizeConfig")(**{name: getattr(self, name) for name in _FIELDS})


IntxFakeQuantizeConfig = FakeQuantizeConfig


class Float8FakeQuantizeConfig(FakeQuantizeConfigBase):
    """How to fake-quantize to FP8, dynamically; interchangeable with torchao's config of the same name.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``float8_e5m2``.
        granularity: torchao's ``PerRow()`` or ``PerTensor()``, ``"per_row"`` or ``"per_tensor"``; None for per row.
        hp_value_lb: smallest value that a block's largest magnitude is taken for.
        hp_value_ub: largest such value.

    Raises:
        ValueError: an unknown value, or ``hp_value_lb`` above ``hp_value_ub``.
    """

    _fields = _FLOAT8_FIELDS

    def __init__(
        self,
        dtype: torch.dtype = torch.float8_e4m3fn,
        granularity: Any = None,
        hp_value_lb: float | None = None,
        hp_value_ub: float | None = None,
    ) -> None:
        if dtype not in _FP8:
            raise ValueError(f"`dtype` {dtype} is not a float8 dtype of this config: choose from {list(_FP8)}")
        if isinstance(granularity, type):
            raise ValueError(
                "Please specify the granularity object instead of the class, e.g. PerRow() instead of PerRow"
            )
        names = {None: "PerRow", "per_row": "PerRow", "per_tensor": "PerTensor"}
        kind = names.get(granularity) if granularity is None or isinstance(granularity, str) else None
        granularity = granularity if kind is None else _torchao.granularity(kind)
        if type(granularity).__name__ not in ("PerRow", "PerTensor"):
            raise ValueError(f"Expected PerRow or PerTensor granularity, got {granularity!r}")
        if hp_value_lb is not None and hp_value_ub is not None and hp_value_lb > hp_value_ub:
            raise ValueError(f"`hp_value_lb` ({hp_value_lb!r}) must not be above `hp_value_ub` ({hp_value_ub!r}).")
        self.dtype, self.granularity = dtype, granularity
        self.hp_value_lb, self.hp_value_ub = hp_value_lb, hp_value_ub

    def target(self) -> CompressionTargetTensor:
        """Return ACTIVATION: parameters are taken from each tensor."""
        return CompressionTargetTensor.ACTIVATION

    def to_spec(self) -> Float8QuantizationSpec:
        """Return the spec with the same numbers."""
        row = type(self.granularity).__name__ == "PerRow"
        if row and getattr(self.granularity, "dim", -1) != -1:
            raise ValueError(f"Only rows along the last dimension are supported, got {self.granularity!r}.")
        return Float8QuantizationSpec(
            dtype=self.dtype,
            granularity=PerTokenGranularity() if row else PerTensorGranularity(),
            hp_value_lb=self.hp_value_lb,
            hp_value_ub=self.hp_value_ub,
        )

    @classmethod
    def from_spec(cls, spec: QuantizationSpec) -> Float8FakeQuantizeConfig:
        """Return the config for a spec with an FP8 dtype.

        Raises:
            ValueError: dtype or granularity is not of this kind.
        """
        kind = {PerTokenGranularity: "per_row", PerTensorGranularity: "per_tensor"}.get(type(spec.granularity))
        if kind is None:
            raise ValueError(f"granularity {spec.granularity!r} is neither per token (row) nor per tensor.")
        bounds = {name: getattr(spec, name, None) for name in ("hp_value_lb", "hp_value_ub")}
        return cls(spec.dtype, kind, **bounds)

    @classmethod
    def from_torchao(cls, config: Any) -> Float8FakeQuantizeConfig:
        """Return the config that torchao's ``Float8FakeQuantizeConfig`` is.

        Raises:
            TypeError: ``config`` is something else.
        """
        _require_fields(config, _FLOAT8_FIELDS, "Float8FakeQuantizeConfig")
        return cls(config.dtype, config.granularity, config.hp_value_lb, config.hp_value_ub)

    def to_torchao(self) -> Any:
        """Return torchao's ``Float8FakeQuantizeConfig`` with the same attributes."""
        made = _torchao.qat_config_class("Float8FakeQuantizeConfig")
        return made(self.dtype, self.granularity, self.hp_value_lb, self.hp_value_ub)


def _plain_extra(spec: QuantizationSpec) -> dict[str, Any]:
    """Return the arguments that a plain spec implies."""
    if format_of(spec.dtype).kind != "int":
        raise ValueError(f"dtype {spec.dtype} is not an integer; use Float8FakeQuantizeConfig.from_spec for FP8.")
    if spec.float_range != [None, None]:
        raise ValueError(f"float_range {spec.float_range!r} has no counterpart in a FakeQuantizeConfig.")
    if spec.qscheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING:
        raise ValueError(
            "qscheme 'symmetric_with_clipping' has no counterpart in a FakeQuantizeConfig; use 'symmetric'."
        )
    learned = issubclass(spec.qparam_calculator_cls, LearnedQParamsCalculatorBase) or hasattr(
        spec.fake_quantize_cls, "calculator_cls"
    )
    affine = spec.qscheme == QuantizationScheme.ASYMMETRIC
    per_token = isinstance(spec.granularity, PerTokenGranularity)
    exact = affine and (learned or spec.qformulation == QuantizationFormulation.MINVAL)
    dynamic = issubclass(spec.qparam_calculator_cls, StatelessQParamsCalculatorBase) or not per_token
    return {
        "zero_point_domain": "FLOAT" if exact and not per_token else "INT",
        "zero_point_precision": torch.float32 if exact else torch.int32,
        "is_dynamic": dynamic and not learned,
        "range_learning": learned,
        "eps": torch.finfo(torch.float32).eps,
    }


def _require_fields(config: Any, names: Iterable[str], kind: str) -> None:
    """Raise a ``TypeError`` where ``config`` is not torchao's class ``kind``, by the attributes that it lacks."""
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise TypeError(f"Expected torchao's {kind}, got {type(config).__name__} without {', '.join(missing)}.")
