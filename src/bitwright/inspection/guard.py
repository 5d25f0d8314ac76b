"""The guard: check a compressed model for damage, and warn, raise, or put damaged layers back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from bitwright._utils.forward_scope import wrap_forward
from bitwright.planning import Plan
from bitwright.program.states import states_preserved
from bitwright.quantization._eager.interception import ShieldScope
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._batches import batches_of, inputs_of
from ._checks import (
    PeakWatch,
    check_bounds,
    check_layers,
    check_measured,
    check_parameters,
    check_sizes,
    check_statistics,
    finding_layers,
)
from .diagnostics import DamageError, DamageWarning, Finding
from .fidelity import Metric, Progress, compare, evaluating
from .report import FidelityReport

__all__ = ["GuardResult", "guard"]


@dataclass(frozen=True, slots=True)
class GuardResult:
    """What the guard found and did.

    Attributes:
        model: the model to go on with: the compressed one, with layers put back where that was asked for.
        findings: what was found at first.
        reverted: names of the layers that were put back to floating point, ``""`` for the whole model.
        report: the fidelity report of ``model``.
    """

    model: nn.Module
    findings: tuple[Finding, ...]
    reverted: tuple[str, ...]
    report: FidelityReport


def guard(
    float_model: nn.Module,
    compressed_model: nn.Module,
    data: Iterable[Any],
    *,
    on_damage: Literal["warn", "raise", "revert"] = "warn",
    plan: Plan | None = None,
    metric: Metric | None = None,
    min_sqnr_db: float | None = None,
    max_kl: float | None = None,
    max_metric_change: float | None = None,
    ignore: Collection[str] = (),
    progress: Progress | None = None,
) -> GuardResult:
    """Check a compressed model against its float model; see :func:`~bitwright.inspection.explain` for the codes.

    Args:
        float_model: the model before compression.
        compressed_model: prepared or finalized.
        data: batches, as for :func:`~bitwright.inspection.compare`; they are kept, so give few.
        on_damage: ``"warn"``: one ``DamageWarning`` for each finding. ``"raise"``: one error that lists all.
            ``"revert"``: damaged layers compute in floating point again, then the worst ones until the bounds hold.
        plan: what was planned, to compare sizes with.
        metric: as for ``compare``.
        min_sqnr_db: smallest SQNR of the output, in dB.
        max_kl: largest KL divergence of the output, in nats.
        max_metric_change: largest difference of the metric, which has to be given. A bound on what the output does not
            have is a finding, too; nothing is put back for it.
        ignore: codes to leave out.
        progress: called with what is being done.

    Returns:
        The model to go on with, the findings, and what was put back. With ``"revert"`` the compressed model is changed
        in place.

    Raises:
        DamageError: something was found, and ``on_damage`` is ``"raise"``.
        ValueError: ``on_damage`` is something else, ``max_metric_change`` comes without ``metric``, or ``compare``
            refuses the models.
    """
    if on_damage not in ("warn", "raise", "revert"):
        raise ValueError(f"on_damage must be 'warn', 'raise' or 'revert', got {on_damage!r}.")
    if max_metric_change is not None and metric is None:
        raise ValueError(f"max_metric_change={max_metric_change!r} needs a metric; pass metric= as well.")
    batches = list(batches_of(data))
    report = compare(float_model, compressed_model, batches, metric=metric, progress=progress)
    watch = PeakWatch(compressed_model)
    try:
        with evaluating(compressed_model), torch.no_grad(), states_preserved(compressed_model, float_model):
            for batch in batches:
                inputs = inputs_of(batch, float_model).copied()
                compressed_model(*inputs.args, **inputs.kwargs)
    finally:
        watch.close()
    layers = finding_layers(report)
    found = [
        *check_statistics(compressed_model, layers),
        *watch.findings(layers),
        *check_parameters(compressed_model, layers),
        *check_layers(report),
        *check_sizes(float_model, compressed_model, plan),
        *check_bounds(report, min_sqnr_db, max_kl, max_metric_change),
        *check_measured(report, min_sqnr_db, max_kl, max_metric_change),
    ]
    findings = tuple(finding for finding in dict.fromkeys(found) if finding.code not in ignore)
    if not findings or on_damage == "warn":
        for finding in findings:
            warnings.warn(str(finding), DamageWarning, stacklevel=2)
        return GuardResult(compressed_model, findings, (), report)
    if on_damage == "raise":
        raise DamageError(findings)
    bounds = (min_sqnr_db, max_kl, max_metric_change) if "BW108" not in ignore else (None, None, None)
    reverter = _Reverter(float_model, compressed_model, batches, metric, bounds)
    model, report = reverter.run(findings, report)
    return GuardResult(model, findings, tuple(reverter.reverted), report)


class _Reverter:
    def __init__(
        self,
        float_model: nn.Module,
        model: nn.Module,
        batches: list[Any],
        metric: Metric | None,
        bounds: tuple[Any, ...],
    ) -> None:
        self.float_model = float_model
        self.model = model
        self.batches = batches
        self.metric = metric
        self.bounds = bounds
        self.reverted: list[str] = []
        self._copies: dict[int, Any] = {}  # one copy of what several layers share

    def run(self, findings: tuple[Finding, ...], report: FidelityReport) -> tuple[nn.Module, FidelityReport]:
        """Put back the layers of findings, then the worst ones while the bounds are not held."""
        order = [layer.name for layer in report.ranking]
        layers = dict.fromkeys(finding.layer for finding in findings if finding.layer is not None)
        for name in layers:
            if not self._revert(name, report):
                return self._give_up()
        if layers:
            report = self._compare()
        if any(report.layer(name).broken for name in self.reverted):
            return self._give_up()  # not its quantizers were at fault, but what they stand on
        while list(check_bounds(report, *self.bounds)):
            order = [name for name in order if name not in self.reverted]
            if not order or not self._revert(order[0], report):
                return self._give_up()
            report = self._compare()
        return self.model, report

    def _compare(self) -> FidelityReport:
        return compare(self.float_model, self.model, self.batches, metric=self.metric, output_batches=0)

    def _give_up(self) -> tuple[nn.Module, FidelityReport]:
        self.reverted = [""]
        self.model = copy.deepcopy(self.float_model)
        return self.model, self._compare()

    def _revert(self, name: str, report: FidelityReport) -> bool:
        """Put one layer back; False where only the whole model can be."""
        layer = report.layer(name)
        if isinstance(self.model, fx.GraphModule) or not layer.weights:
            names = {weight.name for weight in layer.weights} | {values.name for values in layer.activations}
            done = self._switch_off(names, layer.module)
        else:
            done = self._replace(name)
        if done:
            self.reverted.append(name)
        return done

    def _replace(self, path: str) -> bool:
        if not path:
            return False
        found = self.model.get_submodule(path)
        original = copy.deepcopy(self.float_model.get_submodule(path), self._copies).train(found.training)
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if module is found:
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, original)
        wrap_forward(ShieldScope(original))  # its calls are none of those that were planned for the modules around it
        return True

    def _switch_off(self, names: set[str], module: str) -> bool:
        """Let the layer's tensors pass through its quantizers as they are."""
        found = [
            simulator
            for path, simulator in self.model.named_modules()
            if isinstance(simulator, FakeQuantizeImplBase)
            and (
                simulator.tensor_fqn in names
                or (path.rpartition(".")[0] == module and path.rpartition(".")[2] in names)
            )
        ]
        for simulator in found:
            simulator.disable_fake_quant()
            simulator.disable_observer()
        return bool(found)
