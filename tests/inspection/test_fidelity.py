"""The fidelity report: planted damage is found, numbers equal their formulas, all kinds of models can be compared."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact
from bitwright.config.spec import CompressionTargetTensor
from bitwright.inspection import FidelityReport, _ranges, compare, metrics
from bitwright.inspection._lockstep import Stepper
from bitwright.inspection._ranges import code_use
from bitwright.inspection.metrics import ErrorAccumulator, HistogramAccumulator
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import (
    ModuleQuantizerConfig,
    QuantizationSpec,
    Quantizer,
    QuantizerConfig,
)
from bitwright.quantization.spec.factory import QuantizationComponentFactory
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


def chain(layers: int = 4, width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(width, 5)).eval()


def data(batches: int = 2, width: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator) for _ in range(batches)]


def per_tensor(mode: str, dtype: str = "int8") -> QuantizerConfig:
    spec = QuantizationSpec(dtype=dtype, granularity={"type": "per_tensor"})
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    return QuantizerConfig(global_config=module, execution_mode=mode)


def prepared(model: nn.Module, config: QuantizerConfig) -> nn.Module:
    return Quantizer(copy.deepcopy(model), config).prepare((data()[0],))


def large_bytes(rows: int) -> int:
    """Bytes of all tensors with so many rows that are alive."""
    storages = {
        found.untyped_storage().data_ptr(): found.nbytes
        for found in gc.get_objects()
        if type(found) is torch.Tensor and found.ndim and len(found) == rows
    }
    return sum(storages.values())


def weight_simulator(model: nn.Module, name: str) -> FakeQuantizeImplBase:
    for module in model.modules():
        if isinstance(module, FakeQuantizeImplBase) and module.tensor_fqn == name:
            assert module.quantization_target == CompressionTargetTensor.WEIGHT
            return module
    raise AssertionError(name)


def worst(report: FidelityReport, mode: str) -> str:
    layer = report.ranking[0]
    return layer.module if mode == "graph" else layer.name


class TestPlantedDamage:
    """The layer that was spoilt is ranked first, whichever it is."""

    @MODES
    @pytest.mark.parametrize("layer", ["0", "4", "8"])
    def test_one_channel_scaled_by_1000_under_one_scale(self, mode: str, layer: str) -> None:
        """All other channels of the layer drown, though the layer's SQNR as a whole stays high."""
        model = chain()
        with torch.no_grad():
            model.get_submodule(layer).weight[3] *= 1000
        report = compare(model, prepared(model, per_tensor(mode)), data())
        assert worst(report, mode) == layer
        assert report.ranking[0].damage > 0.5
        assert report.ranking[0].weights[0].error.lost_channels > 0.5
        assert report.ranking[1].damage < 0.1

    @pytest.mark.parametrize("layer", ["0", "2"])
    def test_one_channel_scaled_by_1000_under_one_palette(self, layer: str) -> None:
        """The large channel takes most of the palette's entries; the others get noisy without being lost."""
        model = chain(1, 64)
        with torch.no_grad():
            model.get_submodule(layer).weight[3] *= 1000
        spec = PalettizationSpec(n_bits=6, granularity={"type": "per_tensor"})
        module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec})
        palettizer = KMeansPalettizer(copy.deepcopy(model), KMeansPalettizerConfig(global_config=module))
        report = compare(model, palettizer.prepare((data(1, 64)[0],)), data(1, 64))
        assert report.ranking[0].name == layer
        error = report.ranking[0].weights[0].error
        assert error.lost_channels < 0.5
        assert report.ranking[0].damage == pytest.approx(10 ** (-error.channel_sqnr_db / 10))

    @MODES
    def test_one_channel_of_the_compressed_weight_scaled(self, mode: str) -> None:
        """A weight that differs from the float model's is found."""
        model = chain()
        compressed = prepared(model, per_tensor(mode))
        weight = next(p for n, p in compressed.named_parameters() if n.startswith("4.") and "bias" not in n)
        with torch.no_grad():
            weight[3] *= 1000
            weight_simulator(compressed, "4.weight").enable_observer()
            compressed(data()[0])
        assert worst(compare(model, compressed, data()), mode) == "4"

    @MODES
    def test_a_wrong_range(self, mode: str) -> None:
        """A scale that is 50 times too small clips nearly everything, and the report says so."""
        model = chain()
        compressed = prepared(model, per_tensor(mode))
        simulator = weight_simulator(compressed, "2.weight")
        with torch.no_grad():
            simulator.qparams_calculator.scale /= 50  # type: ignore[union-attr]
            simulator.clear_weight_memory()
        report = compare(model, compressed, data())
        assert worst(report, mode) == "2"
        weight = report.ranking[0].weights[0]
        assert weight.clipped > 0.9
        assert weight.saturated >= weight.clipped
        others = [w for layer in report.ranking[1:] for w in layer.weights]
        assert max(w.clipped for w in others) == 0

    @MODES
    def test_a_transposed_weight(self, mode: str) -> None:
        """Right values in the wrong places."""
        model = chain()
        compressed = prepared(model, per_tensor(mode))
        weight = next(p for n, p in compressed.named_parameters() if n.startswith("6.") and "bias" not in n)
        with torch.no_grad():
            weight.copy_(weight.t().clone())
        report = compare(model, compressed, data())
        assert worst(report, mode) == "6"
        assert report.ranking[0].weights[0].error.cosine < 0.5

    def test_nan_in_one_layer(self) -> None:
        """A NaN does not spread over the report: the layer that makes it is first, with -200 dB."""
        model = chain()
        compressed = copy.deepcopy(model)
        with torch.no_grad():
            compressed[2].bias[0] = math.nan
        report = compare(model, compressed, data())
        assert report.ranking[0].name == "2"
        assert report.layer("2").isolated.sqnr_db == -200
        assert report.layer("2").isolated.not_finite == 16
        assert report.layer("4").isolated.sqnr_db == 200


class TestNumbers:
    @MODES
    def test_errors_are_those_of_the_formula(self, mode: str) -> None:
        """Isolated, accumulated and output SQNR of a chain, computed by hand in float64."""
        model = chain(2)
        compressed = prepared(model, per_tensor(mode, "int4"))
        report = compare(model, compressed, data(), output_batches=2)
        batch = torch.cat(data())
        with torch.no_grad():
            quantized = {
                layer: weight_simulator(compressed, f"{layer}.weight")(model.get_submodule(layer).weight)
                for layer in "024"
            }

            def run(compressed_layers: str, until: str) -> torch.Tensor:
                x = batch
                for name, module in model.named_children():
                    x = (
                        nn.functional.linear(x, quantized[name], module.bias)
                        if name in compressed_layers
                        else module(x)
                    )
                    if name == until:
                        return x
                raise AssertionError

            def sqnr(layers: str, until: str) -> float:
                x, y = run("", until).double(), run(layers, until).double()
                return float(10 * torch.log10(x.square().sum() / (x - y).square().sum()))

            # graph mode looks at linear and ReLU as one
            ends = {"0": "1", "2": "3", "4": "4"} if mode == "graph" else {name: name for name in "024"}
            for layer, name in zip(report.layers, "024", strict=True):
                end = ends[name]
                assert layer.isolated.sqnr_db == pytest.approx(sqnr(name, end), abs=1e-3)
                assert layer.accumulated.sqnr_db == pytest.approx(sqnr("024", end), abs=1e-3)
                assert layer.output.sqnr_db == pytest.approx(sqnr(name, "4"), abs=1e-3)
            assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr("024", "4"), abs=1e-3)

    @MODES
    def test_accumulated_error_follows_isolated_error_on_a_chain(self, mode: str) -> None:
        """At the first layer they are equal; behind it the accumulated error is greater."""
        model = chain()
        layers = compare(model, prepared(model, per_tensor(mode, "int4")), data()).layers
        assert layers[0].accumulated == layers[0].isolated
        for layer in layers[1:]:
            assert layer.accumulated.sqnr_db < layer.isolated.sqnr_db

    def test_output_divergence_and_metric(self) -> None:
        """KL divergence by its definition; the user's metric is averaged over batches."""
        model = chain(1)
        compressed = prepared(model, per_tensor("eager", "int2"))
        batches = [(x, torch.zeros(8)) for x in data()]

        def metric(output: torch.Tensor, batch: Any) -> float:
            return float(output.mean() + batch[1].sum())

        end = compare(model, compressed, batches, metric=metric).end_to_end
        x = torch.cat(data())
        with torch.no_grad():
            p, q = model(x).double().softmax(-1), compressed(x).double().softmax(-1)
        assert end.kl_divergence == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-6)
        assert end.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        assert end.metric_float == pytest.approx(float(model(x).mean()), abs=1e-6)
        assert end.metric_compressed == pytest.approx(float(compressed(x).mean()), abs=1e-6)

    def test_accumulator_does_not_depend_on_batching(self) -> None:
        """One tensor or its parts: the same sums."""
        x, y = torch.randn(64, 6), torch.randn(64, 6)
        whole, parts = ErrorAccumulator(-1), ErrorAccumulator(-1)
        whole.update(x, y)
        for a, b in zip(x.split(16), y.split(16), strict=True):
            parts.update(a, b)
        assert whole.result().model_dump() == pytest.approx(parts.result().model_dump(), rel=1e-9)

    def test_large_tensors_are_taken_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sums, channels, histogram and clipping do not depend on where a tensor is cut."""
        torch.manual_seed(0)
        x = torch.randn(3, 5, 7, 4)
        y = x + 0.1 * torch.randn_like(x)
        y[1, 2, 3, 0] = math.nan
        spec = QuantizationSpec(dtype="int4", granularity={"type": "per_tensor"})
        target = CompressionTargetTensor.ACTIVATION
        simulator = QuantizationComponentFactory.create_fake_quantizer(spec, target)
        simulator(0.5 * x)

        def everything() -> tuple[Any, ...]:
            error, histogram = ErrorAccumulator(1), HistogramAccumulator()
            error.update(x, y)
            histogram.update(y)
            return error.result().model_dump(), histogram.result(), code_use(simulator, x)

        whole = everything()
        for module in (metrics, _ranges):
            monkeypatch.setattr(module, "PIECE", 16)
        parts = everything()
        assert parts[0] == pytest.approx(whole[0], rel=1e-9)
        assert parts[0]["not_finite"] == 1
        assert parts[1:] == whole[1:]
        assert whole[2].values == x.numel()
        assert whole[2].clipped > 0

    def test_numbers_whose_squares_overflow(self) -> None:
        """Sums are in float64: half of a signal near float32's largest number is 6 dB of noise."""
        x = torch.full((4, 4), 3e38)
        error = ErrorAccumulator(-1)
        error.update(x, 0.5 * x)
        assert error.result().sqnr_db == pytest.approx(20 * math.log10(2))

    def test_histogram_keeps_all_values_while_its_range_grows(self) -> None:
        """Counts add up, and each value lies in a bin within one bin's width of the truth."""
        histogram = HistogramAccumulator(8)
        values = [torch.rand(100), torch.rand(100) * 40, -torch.rand(100) * 300, torch.tensor([math.inf, math.nan])]
        for part in values:
            histogram.update(part)
        result = histogram.result()
        everything = torch.cat(values[:3])
        assert sum(result.counts) == 300
        assert result.low <= everything.min()
        assert result.high >= everything.max()
        edges = torch.linspace(result.low, result.high, 9)
        below = torch.tensor([float((everything < edge).sum()) for edge in edges[1:]])
        assert (below - torch.tensor(result.counts).cumsum(0)).abs().max() <= 2

    @MODES
    def test_activation_quantizers_report_clipping(self, mode: str) -> None:
        """An activation calibrated on small data clips large data; the range is that of the codes."""
        model = chain(1)
        quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode=mode))
        compressed = quantizer.prepare((data()[0],))
        with quantizer.calibration_mode():
            compressed(data()[0] * 0.05)
        report = compare(model, compressed, data())
        first = report.layers[0].activations[0]
        low, high = first.range
        x = torch.cat(data())
        step = (high - low) / 255
        expected = ((x > high + step / 2) | (x < low - step / 2)).double().mean()
        assert first.clipped == pytest.approx(float(expected), abs=2e-3)
        assert expected > 0.5
        assert sum(first.values.counts) == x.numel()


class Residual(nn.Module):
    """Branches, a batch norm, a reused module and a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.norm(self.conv(x))) * scale
        y = y + self.mix(self.mix(y))
        return self.head(y.mean((2, 3))), y


def _images() -> list[torch.Tensor]:
    return [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def _compressed(kind: str, model: nn.Module, tmp_path: Path) -> nn.Module:
    twin, inputs = copy.deepcopy(model), (_images()[0],)
    if kind == "palettized":
        return KMeansPalettizer(twin, KMeansPalettizerConfig()).prepare(inputs)
    if kind == "pruned":
        return MagnitudePruner(twin, MagnitudePrunerConfig()).prepare(inputs)
    mode = "graph" if "graph" in kind else "eager"
    preset = QuantizerConfig.presets.w8a8 if "w8a8" in kind else QuantizerConfig.presets.w8
    quantizer = Quantizer(twin, preset(execution_mode=mode))
    result = quantizer.prepare(inputs)
    if "w8a8" in kind:
        with quantizer.calibration_mode():
            result(*inputs)
    if "loaded" in kind:
        Artifact.from_model(result).save(tmp_path / "artifact")
        return Artifact.load(tmp_path / "artifact").packed_model(copy.deepcopy(model))
    if "coreml" in kind:
        return quantizer.finalize(backend="coreml")
    return quantizer.finalize(backend="_torch") if "finalized" in kind else result


KINDS = (
    "palettized",
    "pruned",
    "w8 loaded",
    "w8 coreml",
    "w8a8",
    "w8a8 graph",
    "w8a8 graph finalized",
    "w8 graph coreml",
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_can_be_compared(kind: str, tmp_path: Path) -> None:
    """All layers with weights are there, with their errors, and the sizes are those of the packed model."""
    torch.manual_seed(0)
    model = Residual().eval()
    report = compare(model, _compressed(kind, model, tmp_path), _images())
    with_weights = [layer for layer in report.layers if layer.weights and "Norm" not in layer.kind]
    assert len({layer.module for layer in with_weights}) == 3
    for layer in with_weights:
        assert layer.accumulated is not None
        assert layer.isolated is not None
        assert layer.damage is not None
        assert 0 < layer.isolated.sqnr_db < 200
    floor = {"palettized": 10, "pruned": 2}.get(kind, 25)
    assert report.end_to_end.error.sqnr_db > floor
    assert report.bytes_after < report.bytes_before
    assert FidelityReport.from_json(report.to_json()) == report


class TestUse:
    def test_nothing_of_the_models_is_changed(self) -> None:
        """Hooks, switches and modes are as before, also when a metric raises."""
        model = chain().train()
        compressed = prepared(model, per_tensor("eager")).train()
        before = [(name, module.training, len(module._forward_hooks)) for name, module in compressed.named_modules()]

        def broken(output: Any, batch: Any) -> float:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            compare(model, compressed, data(), metric=broken)
        compare(model, compressed, data())
        after = [(name, module.training, len(module._forward_hooks)) for name, module in compressed.named_modules()]
        assert before == after
        assert model.training
        assert "forward" not in model[0].__dict__

    def test_activations_do_not_pile_up(self) -> None:
        """While one layer is compared, the outputs of earlier layers of the float model are gone."""
        model, seen, alive = chain(12), [], []
        for module in model:
            module.register_forward_hook(lambda _m, _a, output: seen.append(weakref.ref(output)))
        compressed = copy.deepcopy(model)
        for module in compressed:
            module._forward_hooks.clear()
        compressed[-1].register_forward_hook(
            lambda *_: (gc.collect(), alive.append(sum(r() is not None for r in seen)))
        )
        compare(model, compressed, data(1), output_batches=0)
        assert len(seen) == 25
        assert alive[0] <= 3

    @MODES
    def test_memory_does_not_grow_with_depth(self, mode: str) -> None:
        """At their peak, as many bytes of tensors are alive beside the models for 12 layers as for 3."""

        def peak(layers: int) -> int:
            model, batch = chain(layers, 64), torch.randn(2048, 64)
            quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode=mode))
            compressed = quantizer.prepare((batch,))
            with quantizer.calibration_mode(), torch.no_grad():
                compressed(batch)
            alive: list[int] = []
            for module in compressed.modules():
                if isinstance(module, FakeQuantizeImplBase):
                    module.register_forward_hook(lambda *_: alive.append(large_bytes(2048)))
            compare(model, compressed, [batch])
            return max(alive)

        gc.collect()
        gc.freeze()  # objects of other tests are many, and need not be looked at
        assert 0 < peak(12) <= peak(3)

    def test_repeated_modules_and_an_order_that_differs(self) -> None:
        """Calls are matched by module and number, in whatever order they come."""

        class Pair(nn.Module):
            def __init__(self, swapped: bool) -> None:
                super().__init__()
                self.a, self.b, self.swapped = nn.Linear(24, 24), nn.Linear(24, 24), swapped

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.swapped:
                    second, first = self.b(x), self.a(x)
                else:
                    first, second = self.a(x), self.b(x)
                return self.a(first + second)

        model = Pair(False).eval()
        other = Pair(True).eval()
        other.load_state_dict(model.state_dict())
        report = compare(model, other, data())
        assert all(layer.accumulated.sqnr_db == 200 for layer in report.layers)

    def test_comparing_is_not_taken_for_calls_of_the_model(self) -> None:
        """What is computed in hooks does not count among the functions that the model calls itself."""

        class Sums(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.a(x)
                return self.b(y * y) + x - y

        model = Sums().eval()
        quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode="eager"))
        compressed = quantizer.prepare((data()[0],))
        with quantizer.calibration_mode():
            compressed(data()[0])
        report = compare(model, compressed, data()[:1])
        error = (compressed(data()[0]).double() - model(data()[0]).double()).square().sum()
        expected = 10 * torch.log10(model(data()[0]).double().square().sum() / error)
        assert report.end_to_end.error.sqnr_db == pytest.approx(float(expected), abs=1e-3)

    def test_tied_models_are_refused(self) -> None:
        """A model that was compressed in place would be compared with itself."""
        model = chain()
        with pytest.raises(ValueError, match=r"copy\.deepcopy"):
            compare(model, Quantizer(model, per_tensor("eager")).prepare((data()[0],)), data())

    @pytest.mark.parametrize(("given", "error"), [([], "data is empty"), (iter([]), "data is empty")])
    def test_empty_data_is_refused(self, given: Any, error: str) -> None:
        """The error says what to pass."""
        model = chain()
        with pytest.raises(ValueError, match=error):
            compare(model, copy.deepcopy(model), given)

    def test_other_objects_are_refused(self) -> None:
        """Types are named."""
        with pytest.raises(TypeError, match="got int"):
            compare(chain(), 3, data())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="data must be an iterable"):
            compare(chain(), chain(), 3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("mode", ["eager", "graph"])
    def test_data_that_does_not_fit_is_described(self, mode: str) -> None:
        """Whichever batch it is: the error says what it was, and that the float model alone refuses it."""
        model = chain(1)
        compressed = prepared(model, per_tensor(mode))
        for batches in ([torch.randn(8, 5)], [*data(1), torch.randn(8, 5)]):
            with pytest.raises(RuntimeError, match=r"does not run on its inputs \(float32\[8, 5\] on cpu\)"):
                compare(model, compressed, batches)

    def test_swapped_models_are_refused(self) -> None:
        """The compressed model in the place of the float one."""
        model = chain(1)
        with pytest.raises(ValueError, match="with the float model first"):
            compare(prepared(model, per_tensor("eager")), model, data())

    def test_a_single_mapping_is_one_batch(self) -> None:
        """As a single tensor is."""
        model = chain(1)
        assert compare(model, prepared(model, per_tensor("eager")), {"input": data()[0]}).batches == 1

    @MODES
    @pytest.mark.parametrize("prepared_by_name", [False, True])
    @pytest.mark.parametrize("given_by_name", [False, True])
    def test_arguments_by_name_and_by_position(self, mode: str, prepared_by_name: bool, given_by_name: bool) -> None:
        """Batches need not have the form of the example inputs of prepare()."""

        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(24, 4), nn.Linear(24, 4)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return self.a(x) - 3 * self.b(y)

        x, y = data()
        model = Sum().eval()
        quantizer = Quantizer(copy.deepcopy(model), per_tensor(mode))
        named = {"y": y, "x": x}
        compressed = quantizer.prepare((), example_kwargs=named) if prepared_by_name else quantizer.prepare((x, y))
        report = compare(model, compressed, [named if given_by_name else (x, y)])
        assert report.end_to_end.error.sqnr_db > 30

    def test_models_of_other_shapes_are_refused(self) -> None:
        """The layer is named."""
        other = chain()
        other[2] = nn.Linear(24, 30)
        other[4] = nn.Linear(30, 24)
        with pytest.raises(ValueError, match=r"Layer '2'.*shapes differ"):
            compare(chain(), other, data())

    def test_batches_of_other_sizes_in_graph_mode(self) -> None:
        """The float model is captured for every batch size, as the compressed one was."""
        model = chain(1)
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        compressed = Quantizer(model, per_tensor("graph")).prepare((data()[0],), dynamic_shapes=shapes)
        report = compare(model, compressed, [torch.randn(8, 24), torch.randn(3, 24)])
        assert report.batches == 2

    def test_an_error_in_the_float_model_comes_through(self) -> None:
        """The stepper hands exceptions of the second thread to the caller."""

        def body(emit: Any) -> None:
            emit(1)
            raise KeyError("x")

        stepper: Stepper[int] = Stepper(body)
        assert stepper.next() == 1
        with pytest.raises(KeyError):
            stepper.next()
        stepper.close()

    def test_schema_describes_the_json(self) -> None:
        """Every property of the JSON is in the schema, and the schema forbids others."""
        schema = FidelityReport.json_schema()
        model = chain(1)
        document = compare(model, prepared(model, per_tensor("eager")), data()).to_dict()
        assert set(document) == set(schema["properties"])
        assert schema["additionalProperties"] is False
        assert set(document["layers"][0]) == set(schema["$defs"]["LayerFidelity"]["properties"])

    def test_table_shows_worst_layer_first_and_totals(self) -> None:
        """The text names the first layers to keep, and the packed size."""
        model = chain()
        with torch.no_grad():
            model[4].weight[3] *= 1000
        text = str(compare(model, prepared(model, per_tensor("eager")), data()))
        rows = [line.split()[0] for line in text.splitlines() if " Linear " in line]
        assert rows[0] == "4"
        assert "keep these in higher precision first: 4" in text
        assert "packed" in text
