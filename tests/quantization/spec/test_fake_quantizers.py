"""Fake quantizers: numbers, gradients, switches, disabling, errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bitwright.quantization.spec import (
    FakeQuantizeImplBase,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    fp4_forward,
)

from .spec_strategies import ACTIVATION, WEIGHT, bits_equal, fake_quantizer


@pytest.mark.parametrize("qscheme", ["symmetric", "asymmetric", "symmetric_with_clipping"])
@pytest.mark.parametrize("qformulation", ["zp", "minval"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint8", "uint3", "int2"])
def test_output_lies_on_the_grid_and_within_half_a_step(dtype: str, qscheme: str, qformulation: str) -> None:
    """Values are ``(code - offset) * scale + origin`` for whole codes in range, the nearest ones (float64 check)."""
    found = fake_quantizer(WEIGHT, dtype=dtype, qscheme=qscheme, qformulation=qformulation)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    y = found(x).double()
    scale, zero_point, minval = (tensor.double() for tensor in found.calculate_qparams())
    origin, offset = (0.0, zero_point) if qformulation == "zp" else (minval, found.quant_min)
    codes = (y - origin) / scale + offset
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert codes.min() > found.quant_min - 0.5
    assert codes.max() < found.quant_max + 0.5
    exact = ((x.double() - origin) / scale + offset).clamp(found.quant_min, found.quant_max)
    assert float((codes - exact).abs().max()) < 0.501


def test_gradient_passes_inside_the_range_only() -> None:
    found = fake_quantizer(ACTIVATION, float_range=[-1.0, 1.0], qscheme="symmetric_with_clipping")
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.9, 1.2], requires_grad=True)
    found(x).backward(torch.full_like(x, 2.0))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 2.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_result_has_the_tensors_dtype(dtype: torch.dtype) -> None:
    found = fake_quantizer()
    x = torch.randn(4, 8).to(dtype).requires_grad_()
    y = found(x)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad is not None
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("calculator", ["static", "moving_average", "global_minmax"])
@pytest.mark.parametrize("qscheme", ["symmetric", "asymmetric"])
def test_double_precision_is_simulated_alike_while_observing_and_frozen(calculator: str, qscheme: str) -> None:
    """Scales are float32 from the first tensor on, so that what calibration saw is what the frozen model computes."""
    found = fake_quantizer(qscheme=qscheme, qparam_calculator_cls=calculator)
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    observing = found(x)
    found.disable_observer()
    assert observing.dtype == torch.float64
    assert torch.equal(observing, found(x))


def test_codes_and_values_go_back_and_forth() -> None:
    found = fake_quantizer(WEIGHT, dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=8))
    x = torch.randn(4, 16)
    y = found(x)
    qparams = found.calculate_qparams()
    codes = found.quantize(x, *qparams)
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= -8
    assert int(codes.max()) <= 7
    assert torch.equal(found.dequantize(codes, *qparams), y)
    assert found.quantize(x.bfloat16(), *qparams, cast_to_target_dtype=False).dtype == torch.bfloat16
    assert found.dequantize(codes, *qparams, output_dtype=torch.float16).dtype == torch.float16


def test_fp4_rounds_to_the_nearest_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -5.1, float("nan")])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -6.0, float("nan")])
    assert torch.equal(fp4_forward(x).nan_to_num(99), expected.nan_to_num(99))
    found = fake_quantizer(WEIGHT, dtype="float4_e2m1fn")
    codes = found.quantize(torch.tensor([3.0, -6.0, 0.4]), torch.ones(1), None, None)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().tolist() == [3.0, -6.0, 0.5]


def test_only_the_observer_changes_the_parameters() -> None:
    found = fake_quantizer()
    x = torch.randn(4, 8)
    found(x)
    found.disable_observer()
    kept = found.calculate_qparams()[0].clone()
    found(x * 100)
    assert torch.equal(found.calculate_qparams()[0], kept)
    found.enable_observer()
    found(x * 100)
    assert not torch.equal(found.calculate_qparams()[0], kept)


def test_observing_without_quantizing_returns_the_tensor_itself() -> None:
    found = fake_quantizer(qparam_calculator_cls="global_minmax")
    found.disable_fake_quant()
    for size in (1.0, 2.0, 5.0, 3.0):
        x = torch.full((2, 3), size)
        assert found(x) is x
    assert float(found.qparams_calculator.running_max) == 5.0


def test_everything_off_is_the_identity() -> None:
    found = fake_quantizer()
    found.disable_observer()
    found.disable_fake_quant()
    x = torch.randn(3)
    assert found(x) is x


def test_quantizing_before_observing_says_what_to_do() -> None:
    found = fake_quantizer()
    found.tensor_fqn = "layers.0.input"
    found.disable_observer()
    with pytest.raises(RuntimeError, match=r"'layers\.0\.input' has no scale.*calibration batch"):
        found(torch.randn(3))


@pytest.mark.parametrize("name", ["observer_enabled", "fake_quant_enabled"])
@pytest.mark.parametrize(
    "write",
    [lambda b: b.fill_(0), lambda b: b.__setitem__(0, 0), lambda b: b.copy_(torch.zeros(1)), lambda b: b.zero_()],
)
def test_a_write_to_a_switch_buffer_counts(name: str, write: Any) -> None:
    found = fake_quantizer()
    x = torch.randn(4, 8)
    found(x)
    before = found.calculate_qparams()[0].clone()
    write(getattr(found, name))
    y = found(10 * x)
    if name == "observer_enabled":
        assert torch.equal(found.calculate_qparams()[0], before)
    else:
        assert torch.equal(y, 10 * x)


@pytest.mark.parametrize(
    "asked", [lambda s: s.train(), lambda s: s.eval(), lambda s: s.is_observing(), lambda s: s.is_disabled()]
)
@pytest.mark.parametrize("write", [lambda b: b.data.zero_(), lambda b: b.numpy().fill(0)])
def test_a_write_that_counts_no_version_holds_as_soon_as_anybody_asks(write: Any, asked: Any) -> None:
    found = fake_quantizer()
    x = torch.randn(4, 8)
    for _ in range(3):  # by then it has a shortcut
        found(x)
    write(found.fake_quant_enabled)
    asked(found)
    assert torch.equal(found(x), x)
    assert not found.is_quantizing()
    write(found.observer_enabled)
    asked(found)
    before = found.calculate_qparams()[0].clone()
    found(10 * x)
    assert torch.equal(found.calculate_qparams()[0], before)


def test_replaced_switch_buffers_count() -> None:
    found = fake_quantizer()
    found.fake_quant_enabled = torch.zeros(1, dtype=torch.uint8)
    x = torch.randn(4)
    assert found(x) is x


def test_switch_methods_keep_outside_writes_to_other_switches() -> None:
    found = fake_quantizer()
    found.fake_quant_enabled.zero_()
    found.disable_observer()
    x = torch.randn(4)
    assert found(x) is x
    assert (int(found.observer_enabled), int(found.fake_quant_enabled)) == (0, 0)


def test_buffers_mirror_the_switches() -> None:
    found = fake_quantizer()
    assert {key: value.tolist() for key, value in found.state_dict().items() if "." not in key} == {
        "fake_quant_enabled": [1],
        "observer_enabled": [1],
        "_disabled": False,
    }
    found.disable_observer()
    found.disable_fake_quant()
    assert found.observer_enabled.dtype == found.fake_quant_enabled.dtype == torch.uint8
    assert (int(found.observer_enabled), int(found.fake_quant_enabled)) == (0, 0)
    assert "observer=off, fake_quant=off" in found.extra_repr()


class _HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("calculator", ["moving_average", "global_minmax", "static", "dynamic"])
def test_forward_reads_no_tensor_on_the_host(calculator: str) -> None:
    """A read would make a GPU wait; the switches are Python attributes."""
    found = fake_quantizer(qparam_calculator_cls=calculator)
    x = torch.randn(4, 8)
    found(x)
    with _HostReads() as reads:
        found(x)
        found.disable_observer()
        found(x)
        found.disable_fake_quant()
        found(x)
    assert reads.count == 0


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("calculator", ["static", "moving_average"])
def test_blocks_that_do_not_divide_switch_the_quantizer_off(
    caplog: pytest.LogCaptureFixture, parameter: bool, calculator: str
) -> None:
    found = fake_quantizer(
        WEIGHT, granularity=PerBlockGranularity(axis=1, block_size=5), qparam_calculator_cls=calculator
    )
    found.tensor_fqn = "head.weight"
    x = torch.nn.Parameter(torch.randn(4, 8)) if parameter else torch.randn(4, 8)
    with caplog.at_level(logging.WARNING):
        assert found(x) is x
        assert found(x) is x
    (record,) = caplog.records
    message = record.getMessage()
    assert "head.weight (weight)" in message
    assert "shape (4, 8) is not divisible by block size 5" in message
    assert found.is_disabled()
    assert bool(found.state_dict()["_disabled"])


def test_other_misfits_of_the_granularity_are_errors() -> None:
    with pytest.raises(ValueError, match="axis 3 is out of bounds"):
        fake_quantizer(granularity=PerChannelGranularity(axis=3))(torch.randn(2, 2))
    with pytest.raises(ValueError, match="axis=None"):
        fake_quantizer(granularity=PerChannelGranularity())(torch.randn(2, 2))


@pytest.mark.parametrize("calculator", ["static", "moving_average", "dynamic"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_empty_tensors_pass_through_and_leave_no_trace(calculator: str, shape: tuple[int, ...]) -> None:
    found = fake_quantizer(qparam_calculator_cls=calculator)
    x = torch.empty(shape)
    assert found(x) is x
    assert found(torch.nn.Parameter(x)).shape == shape
    found(torch.randn(4, 4))
    found.disable_observer()
    assert found(x).shape == shape


@pytest.mark.parametrize("calculator", ["static", "moving_average"])
def test_an_empty_tensor_needs_no_scale(calculator: str) -> None:
    found = fake_quantizer(qparam_calculator_cls=calculator)
    found.disable_observer()
    x = torch.empty(0, 4)
    assert found(x) is x
    with pytest.raises(RuntimeError, match="has seen no tensor"):
        found(torch.randn(2, 4))


@pytest.mark.parametrize("calculator", ["static", "moving_average", "global_minmax"])
def test_per_tensor_observers_take_tensors_of_any_rank(calculator: str) -> None:
    found = fake_quantizer(qparam_calculator_cls=calculator)
    for shape in ((2, 6), (2, 3, 4), (5,), (2, 6)):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
        y = found(x)
        assert y.shape == x.shape
        assert float((y - x).abs().max()) < 0.005


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int1", "uint5", "float4_e2m1fn"])
def test_activations_below_a_byte(dtype: str) -> None:
    found = fake_quantizer(dtype=dtype, qscheme="symmetric" if "float" in dtype else "asymmetric")
    x = torch.randn(16, 16, requires_grad=True)
    y = found(x)
    assert len(y.unique()) <= 2**found.n_bits
    y.sum().backward()


def test_nan_poisons_its_block_only_and_is_reported() -> None:
    found = fake_quantizer(WEIGHT, granularity=PerChannelGranularity(axis=0))
    found.tensor_fqn = "fc.weight"
    x = torch.randn(3, 4)
    x[1, 2] = float("nan")
    y = found(x)
    assert bool(y[1].isnan().all())
    assert not bool(y[[0, 2]].isnan().any())
    assert found.check_health() == ["fc.weight: 1 of 3 scales are NaN"]


def test_health_of_a_good_quantizer_is_empty() -> None:
    found = fake_quantizer()
    assert found.check_health()
    found(torch.randn(3))
    assert found.check_health() == []
    assert fake_quantizer(qparam_calculator_cls="dynamic").check_health() == []


def test_stateless_quantizers_ignore_the_observer_switch() -> None:
    found = fake_quantizer(qparam_calculator_cls="dynamic")
    assert found.is_stateless
    found.disable_observer()
    found.observer_enabled.zero_()
    small, large = torch.full((4,), 0.01), torch.full((4,), 100.0)
    assert torch.allclose(found(small), small, rtol=0.01)
    assert torch.allclose(found(large), large, rtol=0.01)
    found.enable_observer()
    assert found.observer_enabled.item() == 1


def test_granularity_may_be_set_until_the_first_tensor() -> None:
    found = fake_quantizer(WEIGHT)
    found.granularity = PerChannelGranularity(axis=1)
    assert found.qparams_calculator.granularity == PerChannelGranularity(axis=1)
    found(torch.randn(2, 5))
    assert found.qparams_calculator.scale.shape == (1, 5)
    assert found.get_block_size((4, 5)) == (4, 1)
    with pytest.raises(RuntimeError, match="Cannot change granularity"):
        found.granularity = PerTensorGranularity()


def test_delegated_properties() -> None:
    found = fake_quantizer(WEIGHT, qscheme="asymmetric")
    assert (found.qscheme, found.quantization_target) == ("asymmetric", WEIGHT)
    found.qparams_calculator.quantization_target = ACTIVATION
    assert found.quantization_target is ACTIVATION


def test_codes_and_values_have_the_gradient_of_their_formula() -> None:
    """So that a class of the user's own learns by them: a step has the gradient ``code - zero_point``."""
    found = fake_quantizer(WEIGHT, qscheme="asymmetric", dtype="int4")
    x = torch.linspace(-2.0, 1.0, 12).reshape(3, 4).requires_grad_()
    _, point, minval = found.qparams_calculator(x.detach())
    step = torch.tensor([[0.25]], requires_grad=True)
    codes = found.quantize(x, step, point, minval, cast_to_target_dtype=False)
    slopes = torch.arange(12.0).reshape(3, 4)
    found.dequantize(codes, step, point, minval).backward(slopes)
    exact = (x.detach() / 0.25).round().add(point).clamp(-8, 7)
    assert step.grad is not None
    assert step.grad.item() == pytest.approx(((exact - point) * slopes).sum().item())
    assert x.grad is not None
    assert not x.grad.any()
    assert not found.quantize(x, step, point, minval).requires_grad


def test_rounding_to_a_float_format_passes_the_gradient_on() -> None:
    """As a cast does, but for its rounding of the gradient; where values are clipped there is none."""
    found = fake_quantizer(WEIGHT, dtype="float8_e4m3", float_range=[-1.0, 1.0])
    x = torch.tensor([-2.0, -0.3, -1e-9, 0.0, 0.7], requires_grad=True)
    found(x.detach())
    parameters = found.calculate_qparams()
    codes = found.quantize(x, *parameters, cast_to_target_dtype=False)
    plain = found.quantize(x.detach(), *parameters, cast_to_target_dtype=False)
    assert bits_equal(codes.detach(), plain)
    assert torch.equal(codes.signbit(), plain.signbit())
    codes.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad * parameters[0], torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))
    assert not found.quantize(x, *parameters).requires_grad


def test_nothing_is_asked_of_a_quantizer_that_neither_observes_nor_quantizes() -> None:
    """In export mode nothing is observed, so that a weight needs no scale."""
    found = fake_quantizer(WEIGHT)
    found.set_export_mode(True)
    found.disable_fake_quant()
    weight = torch.nn.Parameter(torch.randn(3))
    assert found(weight) is weight


def test_export_mode_freezes() -> None:
    found = fake_quantizer()
    found(torch.ones(4))
    kept = found.calculate_qparams()[0].clone()
    found.set_export_mode(True)
    found(torch.ones(4) * 9)
    assert torch.equal(found.calculate_qparams()[0], kept)


def test_reset_begins_the_average_with_the_next_tensor() -> None:
    found = fake_quantizer()
    found(torch.ones(4))
    found(torch.ones(4))
    found.reset_statistics()
    found(torch.ones(4) * 9)
    assert float(found.qparams_calculator.running_max) == 9.0
    found(torch.zeros(4))
    assert float(found.qparams_calculator.running_max) == pytest.approx(9 * 0.99)
    fake_quantizer(qparam_calculator_cls="dynamic").reset_statistics()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_observes_once_and_gives_the_same_gradient(use_reentrant: bool) -> None:
    def run(checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found = fake_quantizer(averaging_constant=0.5)
        generator = torch.Generator().manual_seed(0)
        found(torch.randn(8, generator=generator))
        x = (4 * torch.randn(8, generator=generator)).requires_grad_()
        y = checkpoint(found, x, use_reentrant=use_reentrant) if checkpointed else found(x)
        (y * y).sum().backward()
        assert x.grad is not None
        return x.grad, found.qparams_calculator.running_max

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_constructor_takes_what_torchao_and_eager_mode_add() -> None:
    constructor = type(fake_quantizer()).with_args(dtype=torch.int4, unknown=3)
    found = fake_quantizer()
    built = constructor.with_args(op_to_optimize=torch.relu)(
        qformulation="zp",
        granularity=PerTensorGranularity(),
        target_dtype=torch.int8,
        quant_min=-8,
        quant_max=7,
        qparams_calculator=found.qparams_calculator,
    )
    assert (built.dtype, built.n_bits) == (torch.int4, 4)


def test_abstract_methods_must_be_given() -> None:
    class Incomplete(FakeQuantizeImplBase):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete(torch.int8, "zp", PerTensorGranularity(), torch.int8, -128, 127, fake_quantizer().qparams_calculator)


@pytest.mark.parametrize("ranges", ["minmax", "percentile"])
def test_a_range_over_other_blocks_is_refused_with_the_tensor(ranges: str) -> None:
    """Whoever calibrates with another batch size reads which tensor it was, and what to do."""
    found = fake_quantizer(
        ACTIVATION,
        granularity=PerTokenGranularity(),
        qparam_calculator_cls="global_minmax",
        range_calculator_cls=ranges,
    )
    found.tensor_fqn = "encoder.relu"
    found(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"^encoder\.relu: .*blocks.*reset_statistics"):
        found(torch.randn(5, 4))
