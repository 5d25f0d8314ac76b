"""The guard finds each kind of planted damage, names it, and can put layers back."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.inspection import DamageError, DamageWarning, compare, diagnostics, explain, guard
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def data(samples: int = 32) -> list[torch.Tensor]:
    return [torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))]


def quantize(
    model: nn.Module, mode: str, preset: str = "w8a8", calibrate: Callable[[Any, nn.Module], None] | None = None
) -> tuple[Quantizer, nn.Module]:
    config = getattr(QuantizerConfig.presets, preset)(execution_mode=mode)
    quantizer = Quantizer(copy.deepcopy(model), config)
    prepared = quantizer.prepare((data()[0],))
    if calibrate is None:
        with quantizer.calibration_mode():
            prepared(data()[0])
    else:
        calibrate(quantizer, prepared)
    return quantizer, prepared


def codes(
    model: nn.Module, compressed: nn.Module, batches: list[torch.Tensor] | None = None, **options: Any
) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        return {finding.code for finding in guard(model, compressed, batches or data(), **options).findings}


@MODES
def test_a_sound_model_gives_no_findings(mode: str) -> None:
    """Calibrated W8A8 within its plan and a sensible bound: silence."""
    model = make()
    quantizer, prepared = quantize(model, mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamageWarning)
        result = guard(model, prepared, data(), plan=quantizer.applied_plan, min_sqnr_db=30, max_kl=1e-2)
    assert result.findings == ()
    assert result.model is prepared


@MODES
def test_uncalibrated_activations(mode: str) -> None:
    """BW101 for every activation, until calibration runs."""
    model = make()
    _, prepared = quantize(model, mode, calibrate=lambda *_: None)
    assert "BW101" in codes(model, prepared)
    assert "BW101" not in codes(model, prepared, ignore=["BW101"])


@MODES
def test_empty_calibration(mode: str) -> None:
    """BW102: the block ran without data."""

    def nothing(quantizer: Any, _: nn.Module) -> None:
        with quantizer.calibration_mode():
            pass

    model = make()
    _, prepared = quantize(model, mode, calibrate=nothing)
    found = codes(model, prepared)
    assert "BW102" in found
    assert "BW101" not in found


@MODES
def test_a_range_dominated_by_one_sample(mode: str) -> None:
    """BW103: one row 100 times larger than the others, seen in calibration."""
    model = make()
    batch = data()[0].clone()
    batch[3] *= 100

    def calibrate(quantizer: Any, prepared: nn.Module) -> None:
        with quantizer.calibration_mode():
            prepared(batch)

    _, prepared = quantize(model, mode, calibrate=calibrate)
    assert "BW103" in codes(model, prepared, [batch])
    assert "BW103" not in codes(model, quantize(model, mode)[1])


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_broken_scales(value: float) -> None:
    """BW104 names the weight whose scale is no positive number."""
    model = make()
    _, prepared = quantize(model, "eager", "w8")
    simulator = next(
        m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase) and m.tensor_fqn == "2.weight"
    )
    simulator.qparams_calculator.scale.fill_(value)  # type: ignore[union-attr]
    simulator.clear_weight_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        findings = guard(model, prepared, data()).findings
    [finding] = [finding for finding in findings if finding.code == "BW104"]
    assert finding.where == "2.weight"
    assert finding.layer == "2"


def test_lost_channels_by_pruning() -> None:
    """BW105: a pruner that zeroes whole channels."""
    model = make()
    twin = copy.deepcopy(model)
    pruner = MagnitudePruner(twin, MagnitudePrunerConfig())
    prepared = pruner.prepare((data()[0],))
    with torch.no_grad():
        prepared[0].parametrizations.weight.original[2] = 0
    assert "BW105" in codes(model, prepared)


def test_nothing_compressed() -> None:
    """BW106 for a model that is still the float model."""
    model = make()
    assert codes(model, copy.deepcopy(model)) == {"BW106"}


def test_larger_than_planned() -> None:
    """BW107: int8 in blocks of one entry takes 40 bits per weight."""
    model = make()
    spec = QuantizationSpec(dtype="int8", granularity={"type": "per_block", "axis": 1, "block_size": 1})
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=module, execution_mode="eager")
    prepared = Quantizer(copy.deepcopy(model), config).prepare((data()[0],))
    assert "BW107" in codes(model, prepared)


@MODES
def test_bounds_on_the_output(mode: str) -> None:
    """BW108 for each bound that is missed: SQNR, KL divergence, metric."""
    model = make()
    _, prepared = quantize(model, mode, "w4")
    assert "BW108" in codes(model, prepared, min_sqnr_db=60)
    assert "BW108" in codes(model, prepared, max_kl=1e-9)
    metric = {"metric": lambda output, _: float(output.sum())}
    assert "BW108" in codes(model, prepared, max_metric_change=1e-9, **metric)
    assert "BW108" not in codes(model, prepared, max_metric_change=1e9, **metric)


@MODES
def test_nan_in_a_layer(mode: str) -> None:
    """BW109 names the layer that makes the NaN, not those behind it."""
    model = make()
    _, prepared = quantize(copy.deepcopy(model), mode, "w8")
    with torch.no_grad():
        prepared.get_submodule("2").bias.fill_(math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        findings = guard(model, prepared, data()).findings
    assert {f.layer for f in findings if f.code == "BW109"} == {"2" if mode == "eager" else "linear_1"}


@MODES
def test_a_calibration_with_nan(mode: str) -> None:
    """BW104 and BW109 tell of it; nothing is left to compare in what the broken quantizers see."""
    model = make()

    def calibrate(quantizer: Any, prepared: nn.Module) -> None:
        with pytest.warns(UserWarning, match="BW104"), quantizer.calibration_mode():
            prepared(torch.full((32, 16), math.nan))

    _, prepared = quantize(model, mode, calibrate=calibrate)
    assert {"BW104", "BW109"} <= codes(model, prepared)


@MODES
def test_heavy_clipping(mode: str) -> None:
    """BW110: calibrated on data twenty times smaller than what the model meets."""

    def calibrate(quantizer: Any, prepared: nn.Module) -> None:
        with quantizer.calibration_mode():
            prepared(data()[0] / 20)

    model = make()
    assert "BW110" in codes(model, quantize(model, mode, calibrate=calibrate)[1])


@MODES
def test_a_spoilt_weight(mode: str) -> None:
    """BW111: a transposed weight keeps all its channels and codes, and is put back."""
    model = make()
    _, prepared = quantize(model, mode)
    (weight,) = (p for name, p in prepared.named_parameters() if name.startswith("2.") and p.ndim == 2)
    with torch.no_grad():
        weight.copy_(weight.t().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        (finding,) = (found for found in guard(model, prepared, data()).findings if found.code == "BW111")
    assert finding.where == finding.layer == ("2" if mode == "eager" else "linear_1")
    assert "in other places" in finding.message
    result = guard(model, prepared, data(), on_damage="revert")
    assert finding.layer in result.reverted or result.reverted == ("",)
    assert not any(layer.broken for layer in result.report.layers)


def test_raise_lists_all_findings() -> None:
    """One error, with every finding and where to read on."""
    model = make()
    _, prepared = quantize(model, "eager", "w4", calibrate=lambda *_: None)
    with pytest.raises(DamageError, match="BW108") as caught:
        guard(model, prepared, data(), on_damage="raise", min_sqnr_db=90)
    assert "bitwright explain BW108" in str(caught.value)
    assert len(caught.value.findings) == 1


@MODES
def test_revert_puts_damaged_layers_back_and_keeps_the_others(mode: str) -> None:
    """One spoilt layer computes in floating point again; the bound holds; the others stay compressed."""
    model = make()
    with torch.no_grad():
        model[2].weight[5] *= 1000
    spec = QuantizationSpec(dtype="int8", granularity={"type": "per_tensor"})
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=module, execution_mode=mode)
    prepared = Quantizer(copy.deepcopy(model), config).prepare((data()[0],))
    result = guard(model, prepared, data(), on_damage="revert", min_sqnr_db=30)
    assert result.reverted == ("2",) if mode == "eager" else ("linear_1",)
    kept = [layer for layer in result.report.layers if layer.name in ("0", "4", "linear", "linear_2")]
    assert all(layer.isolated.sqnr_db < 200 for layer in kept)
    assert result.report.layer(result.reverted[0]).isolated.sqnr_db == 200
    assert result.report.end_to_end.error.sqnr_db >= 30


class Recurrent(nn.Module):
    """A recurrent layer, one of whose gates has far larger weights, in front of a harmless layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 4)
        with torch.no_grad():
            self.layer.weight_ih_l0[3] *= 3000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


@MODES
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.filterwarnings("ignore::bitwright.inspection.DamageWarning")
def test_weights_of_recurrent_layers_are_looked_at(kind: type[nn.Module], mode: str) -> None:
    """They are compared and put back like others, and the harmless layer stays as it is."""
    weight = QuantizationSpec(dtype="int4", granularity={"type": "per_tensor"})
    plain = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": weight})
    config = QuantizerConfig(execution_mode=mode, global_config=plain)
    if mode == "eager":  # where no operator reads the weights
        states = dict.fromkeys(("weight_ih_l0", "weight_hh_l0"), weight)
        config = config.set_module_type(kind, plain.model_copy(update={"module_state_spec": states}))
    model, x = Recurrent(kind).eval(), torch.randn(4, 6, 8)
    prepared = Quantizer(copy.deepcopy(model), config).prepare((x,))
    report = compare(model, prepared, [x])
    assert {"layer", "head"} == {layer.module for layer in report.layers}
    assert {finding.code for finding in guard(model, prepared, [x]).findings} >= {"BW105"}


def test_a_layer_that_is_put_back_is_no_part_of_what_is_around_it() -> None:
    """Its calls are not taken for unseen ones of the module that adds its input."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x) + x)

    torch.manual_seed(0)
    model = Around().eval()
    with torch.no_grad():
        model.outer.weight[1] *= 1000
    config = QuantizerConfig.presets.w8a8(execution_mode="eager")
    config.global_config.op_state_spec = {"weight": QuantizationSpec(granularity={"type": "per_tensor"})}
    quantizer = Quantizer(copy.deepcopy(model), config)
    prepared = quantizer.prepare((data()[0],))
    with quantizer.calibration_mode():
        prepared(data()[0])
    result = guard(model, prepared, data(), on_damage="revert")
    assert result.reverted == ("outer",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.model(data()[0])


@MODES
def test_revert_follows_the_ranking_until_the_bound_holds(mode: str) -> None:
    """A bound that only the float model meets puts everything back; the result then equals the float model."""
    model = make()
    _, prepared = quantize(model, mode, "w4")
    result = guard(model, prepared, data(), on_damage="revert", min_sqnr_db=190)
    assert torch.equal(result.model(data()[0]), model(data()[0]))
    again = quantize(model, mode, "w4")[1]
    bound = compare(model, again, data()).end_to_end.error.sqnr_db + 0.5
    some = guard(model, again, data(), on_damage="revert", min_sqnr_db=bound)
    assert len(some.reverted) == 1
    assert some.report.end_to_end.error.sqnr_db >= bound


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = self.first
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(x))))


def test_a_layer_with_two_names_is_put_back_under_both() -> None:
    """Else the damage stays where the other name is called."""
    torch.manual_seed(0)
    model = Shared().eval()
    compressed: Any = quantize(model, "eager", "w8")[1]
    weight = compressed.first.parametrizations.weight.original
    with torch.no_grad():
        weight.copy_(-weight[torch.randperm(16)].clone())
    result = guard(model, compressed, data(), on_damage="revert")
    assert result.reverted == ("first",)
    assert result.model.first is result.model.second
    assert result.report.end_to_end.error.sqnr_db > 30


class Tied(nn.Module):
    """An embedding and a head on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def test_layers_on_one_weight_are_put_back_on_one() -> None:
    """Else the model would be larger than it was at first."""
    torch.manual_seed(0)
    model, x = Tied().eval(), torch.arange(16).reshape(2, 8)
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w4(execution_mode="eager"))
    result = guard(model, quantizer.prepare((x,)), [x], on_damage="revert", min_sqnr_db=100.0)
    assert set(result.reverted) == {"embedding", "head"}
    assert result.model.embedding.weight is result.model.head.weight
    assert result.model.head.weight is not model.head.weight
    assert result.report.bytes_after == result.report.bytes_before


def test_bounds_that_cannot_be_measured_are_findings() -> None:
    """Nothing is put back for them: the float model does not make them measurable."""

    class Classes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(-1)

    model = Classes(*make()).eval()
    compressed = quantize(model, "eager", "w8")[1]
    for bound in ("min_sqnr_db", "max_kl"):
        with pytest.raises(DamageError, match=f"{bound}=1 cannot be measured"):
            guard(model, compressed, data(), on_damage="raise", **{bound: 1.0})  # type: ignore[arg-type]
    assert guard(model, compressed, data(), on_damage="revert", min_sqnr_db=1.0).reverted == ()
    with pytest.raises(ValueError, match="needs a metric"):
        guard(model, compressed, data(), max_metric_change=0.0)


def test_layers_that_no_row_reaches() -> None:
    """An expert that no token is sent to has no peaks."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + self.idle(x[x[:, 0] > 0]).sum(0)

    torch.manual_seed(0)
    model = Expert().eval()
    compressed = quantize(model, "eager")[1]
    assert "BW103" not in codes(model, compressed, [-data()[0].abs()])


def test_unknown_choice() -> None:
    """The error lists the choices."""
    with pytest.raises(ValueError, match="'warn', 'raise' or 'revert'"):
        guard(make(), make(), data(), on_damage="ignore")  # type: ignore[arg-type]


def test_every_code_has_a_page() -> None:
    """Codes in the source and pages are the same; a page says what to do."""
    import bitwright.inspection._checks as checks
    import bitwright.quantization._statistics as statistics

    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (checks, statistics))
    used = set(re.findall(r'"(BW\d+)"', source))
    assert used == set(diagnostics())
    for diagnostic in diagnostics().values():
        assert "## What to do" in diagnostic.page
    assert explain("bw104").title == diagnostics()["BW104"].title
    with pytest.raises(KeyError, match="there are BW101"):
        explain("BW999")


def test_programs_of_torch_export_are_guarded() -> None:
    """A program that was captured again after compression, against the module it was made from."""
    model = make()
    quantizer, _ = quantize(model, "graph")
    program = torch.export.export(quantizer.finalize(backend="_torch"), (data()[0],)).module()
    assert "BW108" in codes(model, program, min_sqnr_db=150)
    assert "BW108" not in codes(model, program, min_sqnr_db=20)
