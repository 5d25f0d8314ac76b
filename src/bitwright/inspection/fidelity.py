"""Compare a compressed model with its float model, layer by layer and end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from bitwright._utils.free_memory import FreeMemory
from bitwright._utils.module_mode import module_mode
from bitwright.program.export_errors import blaming_inputs
from bitwright.program.states import States
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._batches import batches_of, inputs_of
from ._end_to_end import OutputStatistics
from ._evidence import Evidence, activation_evidence, problems_of, usual_evidence, weight_evidence
from ._probe import Inputs, LayerSite, PairProbe, float_tensors, kept, outside_frames
from ._ranges import CodeUse, code_range, code_use
from ._sizes import StoredSize, is_compressed, stored_sizes
from .metrics import ErrorAccumulator, ErrorMetrics, HistogramAccumulator
from .report import ActivationFidelity, FidelityReport, LayerFidelity, WeightFidelity

__all__ = ["Metric", "Progress", "compare", "evaluating", "make_probe", "under_all_names"]

Metric: TypeAlias = Callable[[Any, Any], float]
"""``metric(output, batch)`` returns a number for the model's output on one batch of ``data``."""

Progress: TypeAlias = Callable[[str], None]
"""Called with what is being done."""


def compare(
    float_model: nn.Module,
    compressed_model: nn.Module,
    data: Iterable[Any],
    *,
    metric: Metric | None = None,
    batches: int | None = None,
    output_batches: int = 1,
    progress: Progress | None = None,
) -> FidelityReport:
    """Say what compression did to every layer and to the output.

    Both models run side by side, one layer at a time, so that only the activations of one layer are held at once, and
    only sums and histograms from batch to batch. What forward writes to buffers and attributes is what one call for
    each batch writes; what it keeps in objects of other classes than dictionaries, lists, sets and queues, the extra
    runs of single layers change, too.

    Args:
        float_model: the model before compression. For an eager compressor, which works in place, keep a copy of it.
        compressed_model: quantized, palettized or pruned; prepared, finalized or loaded; eager or graph. In graph mode
            the float model is captured with ``torch.export``, too.
        data: batches: tensors; tuples, of which forward takes as many entries as it has parameters; or mappings.
        metric: number for an output and its batch, such as an accuracy; averaged over batches.
        batches: use that many batches at most.
        output_batches: batches for which each layer's own effect on the model's output is measured; that costs one run
            of the float model per layer and batch. 0 to leave it out.
        progress: called with what is being done.

    Returns:
        The report; ``print`` shows it, ``to_json`` and ``to_html`` write it.

    Raises:
        TypeError: an argument is no module, or the float model is a graph and the compressed one is not.
        ValueError: ``data`` is empty, ``batches`` is less than 1, the two models are one, an output has another shape
            than before, the metric is not finite, or the compressed model is a graph that does not hold for the sizes
            of a batch.
        TraceError: in graph mode, the float model cannot be exported.

    Example:
        >>> import copy, torch
        >>> from bitwright.quantization import Quantizer, QuantizerConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w4(execution_mode="eager"))
        >>> prepared = quantizer.prepare((torch.randn(1, 8),))
        >>> report = compare(model, prepared, [torch.randn(16, 8)])
        >>> [layer.name for layer in report.layers]
        ['0', '2']
    """
    _check(float_model, compressed_model)
    with ExitStack() as stack:
        for model in (float_model, compressed_model):
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        states = [States(model, float_model) for model in (float_model, compressed_model)]
        feed = batches_of(data, batches)
        first = next(feed)
        example = inputs_of(first, float_model)
        with blaming_inputs(float_model, example.args, example.kwargs):
            probe = make_probe(float_model, compressed_model, example)
        survey = Survey(probe, float_model, states, metric, output_batches, progress or (lambda _: None))
        stack.enter_context(survey.watch_activations())
        survey.add(first)
        for batch in feed:
            survey.add(batch)
        return survey.report(stored_sizes(float_model), stored_sizes(compressed_model, strict=False))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model in eval mode; programs of ``torch.export`` are left in the mode that they were captured in."""
    try:
        with module_mode(model, training=model.training):
            pass
    except NotImplementedError:
        yield
        return
    with module_mode(model, training=False):
        yield


def make_probe(float_model: nn.Module, compressed_model: nn.Module, example: Inputs) -> PairProbe:
    """Return the way to run the two models side by side."""
    if isinstance(compressed_model, fx.GraphModule):
        from ._graph_probe import GraphProbe

        return GraphProbe(float_model, compressed_model, example)
    from ._eager_probe import EagerProbe

    return EagerProbe(float_model, compressed_model)


class _SiteStatistics:
    """What is added up for one layer."""

    def __init__(self, site: LayerSite) -> None:
        self.isolated = ErrorAccumulator(site.channel_axis)
        self.accumulated = ErrorAccumulator(site.channel_axis)
        self.output = ErrorAccumulator()
        self.activations = {name: _ActivationStatistics() for name in site.activations}


class _ActivationStatistics:
    def __init__(self) -> None:
        self.error = ErrorAccumulator()
        self.use = CodeUse()
        self.values = HistogramAccumulator()
        self.evidence: Evidence | None = None


class Survey:
    """Adds up errors over batches.

    Args:
        probe: runs the models.
        model: the float model, for its signature.
        states: those of both models, which forward may write to; extra runs leave no trace in them.
        metric: the user's metric.
        output_batches: batches for each layer's own effect on the output.
        progress: called with what is being done.
    """

    def __init__(
        self,
        probe: PairProbe,
        model: nn.Module,
        states: Sequence[States],
        metric: Metric | None,
        output_batches: int,
        progress: Progress,
    ) -> None:
        self.probe = probe
        self.model = model
        self.states = states
        self.output_batches = output_batches
        self.progress = progress
        self.batches = 0
        self.sites = {site.name: _SiteStatistics(site) for site in probe.layers}
        self.outputs = OutputStatistics(metric)
        self.free_memory = FreeMemory()

    def add(self, batch: Any) -> None:
        """Run both models on a batch."""
        self.progress(f"batch {self.batches + 1}")
        inputs = inputs_of(batch, self.model)
        alone = self.batches < self.output_batches
        begin = [states.copied() for states in self.states] if alone else []
        with blaming_inputs(self.model, inputs.args, inputs.kwargs):
            reference, compressed = self.probe.run(inputs, self._on_layer)
        self.outputs.add(reference, compressed, batch)
        if alone:
            end = [states.copied() for states in self.states]
            expected = kept(float_tensors(reference))  # it may be what the model keeps
            for number, site in enumerate(self.probe.layers, 1):
                self.progress(f"effect on the output: layer {number} of {len(self.probe.layers)}, {site.name}")
                self._put_back(begin)
                output = self.probe.run_with_only(site, inputs) if site.can_substitute else None
                if output is not None:
                    _add_all(self.sites[site.name].output, expected, output, site.name)
            self._put_back(end)
        self.free_memory.release()
        self.batches += 1

    def _put_back(self, content: Sequence[Any]) -> None:
        for states, held in zip(self.states, content, strict=True):
            states.put_back(held)

    @contextmanager
    def watch_activations(self) -> Iterator[None]:
        """Look at what passes through activation quantizers while the compressed model runs."""
        handles = []
        for site in self.probe.layers:
            for name, simulator in site.activations.items():
                hook = self._activation_hook(self.sites[site.name].activations[name], site.can_substitute)
                handles.append(simulator.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def report(self, before: list[StoredSize], after: list[StoredSize]) -> FidelityReport:
        """Return what was found."""
        sizes = ({size.name: size.nbytes for size in before}, {size.name: size.nbytes for size in after})
        named = [under_all_names(entry, self.model) for entry in sizes]
        self.progress("weights")
        evidence: dict[str, Evidence] = {}
        layers = [self._layer(site, evidence, *named) for site in self.probe.layers]
        return FidelityReport(
            mode=self.probe.mode,
            batches=self.batches,
            layers=tuple(self._judged(layers, evidence)),
            end_to_end=self.outputs.result(),
            bytes_before=sum(sizes[0].values()),
            bytes_after=sum(sizes[1].values()),
            notes=(*self.probe.notes, *self.outputs.notes()),
        )

    def _on_layer(self, site: LayerSite, reference: Any, isolated: Any, accumulated: Any) -> None:
        statistics = self.sites[site.name]
        if isolated is not None:
            _add_all(statistics.isolated, reference, isolated, site.name)
        if accumulated is not None:
            _add_all(statistics.accumulated, reference, accumulated, site.name)
        outputs = (reference, isolated, accumulated)
        self.free_memory.saw(sum(tensor.nbytes for output in outputs for tensor in float_tensors(output)))

    def _activation_hook(self, statistics: _ActivationStatistics, runs_alone: bool) -> Any:
        def hook(simulator: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                return
            assert isinstance(simulator, FakeQuantizeImplBase)
            with outside_frames():
                # A layer is judged by what it does with the float model's tensors, where it can be run on them.
                if statistics.evidence is None and self.probe.recording != runs_alone and not simulator.is_disabled():
                    statistics.evidence = activation_evidence(args[0], output, simulator)
                if not self.probe.recording:
                    return
                statistics.error.update(args[0], output)
                statistics.values.update(args[0])
                if not simulator.is_disabled():
                    statistics.use.add(code_use(simulator, args[0]))

        return hook

    def _layer(
        self, site: LayerSite, evidence: dict[str, Evidence], before: dict[str, int], after: dict[str, int]
    ) -> LayerFidelity:
        statistics = self.sites[site.name]
        weights = tuple(_weight(self.probe, name, before, after, evidence) for name in site.weights)
        isolated, output = statistics.isolated.result(), statistics.output.result()
        return LayerFidelity(
            name=site.name,
            kind=site.kind,
            module=site.module,
            isolated=isolated,
            output=output,
            accumulated=statistics.accumulated.result(),
            damage=_damage(isolated, output, weights),
            weights=weights,
            activations=tuple(
                _activation(name, simulator, statistics.activations[name])
                for name, simulator in site.activations.items()
            ),
        )

    def _judged(self, layers: list[LayerFidelity], weights: dict[str, Evidence]) -> Iterator[LayerFidelity]:
        """Yield the layers with what is broken in them; what is common to most of them is not."""
        found = {
            layer.name: [(weight.name, weights[weight.name]) for weight in layer.weights if weight.name in weights]
            + [
                (name, values.evidence)
                for name, values in self.sites[layer.name].activations.items()
                if values.evidence is not None
            ]
            for layer in layers
        }
        usual = usual_evidence(evidence for pairs in found.values() for _, evidence in pairs)
        broken = {
            name: tuple(f"{tensor} is broken: {why}" for tensor, item in pairs for why in problems_of(item, usual))
            for name, pairs in found.items()
        }
        # What cannot be run on the float model's tensors may only pass on what another layer spoilt.
        alone = {site.name for site in self.probe.layers if site.can_substitute}
        suspects = [name for name, problems in broken.items() if problems]
        to_blame = [name for name in suspects if name in alone] or suspects[:1]
        for layer in layers:
            yield layer.model_copy(update={"broken": broken[layer.name] if layer.name in to_blame else ()})


def under_all_names(sizes: dict[str, int], model: nn.Module) -> dict[str, int]:
    """Give tied weights their size under each of their names; it is counted under one."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    known = dict(sizes)
    for names in groups.values():
        size = next((sizes[name] for name in names if name in sizes), None)
        known |= {} if size is None else dict.fromkeys(names, size)
    return known


def _damage(
    isolated: ErrorMetrics | None, output: ErrorMetrics | None, weights: tuple[WeightFidelity, ...]
) -> float | None:
    errors = [weight.error for weight in weights if weight.error is not None]
    hidden = max((error.hidden_noise for error in errors), default=0.0)
    for metrics in (output, isolated):
        if metrics is not None:
            return max(metrics.relative_noise, hidden)
    return max((max(error.relative_noise, hidden) for error in errors), default=None)


def _weight(
    probe: PairProbe, name: str, before: dict[str, int], after: dict[str, int], evidence: dict[str, Evidence]
) -> WeightFidelity:
    found = probe.weight(name)
    sizes = {"bytes_before": before.get(name, 0), "bytes_after": after.get(name, before.get(name, 0))}
    if found is None or found.reference.shape != found.compressed.shape:
        return WeightFidelity(name=name, shape=() if found is None else tuple(found.reference.shape), **sizes)
    error = ErrorAccumulator(channel_axis=0)
    error.update(found.reference, found.compressed)
    evidence[name] = weight_evidence(found.reference, found.compressed, found.simulator if found.alone else None)
    use = CodeUse() if found.simulator is None else code_use(found.simulator, found.entering)
    histograms = HistogramAccumulator(), HistogramAccumulator()
    for histogram, tensor in zip(histograms, (found.reference, found.compressed), strict=True):
        histogram.update(tensor)
    return WeightFidelity(
        name=name,
        shape=tuple(found.reference.shape),
        error=error.result(),
        clipped=use.clipped_share(),
        saturated=use.saturated_share(),
        zeros=float((found.compressed == 0).double().mean()) if found.compressed.numel() else None,
        reference=histograms[0].result(),
        compressed=histograms[1].result(),
        **sizes,
    )


def _activation(name: str, simulator: FakeQuantizeImplBase, found: _ActivationStatistics) -> ActivationFidelity:
    return ActivationFidelity(
        name=name,
        error=found.error.result(),
        clipped=found.use.clipped_share(),
        saturated=found.use.saturated_share(),
        values=found.values.result(),
        range=code_range(simulator),
    )


def _add_all(accumulator: ErrorAccumulator, reference: Any, other: Any, name: str) -> None:
    pairs = zip(float_tensors(reference), float_tensors(other), strict=False)
    for expected, found in pairs:
        try:
            accumulator.update(expected, found)
        except ValueError as error:
            raise ValueError(f"Layer {name!r}: {error}. Are these two forms of the same model?") from error


def _check(float_model: Any, compressed_model: Any) -> None:
    for role, model in (("float_model", float_model), ("compressed_model", compressed_model)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{role} must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(float_model, fx.GraphModule) and not isinstance(compressed_model, fx.GraphModule):
        raise TypeError("float_model is a GraphModule and compressed_model is not; pass the module it was made from.")
    if is_compressed(float_model) and not is_compressed(compressed_model):
        raise ValueError(
            "float_model holds compressed weights or simulators and compressed_model holds none; call "
            "compare(float_model, compressed_model, data), with the float model first."
        )
    if set(float_model.modules()) & set(compressed_model.modules()):
        raise ValueError(
            "float_model and compressed_model share modules, so they would be compared with themselves. Eager "
            "compressors work in place: compress copy.deepcopy(model) and compare with model."
        )
