"""Layers that were spoilt come first in the report, with the reason, though the output may hardly move."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright.config.spec import CompressionTargetTensor
from bitwright.inspection import FidelityReport, compare
from bitwright.inspection._evidence import problems_of, usual_evidence, weight_evidence
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


class Quiet(nn.Module):
    """A branch that adds so little to the output that nothing done to it shows there; 2 bits in the head do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.head(x + 1e-3 * self.branch(x))


class Normed(nn.Module):
    """A convolution whose batch norm graph mode folds, and one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.mix = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.relu(self.norm(self.conv(x))))


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 16, generator=generator) for _ in range(2)]


def quantized(model: nn.Module, config: QuantizerConfig, batches: list[torch.Tensor] | None = None) -> nn.Module:
    batches = data() if batches is None else batches
    quantizer = Quantizer(copy.deepcopy(model), config)
    prepared = quantizer.prepare((batches[0],))
    with quantizer.calibration_mode(), torch.no_grad():
        for batch in batches:
            prepared(batch)
    return prepared


def formats(mode: str, weight: str, activation: str | None = None, **spec: Any) -> QuantizerConfig:
    values = None if activation is None else {"*": QuantizationSpec(dtype=activation)}
    module = ModuleQuantizerConfig(
        op_input_spec=values,
        op_output_spec=values,
        op_state_spec={"weight": QuantizationSpec(dtype=weight, **spec)},
    )
    return QuantizerConfig(global_config=module, execution_mode=mode)


def palettized(model: nn.Module, bits: int) -> nn.Module:
    spec = PalettizationSpec(n_bits=bits, granularity={"type": "per_tensor"})
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    return KMeansPalettizer(copy.deepcopy(model), config).prepare((data()[0],))


def pruned(model: nn.Module, sparsity: float) -> nn.Module:
    spec = PruningSpec(target_sparsity=sparsity)
    config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec={"weight": spec}))
    return MagnitudePruner(copy.deepcopy(model), config).prepare((data()[0],))


def simulators(model: nn.Module, target: CompressionTargetTensor) -> dict[str, FakeQuantizeImplBase]:
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target == target:
            found[module.tensor_fqn or path] = module
    return found


def scale_range(simulator: FakeQuantizeImplBase, factor: float) -> None:
    with torch.no_grad():
        simulator.qparams_calculator.scale.mul_(factor)  # type: ignore[operator,union-attr]
    simulator.clear_weight_memory()


class _Fixed(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.weight


def first(report: FidelityReport) -> tuple[str, tuple[str, ...]]:
    layer = report.ranking[0]
    return layer.module, layer.broken


class TestWeights:
    @MODES
    @pytest.mark.parametrize(
        ("dtype", "factor", "reason"),
        [
            ("int8", 50, r"its SQNR is \d+\.\d dB, where a range found anew gives 4\d\.\d dB"),
            ("int4", 50, "all of its values became 0"),
            ("int8", 0.02, r"its values are \d+(\.\d)? times too small"),
        ],
    )
    def test_a_wrong_range(self, mode: str, dtype: str, factor: float, reason: str) -> None:
        """Ten times the noise that a range found anew leaves, or values of another size, or none."""
        model = Quiet()
        prepared = quantized(model, formats(mode, dtype))
        assert compare(model, prepared, data()).ranking[0].module != "branch"
        scale_range(simulators(prepared, CompressionTargetTensor.WEIGHT)["branch.weight"], factor)
        report = compare(model, prepared, data())
        module, (problem,) = first(report)
        assert module == "branch"
        assert re.fullmatch(f"branch.weight is broken: {reason}", problem)
        assert [layer.module for layer in report.layers if layer.broken] == ["branch"]
        if dtype == "int4":
            assert report.ranking[0].output.sqnr_db > report.ranking[1].output.sqnr_db

    @MODES
    def test_a_transposed_weight(self, mode: str) -> None:
        """The noise has twice the power of the signal; rounding and pruning cannot do that."""
        model = Quiet()
        prepared = quantized(model, formats(mode, "int8"))
        weight = next(p for name, p in prepared.named_parameters() if name.startswith("branch") and p.ndim == 2)
        with torch.no_grad():
            weight.copy_(weight.t().clone())
        module, (problem,) = first(compare(model, prepared, data()))
        assert module == "branch"
        assert "error is greater than the tensor itself" in problem

    @MODES
    @pytest.mark.parametrize("axis", [0, 1])
    def test_one_channel_of_the_compressed_weight(self, mode: str, axis: int) -> None:
        """Output channels and input channels; clipped to the range that was found before."""
        model = Quiet()
        prepared = quantized(model, formats(mode, "int8"))
        weight = next(p for name, p in prepared.named_parameters() if name.startswith("branch") and p.ndim == 2)
        with torch.no_grad():
            weight.select(axis, 5).mul_(1000)
        module, problems = first(compare(model, prepared, data()))
        assert module == "branch"
        assert f"branch.weight is broken: channel 5 of dimension {axis} has an SQNR of" in problems[0]

    @MODES
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
    def test_one_channel_of_the_float_weight(self, mode: str, axis: int, granularity: str) -> None:
        """Also where every channel has a scale of its own, so that compression itself does no harm."""
        model = Quiet()
        with torch.no_grad():
            model.branch.weight.select(axis, 5).mul_(1000)
        kind = {"type": granularity} if granularity == "per_tensor" else {"type": granularity, "axis": 0}
        module, problems = first(compare(model, quantized(model, formats(mode, "int8", granularity=kind)), data()))
        assert module == "branch"
        assert re.search(rf"channel 5 of dimension {axis} is [\d,]+ times as large as the median", problems[0])

    @pytest.mark.parametrize("kind", ["palette", "mask"])
    @pytest.mark.parametrize("how", ["x1000", "narrow", "wide", "transposed"])
    def test_palettes_and_masks(self, kind: str, how: str) -> None:
        """What has no range that could be found anew is known by the size and the place of its values."""
        model = Quiet()
        compressed = palettized(model, 2) if kind == "palette" else pruned(model, 0.75)
        weight = compressed.branch.weight.detach().clone()  # type: ignore[union-attr,operator]
        if how == "x1000":
            weight[int(weight.abs().sum(1).argmax())] *= 1000
        weight = {"narrow": 0.02 * weight, "wide": 50 * weight, "transposed": weight.t().clone()}.get(how, weight)
        parametrize.register_parametrization(compressed.branch, "weight", _Fixed(weight), unsafe=True)  # type: ignore[arg-type]
        report = compare(model, compressed, data())
        assert [layer.name for layer in report.layers if layer.broken] == ["branch"]
        assert report.ranking[0].name == "branch"

    def test_a_folded_batch_norm_does_not_hide_it(self) -> None:
        """The folded weight is compared with that of the float model, not with what entered the quantizer."""
        torch.manual_seed(0)
        model, images = Normed().eval(), [torch.randn(2, 3, 8, 8)]
        prepared = quantized(model, formats("graph", "int8"), images)
        with torch.no_grad():
            prepared.get_parameter("conv.weight").mul_(-1)
        report = compare(model, prepared, images)
        module, (problem,) = first(report)
        assert module == "conv"
        assert "error is greater than the tensor itself" in problem
        assert report.ranking[0].weights[0].error.sqnr_db < 0


class TestActivations:
    @MODES
    @pytest.mark.parametrize("factor", [50, 0.02])
    def test_a_wrong_range_at_any_place(self, mode: str, factor: float) -> None:
        """Every quantizer of an activation, also behind the last layer and at functions that are called directly."""
        model = Quiet()
        good = quantized(model, formats(mode, "int8", "int8"))
        names = list(simulators(good, CompressionTargetTensor.ACTIVATION))
        assert len(names) > 4
        for name in names:
            prepared = copy.deepcopy(good)
            scale_range(simulators(prepared, CompressionTargetTensor.ACTIVATION)[name], factor)
            ranking = compare(model, prepared, data()).ranking
            assert name in {values.name for values in ranking[0].activations} | {
                f"{ranking[0].module}.{values.name}".lstrip(".") for values in ranking[0].activations
            }
            assert ranking[0].broken
            assert not any(layer.broken for layer in ranking[1:])

    def test_entries_that_stand_for_infinity_are_left_out(self) -> None:
        """A mask of -3e38 is clipped, and nothing is broken by that."""

        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(16, 16)
                self.act = nn.ReLU()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.act(self.inner(x) + torch.full((32, 16), -3e38).triu(1))

        model = Masked()
        report = compare(model, quantized(model, formats("eager", "int8", "int8")), data())
        assert not any(layer.broken for layer in report.layers)


class TestGoodOrder:
    """What compression does when nothing is wrong is no damage of this kind, however much it is."""

    @MODES
    @pytest.mark.parametrize(
        ("weight", "activation"),
        [("int8", "int8"), ("int4", "int4"), ("int2", None), ("int2", "int2"), ("float8_e4m3fn", None)],
    )
    def test_quantized(self, mode: str, weight: str, activation: str | None) -> None:
        """Down to 2 bits."""
        model = Quiet()
        report = compare(model, quantized(model, formats(mode, weight, activation)), data())
        assert not any(layer.broken for layer in report.layers)
        damages = [layer.damage for layer in report.ranking if layer.damage is not None]
        assert damages == sorted(damages, reverse=True)

    def test_palettes_and_masks(self) -> None:
        """From 1 bit; up to nine tenths of zeros; and codes of 4 bits on top of a mask."""
        model = Quiet()
        kinds = [palettized(model, bits) for bits in (1, 2, 4)] + [pruned(model, share) for share in (0.5, 0.9)]
        joint = Quantizer(pruned(model, 0.75), formats("eager", "int8")).prepare((data()[0],))
        for compressed in (*kinds, joint):
            assert not any(layer.broken for layer in compare(model, compressed, data()).layers)

    @pytest.mark.parametrize("kind", ["default", "lsq"])
    def test_after_training(self, kind: str) -> None:
        """Training moves all weights away from the float ones, by far more than rounding to 8 bits does."""
        model = Quiet()
        quantizer = Quantizer(copy.deepcopy(model), formats("eager", "int8", "int8", fake_quantize_cls=kind))
        prepared = quantizer.prepare((data()[0],))
        optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
        with quantizer.training_mode():
            for _ in range(60):
                optimizer.zero_grad()
                (prepared(data()[0]) - data()[1][:, :8]).square().mean().backward()
                optimizer.step()
        report = compare(model, prepared.eval(), data())
        assert max(weight.error.sqnr_db for layer in report.layers for weight in layer.weights) < 30
        assert not any(layer.broken for layer in report.layers)

    def test_dead_channels(self) -> None:
        """Where weight decay silenced most channels, those that are left are not called outlying."""
        torch.manual_seed(0)
        weight = torch.randn(64, 32)
        weight[:40] *= 1e-4
        found = weight_evidence(weight, weight, None)
        assert problems_of(found, usual_evidence([found])) == ()


class TestShown:
    @pytest.fixture(scope="class")
    def report(self) -> FidelityReport:
        model = Quiet()
        prepared = quantized(model, formats("eager", "int4"))
        scale_range(simulators(prepared, CompressionTargetTensor.WEIGHT)["branch.weight"], 50)
        return compare(model, prepared, data())

    def test_table(self, report: FidelityReport) -> None:
        """The row is first, and the reason stands below."""
        text = str(report)
        rows = [line.split()[0] for line in text.splitlines() if " Linear " in line]
        assert rows[0] == "branch"
        assert "  branch: branch.weight is broken: all of its values became 0" in text.splitlines()
        assert "first: branch" in text

    def test_json(self, report: FidelityReport) -> None:
        """The reasons are in the document, the schema has them, and they come back."""
        document = report.to_dict()
        assert [layer["broken"] for layer in document["layers"]] == [
            [],
            ["branch.weight is broken: all of its values became 0"],
            [],
        ]
        assert "broken" in FidelityReport.json_schema()["$defs"]["LayerFidelity"]["properties"]
        assert FidelityReport.from_json(report.to_json()).ranking[0].name == "branch"
