"""torchao's fake quantization as simulators, under the registry keys ``intx`` and ``fp8_row``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import (
    DynamicQParamsCalculator,
    PerTokenGranularity,
    QParamsCalculatorBase,
    QuantizationScheme,
    QuantizationSpec,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
)
from bitwright.quantization.spec._calculator_base import QParams
from bitwright.quantization.spec._fields import DtypeField, RegisteredClass
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from bitwright.quantization.spec.learned import LearnedQParamsCalculatorBase

from .intx_arithmetic import Domain, choose_intx, decode_intx, encode_intx, fake_quantize_float8, fake_quantize_intx

__all__ = ["Float8QuantizationSpec", "IntxFakeQuantize", "IntxQuantizationSpec"]

_SMALLEST_LEARNED_SCALE = 1e-9


class IntxQuantizationSpec(QuantizationSpec):
    """A ``QuantizationSpec`` with the numbers of torchao's ``IntxFakeQuantizer``; see :class:`FakeQuantizeConfig`.

    Attributes:
        scale_precision: dtype of scales; None for that of the tensor.
        zero_point_precision: dtype of zero points.
        zero_point_domain: ``"INT"``, ``"FLOAT"`` or ``"NONE"``.
        is_dynamic: parameters from each tensor; else from the first one.
        range_learning: learn scale and zero point.
        eps: smallest scale; None for torchao's default.
    """

    fake_quantize_cls: Annotated[Any, RegisteredClass(FakeQuantizeImplBase)] = Field(
        default="intx", validate_default=True
    )
    scale_precision: DtypeField | None = torch.float32
    zero_point_precision: DtypeField = torch.int32
    zero_point_domain: Literal["INT", "FLOAT", "NONE"] = "INT"
    is_dynamic: bool = True
    range_learning: bool = False
    eps: float | None = None

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        if self.is_dynamic and self.range_learning:
            raise ValueError("`is_dynamic` is not compatible with `range_learning`: set is_dynamic=False.")
        return self


class Float8QuantizationSpec(QuantizationSpec):
    """A ``QuantizationSpec`` with the numbers of torchao's ``Float8FakeQuantizer``.

    Attributes:
        hp_value_lb: smallest value that a block's largest magnitude is taken for.
        hp_value_ub: largest such value.
    """

    fake_quantize_cls: Annotated[Any, RegisteredClass(FakeQuantizeImplBase)] = Field(
        default="fp8_row", validate_default=True
    )
    hp_value_lb: float | None = None
    hp_value_ub: float | None = None


class _IntxParameters(QParamsCalculatorBase):
    """The formulas, in front of a stateful or stateless calculator."""

    def __init__(
        self,
        *,
        scale_precision: torch.dtype | None = torch.float32,
        zero_point_precision: torch.dtype = torch.int32,
        zero_point_domain: Domain = "INT",
        eps: float | None = None,
        is_dynamic: bool = True,
        range_learning: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision
        self.zero_point_domain, self.eps, self.is_dynamic = zero_point_domain, eps, is_dynamic

    @property
    def _float_domain(self) -> bool:
        return not isinstance(self.granularity, PerTokenGranularity)

    def _get_min_and_max_val(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self.range_calculator(tensor)
        return low, high

    def _compute_scale_zero_point_minval(
        self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor
    ) -> QParams:
        bits = int(self.quant_max - self.quant_min).bit_length()
        scale, zero_point = choose_intx(
            min_val,
            max_val,
            bits=bits,
            bounds=(int(self.quant_min), int(self.quant_max)),
            symmetric=self.qscheme != QuantizationScheme.ASYMMETRIC,
            float_domain=self._float_domain,
            eps=self.eps,
            scale_precision=self.scale_precision or min_val.dtype,
            zero_point_precision=self.zero_point_precision,
        )
        return scale, None if self.zero_point_domain == "NONE" and self._float_domain else zero_point, None


class _IntxStatefulQParamsCalculator(_IntxParameters, StatefulQParamsCalculatorBase):
    """Parameters of the latest tensor, or of the first one where they are static."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._restart = False
        self._buffers["minval"] = None
        if self.zero_point_domain == "NONE" and self._float_domain:
            self._buffers["zero_point"] = None
        else:
            self._buffers["zero_point"] = torch.empty(0, dtype=self.zero_point_precision, device="cpu")

    def forward(self, tensor: torch.Tensor) -> QParams:
        """Return ``(scale, zero_point, None)``."""
        if self._initialized and not self.is_dynamic and not self._restart:
            return self.get_qparams()
        self._restart = False
        qparams: QParams = super().forward(tensor)
        return qparams

    def reset_statistics(self) -> None:
        """Find static parameters anew with the next tensor."""
        self._restart = True


class _IntxDynamicQParamsCalculator(_IntxParameters, StatelessQParamsCalculatorBase):
    """Parameters of each tensor, never stored."""


class _IntxLearnedQParamsCalculator(_IntxParameters, LearnedQParamsCalculatorBase):
    """Scale, and with an asymmetric scheme the zero point, as parameters."""

    fake_quantize_key = "intx"
    _MARGIN_OF_ZEROS = 0.0  # as torchao has it

    def __init__(self, **kwargs: Any) -> None:
        self._LEARNED = ("scale",) if kwargs["qscheme"] != QuantizationScheme.ASYMMETRIC else ("scale", "zero_point")
        super().__init__(**kwargs)
        if self.zero_point_domain == "NONE" and self._float_domain:
            self._buffers["zero_point"] = None

    def _initial_values(self, low: torch.Tensor, high: torch.Tensor, mean_abs: torch.Tensor) -> dict[str, torch.Tensor]:
        # torchao computes in the dtype of the tensor, to which the extremes belong.
        low, high = (ends.to(self._compute_dtype_for_export or ends.dtype) for ends in (low, high))
        scale, zero_point, _ = self._compute_scale_zero_point_minval(low, low, high)
        values = {"scale": scale.clamp(min=_SMALLEST_LEARNED_SCALE)}
        if zero_point is not None:
            kept = zero_point.float().round().clamp(self.quant_min, self.quant_max)
            values["zero_point"] = kept.to(zero_point.dtype)
        return values

    def _derive(self) -> QParams:
        return self.scale.detach(), None if self.zero_point is None else self.zero_point.detach(), None


@FakeQuantizeImplBase.register("intx")
class IntxFakeQuantize(FakeQuantizeImplBase):
    """Fake quantization with the numbers and gradients of torchao's ``IntxFakeQuantizer``.

    Args:
        qparams_calculator: replaced by one with torchao's formulas, with the same settings and range calculator.
        scale_precision: see :class:`IntxQuantizationSpec`, also for the following.
        zero_point_precision: dtype of zero points.
        zero_point_domain: ``"INT"``, ``"FLOAT"`` or ``"NONE"``.
        is_dynamic: parameters from each tensor.
        range_learning: learn scale and zero point.
        eps: smallest scale.
        **kwargs: see ``FakeQuantizeImplBase``.
    """

    def __init__(
        self,
        *,
        qparams_calculator: QParamsCalculatorBase,
        scale_precision: torch.dtype | None = torch.float32,
        zero_point_precision: torch.dtype = torch.int32,
        zero_point_domain: Domain = "INT",
        is_dynamic: bool = True,
        range_learning: bool = False,
        eps: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(qparams_calculator, _IntxParameters):
            given = qparams_calculator
            weight = given.quantization_target != CompressionTargetTensor.ACTIVATION
            cls: type[_IntxParameters] = _IntxStatefulQParamsCalculator
            if range_learning:
                cls = _IntxLearnedQParamsCalculator
            elif is_dynamic and not weight:
                cls = _IntxDynamicQParamsCalculator
            qparams_calculator = cls(
                dtype=given.dtype,
                qscheme=given.qscheme,
                granularity=given.granularity,
                target_dtype=given.target_dtype,
                quant_min=given.quant_min,
                quant_max=given.quant_max,
                range_calculator=given.range_calculator,
                float_range=given.float_range,
                scale_precision=scale_precision,
                zero_point_precision=zero_point_precision,
                zero_point_domain=zero_point_domain,
                eps=eps,
                is_dynamic=is_dynamic,
            )
        super().__init__(qparams_calculator=qparams_calculator, **kwargs)
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision
        # torchao's per-token form has integer zero points in every domain.
        self.zero_point_domain: Domain = (
            "INT" if isinstance(self.granularity, PerTokenGranularity) else zero_point_domain
        )

    @property
    def _bounds(self) -> tuple[int, int]:
        return int(self.quant_min), int(self.quant_max)

    def _typed(
        self, scale: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the parameters in their precisions, for a tensor of ``dtype``."""
        if isinstance(self.qparams_calculator, LearnedQParamsCalculatorBase):
            calculator: Any = self.qparams_calculator  # the parameters themselves, which get a gradient
            scale, zero_point = calculator.scale, calculator.zero_point
        zero_point = None if zero_point is None else zero_point.to(self.zero_point_precision)
        return scale.to(self.scale_precision or dtype), zero_point

    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        scale, zero_point = self._typed(scale, zero_point, tensor.dtype)
        block_size = self._block_size(tensor.shape)
        return fake_quantize_intx(tensor, scale, zero_point, block_size, self._bounds, self.zero_point_domain)

    _fused_fake_quant_dequant = _fake_quantize

    def quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> torch.Tensor:
        """Return the codes of ``tensor``; see the base class."""
        scale, zero_point = self._typed(scale, zero_point, tensor.dtype)
        block_size = self._block_size(tensor.shape)
        codes = encode_intx(tensor, scale, zero_point, block_size, self._bounds, self.zero_point_domain).detach()
        return codes.to(self.target_dtype if cast_to_target_dtype else tensor.dtype)

    def dequantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return the values that codes stand for; see the base class."""
        scale, zero_point = self._typed(scale, zero_point, output_dtype)
        block_size = self._block_size(tensor.shape)
        return decode_intx(
            tensor.to(torch.float32), scale, zero_point, block_size, self._bounds, self.zero_point_domain, output_dtype
        ).detach()


@FakeQuantizeImplBase.register("fp8_row")
class Float8FakeQuantize(FakeQuantizeImplBase):
    """Dynamic FP8 fake quantization with the numbers of torchao's ``Float8FakeQuantizer``.

    The gradient is that of the definition, through the scale too; torchao rounds it to FP8.

    Args:
        hp_value_lb: see :class:`Float8QuantizationSpec`.
        hp_value_ub: likewise.
        **kwargs: see ``FakeQuantizeImplBase``.
    """

    def __init__(
        self,
        *,
        qparams_calculator: QParamsCalculatorBase,
        hp_value_lb: float | None = None,
        hp_value_ub: float | None = None,
        **kwargs: Any,
    ) -> None:
        given = qparams_calculator
        if given.quantization_target == CompressionTargetTensor.ACTIVATION and not isinstance(
            given, StatelessQParamsCalculatorBase
        ):
            qparams_calculator = DynamicQParamsCalculator(
                dtype=given.dtype,
                qscheme=given.qscheme,
                granularity=given.granularity,
                target_dtype=given.target_dtype,
                quant_min=given.quant_min,
                quant_max=given.quant_max,
                range_calculator=given.range_calculator,
                float_range=given.float_range,
            )
        super().__init__(qparams_calculator=qparams_calculator, **kwargs)
        self.hp_value_lb, self.hp_value_ub = hp_value_lb, hp_value_ub

    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        block_size = self._block_size(tensor.shape)
        return fake_quantize_float8(tensor, block_size, self.dtype, self.hp_value_lb, self.hp_value_ub)

    _fused_fake_quant_dequant = _fake_quantize

    def quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> torch.Tensor:
        """Return the FP8 values of ``tensor / scale``; see the base class."""
        largest = torch.finfo(self.dtype).max
        scaled = tensor.detach().float() / self._spread(scale, tensor)
        codes = scaled.clamp(-largest, largest).to(self.dtype)
        return codes.to(self.target_dtype if cast_to_target_dtype else tensor.dtype)

    def dequantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return ``tensor * scale``; see the base class."""
        return (tensor.float() * self._spread(scale, tensor)).to(output_dtype)

    def _spread(self, scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        for dim, block in enumerate(self._block_size(tensor.shape)):
            repeats = tensor.shape[dim] // scale.shape[dim]
            scale = scale.repeat_interleave(repeats, dim) if block > 1 else scale
        return scale
