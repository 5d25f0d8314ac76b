"""The short way through a simulator gives what the long way gives, whatever is changed in between."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from bitwright._utils.direct_calls import pass_through
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels import saved_as_codes, set_form
from bitwright.quantization.spec import PerChannelGranularity, PerTensorGranularity, QuantizationSpec
from bitwright.quantization.spec.factory import QuantizationComponentFactory

Change = Callable[[Any], object]


def simulator(target: str = "ACTIVATION", **spec: Any) -> Any:
    made = QuantizationSpec(**{"dtype": "int8", **spec})
    return QuantizationComponentFactory.create_fake_quantizer(made, CompressionTargetTensor[target])


def _switch_observer(s: Any) -> None:
    s.enable_observer(not s._observer_on)


def _load(s: Any) -> None:
    state = {name: value.clone() for name, value in s.state_dict().items()}
    state["qparams_calculator.scale"] *= 3
    s.load_state_dict(state, assign=True)


def _data(s: Any) -> None:
    s.qparams_calculator.scale.data = torch.full_like(s.qparams_calculator.scale, 0.5)


def _new_buffer(s: Any) -> None:
    s.qparams_calculator.scale = s.qparams_calculator.scale * 5


def _grid(s: Any) -> None:
    s.quant_min, s.quant_max = -3, 3


def _doubled(calculator: Any) -> Any:
    other = copy.deepcopy(calculator)
    other.scale.mul_(2)
    return other


CHANGES: dict[str, Change] = {
    "observer": _switch_observer,
    "fake-quantize off": lambda s: s.disable_fake_quant(),
    "switch buffer": lambda s: s.fake_quant_enabled.fill_(0),
    "switch buffer replaced": lambda s: setattr(s, "observer_enabled", torch.zeros(1, dtype=torch.uint8)),
    "switch buffer put in": lambda s: s._buffers.update(fake_quant_enabled=torch.zeros(1, dtype=torch.uint8)),
    "switch buffer registered": lambda s: s.register_buffer("_disabled", torch.tensor(True)),
    "switch data": lambda s: s.fake_quant_enabled.data.zero_(),
    "disabled": lambda s: s._disabled.fill_(True),
    "scale in place": lambda s: s.qparams_calculator.scale.mul_(2),
    "scale data": _data,
    "scale replaced": _new_buffer,
    "state loaded": _load,
    "scale put in": lambda s: s.qparams_calculator._buffers.update(scale=s.qparams_calculator.scale * 3),
    "calculator": lambda s: s.add_module("qparams_calculator", _doubled(s.qparams_calculator)),
    "grid": _grid,
    "granularity": lambda s: setattr(s, "_granularity", PerChannelGranularity(axis=0)),
    "formulation": lambda s: setattr(s, "qformulation", "minval"),
    "restart": lambda s: s.reset_statistics(),
    "frozen": lambda s: s.set_export_mode(True),
    "range fixed": lambda s: setattr(s.qparams_calculator, "float_range", (-0.5, 0.5)),
    "constant": lambda s: setattr(s.qparams_calculator, "averaging_constant", 0.9),
    "calculator's bounds": lambda s: s.qparams_calculator.__dict__.update(quant_min=-8, quant_max=7),
    "evaluation": lambda s: s.eval(),
    "double": lambda s: s.double(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("observing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_honoured(change: str, observing: bool, dtype: torch.dtype) -> None:
    """After any change of the state, outputs and state are those of the reference, which has no short way."""
    results = []
    for form in ("auto", "reference"):
        before = set_form(form)
        try:
            torch.manual_seed(0)
            mine = simulator(qscheme="asymmetric")
            mine.enable_observer(True)
            outputs = [mine(torch.randn(4, 8).to(dtype)) for _ in range(2)]
            mine.enable_observer(observing)
            outputs += [mine(torch.randn(4, 8).to(dtype)) for _ in range(3)]
            assert (mine._shortcut.call is not None) == (form == "auto")
            CHANGES[change](mine)
            outputs += [mine(torch.randn(4, 8).to(dtype)) for _ in range(3)]
            results.append([*outputs, *mine.state_dict().values()])
        finally:
            set_form(before)
    for fast, slow in zip(*results, strict=True):
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("granularity", [PerTensorGranularity(), PerChannelGranularity(axis=1)])
def test_shapes_take_turns(granularity: Any) -> None:
    """Batches of several sizes and layouts of memory, with and without gradient."""
    mine = simulator(granularity=granularity)
    for _ in range(2):
        mine(torch.randn(4, 8))
    mine.disable_observer()
    for rows in (4, 2, 7, 4, *range(20), 4):
        for x in (torch.randn(rows, 8), torch.randn(8, rows).T, torch.randn(rows, 16)[:, ::2]):
            expected = mine._fake_quantize(x, *mine.calculate_qparams())
            assert torch.equal(mine(x), expected)
            leaf = x.clone().requires_grad_()
            y = mine(leaf)
            assert torch.equal(y, expected)
            assert y.requires_grad


def test_shapes_of_as_many_elements() -> None:
    """One scale for the whole tensor: kernels are known by the number of elements, codes keep the shape."""
    mine = simulator()
    mine(torch.randn(4, 8))
    mine.disable_observer()
    for shape in ((4, 8), (8, 4), (32,), (2, 2, 8)):
        x, results = torch.randn(shape), []
        for codes in (True, False):
            leaf = x.clone().requires_grad_()
            with saved_as_codes(minimum=1) if codes else contextlib.nullcontext():
                y = mine(leaf)
                (y * y).sum().backward()
            assert y.shape == shape
            results += [y, leaf.grad]
            assert torch.equal(mine(x), y)
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("calculator", ["moving_average", "global_minmax", "dynamic", "static"])
@pytest.mark.parametrize("granularity", [PerTensorGranularity(), PerChannelGranularity(axis=1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_are_kept_of_what_was_observed(calculator: str, granularity: Any, transposed: bool) -> None:
    """On the long way and on the short one, with the observer on and off, what an operation saves is a byte each."""
    mine = simulator(qparam_calculator_cls=calculator, granularity=granularity)
    mine.enable_observer(True)
    for number in range(6):
        if number == 4:
            mine.disable_observer()
        x = torch.randn(32, 64, requires_grad=True)
        with saved_as_codes(minimum=1):
            y = mine(x.T.contiguous().T if transposed else x)
            z = y * y
        kept = z.grad_fn._raw_saved_self.data
        assert kept.substitute.data.dtype == torch.uint8, number
        mine.qparams_calculator.scale.mul_(3)  # what comes later must not matter
        z.sum().backward()
        inside = x.grad != 0
        assert inside.float().mean() > 0.5, number
        assert torch.equal(x.grad[inside], 2 * y[inside]), number


@torch.no_grad()
def test_functional_calls_use_what_they_are_given() -> None:
    mine, weight = simulator("WEIGHT", granularity=PerChannelGranularity(axis=0)), nn.Parameter(torch.randn(4, 8))
    for target, x in ((mine, weight), (simulator(), torch.randn(4, 8))):
        target(x)
        target.disable_observer()
        target.eval()
        before = [target(x) for _ in range(3)][-1].clone()
        other = {"qparams_calculator.scale": target.qparams_calculator.scale * 2}
        expected = target._fake_quantize(x, other["qparams_calculator.scale"], *target.calculate_qparams()[1:])
        for _ in range(3):
            assert torch.equal(functional_call(target, other, (x,)), expected)
        off = {"fake_quant_enabled": torch.zeros(1, dtype=torch.uint8)}
        assert torch.equal(functional_call(target, off, (x,)), x)
        assert torch.equal(target(x), before)


def test_versions_advance_while_observing() -> None:
    """What is cached by version notices that the parameters were written."""
    mine = simulator()
    mine(torch.ones(4))
    mine(torch.ones(4))
    calculator = mine.qparams_calculator
    names = ("running_min", "running_max", "scale", "zero_point", "minval")
    versions = [getattr(calculator, name)._version for name in names]
    mine(torch.ones(4) * 2)
    assert all(getattr(calculator, name)._version > v for name, v in zip(names, versions, strict=True))
    assert calculator._progress.observations == 3


def test_copies_have_no_shortcut_to_the_original() -> None:
    """A copy, a pickle and the original go their own ways."""
    mine = simulator()
    mine(torch.ones(4))
    mine.disable_observer()
    mine(torch.linspace(-1, 1, 4))
    expected = mine(torch.linspace(-1, 1, 4))
    stream = io.BytesIO()
    pickle.dump(mine, stream)
    for other in (copy.deepcopy(mine), pickle.loads(stream.getvalue())):
        assert other._shortcut.call is None
        other.qparams_calculator.scale.mul_(2)
        for _ in range(3):
            assert not torch.equal(other(torch.linspace(-1, 1, 4)), expected)
    assert torch.equal(mine(torch.linspace(-1, 1, 4)), expected)


WEIGHT_CHANGES: dict[str, Callable[[Any, nn.Parameter], object]] = {
    "weight in place": lambda s, w: w.add_(0.3),
    "weight data": lambda s, w: w.data.mul_(1.7),
    "new memory": lambda s, w: setattr(w, "data", w.detach() * 0.4),
    "scale": lambda s, w: s.qparams_calculator.scale.mul_(1.5),
    "training": lambda s, w: s.train(),
    "observer": lambda s, w: s.enable_observer(),
    "off": lambda s, w: s.disable_fake_quant(),
    "grid": lambda s, w: _grid(s),
    "not kept": lambda s, w: setattr(s, "keep_frozen_weight", False),
    "kept result": lambda s, w: s(w).mul_(0.5),
    "forgotten": lambda s, w: s.clear_weight_memory(),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES)
@torch.no_grad()
def test_changes_of_a_kept_weight_are_honoured(change: str) -> None:
    """A weight that is read again and again gives the kept result until anything changes."""
    torch.manual_seed(0)
    mine, weight = simulator("WEIGHT", granularity=PerChannelGranularity(axis=0)), nn.Parameter(torch.randn(4, 8))
    mine(weight)
    mine.disable_observer()
    mine.eval()
    kept = [mine(weight) for _ in range(4)]
    assert kept[-1] is kept[1]
    WEIGHT_CHANGES[change](mine, weight)
    fresh = copy.deepcopy(mine)
    for _ in range(3):
        assert torch.equal(mine(weight), fresh(nn.Parameter(weight.detach().clone())))


def test_a_gradient_is_wanted_again() -> None:
    """The kept result is for evaluation without gradient only."""
    mine, weight = simulator("WEIGHT"), nn.Parameter(torch.randn(4, 8))
    mine(weight)
    mine.disable_observer()
    mine.eval()
    with torch.no_grad():
        kept = [mine(weight) for _ in range(3)][-1]
    y = mine(weight)
    assert y.requires_grad
    assert torch.equal(y, kept)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("observing", [True, False])
@pytest.mark.parametrize("spec", [{"qscheme": "asymmetric"}, {"dtype": "float8_e4m3fn"}])
def test_weights_in_training(change: str, observing: bool, spec: dict[str, Any]) -> None:
    """A small weight that moves, after any change: outputs, gradients and state are those of the reference."""
    if spec.get("dtype") and change in ("grid", "formulation"):
        pytest.skip("of integers")
    results = []
    for form in ("auto", "reference"):
        before = set_form(form)
        try:
            torch.manual_seed(0)
            mine = simulator("WEIGHT", granularity=PerChannelGranularity(axis=0), **spec)
            weight, found = nn.Parameter(torch.randn(4, 8)), []

            def step(
                mine: Any = mine, weight: nn.Parameter = weight, found: list[torch.Tensor] = found
            ) -> torch.Tensor:
                weight.grad = None
                y: torch.Tensor = mine(weight)
                (y * torch.arange(32.0).view(4, 8)).sum().backward()
                found += [y.detach().clone(), weight.grad.clone()]
                with torch.no_grad():
                    weight.add_(torch.randn(4, 8))
                return y

            step()
            mine.enable_observer(observing)
            step()
            assert (mine._shortcut.task is not None) == (form == "auto")
            y = step()
            CHANGES[change](mine)
            for _ in range(2):
                step()
            with torch.no_grad():
                found.append(mine(weight).clone())
            results.append([*found, *mine.state_dict().values()])
            assert torch.equal(y.detach(), found[4])
        finally:
            set_form(before)
    for fast, slow in zip(*results, strict=True):
        assert torch.equal(fast, slow)


def test_weights_take_turns_with_evaluation() -> None:
    """Evaluation keeps a quantized weight; training between takes its short way again, and copies have none."""
    mine, weight = simulator("WEIGHT"), nn.Parameter(torch.randn(4, 8))
    for _ in range(3):
        mine.train()
        for _ in range(2):
            y = mine(weight)
            assert y.requires_grad
        mine.eval()
        with torch.no_grad():
            kept = [mine(weight) for _ in range(3)]
        assert kept[1] is kept[2]
        assert torch.equal(kept[2], y)
        with torch.no_grad():
            weight.add_(1.0)
    assert copy.deepcopy(mine)._shortcut.task is None


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "heads of attention": lambda x: x.transpose(1, 2).chunk(2, -1)[1],
    "every other": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "negated view": lambda x: torch._neg_view(x.transpose(0, 1)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("observing", [True, False])
@pytest.mark.parametrize("size", [6, 96])
@pytest.mark.parametrize("relu", [False, True])
def test_orders_of_memory(order: str, observing: bool, size: int, relu: bool) -> None:
    """Values, strides, gradients and ranges are those of the long way, for small tensors and large ones."""
    torch.manual_seed(0)
    short, long = simulator(), simulator()
    long.register_forward_hook(lambda *_: None)
    found = []
    for s in (short, long):
        torch.manual_seed(1)
        rows = []
        for step in range(3):
            leaf = torch.randn(2, 4, size, size, requires_grad=True)
            x = leaf * (1 + step)
            x = ORDERS[order](torch.relu(x) if relu else x)
            if step == 1 and not observing:
                s.disable_observer()
            before = x.detach().clone()
            y = s(x) if s is long else pass_through(s, x)
            assert torch.equal(x, before)
            gradient = torch.randn_like(y)
            y.backward(gradient)
            with torch.no_grad():
                without = s(x) if not observing else y
            rows += [y.detach(), leaf.grad, without.detach(), *(b.clone() for b in s.qparams_calculator.buffers())]
            strides = [t.stride() for t in (y, without)]
            rows.append(torch.tensor(strides))
        found.append(rows)
    assert short._shortcut.call is not None
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
