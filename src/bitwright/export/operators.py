"""Operators that a converter lacks: found while planning, and refused in the same words while exporting.

Which operators a converter translates is asked of its own registry. What a registry does not show, such as padding
modes and dtypes, is asked of the converter itself: it translates the float model, whose repeated calls are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bitwright._utils.module_mode import has_modes
from bitwright.artifact.sites import simulators_in
from bitwright.planning import Problem
from bitwright.program.protect import preserved_state

from .conversion import ConversionError, captured
from .coreai import check_coreai_operators
from .coreml_package import check_coreml_operators
from .executorch import check_executorch_operators
from .onnx.tracing import check_onnx_operators
from .signatures import refuse_numbers, warn_of_lost_states, written_states
from .specimens import specimens
from .targets import target_named
from .uncompressed import float_copy

__all__ = ["check_operators"]

_BY_PROGRAM: Mapping[str, Callable[[torch.export.ExportedProgram], None] | None] = {
    "coreai": check_coreai_operators,
    "executorch": check_executorch_operators,
    "onnx": check_onnx_operators,
    "onnx-nbits": check_onnx_operators,
    "torch": None,
    "aot-inductor": None,
}
"""What checks the programs of each target that is written from one; None where a program is all that is asked for."""

_TENSORS_ONLY = {check_coreai_operators: "coreai-torch", check_onnx_operators: "torch.onnx"}
"""Converters that take programs only if all that they return is tensors."""


def check_operators(
    model: nn.Module,
    target: str,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> list[Problem]:
    """Return what a target's converter cannot translate of a float model.

    Args:
        model: the float model, or one that was prepared, in which the float model is asked about; not changed. Of those
            in bfloat16 Core ML is not asked.
        target: its name in :data:`~bitwright.export.targets.TARGETS`.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``; of no meaning for targets with fixed shapes.

    Returns:
        An error for each operator that the converter lacks, or else for the first one that it refuses. Empty where the
        target's extra is not installed.

    Raises:
        KeyError: there is no such target.
    """
    if target_named(target).missing() is not None or target not in {*_BY_PROGRAM, "coreml"}:
        return []
    if simulators_in(model) or not has_modes(model):
        model = float_copy(model)
    try:
        with preserved_state(model):
            if target in _BY_PROGRAM:
                _check_program(_BY_PROGRAM[target], model, example_inputs, example_kwargs, dynamic_shapes)
            elif not any(map(_is_bfloat16, (*model.parameters(), *model.buffers()))):
                check_coreml_operators(model, example_inputs, example_kwargs)
    except ConversionError as error:
        return list(error.problems)
    return []


def _check_program(
    check: Callable[[torch.export.ExportedProgram], None] | None,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> None:
    """Ask about one call of each kind; if one is refused, about the whole program, which knows all places."""
    program = captured(model, args, kwargs, dynamic_shapes)
    if check is None:
        return
    if check in _TENSORS_ONLY:
        refuse_numbers(program, _TENSORS_ONLY[check])
    if check is check_onnx_operators:
        warn_of_lost_states(written_states(program), "an ONNX file")
    if not dynamic_shapes:
        with contextlib.suppress(Exception):  # whatever it is, the whole program tells
            check(specimens(program))
            return
    check(program)


def _is_bfloat16(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16
