"""Operators that a converter lacks are problems of the plan, in the words of the exporter; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.export.conversion import ConversionError
from bitwright.export.operators import check_operators
from bitwright.export.targets import TARGETS
from bitwright.planning import Severity
from bitwright.quantization import Quantizer, QuantizerConfig

from .random_cases import random_case


class Gammas(nn.Module):
    """An operator without translation in two modules and in the model itself."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return torch.lgamma(self.linear(x))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.digamma(x)


class Masked(nn.Module):
    """An embedding of the low bits of its input."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.embed(x & 3))


class Counting(nn.Module):
    """A model with a buffer that calls change, dropout, and random numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        self.calls.add_(1)
        return self.drop(self.linear(x))


def _skip_without(name):
    if TARGETS[name].missing() is not None:
        pytest.skip(TARGETS[name].missing())


def _circular():
    return nn.Sequential(nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"))


LACKING = {
    ("coreai", "hundreds of unequal windows"): (
        lambda: nn.Sequential(nn.Linear(8, 400), nn.AdaptiveMaxPool1d(300)),
        (2, 8),
        "1",
        "aten.adaptive_max_pool2d",
    ),
    ("coreai", "two places"): (Gammas, (2, 8), "blocks.0", "aten.lgamma"),
    ("coreml", "two places"): (Gammas, (2, 8), "blocks.0", "lgamma"),
    ("onnx", "two places"): (Gammas, (2, 8), "blocks.0", "aten.lgamma"),
    ("executorch", "two places"): (Gammas, (2, 8), "blocks.0", "aten.lgamma"),
    ("coreml", "circular padding"): (_circular, (2, 4, 6, 6), "1", "Pad mode"),
    ("coreml", "bits"): (Masked, None, "the model itself", "bitwise_and"),
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("key", LACKING, ids=" ".join)
def test_named_in_the_plan_and_by_the_exporter(key, mode, tmp_path):
    _skip_without(key[0])
    make, shape, where, op = LACKING[key]
    model = make().eval()
    inputs = (torch.randint(0, 8, (2, 3)) if shape is None else torch.randn(*shape),)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode))
    errors = [one for one in quantizer.plan(inputs, target=key[0]).problems if one.severity == Severity.ERROR]
    assert errors[0].where == where
    assert op in errors[0].message
    assert "other operators" in errors[0].message
    with pytest.raises(PlanError, match=op):
        quantizer.prepare(inputs, target=key[0])
    ready = quantizer.prepare(inputs)
    with pytest.raises(ConversionError, match=op):
        TARGETS[key[0]].write(ready, inputs, tmp_path / f"m{TARGETS[key[0]].suffix}", {}, None)


@pytest.mark.parametrize("target", ["coreai", "coreml", "executorch", "onnx"])
def test_every_missing_operator_has_one_problem_with_its_places(target):
    _skip_without(target)
    first, second = check_operators(Gammas(), target, (torch.randn(2, 8),))
    assert "blocks.0, blocks.1" in first.message
    assert "digamma" in second.message
    assert second.where == "the model itself"


@pytest.mark.parametrize("target", ["coreai", "coreml", "executorch", "onnx"])
def test_models_in_train_mode_with_state_are_left_as_they_were(target):
    """Dropout in train mode is no operator that the exporter meets: it writes models in eval mode."""
    _skip_without(target)
    model, state = Counting().train(), torch.get_rng_state()
    inputs = (torch.randn(2, 8, generator=torch.Generator().manual_seed(0)),)
    assert check_operators(model, target, inputs) == []
    assert model.training
    assert model.drop.training
    assert not model.calls.any()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("target", ["coreai", "coreml", "executorch", "onnx"])
def test_the_weights_stay_and_nothing_is_printed(target, capfd):
    _skip_without(target)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    assert check_operators(model, target, (torch.randn(2, 128),)) == []
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert capfd.readouterr().out == ""


def _converts(target, model, inputs, path):
    try:
        TARGETS[target].write(model, inputs, path, {}, None)
    except ConversionError:
        return False
    return True


@pytest.mark.parametrize("target", ["coreai", "coreml", "executorch", "onnx"])
@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_only_models_are_refused_that_the_exporter_refuses(target, count, tmp_path):
    """Both ways: what the plan accepts of a float model is written, what it refuses is not."""
    _skip_without(target)
    for seed in range(count):
        case = random_case(seed)
        if target == "coreml" and next(case.model.parameters()).dtype == torch.bfloat16:
            continue  # which it has no numbers for, as the plan says of each tensor
        problems = check_operators(case.model, target, case.inputs)
        written = _converts(target, case.model, case.inputs, tmp_path / f"{seed}{TARGETS[target].suffix}")
        assert written == (not problems), (case.name, problems)


@pytest.mark.parametrize("make", [_circular, lambda: nn.Conv2d(4, 8, 3, padding=1)])
def test_half_precision_is_asked_in_the_form_that_is_written(make, tmp_path):
    """Core ML packages of models in float16 are made from float32 ones."""
    _skip_without("coreml")
    model, inputs = make().half().eval(), (torch.randn(2, 4, 6, 6).half(),)
    problems = check_operators(model, "coreml", inputs)
    assert _converts("coreml", model, inputs, tmp_path / "m.mlpackage") == (not problems)
    assert bool(problems) == (make is _circular)
    assert next(model.parameters()).dtype == torch.float16


def test_a_missing_target_is_named():
    with pytest.raises(KeyError, match="There is no target"):
        check_operators(nn.Linear(2, 2), "nowhere", (torch.randn(1, 2),))


def test_executorch_asks_for_the_largest_size_of_a_dynamic_dimension():
    _skip_without("executorch")
    x, model = (torch.randn(2, 8),), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    (problem,) = check_operators(model, "executorch", x, None, ({0: torch.export.Dim("batch")},))
    assert "with a max" in problem.message
    assert check_operators(model, "executorch", x, None, ({0: torch.export.Dim("batch", max=8)},)) == []
