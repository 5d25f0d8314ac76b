"""The factory, and classes that users write against the public base classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import (
    DynamicQParamsCalculator,
    FakeQuantizeImplBase,
    GlobalMinMaxQParamsCalculator,
    MinMaxRangeCalculator,
    MovingAverageQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationSpec,
    RangeCalculatorBase,
    RunningRangeMixin,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from bitwright.quantization.spec.fake_quantize import _DefaultFakeQuantizeImpl

from .spec_strategies import ACTIVATION, WEIGHT

Factory = QuantizationComponentFactory


@pytest.fixture(autouse=True)
def _clean_registries() -> Iterator[None]:
    bases = (FakeQuantizeImplBase, QParamsCalculatorBase, RangeCalculatorBase)
    before = [dict(base.REGISTRY) for base in bases]
    yield
    for base, entries in zip(bases, before, strict=True):
        for key in [key for key in base.REGISTRY if key not in entries]:
            base.unregister(key)


def test_components_carry_the_specs_values() -> None:
    spec = QuantizationSpec(
        dtype="uint4", qscheme="asymmetric", granularity=PerChannelGranularity(axis=1), float_range=[-1, None]
    )
    quantizer = Factory.create_fake_quantizer(spec, WEIGHT)
    calculator = quantizer.qparams_calculator
    assert type(quantizer) is _DefaultFakeQuantizeImpl
    assert type(calculator) is StaticQParamsCalculator
    assert type(calculator.range_calculator) is MinMaxRangeCalculator
    for part in (quantizer, calculator):
        for name in (
            "dtype",
            "qscheme",
            "granularity",
            "target_dtype",
            "quant_min",
            "quant_max",
            "quantization_target",
        ):
            assert getattr(part, name) == getattr(spec, name, WEIGHT), name
    assert (quantizer.n_bits, quantizer.qformulation) == (4, "zp")
    assert calculator.float_range == [-1.0, None]
    assert Factory.create_range_calculator(spec).granularity == spec.granularity


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("default", "weight", StaticQParamsCalculator),
        ("default", "lut", StaticQParamsCalculator),
        ("default", "activation", MovingAverageQParamsCalculator),
        ("static", "activation", StaticQParamsCalculator),
        ("global_minmax", "weight", GlobalMinMaxQParamsCalculator),
        ("dynamic", "activation", DynamicQParamsCalculator),
    ],
)
def test_calculators_by_name_and_target(name: str, target: str, expected: type) -> None:
    spec = QuantizationSpec(qparam_calculator_cls=name)
    for given in (target, CompressionTargetTensor(target)):
        assert type(Factory.create_qparams_calculator(spec, given)) is expected


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        Factory.create_fake_quantizer(QuantizationSpec(), "bias")


@pytest.mark.parametrize("target", [WEIGHT, CompressionTargetTensor.LUT])
def test_dynamic_is_for_activations(target: Any) -> None:
    with pytest.raises(ValueError, match="only supported for activations, got the target"):
        Factory.create_fake_quantizer(QuantizationSpec(qparam_calculator_cls="dynamic"), target)


def test_no_spec_no_simulator() -> None:
    assert Factory.construct(None, WEIGHT) is None
    assert Factory.construct_partial(None, WEIGHT) is None
    assert Factory.construct(QuantizationSpec(), WEIGHT) is not None
    assert Factory.construct_partial(QuantizationSpec(), WEIGHT)() is not None


def test_objects_of_one_partial_share_nothing() -> None:
    partial = Factory.create_fake_quantizer_partial(QuantizationSpec(), WEIGHT)
    one, other = partial(), partial()
    assert one.qparams_calculator is not other.qparams_calculator
    assert one.qparams_calculator.range_calculator is not other.qparams_calculator.range_calculator
    one(torch.ones(3))
    assert other.qparams_calculator.scale.numel() == 0


def test_partials_take_further_arguments() -> None:
    partial = Factory.create_fake_quantizer_partial(QuantizationSpec(), WEIGHT)
    assert partial.with_args(quant_min=-100)().quant_min == -100
    assert partial(quant_max=100).quant_max == 100
    assert partial().quant_max == 127
    mine = Factory.create_qparams_calculator(QuantizationSpec(), ACTIVATION)
    assert partial.with_args(qparams_calculator=mine)().qparams_calculator is mine
    assert partial.with_callable_args(qparams_calculator=lambda: mine)().qparams_calculator is mine
    assert "dtype=torch.int8" in repr(partial)


@pytest.mark.parametrize(
    "rebuild", [Factory.reconstruct_partial_qparams_calculator, Factory.update_partial_qparams_calculator]
)
def test_attributes_of_the_calculator_can_be_replaced(rebuild: Any) -> None:
    partial = Factory.create_fake_quantizer_partial(QuantizationSpec(), ACTIVATION)
    changed = rebuild(partial, qscheme="asymmetric", float_range=(0.0, 1.0))
    one, other = changed(), changed()
    assert one.qparams_calculator is not other.qparams_calculator
    assert (one.qscheme, one.qparams_calculator.float_range) == ("asymmetric", (0.0, 1.0))
    assert partial().qscheme == "symmetric"
    with pytest.raises(AttributeError, match="unknown attribute 'range_flaot' on MovingAverage"):
        rebuild(partial, range_flaot=1)()


def test_extra_fields_reach_all_three_constructors() -> None:
    seen: dict[str, Any] = {}

    @RangeCalculatorBase.register("extra")
    class Range(MinMaxRangeCalculator):
        def __init__(self, granularity: Any, shrink: float = 1.0, **kwargs: Any) -> None:
            super().__init__(granularity, **kwargs)
            seen["range"] = self.shrink = shrink

        def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            low, high = super()._generate_min_max(x)
            return low * self.shrink, high * self.shrink

    @QParamsCalculatorBase.register("extra")
    class Calculator(MovingAverageQParamsCalculator):
        def __init__(self, averaging_constant: float = 0.9, shrink: float = 1.0, **kwargs: Any) -> None:
            super().__init__(averaging_constant=averaging_constant, **kwargs)
            seen["calculator"] = shrink

    @FakeQuantizeImplBase.register("extra")
    class Simulator(_DefaultFakeQuantizeImpl):
        def __init__(self, dtype: Any, qformulation: Any, *args: Any, shrink: float, **kwargs: Any) -> None:
            super().__init__(dtype, qformulation, *args, **kwargs)
            seen["simulator"] = shrink

    class Spec(QuantizationSpec):
        shrink: float = 0.5
        averaging_constant: float = 0.25

    spec = Spec(range_calculator_cls="extra", qparam_calculator_cls=Calculator, fake_quantize_cls=Simulator)
    quantizer = Factory.create_fake_quantizer(spec, ACTIVATION)
    assert seen == {"range": 0.5, "calculator": 0.5, "simulator": 0.5}
    assert quantizer.qparams_calculator.averaging_constant == 0.25
    quantizer(torch.tensor([-2.0, 2.0]))
    assert float(quantizer.qparams_calculator.running_max) == 1.0
    assert Spec(**spec.model_dump()) == spec


@pytest.mark.parametrize("kind", ["minmax", "mse"])
def test_a_field_may_have_the_name_of_the_whole_spec(kind: str) -> None:
    class Named(QuantizationSpec):
        spec: str = "mine"

    quantizer = Factory.create_fake_quantizer(Named(range_calculator_cls=kind), ACTIVATION)
    assert quantizer(torch.tensor([-1.0, 1.0])).shape == (2,)


def test_simulators_do_not_share_the_range_of_their_spec() -> None:
    spec = QuantizationSpec()
    quantizer = Factory.create_fake_quantizer(spec, ACTIVATION)
    quantizer.qparams_calculator.float_range[1] = 6.0
    assert spec == QuantizationSpec()


@pytest.mark.parametrize("calculator", ["static", "dynamic", "moving_average"])
def test_shapes_that_do_not_fit_are_reported_with_the_tensors_name(calculator: str) -> None:
    spec = QuantizationSpec(qparam_calculator_cls=calculator, granularity=PerChannelGranularity(axis=2))
    quantizer = Factory.create_fake_quantizer(spec, ACTIVATION)
    quantizer.tensor_fqn = "block.linear.input"
    for _ in range(3):
        quantizer(torch.randn(2, 8, 4))
    with pytest.raises(ValueError, match=r"^block\.linear\.input: axis 2 is out of bounds"):
        quantizer(torch.randn(8, 4))
    quantizer.disable_observer()
    with pytest.raises(ValueError, match=r"^block\.linear\.input: axis 2 is out of bounds"):
        quantizer(torch.randn(8, 4))


def test_missing_required_argument_of_a_users_class_is_a_type_error() -> None:
    @FakeQuantizeImplBase.register("needs_more")
    class Simulator(_DefaultFakeQuantizeImpl):
        def __init__(self, epsilon: float, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    with pytest.raises(TypeError, match="epsilon"):
        Factory.create_fake_quantizer(QuantizationSpec(fake_quantize_cls="needs_more"), WEIGHT)


def test_running_calculator_of_a_user() -> None:
    @QParamsCalculatorBase.register("mean_range")
    class MeanRange(RunningRangeMixin, StatefulQParamsCalculatorBase):
        """The mean over all tensors so far."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.seen = 1

        def update_running_range(
            self, min_val: torch.Tensor, max_val: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen += 1
            share = 1 / self.seen
            return (
                self.running_min + share * (min_val - self.running_min),
                self.running_max + share * (max_val - self.running_max),
            )

    quantizer = Factory.create_fake_quantizer(QuantizationSpec(qparam_calculator_cls="mean_range"), ACTIVATION)
    for size in (1.0, 2.0, 6.0):
        quantizer(torch.tensor([-size, size]))
    calculator = quantizer.qparams_calculator
    assert float(calculator.running_max) == pytest.approx(3.0)
    assert float(calculator.scale) == pytest.approx(3.0 / 127.5)


def test_stateful_calculator_of_a_user_sees_every_weight_anew() -> None:
    """Only Bitwright's own calculators may skip an unchanged weight; another one may count, or draw at random."""

    @QParamsCalculatorBase.register("counting")
    class Counting(StaticQParamsCalculator):
        calls = 0

        def compute_qparams(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> Any:
            self.calls += 1
            return super().compute_qparams(tensor, min_val, max_val * self.calls)

    quantizer = Factory.create_fake_quantizer(QuantizationSpec(qparam_calculator_cls="counting"), WEIGHT).eval()
    weight = torch.nn.Parameter(torch.tensor([-1.0, 1.0]))
    with torch.no_grad():
        quantizer(weight)
        quantizer(weight)
    assert quantizer.qparams_calculator.calls == 2
    assert float(quantizer.qparams_calculator.scale) == pytest.approx(2 / 127.5)


def test_stateless_calculator_of_a_user() -> None:
    @QParamsCalculatorBase.register("half_range")
    class HalfRange(StatelessQParamsCalculatorBase):
        def compute_qparams(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> Any:
            return super().compute_qparams(tensor, min_val / 2, max_val / 2)

    quantizer = Factory.create_fake_quantizer(QuantizationSpec(qparam_calculator_cls="half_range"), ACTIVATION)
    assert float(quantizer(torch.tensor([-8.0, 8.0])).max()) == pytest.approx(4.0, rel=0.01)


def test_simulator_of_a_user_with_its_own_arithmetic() -> None:
    """The three abstract methods are enough; the tensor arrives in float32 and leaves in its own dtype."""

    @FakeQuantizeImplBase.register("truncating")
    class Truncating(FakeQuantizeImplBase):
        def quantize(
            self, tensor: Any, scale: Any, zero_point: Any, minval: Any, cast_to_target_dtype: bool = True
        ) -> Any:
            return torch.trunc(tensor / scale)

        def dequantize(
            self, tensor: Any, scale: Any, zero_point: Any, minval: Any, output_dtype: Any = torch.float32
        ) -> Any:
            return (tensor * scale).to(output_dtype)

        def _fused_fake_quant_dequant(self, tensor: Any, scale: Any, zero_point: Any, minval: Any) -> Any:
            assert tensor.dtype == torch.float32
            y = self.dequantize(self.quantize(tensor, scale, zero_point, minval), scale, zero_point, minval)
            return tensor + (y - tensor).detach()

    quantizer = Factory.create_fake_quantizer(QuantizationSpec(fake_quantize_cls="truncating"), WEIGHT)
    x = torch.tensor([1.0, 0.9999, -0.003], dtype=torch.bfloat16, requires_grad=True)
    y = quantizer(x)
    assert y.dtype == torch.bfloat16
    assert bool((y.abs() <= x.abs()).all())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_overriding_the_fused_method_of_the_default_simulator_counts() -> None:
    @FakeQuantizeImplBase.register("doubling")
    class Doubling(_DefaultFakeQuantizeImpl):
        def _fused_fake_quant_dequant(self, *args: Any) -> torch.Tensor:
            return 2 * super()._fused_fake_quant_dequant(*args)

    quantizer = Factory.create_fake_quantizer(QuantizationSpec(fake_quantize_cls="doubling"), WEIGHT)
    weight = torch.nn.Parameter(torch.tensor([-1.0, 1.0]))
    assert torch.allclose(quantizer(weight), 2 * weight, rtol=0.02)
    assert torch.allclose(quantizer(weight.detach()), 2 * weight, rtol=0.02)


def test_range_calculator_of_a_user_may_return_any_shape() -> None:
    @RangeCalculatorBase.register("flat")
    class Flat(RangeCalculatorBase):
        def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return -torch.ones(6), torch.ones(6)

    spec = QuantizationSpec(range_calculator_cls="flat", granularity=PerBlockGranularity(axis=1, block_size=2))
    quantizer = Factory.create_fake_quantizer(spec, WEIGHT)
    quantizer(torch.randn(3, 4, 5))
    assert quantizer.qparams_calculator.scale.shape == (3, 2, 1)


@pytest.mark.parametrize("target", [WEIGHT, ACTIVATION])
def test_a_replaced_granularity_is_that_of_the_simulator_too(target: Any) -> None:
    partial = Factory.create_fake_quantizer_partial(QuantizationSpec(), target)
    changed = Factory.reconstruct_partial_qparams_calculator(partial, granularity=PerChannelGranularity(axis=0))
    spec = QuantizationSpec(granularity=PerChannelGranularity(axis=0))
    x = torch.tensor([[1.0, 2.0], [100.0, 200.0]])
    for _ in range(3):
        assert torch.equal(changed()(x), Factory.create_fake_quantizer(spec, target)(x))
    assert partial().granularity == PerTensorGranularity()
