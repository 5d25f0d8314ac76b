"""Builds range calculators, qparams calculators and fake quantizers from specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitwright._utils.spec_utils import PartialConstructor
from bitwright.config.spec import CompressionComponentFactoryBase, CompressionTargetTensor

from .fake_quantize import FakeQuantizeImplBase
from .learned import LearnedQParamsCalculatorBase
from .qparams_calculator import (
    AccumulatedQParamsCalculator,
    DynamicQParamsCalculator,
    MovingAverageQParamsCalculator,
    QParamsCalculatorBase,
    StaticQParamsCalculator,
    _DefaultQParamsCalculator,
)
from .range_calculator import RangeCalculatorBase

if TYPE_CHECKING:
    from .spec import QuantizationSpec

__all__ = ["QuantizationComponentFactory"]


class QuantizationComponentFactory(CompressionComponentFactoryBase):
    """Builds what a ``QuantizationSpec`` describes.

    Fields that a subclass of the spec adds are handed to all three constructors as keywords.
    """

    @classmethod
    def create_range_calculator(
        cls,
        spec: QuantizationSpec,
        quantization_target: CompressionTargetTensor | str = CompressionTargetTensor.WEIGHT,
    ) -> RangeCalculatorBase:
        """Return a new range calculator."""
        whole = {"spec": spec} if spec.range_calculator_cls.needs_spec else {}
        calculator: RangeCalculatorBase = spec.range_calculator_cls(
            granularity=spec.granularity,
            quantization_target=CompressionTargetTensor(quantization_target),
            **{**spec.get_extra_args(), **whole},  # a field that is itself named "spec" is in the whole one
        )
        return calculator

    @classmethod
    def create_qparams_calculator(
        cls, spec: QuantizationSpec, quantization_target: CompressionTargetTensor | str
    ) -> QParamsCalculatorBase:
        """Return a new qparams calculator with its range calculator.

        Raises:
            ValueError: a dynamic calculator for anything but an activation, or an unknown target.
        """
        target = CompressionTargetTensor(quantization_target)
        calculator_cls = _resolve_calculator(spec.qparam_calculator_cls, target)
        by_default = spec.qparam_calculator_cls is _DefaultQParamsCalculator
        if by_default and target == CompressionTargetTensor.ACTIVATION and spec.range_calculator_cls.accumulates:
            calculator_cls = AccumulatedQParamsCalculator
        optional = {} if spec.averaging_constant is None else {"averaging_constant": spec.averaging_constant}
        calculator: QParamsCalculatorBase = calculator_cls(
            dtype=spec.dtype,
            qscheme=spec.qscheme,
            granularity=spec.granularity,
            target_dtype=spec.target_dtype,
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            range_calculator=cls.create_range_calculator(spec, target),
            float_range=list(spec.float_range),
            scale_dtype=spec.scale_dtype,
            **{**optional, **spec.get_extra_args()},
        )
        return calculator

    @classmethod
    def create_fake_quantizer(
        cls, spec: QuantizationSpec, quantization_target: CompressionTargetTensor | str
    ) -> FakeQuantizeImplBase:
        """Return a new fake quantizer with its calculators.

        Raises:
            ValueError: as ``create_qparams_calculator``.
        """
        return cls.create_fake_quantizer_partial(spec, quantization_target)()

    @classmethod
    def create_fake_quantizer_partial(
        cls, spec: QuantizationSpec, quantization_target: CompressionTargetTensor | str
    ) -> PartialConstructor[FakeQuantizeImplBase]:
        """Return a constructor of fake quantizers, each of which gets calculators of its own."""
        target = CompressionTargetTensor(quantization_target)
        constructor: PartialConstructor[FakeQuantizeImplBase] = _resolve_fake_quantizer(spec).with_args(
            dtype=spec.dtype,
            qformulation=spec.qformulation,
            granularity=spec.granularity,
            target_dtype=spec.target_dtype,
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            n_bits=spec.n_bits,
            **spec.get_extra_args(),
        )
        return constructor.with_callable_args(qparams_calculator=lambda: cls.create_qparams_calculator(spec, target))

    @classmethod
    def construct(  # type: ignore[override]
        cls, spec: QuantizationSpec | None, target: CompressionTargetTensor
    ) -> FakeQuantizeImplBase | None:
        """Return a new fake quantizer; None for a None spec."""
        return None if spec is None else cls.create_fake_quantizer(spec, target)

    @classmethod
    def construct_partial(  # type: ignore[override]
        cls, spec: QuantizationSpec | None, target: CompressionTargetTensor
    ) -> PartialConstructor[FakeQuantizeImplBase] | None:
        """Return a constructor of fake quantizers; None for a None spec."""
        return None if spec is None else cls.create_fake_quantizer_partial(spec, target)

    @classmethod
    def reconstruct_partial_qparams_calculator(
        cls, partial_ctr: PartialConstructor[FakeQuantizeImplBase], **kwargs: Any
    ) -> PartialConstructor[FakeQuantizeImplBase]:
        """Return a constructor whose fake quantizers have attributes of their qparams calculator replaced.

        Args:
            partial_ctr: as ``create_fake_quantizer_partial`` returns it; left as it is.
            **kwargs: attribute names and values, for example ``float_range=(0.0, 1.0)``. A granularity is that of the
                fake quantizers too.

        Raises:
            AttributeError: on construction, when the calculator has no such attribute.
        """
        build = partial_ctr.callable_args["qparams_calculator"]

        def rebuilt() -> QParamsCalculatorBase:
            calculator: QParamsCalculatorBase = build()
            for name, value in kwargs.items():
                if not hasattr(calculator, name):
                    raise AttributeError(
                        f"Cannot override unknown attribute {name!r} on {type(calculator).__name__}; expected an "
                        "existing calculator attribute."
                    )
                setattr(calculator, name, value)
            return calculator

        shared = {name: value for name, value in kwargs.items() if name == "granularity"}
        return partial_ctr.with_args(**shared).with_callable_args(qparams_calculator=rebuilt)

    #: Later releases of the peer library use this name.
    update_partial_qparams_calculator = reconstruct_partial_qparams_calculator


def _resolve_calculator(
    calculator_cls: type[QParamsCalculatorBase], target: CompressionTargetTensor
) -> type[QParamsCalculatorBase]:
    if calculator_cls is DynamicQParamsCalculator and target != CompressionTargetTensor.ACTIVATION:
        raise ValueError(
            f"DynamicQParamsCalculator is only supported for activations, got the target {target.value!r}. Use "
            "'static' (or 'default') for weights, which do not change at run time."
        )
    if calculator_cls is not _DefaultQParamsCalculator:
        return calculator_cls
    if target == CompressionTargetTensor.ACTIVATION:
        return MovingAverageQParamsCalculator
    return StaticQParamsCalculator


def _resolve_fake_quantizer(spec: QuantizationSpec) -> type[FakeQuantizeImplBase]:
    """Return the class that trains a learned calculator where the spec leaves the choice open."""
    calculator_cls, chosen = spec.qparam_calculator_cls, spec.fake_quantize_cls
    if issubclass(calculator_cls, LearnedQParamsCalculatorBase) and FakeQuantizeImplBase.get_key(chosen) == "default":
        chosen = FakeQuantizeImplBase.get_class(calculator_cls.fake_quantize_key)
    found: type[FakeQuantizeImplBase] = chosen
    return found
