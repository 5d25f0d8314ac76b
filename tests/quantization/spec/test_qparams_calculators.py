"""Calculators of quantization parameters: formulas in float64, running ranges, state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.quantization.spec import (
    DynamicQParamsCalculator,
    MinMaxRangeCalculator,
    MovingAverageQParamsCalculator,
    PerChannelGranularity,
    PerTensorGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationScheme,
    QuantizationSpec,
    StatelessQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from bitwright.quantization.spec.qparams_calculator import _DefaultQParamsCalculator

from .spec_strategies import ACTIVATION, WEIGHT, bits_equal, calculator

EPS = torch.finfo(torch.float32).eps


def build(cls: Any, **changes: Any) -> Any:
    """Construct a calculator directly, as code without a factory does."""
    granularity = changes.pop("granularity", PerTensorGranularity())
    arguments = {
        "dtype": torch.int8,
        "qscheme": QuantizationScheme.ASYMMETRIC,
        "granularity": granularity,
        "target_dtype": torch.int8,
        "quant_min": -128,
        "quant_max": 127,
        "range_calculator": MinMaxRangeCalculator(granularity),
        "float_range": [None, None],
    }
    return cls(**{**arguments, **changes})


def truth(x: torch.Tensor, spec: QuantizationSpec) -> tuple[float, int, float]:
    """Scale, zero point and minval of a whole tensor by their formulas, in float64."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    low = spec.float_range[0] if spec.float_range[0] is not None else low
    high = spec.float_range[1] if spec.float_range[1] is not None else high
    steps = spec.quant_max - spec.quant_min
    if spec.qscheme == "asymmetric":
        scale = max((high - low) / steps, EPS)
        return scale, min(max(spec.quant_min - round(low / scale), spec.quant_min), spec.quant_max), low
    largest = max(-low, high)
    return max(largest / (steps / 2), EPS), (spec.quant_min + spec.quant_max + 1) // 2, -largest


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([f"{sign}int{bits}" for bits in range(2, 9) for sign in ("", "u")]),
    st.sampled_from(("symmetric", "asymmetric", "symmetric_with_clipping")),
    st.sampled_from(([None, None], [-2.0, None], [None, 3.0], [0.0, 6.0])),
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8),
)
def test_parameters_follow_the_formulas(dtype: str, scheme: str, float_range: list[Any], values: list[float]) -> None:
    spec = QuantizationSpec(dtype=dtype, qscheme=scheme, float_range=float_range)
    x = torch.tensor(values)
    scale, zero_point, minval = calculator(dtype=dtype, qscheme=scheme, float_range=float_range)(x)
    expected_scale, expected_point, expected_minval = truth(x, spec)
    assert float(scale) == pytest.approx(expected_scale, rel=1e-6)
    assert abs(int(zero_point) - expected_point) <= 1  # a tie may round differently in float32
    assert float(minval) == pytest.approx(expected_minval, rel=1e-6, abs=1e-30)
    assert (scale.dtype, zero_point.dtype, minval.dtype) == (torch.float32, torch.int32, torch.float32)


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_maps_the_largest_value_to_the_largest_code(dtype: str, largest: float) -> None:
    scale, zero_point, minval = calculator(dtype=dtype)(torch.tensor([-3.0, 1.0]))
    assert float(scale) == pytest.approx(3.0 / largest)
    assert zero_point is None
    assert minval is None


@pytest.mark.parametrize(("dtype", "power"), [("float4_e2m1fn_x2", 2), ("float8_e4m3fn", 8), ("float8_e5m2", 15)])
@pytest.mark.parametrize("max_abs", [1.0, 1.99, 2.0, 3.0, 6.0, 448.0, 1e-20, 0.0])
def test_power_of_two_scales_round_the_exponent_down(dtype: str, power: int, max_abs: float) -> None:
    """OCP MX 1.0: ``2 ** (floor(log2(max_abs)) - power of the largest value)``, at least ``2 ** -126``."""
    import math

    scale, _, _ = calculator(dtype=dtype, scale_dtype="float8_e8m0fnu")(torch.tensor([max_abs, -max_abs / 2]))
    exponent = math.floor(math.log2(max_abs)) - power if max_abs else -126
    assert float(scale) == 2.0 ** max(exponent, -126)


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_come_in_the_tensors_dtype_and_are_kept_in_float32(name: str, dtype: torch.dtype) -> None:
    found = calculator(qparam_calculator_cls=name, qscheme="asymmetric")
    scale, zero_point, minval = found(torch.tensor([-1.0, 2.0]).to(dtype))
    assert (scale.dtype, minval.dtype, zero_point.dtype) == (dtype, dtype, torch.int32)
    assert found._compute_dtype_for_export == dtype
    if name != "dynamic":
        assert (found.scale.dtype, found.minval.dtype) == (torch.float32, torch.float32)
        assert float(found.scale) == float(scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_values_of_half_precision_keep_their_scale(dtype: torch.dtype) -> None:
    """The floor of a scale is float32's epsilon, not that of the tensor's dtype."""
    x = torch.full((4,), torch.finfo(dtype).eps / 4).to(dtype)
    scale, _, _ = calculator()(x)
    assert float(scale) == pytest.approx(float(x[0]) / 127.5, rel=0.01)


def test_moving_average_follows_the_recurrence() -> None:
    found = calculator(qparam_calculator_cls="moving_average", averaging_constant=0.25)
    batches = [torch.tensor([-a, 2 * a]) for a in (1.0, 5.0, 0.5, 9.0)]
    low, high = -1.0, 2.0
    for index, batch in enumerate(batches):
        found(batch)
        if index:
            low, high = 0.25 * float(batch[0]) + 0.75 * low, 0.25 * float(batch[1]) + 0.75 * high
    assert float(found.running_min) == pytest.approx(low)
    assert float(found.running_max) == pytest.approx(high)
    assert float(found.scale) == pytest.approx(max(-low, high) / 127.5)


def test_default_averaging_constant_is_a_hundredth() -> None:
    assert calculator().averaging_constant == 0.01
    assert calculator(averaging_constant=0.5).averaging_constant == 0.5


def test_averaging_constant_does_not_disturb_calculators_without_one() -> None:
    assert isinstance(calculator(WEIGHT, averaging_constant=0.5), StaticQParamsCalculator)


def test_global_range_only_grows() -> None:
    found = calculator(qparam_calculator_cls="global_minmax", granularity=PerChannelGranularity(axis=0))
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(3, 8, generator=generator) * 3**i for i in (1, 0, 2)]
    for batch in batches:
        found(batch)
    joined = torch.cat(batches, dim=1)
    assert torch.equal(found.running_min, joined.amin(1, keepdim=True))
    assert torch.equal(found.running_max, joined.amax(1, keepdim=True))


def test_dynamic_remembers_nothing() -> None:
    found = calculator(qparam_calculator_cls="dynamic", granularity={"type": "per_token"})
    for rows in (3, 8):
        scale, _, _ = found(torch.full((2, rows, 4), float(rows)))
        assert scale.shape == (2, rows, 1)
        assert torch.allclose(scale, torch.tensor(rows / 127.5))
    assert not found.state_dict()
    assert not hasattr(found, "get_qparams")


def test_reset_starts_anew_with_the_next_tensor_and_not_before() -> None:
    """Until a further tensor comes, the parameters stay those of the tensors before the reset."""
    found = calculator(qparam_calculator_cls="moving_average")
    found(torch.tensor([-1.0, 1.0]))
    kept = found.scale.clone()
    found.reset_statistics()
    assert torch.equal(found.scale, kept)
    found(torch.tensor([-100.0, 10.0]))
    assert (float(found.running_min), float(found.running_max)) == (-100.0, 10.0)
    found(torch.tensor([0.0, 10.0]))
    assert float(found.running_min) == pytest.approx(-99.0)


def test_after_a_reset_another_number_of_blocks_is_welcome() -> None:
    found = calculator(qparam_calculator_cls="global_minmax", granularity=PerChannelGranularity(axis=0))
    found(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"shape \(5, 4\) has \(5, 1\) blocks.*\(3, 1\) blocks"):
        found(torch.randn(5, 4))
    found.reset_statistics()
    assert found(torch.randn(5, 4))[0].shape == found.running_min.shape == (5, 1)


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_one_scale_for_the_tensor_serves_tensors_of_any_rank(name: str) -> None:
    found = calculator(qparam_calculator_cls=name, averaging_constant=0.5)
    reference = calculator(qparam_calculator_cls=name, averaging_constant=0.5)
    for x in (torch.randn(4, 6), torch.randn(2, 3, 4), torch.randn(5), torch.tensor(3.0)):
        found(x)
        reference(x.reshape(1, -1))
    assert found.scale.shape == (1, 1)
    assert torch.equal(found.scale, reference.scale)


def test_static_follows_a_changing_number_of_channels() -> None:
    found = calculator(WEIGHT, granularity=PerChannelGranularity(axis=0))
    found(torch.randn(3, 4))
    found(torch.ones(5, 4))
    assert torch.allclose(found.scale, torch.full((5, 1), 1 / 127.5))


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_export_mode_freezes(name: str) -> None:
    found = calculator(qparam_calculator_cls=name)
    found(torch.tensor([-3.0, 3.0]))
    kept = found.scale.clone()
    found.set_export_mode(True)
    assert torch.equal(found(torch.tensor([-30.0, 30.0]))[0], kept)
    found.set_export_mode(False)
    assert not torch.equal(found(torch.tensor([-30.0, 30.0]))[0], kept)


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_a_range_fixed_on_both_sides_is_measured_never(name: str) -> None:
    class Forbidden(MinMaxRangeCalculator):
        def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError

    found = calculator(qparam_calculator_cls=name, float_range=[0.0, 5.1], qscheme="asymmetric")
    found.range_calculator = Forbidden(PerTensorGranularity())
    first, second = found(torch.randn(8)), found(torch.randn(8) * 100)
    assert float(first[0]) == float(second[0]) == pytest.approx(0.02)
    assert int(second[1]) == -128


def test_granularity_is_fixed_by_the_first_tensor() -> None:
    found = build(MovingAverageQParamsCalculator)
    found.granularity = PerChannelGranularity(axis=1)
    assert found.range_calculator.granularity == PerChannelGranularity(axis=1)
    assert found(torch.randn(2, 5))[0].shape == (1, 5)
    with pytest.raises(RuntimeError, match="Cannot change granularity after observer has been initialized"):
        found.granularity = PerTensorGranularity()


def test_parameters_before_the_first_tensor_come_with_a_warning() -> None:
    found = build(StaticQParamsCalculator)
    with pytest.warns(UserWarning, match="no tensor has been observed"):
        scale, zero_point, minval = found.get_qparams()
    assert scale.numel() == zero_point.numel() == minval.numel() == 0


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_scale_is_differentiable_when_asked_for(name: str) -> None:
    """A calculator called with gradients on keeps the path from the tensor to its scale."""
    found = calculator(qparam_calculator_cls=name, qscheme="asymmetric", averaging_constant=0.5)
    found(torch.tensor([-3.0, 0.0, 3.0]))
    x = torch.tensor([-6.0, 0.0, 9.0], requires_grad=True)
    found(x)[0].sum().backward()
    share = 0.5 if name == "moving_average" else 1.0
    assert torch.allclose(x.grad, torch.tensor([-share, 0.0, share]) / 255)
    assert not found.scale.requires_grad


def test_default_is_a_marker() -> None:
    with pytest.raises(RuntimeError, match="_DefaultQParamsCalculator is a marker class"):
        build(_DefaultQParamsCalculator)


def test_stateless_calculators_refuse_what_needs_state() -> None:
    assert issubclass(DynamicQParamsCalculator, StatelessQParamsCalculatorBase)
    with pytest.raises(ValueError, match=r"requires float_range=\[None, None\].*got \[-1.0, None\]"):
        build(DynamicQParamsCalculator, float_range=[-1.0, None])
    found = build(DynamicQParamsCalculator)
    found.set_export_mode(False)
    with pytest.raises(NotImplementedError, match=r"Stateless quantization .* does not support export mode"):
        found.set_export_mode(True)


def test_dynamic_equals_static_on_one_tensor() -> None:
    x = torch.randn(4, 6)
    for dtype in ("int8", "uint4", "float8_e5m2", "float4_e2m1fn"):
        one, other = calculator(dtype=dtype, qparam_calculator_cls="dynamic")(x), calculator(WEIGHT, dtype=dtype)(x)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def observed(name: str, batches: list[torch.Tensor]) -> Any:
    found = calculator(qparam_calculator_cls=name, granularity=PerChannelGranularity(axis=0), averaging_constant=0.5)
    for batch in batches:
        found(batch)
    return found


def test_merged_global_ranges_equal_one_range_over_everything() -> None:
    """However the batches are split and in whichever order the parts are merged; an unused part changes nothing."""
    batches = [torch.randn(3, 5) * s for s in (1.0, 4.0, 2.0, 3.0)]
    whole = observed("global_minmax", batches)
    for order in itertools.permutations(range(3)):
        parts = [observed("global_minmax", part) for part in (batches[:1], batches[1:], [])]
        merged = parts[order[0]]
        merged.merge(parts[order[1]])
        merged.merge(parts[order[2]])
        for name, value in whole.state_dict().items():
            assert torch.equal(merged.state_dict()[name], value), name


def test_merged_averages_weight_by_the_number_of_tensors_and_do_not_depend_on_the_order() -> None:
    one, two = torch.full((2, 4), 1.0), torch.full((2, 4), 4.0)
    left, right = observed("moving_average", [one, one]), observed("moving_average", [two])
    other_way = copy.deepcopy(right)
    other_way.merge(copy.deepcopy(left))
    left.merge(right)
    assert torch.allclose(left.running_max, torch.full((2, 1), (2 * 1.0 + 4.0) / 3))
    assert torch.allclose(left.running_max, other_way.running_max)
    assert torch.allclose(left.scale, left.running_max / 127.5)


def test_merge_refuses_what_it_cannot_join() -> None:
    static = observed("static", [torch.randn(3, 5)])
    with pytest.raises(TypeError, match="keeps no statistics"):
        static.merge(observed("static", [torch.randn(3, 5)]))
    with pytest.raises(TypeError, match="Cannot merge a MovingAverage"):
        static.merge(observed("moving_average", []))
    with pytest.raises(ValueError, match=r"blocks of shape \(4, 1\).*\(3, 1\)"):
        observed("global_minmax", [torch.randn(3, 5)]).merge(observed("global_minmax", [torch.randn(4, 5)]))


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_state_loads_into_an_unused_calculator_of_unknown_size(name: str) -> None:
    """Nothing is initialised again: the next tensor continues where the saved one stopped."""
    found, fresh = observed(name, [torch.randn(3, 5)]), observed(name, [])
    fresh.load_state_dict(copy.deepcopy(found.state_dict()))
    x = torch.randn(3, 5)
    assert fresh._resolved_axis == 0
    assert all(torch.equal(a, b) for a, b in zip(found(x), fresh(x), strict=True))
    for key, value in found.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value)


def test_moving_to_half_precision_leaves_the_parameters_alone() -> None:
    found = observed("moving_average", [torch.randn(3, 5) * 1e-3])
    before = copy.deepcopy(found.state_dict())
    found.half()
    assert all(bits_equal(value, before[key]) for key, value in found.state_dict().items())


def test_health_names_scales_that_cannot_work() -> None:
    found = calculator(granularity=PerChannelGranularity(axis=0))
    assert found.check_health() == ["no tensor has been observed, so there is no scale"]
    found(torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]]))
    assert found.check_health() == ["1 of 3 scales are NaN", "1 of 3 scales are infinite"]
    found.scale.zero_()
    assert found.check_health() == ["3 of 3 scales are not positive"]


def test_text_shows_the_state() -> None:
    found = build(StaticQParamsCalculator)
    assert "scale=tensor([])" in found.extra_repr()
    assert "zero_point=tensor([], dtype=torch.int32)" in found.extra_repr()
    assert "export_mode=False" in found.extra_repr()
    assert "running_min=" in build(MovingAverageQParamsCalculator).extra_repr()


@pytest.mark.parametrize("target", [WEIGHT, ACTIVATION])
def test_default_resolves_by_what_the_tensor_is(target: Any) -> None:
    expected = StaticQParamsCalculator if target is WEIGHT else MovingAverageQParamsCalculator
    assert type(calculator(target)) is expected
    assert calculator(target).quantization_target is target


def test_dynamic_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="DynamicQParamsCalculator is only supported for activation"):
        QuantizationComponentFactory.create_qparams_calculator(
            QuantizationSpec(qparam_calculator_cls="dynamic"), WEIGHT
        )


def test_registry_lists_what_specs_may_name() -> None:
    assert {"default", "static", "dynamic", "moving_average", "global_minmax"} <= set(
        QParamsCalculatorBase.list_registry_keys()
    )


@pytest.mark.parametrize("name", ["moving_average", "global_minmax"])
def test_a_restart_takes_the_dtype_of_the_next_tensor(name: str) -> None:
    """A range that began in half precision, with example inputs, holds what a float32 model computes."""
    found = calculator(qparam_calculator_cls=name)
    found(torch.tensor([-1.0, 1.0]).half())
    found.reset_statistics()
    found.float()
    found(torch.tensor([-1e5, 1e5]))
    assert found.running_max.dtype == torch.float32
    assert (float(found.running_min), float(found.running_max)) == (-1e5, 1e5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_unused_calculator_is_neutral_in_merging(dtype: torch.dtype) -> None:
    """What it took over counts with the number of tensors behind it, in their dtype."""
    ones, threes = ([torch.tensor([-v, v], dtype=dtype)] * 100 for v in (1.0, 3.0))
    into, direct = observed("moving_average", []), observed("moving_average", ones)
    into.merge(observed("moving_average", ones))
    for found in (into, direct):
        found.merge(observed("moving_average", threes))
        assert bits_equal(found.running_max, torch.tensor([0.0, 2.0], dtype=dtype))


@pytest.mark.parametrize("name", ["default", "lsq_plus"])
@pytest.mark.parametrize("float_range", [[-10.0, None], [None, 10.0]])
def test_merged_searched_ranges_keep_a_fixed_end(name: str, float_range: list[float | None]) -> None:
    def seen() -> Any:
        fields = {"range_calculator_cls": "percentile", "qscheme": "asymmetric", "float_range": float_range}
        found = calculator(qparam_calculator_cls=name, **fields).eval()
        found(torch.linspace(-1, 1, 100))
        return found

    merged, alone = seen(), seen()
    merged.merge(seen())
    torch.testing.assert_close(merged.get_qparams(), alone.get_qparams())
    assert float(merged.get_qparams()[0].detach()) > 10 / 255


@pytest.mark.parametrize("float_range", [[None, 70000.0], [-70000.0, None]])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_a_fixed_end_beyond_half_precision_is_kept(float_range: list[Any], scheme: str) -> None:
    """The parameters are those of a float32 tensor of the same values."""
    x = torch.tensor([-500.0, 1.0, 500.0]).half()
    found, expected = (calculator(float_range=float_range, qscheme=scheme)(values) for values in (x, x.float()))
    assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["static", "moving_average", "global_minmax"])
def test_a_state_of_nothing_seen_is_that(name: str) -> None:
    """Loading it has the next tensor begin anew."""
    found, fresh = observed(name, [torch.randn(3, 5)]), observed(name, [])
    found.load_state_dict(copy.deepcopy(fresh.state_dict()))
    assert not found._initialized
    x = torch.randn(4, 5)
    assert all(torch.equal(a, b) for a, b in zip(found(x), fresh(x), strict=True))


def test_assigned_states_of_half_precision_are_cast_back() -> None:
    found = observed("moving_average", [torch.randn(3, 5)])
    state = {name: value.half() if value.is_floating_point() else value for name, value in found.state_dict().items()}
    found.load_state_dict(state, assign=True)
    dtypes = {name: value.dtype for name, value in found.state_dict().items()}
    assert dtypes.pop("zero_point") == torch.int32
    assert set(dtypes.values()) == {torch.float32}
