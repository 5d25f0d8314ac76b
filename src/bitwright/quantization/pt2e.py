"""Configurations for torchao's PT2E flow: ``prepare_pt2e`` or ``prepare_qat_pt2e``, then ``convert_pt2e``.

Backends that are built on that flow (ExecuTorch) get the same decisions as a :class:`Quantizer` in graph mode makes,
in the form that they know: torchao's own observers, and ``quantized_decomposed`` ops after conversion.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from bitwright import _torchao
from bitwright.config.spec import CompressionTargetTensor
from bitwright.errors import ConfigMatchWarning, PlanError
from bitwright.planning import Placement, Severity, Site
from bitwright.planning.graph import plan_graph_quantization
from bitwright.program.graph_program import build_program

from .config import QuantizerConfig
from .spec import PerChannelGranularity, PerTensorGranularity, QuantizationScheme, QuantizationSpec
from .spec.learned import LearnedQParamsCalculatorBase
from .spec.qparams_calculator import (
    AccumulatedQParamsCalculator,
    DynamicQParamsCalculator,
    StaticQParamsCalculator,
)

__all__ = ["pt2e_quantizer"]


def pt2e_quantizer(config: QuantizerConfig, model: nn.Module | None = None, *, is_qat: bool = False) -> Any:
    """Return a torchao ``Quantizer`` that annotates exported graphs as ``config`` says.

    Args:
        config: integers per tensor or per channel; per-tensor activations may be dynamic.
        model: the model that was exported, to which ``module_type_configs`` refer; the graph module's own tree, which
            knows names but no types, when None.
        is_qat: for ``prepare_qat_pt2e``: fake quantizers in place of observers.

    Returns:
        An instance of ``torchao.quantization.pt2e.quantizer.Quantizer``. Its ``annotate`` raises ``PlanError`` where
        the configuration cannot be applied, and ``ValueError`` for a spec that PT2E cannot hold.

    Example:
        >>> import torch
        >>> from bitwright.quantization import QuantizerConfig
        >>> from bitwright.quantization.pt2e import pt2e_quantizer
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> exported = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(1, 4),)).module()
        >>> prepared = prepare_pt2e(exported, pt2e_quantizer(QuantizerConfig()))
        >>> _ = prepared(torch.randn(1, 4))
        >>> converted = convert_pt2e(prepared)
    """
    api = _torchao.pt2e_quantizer()

    class Pt2eQuantizer(api.Quantizer):  # type: ignore[misc, name-defined]
        """Annotates a graph with the decisions of a plan."""

        def annotate(self, graph_module: fx.GraphModule) -> fx.GraphModule:
            _Annotator(config, graph_module, model, is_qat).run()
            return graph_module

        def validate(self, graph_module: fx.GraphModule) -> None:
            """Everything was checked while annotating."""

    return Pt2eQuantizer()


class _Annotator:
    """Writes the placements of a plan into a graph as PT2E annotations."""

    def __init__(self, config: QuantizerConfig, module: fx.GraphModule, model: nn.Module | None, is_qat: bool) -> None:
        self.api = _torchao.pt2e_quantizer()
        self.program = build_program(module, module if model is None else model)
        self.decisions = plan_graph_quantization(config, module if model is None else model, self.program)
        self.nodes = {node.name: node for node in module.graph.nodes}
        self.is_qat = is_qat
        self.annotations: dict[fx.Node, Any] = {}

    def run(self) -> None:
        plan = self.decisions.plan
        errors = tuple(problem for problem in plan.problems if problem.severity is Severity.ERROR)
        if errors:
            raise PlanError("The configuration cannot be applied:\n" + "\n".join(f"  {e}" for e in errors), errors)
        for problem in plan.problems:
            warnings.warn(f"{problem}", ConfigMatchWarning, stacklevel=4)
        for placement in plan.placements:
            self._annotate(placement)
        for chain in self.decisions.chains:
            for op in chain.ops:
                self._annotation(op.handle)._annotated = True

    def _annotate(self, placement: Placement) -> None:
        spec = torchao_spec(placement.spec, placement.target, placement.name, self.is_qat)  # type: ignore[arg-type]
        anchor: Any = None
        for place in self._places(placement):
            given = spec if anchor is None else self.api.SharedQuantizationSpec(anchor)
            anchor = place if anchor is None else anchor
            if isinstance(place, tuple):
                source, reader = place
                self._annotation(reader).input_qspec_map[source] = given
            else:
                self._annotation(place).output_qspec = given

    def _places(self, placement: Placement) -> Iterator[Any]:
        if placement.state is not None:
            for use in placement.state.uses:
                yield self.nodes[use.value.name], use.op.handle
        for site in placement.sites:
            yield self._place(site)

    def _place(self, site: Site) -> Any:
        node = self.nodes[site.value.name]
        return node if site.argument is None else (node, site.op.handle)

    def _annotation(self, node: fx.Node) -> Any:
        if node not in self.annotations:
            known = node.meta.get("quantization_annotation")
            annotation = self.api.QuantizationAnnotation() if known is None else known
            node.meta["quantization_annotation"] = self.annotations[node] = annotation
        return self.annotations[node]


_SCHEMES: Mapping[tuple[bool, bool], torch.qscheme] = {
    (False, True): torch.per_tensor_symmetric,
    (False, False): torch.per_tensor_affine,
    (True, True): torch.per_channel_symmetric,
    (True, False): torch.per_channel_affine,
}


_REMEDY = "Change the spec, or prepare the model with bitwright.quantization.Quantizer, which simulates it."


def torchao_spec(spec: QuantizationSpec, target: CompressionTargetTensor, where: str, is_qat: bool) -> Any:
    """Return a torchao spec that means the same.

    Raises:
        ValueError: a float format, offsets by minval, blocks, learned or searched ranges, one end of a range, or a
            fixed range per channel; PT2E has no form for them.
    """
    granularity = spec.granularity
    per_channel = isinstance(granularity, PerChannelGranularity)
    if spec.dtype.is_floating_point or spec.qformulation.value != "zp":
        form = f"{spec.dtype} by {spec.qformulation.value}"
        raise ValueError(f"{where}: PT2E holds integers with zero points, not {form}. {_REMEDY}")
    if not per_channel and not isinstance(granularity, PerTensorGranularity):
        name = type(granularity).__name__
        raise ValueError(f"{where}: PT2E holds scales per tensor or per channel, not {name}. {_REMEDY}")
    _check_ranges(spec, where, per_channel)
    symmetric = spec.qscheme != QuantizationScheme.ASYMMETRIC
    shared = {
        "dtype": spec.target_dtype,
        "quant_min": int(spec.quant_min),
        "quant_max": int(spec.quant_max),
        "qscheme": _SCHEMES[per_channel, symmetric],
    }
    api = _torchao.pt2e_quantizer()
    if None not in spec.float_range:
        scale, zero_point = _fixed(spec, symmetric)
        return api.FixedQParamsQuantizationSpec(scale=scale, zero_point=zero_point, **shared)
    dynamic = issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator)
    constructor = _constructor(spec, target, per_channel, dynamic, is_qat)
    axis = granularity.axis if per_channel else None
    return api.QuantizationSpec(observer_or_fake_quant_ctr=constructor, ch_axis=axis, is_dynamic=dynamic, **shared)


def _check_ranges(spec: QuantizationSpec, where: str, per_channel: bool) -> None:
    """Refuse ways to a range that torchao's observers do not know."""
    plain = QuantizationSpec()
    for field in ("fake_quantize_cls", "range_calculator_cls"):
        chosen = getattr(spec, field)
        if chosen is not getattr(plain, field):
            raise ValueError(f"{where}: PT2E has no form for {field} {chosen.__name__}. {_REMEDY}")
    if issubclass(spec.qparam_calculator_cls, LearnedQParamsCalculatorBase):
        name = spec.qparam_calculator_cls.__name__
        raise ValueError(f"{where}: PT2E has no form for qparam_calculator_cls {name}. {_REMEDY}")
    fixed = [end is not None for end in spec.float_range]
    if any(fixed) and (per_channel or not all(fixed)):
        kind = "per channel" if per_channel else "open at one end"
        raise ValueError(f"{where}: PT2E has no form for float_range {spec.float_range!r} {kind}. {_REMEDY}")


def _constructor(
    spec: QuantizationSpec,
    target: CompressionTargetTensor,
    per_channel: bool,
    dynamic: bool,
    is_qat: bool,
) -> Any:
    module = _torchao.pt2e()
    moving = target == CompressionTargetTensor.ACTIVATION and not dynamic
    moving = moving and spec.qparam_calculator_cls.__name__ != "GlobalMinMaxQParamsCalculator"
    names = {
        (False, False): "MinMaxObserver",
        (False, True): "MovingAverageMinMaxObserver",
        (True, False): "PerChannelMinMaxObserver",
        (True, True): "MovingAveragePerChannelMinMaxObserver",
    }
    observer = getattr(module, names[per_channel, moving])
    options: dict[str, Any] = {}
    if moving and issubclass(spec.qparam_calculator_cls, (StaticQParamsCalculator, AccumulatedQParamsCalculator)):
        options["averaging_constant"] = 1.0  # They keep the range of the latest tensor.
    elif moving and spec.averaging_constant is not None:
        options["averaging_constant"] = spec.averaging_constant
    if not is_qat:
        return observer.with_args(**options)
    return module.FakeQuantize.with_args(observer=observer, **options)


def _fixed(spec: QuantizationSpec, symmetric: bool) -> tuple[float, int]:
    low, high = spec.float_range
    assert low is not None
    assert high is not None
    steps = spec.quant_max - spec.quant_min
    if symmetric:
        return max(-low, high) / (steps / 2), int((spec.quant_max + spec.quant_min + 1) // 2)
    scale = (high - low) / steps
    return scale, int(spec.quant_min - round(low / scale))
