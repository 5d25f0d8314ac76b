"""torch's own exporter to ONNX: what it translates, and what it lacks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.call_frames import captured_again_if_corrected
from bitwright.export.asked_sizes import sizes_left_out
from bitwright.export.complex_numbers import without_complex_numbers
from bitwright.export.constants import compute_beforehand, primitives
from bitwright.export.conversion import (
    OTHER_OPERATOR,
    ConversionError,
    captured,
    converting,
    places_by_operator,
    refuse_missing,
)  # fmt: skip
from bitwright.export.experts import spell_out_experts
from bitwright.export.extras import require
from bitwright.export.lacking import LACKING, without_lacking
from bitwright.export.signatures import refuse_numbers
from bitwright.program.assigned_buffers import assignments_written
from bitwright.program.dynamic_marks import inputs_unmarked
from bitwright.program.export_errors import sizes_refused
from bitwright.program.input_shapes import each_input_named

from .kernels import check_kernels
from .optimizer import computed_splits, exact_constants
from .recurrent import PROJECTED
from .sizes import sizes_as_asked
from .torchlib import registry_kept, torchs_registry
from .translations import translations

__all__ = ["MIN_OPSET", "check_onnx_operators", "traced"]

_RECURRENT = (torch.ops.aten.gru.input, torch.ops.aten.lstm.input)

MIN_OPSET = 18
"""The version of the operator set that models are written in which need no later one."""


def traced(
    model: nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    opset: int | None = None,
    remedy: str | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    meaning: Callable[[fx.Node], Callable[..., Any] | None] = lambda _: None,
) -> Any:
    """Return torch's ONNX program of a model.

    Args:
        model: a module, or its captured program, which needs no inputs.
        args: positional inputs.
        kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.
        opset: version of the operator set.
        remedy: what a refused model's message ends with; None for advice on a compressed model.
        input_names: names of the graph's inputs.
        output_names: names of the graph's outputs.
        meaning: of stand-ins, as for ``compute_beforehand``.

    Raises:
        ConversionError: torch.export or torch.onnx cannot take the model; with a problem for each operator that
            torch.onnx lacks.
    """
    options = {
        "opset": opset, "remedy": remedy, "input_names": input_names, "output_names": output_names, "meaning": meaning,
    }  # fmt: skip
    with each_input_named(model, args, kwargs, dynamic_shapes) as shapes:
        return _traced(model, args, kwargs, shapes, options)


def _traced(
    model: nn.Module | torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any, options: Mapping[str, Any],
) -> Any:  # fmt: skip
    if isinstance(model, nn.Module) and args and isinstance(args[-1], dict) and not kwargs:
        # torch.onnx takes a dictionary that comes last for keyword inputs
        return _traced_as_captured(captured(model, args, None, dynamic_shapes), dynamic_shapes, options)
    try:
        with (
            converting("torch.onnx.export", options["remedy"]),
            _quiet(),
            sizes_as_asked() as fixed,
            exact_constants(),
            computed_splits(),
            registry_kept(),
            inputs_unmarked(args, kwargs),
            assignments_written(model) if isinstance(model, nn.Module) else contextlib.nullcontext(),
        ):
            export = partial(
                torch.onnx.export,
                model,
                args,
                kwargs=dict(kwargs) if kwargs else None,
                dynamo=True,
                opset_version=options["opset"],
                dynamic_shapes=dynamic_shapes,
                input_names=options["input_names"],
                output_names=options["output_names"],
                custom_translation_table=translations(options["opset"]),
                verbose=False,
            )
            program: Any = captured_again_if_corrected(export)
            _register_constants(program.model.graph)
        if not isinstance(model, nn.Module) or not dynamic_shapes:
            return program
        with warnings.catch_warnings(record=True) as told:  # of a program that may not be the one that is written
            warnings.simplefilter("always")
            fixed = fixed or _leaves_out(program, model, args, kwargs, dynamic_shapes)
        if not (fixed or _assumes_sizes(program)):
            return _with_warnings(program, told)
    except ConversionError as error:
        exported: Any = model
        if isinstance(model, nn.Module):
            with contextlib.suppress(ConversionError):
                exported = captured(model, args, kwargs, dynamic_shapes)
        if isinstance(exported, torch.export.ExportedProgram):
            written = _written(exported, options["meaning"])
            if written is not None:
                return _traced_as_captured(written, dynamic_shapes, options)
            refuse_numbers(exported, "torch.onnx")
            refuse_missing("torch.onnx", places_by_operator(_lacking(exported)))  # all; it names the first itself
            if exported is not model and type(error.__cause__).__name__ == "TorchExportError":
                return _traced_as_captured(exported, dynamic_shapes, options)
        raise
    try:
        return _traced_as_captured(captured(model, args, kwargs, dynamic_shapes), dynamic_shapes, options)
    except ConversionError as error:
        if fixed or sizes_refused(error):
            raise
        return _with_warnings(program, told)


def _with_warnings(program: Any, told: Sequence[warnings.WarningMessage]) -> Any:
    for warning in told:
        warnings.warn(warning.message, stacklevel=5)
    return program


def _leaves_out(
    program: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> list[str]:
    """Sizes that were asked for, and that the program of torch.onnx does not hold for."""
    exported = program.exported_program
    return [] if exported is None else list(map(str, sizes_left_out(exported, model, args, kwargs, dynamic_shapes)))


def _assumes_sizes(program: Any) -> bool:
    """Whether torch.onnx may have captured a program that holds for fewer sizes than it says.

    So it does where it has torch.export look into Python code, and where recurrent layers begin with a given state:
    their results have as many steps as the example's.
    """
    if getattr(program, "_capture_strategy", None) == "TorchExportStrictStrategy":
        return True
    exported = program.exported_program
    return exported is not None and any(node.target in _RECURRENT for node in exported.graph.nodes)


def _written(
    program: torch.export.ExportedProgram, meaning: Callable[[fx.Node], Callable[..., Any] | None]
) -> torch.export.ExportedProgram | None:
    """A program with something that torch.onnx lacks written another way; None where it lacks nothing that has one.

    Args:
        program: may be changed.
        meaning: of stand-ins, as for ``compute_beforehand``.
    """
    if (without := without_complex_numbers(program)) is not None:
        return without
    if spell_out_experts(program.graph_module):
        return program
    if (without := without_lacking(program, {**LACKING, **PROJECTED})) is not None:
        return without
    lacking = _lacking(program)  # some, such as lgamma, are another operator by then
    missing = {str(op) for node in lacking for op in (node.target, node.meta.get("original_aten"))}
    found = compute_beforehand(program, lambda node: not missing.isdisjoint(map(str, primitives(node))), meaning)
    return program if found else None


def _traced_as_captured(exported: torch.export.ExportedProgram, dynamic_shapes: Any, options: Mapping[str, Any]) -> Any:
    program = traced(exported, **options)
    if dynamic_shapes:
        program._rename_dynamic_axes(dynamic_shapes)  # a program keeps PyTorch's names of its sizes
    return program


def _register_constants(graph: Any) -> None:
    """Give a graph the constants that its nodes read, in place; the optimizer forgets those of some joined clamps."""
    for node in graph.all_nodes():
        for value in node.inputs:
            is_constant = value is not None and value.const_value is not None and value.producer() is None
            if is_constant and not value.is_initializer() and not value.is_graph_input():
                graph.register_initializer(value)


def check_onnx_operators(program: torch.export.ExportedProgram) -> None:
    """Check that torch.onnx translates a captured float model, and that ONNX Runtime has kernels for what it makes.

    Raises:
        MissingExtraError: the onnx extra is not installed.
        ConversionError: it does not, with a problem for each operator that it lacks; or there is no kernel.
    """
    for module in ("onnx", "onnxscript", "onnx_ir"):
        require(module, "onnx", "Export to ONNX")
    check_kernels(traced(program, opset=MIN_OPSET, remedy=OTHER_OPERATOR).model)


def _lacking(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Calls of PyTorch's operators that torch.onnx has no function for."""
    private = "torch.onnx._internal.exporter"
    dispatching, passes = (
        require(f"{private}.{name}", "onnx", "Export to ONNX") for name in ("_dispatching", "_fx_passes")
    )
    with converting("torch.export"), _quiet():
        registry = torchs_registry(None)
        graph = passes.remove_assertion_nodes(passes.decompose_with_registry(program, registry).graph_module).graph
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and str(node.target).startswith(("aten.", "prims."))
        and dispatching.dispatch(node, registry)[0] is None
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes on libraries that this model does not use from the user's terminal."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        yield
    finally:
        registration.setLevel(level)
