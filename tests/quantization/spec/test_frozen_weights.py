"""A weight that does not change is observed and quantized once; any change is noticed."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitwright import kernels
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels.many import LARGEST
from bitwright.quantization.spec import FakeQuantizeImplBase, PerChannelGranularity, QuantizationScheme

from .spec_strategies import ACTIVATION, WEIGHT, fake_quantizer


def frozen(**fields: Any) -> tuple[FakeQuantizeImplBase, torch.nn.Parameter]:
    """A quantizer in eval mode that no longer observes, and its weight."""
    found = fake_quantizer(WEIGHT, granularity=PerChannelGranularity(axis=0), **fields)
    weight = torch.nn.Parameter(torch.randn(6, 50, generator=torch.Generator().manual_seed(0)))
    found(weight)
    found.disable_observer()
    return found.eval(), weight


def fresh(found: FakeQuantizeImplBase, weight: torch.Tensor) -> torch.Tensor:
    """What the quantizer must return, computed without its memory."""
    return kernels.fake_quantize(
        weight.detach().clone(),
        *found.calculate_qparams(),
        block_size=found.get_block_size(weight.shape),
        grid=kernels.Grid(found.dtype, found.quant_min, found.quant_max),
    )


@torch.no_grad()
def test_the_same_weight_is_quantized_once() -> None:
    found, weight = frozen()
    assert found(weight) is found(weight)
    assert torch.equal(found(weight), fresh(found, weight))


def sgd(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


def adam_fused(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()


def foreach(weight: torch.nn.Parameter) -> None:
    torch._foreach_mul_([weight.detach()], 0.5)


def load(weight: torch.nn.Parameter) -> None:
    torch.nn.ParameterDict({"w": weight}).load_state_dict({"w": weight.detach() * 0.5})


def in_inference_mode(weight: torch.nn.Parameter) -> None:
    with torch.inference_mode():
        weight.mul_(0.5)


def through_numpy(weight: torch.nn.Parameter) -> None:
    weight.detach().numpy()[...] *= 0.5


CHANGES: list[Callable[[torch.nn.Parameter], Any]] = [
    sgd,
    adam_fused,
    foreach,
    load,
    in_inference_mode,
    through_numpy,
    lambda weight: weight.copy_(weight * 0.5),
    lambda weight: weight.data.mul_(0.5),
    lambda weight: weight.data.copy_(weight.data * 0.9),
    lambda weight: setattr(weight, "data", weight.data * 0.5),
    lambda weight: weight[0, 3].fill_(0.1),
    lambda weight: weight.detach().lerp_(torch.zeros_like(weight), 0.01),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_write_to_the_weight_is_noticed(change: Callable[[torch.nn.Parameter], Any]) -> None:
    found, weight = frozen()
    with torch.no_grad():
        before = found(weight)
        change(weight)
        after = found(weight)
        assert not torch.equal(before, after)
        assert torch.equal(after, fresh(found, weight))
        assert found(weight) is after


@torch.no_grad()
def test_another_weight_is_another_weight() -> None:
    found, weight = frozen()
    found(weight)
    other = torch.nn.Parameter(weight.detach() * 0.5)
    assert torch.equal(found(other), fresh(found, other))


@pytest.mark.parametrize("name", ["scale", "zero_point", "minval"])
@torch.no_grad()
def test_changed_parameters_are_noticed(name: str) -> None:
    found, weight = frozen(qscheme="asymmetric", qformulation="minval" if name == "minval" else "zp")
    before = found(weight)
    buffer = getattr(found.qparams_calculator, name)
    buffer.add_(1)
    assert not torch.equal(found(weight), before)


@torch.no_grad()
def test_loaded_parameters_are_noticed() -> None:
    found, weight = frozen()
    before = found(weight)
    state = {key: value * 2 if key.endswith("scale") else value for key, value in found.state_dict().items()}
    found.load_state_dict(state)
    assert torch.equal(found(weight), fresh(found, weight))
    assert not torch.equal(found(weight), before)


@torch.no_grad()
def test_parameters_changed_by_observing_something_else_are_noticed() -> None:
    """Also when the running range is changed by a kernel, which writes behind autograd's back."""
    found, weight = frozen(qparam_calculator_cls="global_minmax")
    before = found(weight)
    found.enable_observer()
    found(torch.randn(6, 50) * 7)
    found(torch.randn(6, 50) * 9)
    found.disable_observer()
    assert not torch.equal(found(weight), before)
    assert torch.equal(found(weight), fresh(found, weight))


@torch.no_grad()
def test_a_write_to_the_kept_result_does_not_last() -> None:
    found, weight = frozen()
    expected = found(weight).clone()
    found(weight).zero_()
    assert torch.equal(found(weight), expected)


def test_a_weight_that_needs_its_gradient_is_never_kept() -> None:
    found, weight = frozen()
    one, other = found(weight), found(weight)
    assert one is not other
    one.sum().backward()
    assert weight.grad is not None


def test_training_mode_keeps_nothing() -> None:
    found, weight = frozen()
    with torch.no_grad():
        found(weight)
        found.train()
        assert found._memory.output is None
        assert found(weight) is not found(weight)


@torch.no_grad()
def test_keeping_can_be_turned_off() -> None:
    found, weight = frozen()
    found.keep_frozen_weight = False
    assert found(weight) is not found(weight)


def test_a_result_kept_in_inference_mode_is_not_used_for_training() -> None:
    found, weight = frozen()
    weight.requires_grad_(False)
    with torch.inference_mode():
        assert found(weight) is found(weight)
    x = torch.randn(2, 50, requires_grad=True)
    torch.nn.functional.linear(x, found(weight)).sum().backward()
    assert x.grad is not None


@torch.no_grad()
def test_copies_and_pickles_do_not_carry_the_kept_weight() -> None:
    found, weight = frozen()
    kept = found(weight)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other._memory.output is None
        assert torch.equal(other(weight), kept)
    assert len(pickle.dumps(found)) < 20_000
    assert all("memory" not in key for key in found.state_dict())


@torch.no_grad()
def test_forgetting_on_request() -> None:
    found, weight = frozen()
    kept = found(weight)
    found.clear_weight_memory()
    assert found(weight) is not kept


def count_observations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    whole = kernels.observe_and_fake_quantize

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return whole(*args, **kwargs)

    monkeypatch.setattr(kernels, "observe_and_fake_quantize", counted)
    return calls


def test_an_unchanged_weight_is_not_observed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in gradient accumulation: two forwards for one step of the optimizer. Small weights take one call anyway."""
    calls = count_observations(monkeypatch)
    found = fake_quantizer(WEIGHT, granularity=PerChannelGranularity(axis=0))
    weight = torch.nn.Parameter(torch.randn(6, LARGEST))
    for _ in range(3):
        found(weight).sum().backward()
        found(weight).sum().backward()
        sgd(weight)
    assert len(calls) == 3
    found(weight)
    assert torch.allclose(found.calculate_qparams()[0], weight.detach().abs().amax(1, keepdim=True) / 127.5)


def test_an_observed_weight_is_quantized_once_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As during calibration: the weights are on, and the same for every batch."""
    calls = count_observations(monkeypatch)
    found = fake_quantizer(WEIGHT, granularity=PerChannelGranularity(axis=0)).eval()
    weight = torch.nn.Parameter(torch.randn(6, 50))
    with torch.no_grad():
        assert found(weight) is found(weight)
        assert len(calls) == 1
        found.calculate_qparams()[0].mul_(2)
        assert torch.allclose(found(weight), weight, atol=0.05)
    assert len(calls) == 2


def test_a_weight_observed_by_a_running_calculator_is_observed_each_time() -> None:
    found = fake_quantizer(WEIGHT, qparam_calculator_cls="moving_average", averaging_constant=0.5).eval()
    with torch.no_grad():
        found(torch.nn.Parameter(torch.ones(2, 2)))
        weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
        found(weight)
        found(weight)
    assert float(found.qparams_calculator.running_max) == 2.5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_of_what_a_range_is_made_of_is_noticed(training: bool, grad: bool) -> None:
    """The weight is the same; what its range is measured with is another."""
    found = fake_quantizer(WEIGHT, dtype="int4").train(training)
    weight, calculator = torch.nn.Parameter(torch.linspace(0, 3, 8)), found.qparams_calculator
    with torch.set_grad_enabled(grad):
        for float_range, qscheme, expected in (
            ([None, None], QuantizationScheme.SYMMETRIC, 0.4),
            ([None, 6.0], QuantizationScheme.SYMMETRIC, 0.8),
            ([None, None], QuantizationScheme.ASYMMETRIC, 0.2),
            ([None, None], QuantizationScheme.SYMMETRIC, 0.4),
        ):
            calculator.float_range, calculator.qscheme = float_range, qscheme
            for _ in range(3):
                found(weight)
                assert calculator.scale.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        *itertools.product([WEIGHT, ACTIVATION], ["static", "moving_average", "global_minmax"]),
        (ACTIVATION, "dynamic"),
    ],
)
def test_a_calculator_keeps_its_own_bounds(target: CompressionTargetTensor, kind: str) -> None:
    """Those of the simulator say what codes there are, as in coreai-opt."""
    found = fake_quantizer(target, dtype="int4", qparam_calculator_cls=kind)
    x = torch.linspace(-3, 3, 64)
    x = torch.nn.Parameter(x) if target is WEIGHT else x
    found(x)
    found.quant_min = -2
    for _ in range(3):
        y = found(x)
        assert found.qparams_calculator.scale.item() == pytest.approx(0.4)
        assert y.min().item() == pytest.approx(-0.8)
