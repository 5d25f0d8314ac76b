"""The checks behind the diagnostics; each yields findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.quantization._statistics import unmeasured
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._probe import outside_frames
from ._ranges import code_range
from ._sizes import stored_sizes
from .diagnostics import Finding
from .report import FidelityReport, LayerFidelity

__all__ = [
    "PeakWatch",
    "check_bounds",
    "check_layers",
    "check_measured",
    "check_parameters",
    "check_sizes",
    "check_statistics",
    "finding_layers",
]

_FEW_SAMPLES = 4
_OUTLIER = 8.0
_HEAVY_CLIPPING = 0.1


def finding_layers(report: FidelityReport) -> dict[str, str]:
    """Return the layer of each weight and activation by name."""
    found = {}
    for layer in report.layers:
        names = [weight.name for weight in layer.weights] + [values.name for values in layer.activations]
        found.update(dict.fromkeys(names, layer.name))
    return found


def check_statistics(model: nn.Module, layers: Mapping[str, str]) -> Iterator[Finding]:
    """BW101 and BW102: activation ranges that calibration did not find."""
    messages = {
        "BW101": "its range comes from the example inputs of prepare(); calibration never ran.",
        "BW102": "calibration ran, but no data reached this quantizer.",
    }
    for code, names in unmeasured(model).items():
        for name in names:
            yield Finding(code, name, messages[code], _layer(name, layers))


def check_parameters(model: nn.Module, layers: Mapping[str, str]) -> Iterator[Finding]:
    """BW104: scales that are no positive finite numbers, weights that are not finite."""
    for name, simulator in _named_simulators(model):
        for problem in simulator.check_health():
            yield Finding("BW104", name, f"{problem.partition(': ')[2]}.", _layer(name, layers))
    for name, parameter in model.named_parameters():
        broken = _not_finite(parameter)
        if broken:
            shown = name.replace("parametrizations.", "").removesuffix(".original")
            yield Finding("BW104", shown, f"{broken} entries are NaN or infinite.", _layer(shown, layers))


def _not_finite(tensor: torch.Tensor) -> int:
    """Number of entries that are NaN or infinite; none in formats that torch neither tells nor converts."""
    values = tensor.detach().coalesce().values() if tensor.layout == torch.sparse_coo else tensor.detach()
    if not values.is_floating_point():
        return 0
    try:
        return int((~torch.isfinite(values.float() if values.itemsize == 1 else values)).sum())
    except (NotImplementedError, RuntimeError):
        return 0


def check_layers(report: FidelityReport) -> Iterator[Finding]:
    """BW105, BW109, BW110 and BW111: what the fidelity report says about single layers."""
    for layer in report.layers:
        yield from _findings_in(layer)
        if layer.broken:
            yield Finding("BW111", layer.name, "; ".join(layer.broken) + ".", layer.name)


def _findings_in(layer: LayerFidelity) -> Iterator[Finding]:
    for weight in layer.weights:
        if weight.error is not None and weight.error.lost_channels > 0:
            message = f"{weight.error.lost_channels:.1%} of its channels are lost (noise above half of their power)."
            yield Finding("BW105", weight.name, message, layer.name)
    for activation in layer.activations:
        if activation.clipped is not None and activation.clipped > _HEAVY_CLIPPING:
            message = f"{activation.clipped:.1%} of its values lie beyond the range of the codes."
            yield Finding("BW110", activation.name, message, layer.name)
    metrics = layer.isolated or layer.accumulated
    if metrics is not None and metrics.not_finite:
        yield Finding(
            "BW109", layer.name, f"{metrics.not_finite} entries of its output are NaN or infinite.", layer.name
        )


def check_sizes(float_model: nn.Module, model: nn.Module, plan: Any = None) -> Iterator[Finding]:
    """BW106 and BW107: nothing compressed, or larger than it should be."""
    sizes = stored_sizes(model, strict=False)
    before = sum(size.nbytes for size in stored_sizes(float_model))
    packed = sum(size.nbytes for size in sizes if size.compressed)
    after = sum(size.nbytes for size in sizes)
    simulated = any(isinstance(module, CompressionSimulatorBase) for module in model.modules())
    if not packed and not simulated:
        yield Finding("BW106", "model", "no tensor is compressed; the configuration matched nothing that can be.")
    if after > before:
        yield Finding("BW107", "model", f"packed it takes {after:,} bytes, the float model {before:,}.")
    if plan is not None and packed > plan.compressed_bytes > 0:
        message = f"the compressed weights take {packed:,} bytes, the plan said {plan.compressed_bytes:,}."
        yield Finding("BW107", "model", message)


def check_bounds(
    report: FidelityReport, min_sqnr_db: float | None, max_kl: float | None, max_metric_change: float | None
) -> Iterator[Finding]:
    """BW108: an output that is worse than allowed."""
    end = report.end_to_end
    if min_sqnr_db is not None and end.error is not None and end.error.sqnr_db < min_sqnr_db:
        message = f"the output's SQNR is {end.error.sqnr_db:.1f} dB, {min_sqnr_db:.1f} dB were asked for."
        yield Finding("BW108", "model", message)
    if max_kl is not None and end.kl_divergence is not None and end.kl_divergence > max_kl:
        message = f"the output's KL divergence is {end.kl_divergence:.3g} nats, {max_kl:.3g} were allowed."
        yield Finding("BW108", "model", message)
    if max_metric_change is not None and end.metric_float is not None and end.metric_compressed is not None:
        change = abs(end.metric_compressed - end.metric_float)
        if not change <= max_metric_change:
            message = (
                f"the metric went from {end.metric_float:.6g} to {end.metric_compressed:.6g}; a change of "
                f"{max_metric_change:.6g} was allowed."
            )
            yield Finding("BW108", "model", message)


def check_measured(
    report: FidelityReport, min_sqnr_db: float | None, max_kl: float | None, max_metric_change: float | None
) -> Iterator[Finding]:
    """BW108: a bound on what the report does not know, so that nothing says whether it holds."""
    end = report.end_to_end
    bounds = (
        ("min_sqnr_db", min_sqnr_db, end.error, "the output holds no floating-point tensor"),
        ("max_kl", max_kl, end.kl_divergence, "the output's first tensor holds no finite scores of several classes"),
        ("max_metric_change", max_metric_change, end.metric_float, "there is no metric"),
    )
    for name, bound, measured, reason in bounds:
        if bound is not None and measured is None:
            yield Finding("BW108", "model", f"{name}={bound:.6g} cannot be measured: {reason}.")


class PeakWatch:
    """Collects the largest absolute value of each sample at activation quantizers, for BW103.

    Args:
        model: a prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.peaks: dict[str, list[float]] = {}
        self._simulators = dict(_named_simulators(model))
        self._handles = [
            simulator.register_forward_hook(self._hook(name))
            for name, simulator in self._simulators.items()
            if simulator.quantization_target == CompressionTargetTensor.ACTIVATION
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def findings(self, layers: Mapping[str, str]) -> Iterator[Finding]:
        """BW103: one sample's peak is far above the others' and inside the range."""
        for name, peaks in self.peaks.items():
            limits = code_range(self._simulators[name])
            if len(peaks) < _FEW_SAMPLES or limits is None:
                continue
            *others, most = sorted(peaks)
            reach = max(abs(limits[0]), abs(limits[1]))
            if others[-1] > 0 and most > _OUTLIER * others[-1] and reach > _OUTLIER / 2 * others[-1]:
                message = (
                    f"one sample peaks at {most:.4g}, no other above {others[-1]:.4g}; the range reaches {reach:.4g}."
                )
                yield Finding("BW103", name, message, _layer(name, layers))

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
            with outside_frames():
                x = args[0].detach()
                if not x.numel():  # such as an expert that no token was sent to
                    return
                rows = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1)
                self.peaks.setdefault(name, []).extend(rows.abs().amax(1).float().tolist())

        return hook


def _named_simulators(model: nn.Module) -> Iterator[tuple[str, FakeQuantizeImplBase]]:
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantizeImplBase):
            yield module.tensor_fqn or path, module


def _layer(name: str, layers: Mapping[str, str]) -> str | None:
    """Return the layer of a tensor; eager activations are listed under their local name."""
    return layers.get(name) or layers.get(name.rpartition(".")[2])
