"""Apply configurations to a model: prepare, calibrate where that is needed, technique after technique."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitwright.base_model_compressor import _BaseModelCompressor
from bitwright.common import ExportBackend
from bitwright.config import CompressionConfig
from bitwright.config.spec import CompressionTargetTensor
from bitwright.planning import Plan
from bitwright.program.export_errors import blaming_inputs

from ._batches import batches_of, inputs_of
from ._probe import Inputs
from .fidelity import Progress

__all__ = ["AppliedConfig", "apply_configs", "compressor_for", "plan_config"]


@dataclass(frozen=True, slots=True)
class AppliedConfig:
    """The result of applying configurations.

    Attributes:
        model: the prepared and calibrated model.
        compressors: one for each configuration, in the order of use.
        plans: their plans.
    """

    model: nn.Module
    compressors: tuple[_BaseModelCompressor, ...]
    plans: tuple[Plan, ...]

    def finalize(self, backend: ExportBackend | str) -> nn.Module:
        """Return the model in the form that ``backend`` takes."""
        return self.compressors[-1].finalize(self.model, ExportBackend(backend))


def compressor_for(model: nn.Module, config: CompressionConfig[Any]) -> Any:
    """Return the compressor that a configuration belongs to, on ``model``.

    Raises:
        TypeError: ``config`` is of no known class.
    """
    name = type(config).__name__
    if name == "QuantizerConfig":
        from bitwright.quantization import Quantizer

        return Quantizer(model, config)  # type: ignore[arg-type]
    if name == "KMeansPalettizerConfig":
        from bitwright.palettization import KMeansPalettizer

        return KMeansPalettizer(model, config)  # type: ignore[arg-type]
    if name == "MagnitudePrunerConfig":
        from bitwright.pruning import MagnitudePruner

        return MagnitudePruner(model, config)  # type: ignore[arg-type]
    raise TypeError(
        f"No compressor is known for a {name}; pass a QuantizerConfig, KMeansPalettizerConfig or MagnitudePrunerConfig."
    )


def plan_config(model: nn.Module, config: CompressionConfig[Any], example: Inputs) -> Plan:
    """Return what applying a configuration would do; the model is not changed."""
    with blaming_inputs(model, example.args, example.kwargs):
        plan: Plan = compressor_for(model, config).plan(example.args, example_kwargs=example.kwargs)
    return plan


def apply_configs(
    model: nn.Module,
    configs: Sequence[CompressionConfig[Any]],
    data: Iterable[Any],
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> AppliedConfig:
    """Apply configurations one after the other to a copy of a model.

    Activations are calibrated with all of ``data``; pruning by scores that need data is, too.

    Args:
        model: the float model; it is not changed.
        configs: one for each technique, in the order of use.
        data: batches, as for :func:`~bitwright.inspection.compare`. The first one serves as example inputs.
        strict: turn every problem of a plan into an error.
        progress: called with what is being done.

    Raises:
        ValueError: ``configs`` or ``data`` is empty.
        PlanError: a configuration cannot be applied.
    """
    if not configs:
        raise ValueError("There is nothing to apply: give at least one configuration.")
    say = progress or (lambda _: None)
    batches = data if isinstance(data, (list, tuple)) else list(batches_of(data))
    example = inputs_of(next(batches_of(batches)), model)
    current = _in_eval_mode(copy.deepcopy(model))
    compressors: list[_BaseModelCompressor] = []
    plans = []
    for config in configs:
        if compressors:
            current = compressors[-1].finalize(current, ExportBackend._TORCH)
        compressor = compressor_for(current, config)
        say(f"preparing: {type(config).__name__}")
        options: dict[str, Any] = {"example_kwargs": example.kwargs, "strict": strict}
        if getattr(config, "execution_mode", None) == "graph":
            options["dynamic_shapes"] = _any_batch(example)
        with blaming_inputs(model, example.args, example.kwargs):
            compressor, current = _prepared(compressor, config, example, options)
        plan = compressor.applied_plan if hasattr(compressor, "applied_plan") else compressor._plan
        if _needs_data(plan):
            _calibrate(compressor, current, batches, model, say)
        compressors.append(compressor)
        plans.append(plan)
    return AppliedConfig(_in_eval_mode(current), tuple(compressors), tuple(plans))


def _in_eval_mode(model: nn.Module) -> nn.Module:
    """Switch to eval mode; programs of ``torch.export`` stay in the mode that they were captured in."""
    try:
        return model.eval()
    except NotImplementedError:
        return model


def _prepared(
    compressor: Any, config: CompressionConfig[Any], example: Inputs, options: dict[str, Any]
) -> tuple[Any, nn.Module]:
    """Prepare with a free batch size, or where the model fixes it, with that of the example."""
    model = compressor._model
    try:
        return compressor, compressor.prepare(example.args, **options)
    except RuntimeError:
        if options.pop("dynamic_shapes", None) is None:
            raise
        compressor = compressor_for(model, config)
        return compressor, compressor.prepare(example.args, **options)


def _needs_data(plan: Plan) -> bool:
    targets = {placement.target for placement in plan.placements}
    if CompressionTargetTensor.ACTIVATION in targets:
        return True
    algorithms = [getattr(placement.spec, "pruning_algo", None) for placement in plan.placements]
    return any(getattr(algorithm, "input_statistics", "none") != "none" for algorithm in algorithms)


def _calibrate(compressor: Any, model: nn.Module, batches: Any, signature: nn.Module, say: Progress) -> None:
    with compressor.calibration_mode(), torch.no_grad():
        for number, batch in enumerate(batches_of(batches), 1):
            say(f"calibrating: batch {number}")
            inputs = inputs_of(batch, signature)
            with blaming_inputs(signature, inputs.args, inputs.kwargs):
                model(*inputs.args, **inputs.kwargs)


def _any_batch(example: Inputs) -> Any:
    """Let the first dimension vary where there is one of more than one entry."""
    if example.kwargs or not all(isinstance(entry, torch.Tensor) for entry in example.args):
        return None
    return tuple({0: torch.export.Dim.AUTO} if x.ndim and x.shape[0] > 1 else {} for x in example.args)
