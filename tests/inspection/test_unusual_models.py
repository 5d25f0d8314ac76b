"""Models that write to what they are given, and outputs with masked, huge or missing numbers, are measured rightly."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.inspection import DamageWarning, _end_to_end, compare, guard, sweep
from bitwright.inspection._lockstep import Stepper
from bitwright.inspection.applying import apply_configs
from bitwright.inspection.metrics import ErrorAccumulator
from bitwright.quantization import Quantizer, QuantizerConfig

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])
LEAST = torch.finfo(torch.float32).min
FIRST = torch.tensor([True, False, False, False])


class LayerScale(nn.Module):
    """Scales its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((8,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.gamma)


class Normalizing(nn.Module):
    """Normalizes its own input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.sub_(1.0).div_(2.0))


class Head(nn.Module):
    """Does something to the output of a layer."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.linear(x))


def data() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def w8(mode: str = "eager") -> QuantizerConfig:
    return QuantizerConfig.presets.w8(execution_mode=mode)


def prepared(model: nn.Module, mode: str = "eager") -> nn.Module:
    return Quantizer(copy.deepcopy(model), w8(mode)).prepare((data(),))


def spoilt(model: Head) -> Any:
    compressed: Any = prepared(model)
    with torch.no_grad():
        compressed.linear.parametrizations.weight.original.zero_()
    return compressed


def sqnr(model: nn.Module, compressed: nn.Module) -> float:
    """Of the output, each model being run on inputs of its own."""
    with torch.no_grad():
        x, y = model(data()).double(), compressed(data()).double()
    return 10 * math.log10(float(x.square().sum() / (x - y).square().sum()))


@MODES
def test_layers_that_write_to_their_input(mode: str) -> None:
    """Running the compressed layer on the float model's tensors leaves these as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), LayerScale(), nn.Linear(8, 4)).eval()
    compressed = prepared(model, mode)
    report = compare(model, compressed, [data()])
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr(model, compressed))
    assert all(layer.isolated.sqnr_db > 40 for layer in report.layers)
    assert guard(model, compressed, [data()], on_damage="revert", min_sqnr_db=25).reverted == ()


@MODES
def test_models_that_write_to_their_input(mode: str) -> None:
    """Each run has inputs of its own, and the user's batches stay as they were."""
    torch.manual_seed(0)
    model, x = Normalizing().eval(), data()
    compressed = prepared(model, mode)
    expected = pytest.approx(sqnr(model, compressed))
    assert compare(model, compressed, [x]).end_to_end.error.sqnr_db == expected
    assert sweep(model, {"w8": w8(mode)}, [x]).entries[0].output.error.sqnr_db == expected
    assert guard(model, compressed, [x], on_damage="revert", min_sqnr_db=25).reverted == ()
    assert torch.equal(x, data())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_damage_beside_masked_positions(dtype: torch.dtype) -> None:
    """What stands for minus infinity in both outputs is left out; its power would hide all else."""
    torch.manual_seed(0)
    plain = Head(lambda y: y[:, 1:].to(dtype)).eval()
    masked = Head(lambda y: y.to(dtype).masked_fill(FIRST, torch.finfo(dtype).min)).eval()
    masked.load_state_dict(plain.state_dict())
    error = compare(masked, spoilt(masked), [data()]).end_to_end.error
    expected = compare(plain, spoilt(plain), [data()]).end_to_end.error
    assert error.sqnr_db == pytest.approx(expected.sqnr_db)
    assert error.cosine == pytest.approx(expected.cosine)


def test_differences_of_huge_numbers() -> None:
    """Only what is equal in both is left out, and sums that overflow float64 are no reason to fail."""
    error = ErrorAccumulator()
    error.update(torch.tensor([LEAST, 1.0]), torch.tensor([0.5 * LEAST, 1.0]))
    assert error.result().sqnr_db == pytest.approx(20 * math.log10(2))
    beyond = ErrorAccumulator(-1)
    beyond.update(torch.full((2, 2), 1e200, dtype=torch.float64), torch.full((2, 2), -1e200, dtype=torch.float64))
    assert beyond.result().sqnr_db == -200
    assert beyond.result().channel_sqnr_db <= 0


def test_classes_masked_with_minus_infinity() -> None:
    """KL divergence and agreement are those of the classes that are left."""
    torch.manual_seed(0)
    model = Head(lambda y: y.masked_fill(FIRST, -math.inf)).eval()
    compressed = spoilt(model)
    end = compare(model, compressed, [data()]).end_to_end
    with torch.no_grad():
        first, second = (one(data())[:, 1:].double().log_softmax(-1) for one in (model, compressed))
    assert end.kl_divergence == pytest.approx(float((first.exp() * (first - second)).sum(-1).mean()))
    assert end.top1_agreement == pytest.approx(float((first.argmax(-1) == second.argmax(-1)).double().mean()))


def test_weights_near_the_largest_number() -> None:
    """The edges of the histogram may lie beyond float32."""
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = 3.4e38
    histogram = compare(model, prepared(model), [data()]).layers[0].weights[0].reference
    assert histogram is not None
    assert sum(histogram.counts) == 32


def test_both_models_run_in_the_callers_modes() -> None:
    """Under autocast a copy computes what the model does; the float model runs in another thread."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert compare(model, copy.deepcopy(model), [data()]).end_to_end.error.sqnr_db == 200


def test_metrics_that_return_no_number() -> None:
    """The error names the model and the batch."""
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    scores = iter([1.0, 1.0, 1.0, math.nan])
    with pytest.raises(ValueError, match="returned nan for the compressed model's output on batch 2"):
        compare(model, prepared(model), [data(), data()], metric=lambda output, batch: next(scores))


@pytest.mark.parametrize("batches", [0, -1])
def test_numbers_of_batches_that_are_none(batches: int) -> None:
    """They are not taken for data that is empty."""
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    with pytest.raises(ValueError, match=f"got batches={batches}"):
        compare(model, prepared(model), [data()], batches=batches)


def test_a_batch_that_holds_a_tensor_several_times() -> None:
    """Attention projects query, key and value at once where they are one tensor; the copies that run are one, too."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 2).eval(), torch.randn(5, 2, 16)
    config = QuantizerConfig.presets.w8(execution_mode="graph")
    applied = apply_configs(model, [config], [(x, x, x)])
    assert len(applied.model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 2
    assert compare(model, applied.model, [(x, x, x)]).end_to_end.error.sqnr_db > 30


@dataclass
class Output:
    """What a forward returns that torch takes for one leaf; so is a mapping of a class of its own."""

    scores: Any
    extra: Any = None


@pytest.mark.parametrize("wrap", [Output, lambda y: ({"a": Output(UserDict(y=y))}, None)])
def test_outputs_in_data_classes_are_measured(wrap: Callable[[Any], Any]) -> None:
    """Also those inside other containers; what is no tensor is passed over."""
    torch.manual_seed(0)
    plain, model = Head(lambda y: y).eval(), Head(wrap).eval()
    model.load_state_dict(plain.state_dict())
    report, expected = (compare(one, prepared(one), [data()]) for one in (model, plain))
    assert report.end_to_end == expected.end_to_end
    assert report.layers[0].output == expected.layers[0].output


class Counting(nn.Module):
    """Its output grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


@MODES
def test_models_that_count_their_calls(mode: str) -> None:
    """Extra runs, for the effect of a layer, begin where the batch began and leave no trace."""
    torch.manual_seed(0)
    model = Counting().eval()
    compressed = prepared(model, mode)
    report = compare(model, compressed, [data()] * 3, output_batches=2)
    (layer,) = report.layers
    counts = [dict(one.named_buffers())["calls"] for one in (model, compressed)]
    assert counts == [3, 3]
    # an output that is multiplied by a number has the error that it had
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr(model, compressed), abs=1e-3)
    assert layer.output.sqnr_db == pytest.approx(report.end_to_end.error.sqnr_db, abs=1e-3)
    for calls in counts:
        calls.zero_()
    (entry,) = sweep(model, {"w8": w8(mode)}, [data()] * 3).entries
    assert entry.output.error.sqnr_db == pytest.approx(layer.output.sqnr_db, abs=1e-3)
    assert counts == [0, 0]
    guard(model, compressed, [data()])
    assert counts == [1, 1]


class Reading(nn.Module):
    """Reads the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.last.weight)


def test_layers_that_are_not_called_have_no_effect_of_their_own() -> None:
    """It is unknown, not zero, as it was for the output projection of ``nn.MultiheadAttention``."""
    torch.manual_seed(0)
    model = Reading().eval()
    first, last = compare(model, prepared(model), [data()]).layers
    assert first.output is not None
    assert last.output is None
    assert last.damage == last.weights[0].error.relative_noise
    result = sweep(model, {"w8": w8()}, [data()])
    assert [entry.output.error is None for entry in result.entries] == [False, True]
    assert result.layers == ("first", "last")


def test_both_models_make_tensors_on_the_default_device() -> None:
    """The float model runs in another thread, which knows nothing of ``torch.set_default_device``."""
    with torch.device("meta"):
        stepper: Stepper[torch.device] = Stepper(lambda emit: emit(torch.empty(0).device))
        found = stepper.next()
        stepper.close()
    assert found == torch.device("meta")


def test_weights_in_eight_bits_are_checked() -> None:
    """Torch tells NaN in them only as other numbers; those of sparse weights are their values."""
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    compressed = prepared(model)
    values = torch.tensor([1.0, math.nan])
    for name, tensor in (("bits", values.to(torch.float8_e4m3fn)), ("sparse", values.to_sparse())):
        compressed.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    with pytest.warns(DamageWarning):
        findings = guard(model, compressed, [data()]).findings
    assert {finding.where for finding in findings if finding.code == "BW104"} == {"bits", "sparse"}


def test_scores_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a language model would take gigabytes in double precision."""
    torch.manual_seed(0)
    model = Head(lambda y: y).eval()
    compressed = prepared(model)
    whole = compare(model, compressed, [data()]).end_to_end
    monkeypatch.setattr(_end_to_end, "PIECE", 12)
    sizes = []
    add = _end_to_end.OutputStatistics._add_scores
    monkeypatch.setattr(
        _end_to_end.OutputStatistics, "_add_scores", lambda *given: (sizes.append(given[1].shape), add(*given))[1]
    )
    parts = compare(model, compressed, [data()]).end_to_end
    assert sizes == [(3, 4)] * 5 + [(1, 4)]
    assert parts.kl_divergence == pytest.approx(whole.kl_divergence)
    assert parts.top1_agreement == whole.top1_agreement


class Remembering(nn.Module):
    """Keeps its last output and the number of its calls in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.calls: int = 0
        self.outputs: list[torch.Tensor] = []
        self.table = {"sum": torch.zeros(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.outputs.append(self.linear(x) * self.calls)
        self.table["sum"] += self.outputs[-1].mean(0)
        self.last = self.outputs[-1]
        return self.last + self.table["sum"]


def test_models_that_keep_things_in_attributes() -> None:
    """Extra runs leave no trace in numbers, lists, and tensors in dictionaries; new attributes are taken away."""
    torch.manual_seed(0)
    model = Remembering().eval()
    compressed = copy.deepcopy(model)
    with torch.no_grad():
        compressed.linear.weight.add_(0.01)
    report = compare(model, compressed, [data()] * 3, output_batches=3)
    # it begins each batch with what the float model kept, and not with what the compressed one did
    assert report.layers[0].output.sqnr_db == pytest.approx(report.end_to_end.error.sqnr_db, abs=1)
    for one in (model, compressed):
        assert (one.calls, len(one.outputs)) == (3, 3)
    fresh = Remembering().eval()
    fresh.load_state_dict(model.state_dict())
    for mode in ("eager", "graph"):
        (entry,) = sweep(fresh, {"w8": w8(mode)}, [data()] * 3).entries
        assert entry.output.error.sqnr_db > (40 if mode == "eager" else 0)
        assert (fresh.calls, fresh.outputs, hasattr(fresh, "last")) == (0, [], False)
        assert not fresh.table["sum"].any()


class CountingLayer(nn.Linear):
    """A layer of which each call has another output."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_layers_that_count_their_calls() -> None:
    """The compressed layer is run by itself, too; it counts what its model does, and not what calibration did."""
    torch.manual_seed(0)
    model = nn.Sequential(CountingLayer()).eval()
    compressed: Any = prepared(model)
    report = compare(model, compressed, [data()] * 3)
    assert (float(model[0].calls), float(compressed[0].calls)) == (3, 3)
    assert report.end_to_end.error.sqnr_db == pytest.approx(report.layers[0].isolated.sqnr_db)
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr(model, compressed), abs=1e-3)
    a8 = QuantizerConfig(execution_mode="eager")
    (entry,) = sweep(nn.Sequential(CountingLayer()).eval(), {"a8": a8}, [data()]).entries
    assert entry.output.error.sqnr_db > 25


class Returning(nn.Module):
    """Returns a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("out", torch.zeros(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out.copy_(self.linear(x))


def test_outputs_that_the_model_keeps() -> None:
    """What was returned is what later runs write to."""
    torch.manual_seed(0)
    model = Returning().eval()
    report = compare(model, prepared(model), [data()])
    assert report.layers[0].output == report.end_to_end.error
    batches = [data(), data() + 1]
    (entry,) = sweep(model, {"w8": w8()}, batches).entries
    plain = nn.Sequential(model.linear).eval()
    assert entry.output == sweep(plain, {"w8": w8()}, batches).entries[0].output


@MODES
def test_complex_outputs_are_measured(mode: str) -> None:
    """By real and imaginary parts, whose power is that of the signal; they are no scores of classes."""
    torch.manual_seed(0)
    plain, model = Head(lambda y: y).eval(), Head(torch.fft.fft).eval()
    model.load_state_dict(plain.state_dict())
    end = compare(model, prepared(model, mode), [data()]).end_to_end
    assert end.error.sqnr_db == pytest.approx(compare(plain, prepared(plain, mode), [data()]).end_to_end.error.sqnr_db)
    assert end.kl_divergence is None


def test_outputs_without_numbers_are_said() -> None:
    """A report with nothing on the output says so."""
    model = Head(lambda y: y.argmax(-1)).eval()
    report = compare(model, prepared(model), [data()])
    assert report.end_to_end.error is None
    assert report.notes[0].startswith("The output holds no floating-point tensor")
