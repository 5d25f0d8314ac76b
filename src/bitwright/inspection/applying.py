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
from bitwright.program.states import states_preserved

from ._batches import batches_of, dynamic_shapes, example_of, inputs_of
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
    own = example.copied()
    with blaming_inputs(model, example.args, example.kwargs):
        plan: Plan = compressor_for(model, config).plan(own.args, example_kwargs=own.kwargs)
    return plan


def apply_configs(
    model: nn.Module,
    configs: Sequence[CompressionConfig[Any]],
    data: Iterable[Any],
    *,
    shapes_of: Sequence[Any] = (),
    strict: bool = False,
    progress: Progress | None = None,
) -> AppliedConfig:
    """Apply configurations one after the other to a copy of a model.

    Activations are calibrated with all of ``data``; pruning by scores that need data is, too. What forward keeps from
    call to call, in buffers and attributes, is not kept from calibration. In graph mode sizes that differ among the
    batches may vary, as well as the batch size.

    Args:
        model: the float model; it is not changed.
        configs: one for each technique, in the order of use.
        data: batches, as for :func:`~bitwright.inspection.compare`. The first one serves as example inputs; in
            graph mode, the first one with the fewest dimensions of size 1.
        shapes_of: further batches that the model will be called with; in graph mode their sizes may vary, too.
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
    first = inputs_of(next(batches_of(batches)), model)
    current = _in_eval_mode(copy.deepcopy(model))
    compressors: list[_BaseModelCompressor] = []
    plans = []
    for config in configs:
        if compressors:
            current = compressors[-1].finalize(current, ExportBackend._TORCH)
        compressor = compressor_for(current, config)
        say(f"preparing: {type(config).__name__}")
        example, shapes = first, [None]
        if getattr(config, "execution_mode", None) == "graph":
            example = example_of([*batches, *shapes_of], model)
            shapes = _shapes_to_try(example, current, [inputs_of(batch, model) for batch in (*batches, *shapes_of)])
        with blaming_inputs(model, example.args, example.kwargs):
            compressor, current = _prepared(compressor, config, example, shapes, strict)
        plan = compressor.applied_plan if hasattr(compressor, "applied_plan") else compressor._plan
        if _needs_data(plan):
            with states_preserved(current, model):
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
    compressor: Any, config: CompressionConfig[Any], example: Inputs, shapes: Sequence[Any], strict: bool
) -> tuple[Any, nn.Module]:
    """Prepare with the first of the dynamic shapes that the model can be captured with; None for those of the example.

    Returns:
        The compressor, made anew where it failed before, and the prepared model.
    """
    model = compressor._model
    for given in shapes:
        own = example.copied()
        options: dict[str, Any] = {"example_kwargs": own.kwargs, "strict": strict}
        if given is not None:
            options["dynamic_shapes"] = given
        try:
            return compressor, compressor.prepare(own.args, **options)
        except RuntimeError:
            if given is None:
                raise
            compressor = compressor_for(model, config)
    raise AssertionError("the last of the shapes is None")


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
            inputs = inputs_of(batch, signature).copied()
            with blaming_inputs(signature, inputs.args, inputs.kwargs):
                model(*inputs.args, **inputs.kwargs)


def _shapes_to_try(example: Inputs, model: nn.Module, batches: Sequence[Inputs]) -> list[Any]:
    """Return dynamic shapes: all that differ among batches, the batch size alone, and None."""
    wanted = dynamic_shapes(example, model, batches), dynamic_shapes(example, model, ())
    return [*(wanted if wanted[0] != wanted[1] else wanted[:1]), None]
