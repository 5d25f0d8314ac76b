"""Weights that reach their op cast, transposed or cut are quantized as weights, alike in both modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.planning import Plan
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity

MODES = ("eager", "graph")


class Weighted(nn.Module):
    """Calls a function with its input and its weight."""

    def __init__(self, shape: tuple[int, ...], call: Any, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.name, self.call = name, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, getattr(self, self.name))


def plan_of(model: nn.Module, mode: str, *inputs: torch.Tensor, config: Any = None) -> Plan:
    """The plan of a preset of eight bits a weight, one scale for each output channel."""
    chosen = config or QuantizerConfig.presets.w8(execution_mode=mode)
    return Quantizer(model, chosen).plan(inputs)


VIEWS = {
    "transposed": ((6, 4), lambda x, w: x @ w.T, 0),
    "transposed by dims": ((6, 4), lambda x, w: x @ w.transpose(0, 1), 0),
    "transposed from behind": ((6, 4), lambda x, w: torch.matmul(x, w.transpose(-2, -1)), 0),
    "transposed by method": ((6, 4), lambda x, w: x.matmul(w.t()), 0),
    "swapped": ((6, 4), lambda x, w: x @ w.swapaxes(0, 1), 0),
    "swapped by keywords": ((6, 4), lambda x, w: x @ torch.swapaxes(w, axis0=-1, axis1=0), 0),
    "swapped by dims": ((6, 4), lambda x, w: x @ w.swapdims(1, 0), 0),
    "permuted": ((6, 4), lambda x, w: x @ w.permute(1, 0), 0),
    "permuted by a tuple": ((6, 4), lambda x, w: x @ w.permute((1, 0)), 0),
    "twice": ((4, 6), lambda x, w: F.linear(x, w.mT.double().float()), 1),
    "as it is": ((4, 6), lambda x, w: x @ w, 1),
    "first factor": ((6, 4), lambda x, w: (w @ x.T).T, 0),
    "cast": ((6, 4), lambda x, w: F.linear(x, w.double().float()), 0),
    "cast to what it is": ((6, 4), lambda x, w: F.linear(x, w.float()), 0),
    "without an axis, and with it again": (
        (4, 1, 3),
        lambda x, w: F.conv1d(x[..., None].expand(3, 4, 3), w.squeeze(1).unsqueeze(1), groups=4),
        0,
    ),
    "cut in equal pieces": ((6, 4), lambda x, w: F.linear(x, w.chunk(2)[0]) + F.linear(x, w.chunk(2)[1]), 0),
    "cut in two": ((6, 4), lambda x, w: F.linear(x, w.split([2, 4])[1]), 0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", VIEWS)
def test_views_of_a_weight(case: str, mode: str) -> None:
    """The weight gets the simulator with the axis that the op needs; no activation simulator stands on a view."""
    shape, call, axis = VIEWS[case]
    model, x = Weighted(shape, call), torch.randn(3, 4)
    (row,) = (row for row in plan_of(model, mode, x) if row.kind == "weight")
    assert row.spec is not None
    assert row.spec.granularity == PerChannelGranularity(axis=axis)
    everything = plan_of(model, mode, x, config=QuantizerConfig(execution_mode=mode))
    shapes = {row.shape for row in everything if row.kind == "activation"}
    assert shapes.isdisjoint({shape, shape[::-1], (3, 4)[:1] + shape, (2, 4), (4, 2)})


@pytest.mark.parametrize("mode", MODES)
def test_prepared_views_compute_with_rounded_weights(mode: str) -> None:
    """``x @ w.T`` becomes ``x`` times the fake-quantized weight, transposed."""
    shape, call, _ = VIEWS["transposed"]
    model, x = Weighted(shape, call), torch.randn(3, 4)
    weight = model.weight.detach().clone()
    prepared: Any = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare((x,))
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    rounded = (weight / scale).round().clamp(-128, 127) * scale
    assert torch.allclose(prepared(x), x @ rounded.T, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((4,), lambda x, w: x * (1.0 + w.float())),
        ((4,), lambda x, w: F.rms_norm(x, (4,)) * w),
        ((1, 4), lambda x, w: x + x * w),
    ],
)
def test_gains_are_left_alone(shape: tuple[int, ...], call: Any, mode: str) -> None:
    """One scale for each number is no compression, so presets pass norms by, also when they add one or cast."""
    plan = plan_of(Weighted(shape, call), mode, torch.randn(3, 4))
    assert not plan.problems
    assert not plan.placements


@pytest.mark.parametrize("mode", MODES)
def test_stacked_weights_of_experts_are_weights(mode: str) -> None:
    """They carry names of their own, and hold most of a model with experts."""
    model = Weighted((2, 6, 4), lambda x, w: torch.bmm(x, w.transpose(1, 2)), "gate_up_proj")
    (row,) = plan_of(model, mode, torch.randn(2, 3, 4))
    assert row.tensor == "gate_up_proj"
    assert row.spec is not None
    assert row.spec.granularity == PerChannelGranularity(axis=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("move", [lambda w: w.squeeze(0), lambda w: w.transpose(0, 0), lambda w: w.unsqueeze(0)])
def test_a_parameter_without_dimensions_is_moved(move: Any, mode: str) -> None:
    """A single number has no axes, and torch takes 0 and -1 as a dimension of it all the same."""
    model, x = Weighted((), lambda x, w: x * move(w)), torch.randn(3, 4)
    prepared: Any = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare((x,))
    assert torch.equal(prepared(x), model(x))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention_has_the_same_weights_in_both_modes(kind: str) -> None:
    """Packed projections are one weight, whether the op cuts them up or not."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.attention(x, y, y)[0] if kind == "cross" else self.attention(x, x, x)[0]

    inputs = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    plans = [plan_of(Attention().eval(), mode, *inputs) for mode in MODES]
    eager, graph = ({row.tensor: row.spec for row in plan if row.kind == "weight"} for plan in plans)
    assert eager == graph
    assert eager["attention.in_proj_weight"].granularity == PerChannelGranularity(axis=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", ["masked_fill", "where", "assignment"])
def test_masked_scores_stay_finite(mode: str, write: str) -> None:
    """The smallest number of the dtype stands for minus infinity; no scale is made for it."""

    def masked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = x @ w
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        lowest = torch.finfo(x.dtype).min
        if write == "masked_fill":
            bias = torch.zeros(3, 3).masked_fill(mask, lowest)
        elif write == "where":
            bias = torch.where(mask, torch.tensor(lowest), torch.zeros(()))
        else:
            bias = torch.zeros(3, 3)
            bias[:, 1:] = lowest
            bias[0] = 0.0
        return torch.softmax(scores + bias, -1)

    model, x = Weighted((4, 3), masked), torch.randn(3, 4)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    expected = model(x)
    prepared: Any = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    assert torch.allclose(prepared(x), expected, atol=0.05)


class TestComputedWeights:
    @pytest.mark.parametrize("mode", MODES)
    def test_normalized_weights_are_told(self, mode: str) -> None:
        """They are not quantized, and the plan says so and how to change that."""
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))
        (problem,) = plan_of(model, mode, torch.randn(2, 4)).problems
        assert problem.code == "computed-weight"
        assert "remove_parametrizations" in problem.message
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        assert not plan_of(model, mode, torch.randn(2, 4)).problems

    @pytest.mark.parametrize("mode", MODES)
    def test_standardized_weights_are_told(self, mode: str) -> None:
        """Arithmetic on the parameter counts like a parametrization; without a spec for weights nothing is said."""
        model = Weighted((6, 4), lambda x, w: F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)))
        (problem,) = plan_of(model, mode, torch.randn(2, 4)).problems
        assert problem.code == "computed-weight"
        off = QuantizerConfig(execution_mode=mode, global_config={"op_state_spec": None})
        assert not plan_of(model, mode, torch.randn(2, 4), config=off).problems
