"""Operators that a converter lacks: found while planning, and refused in the same words while exporting.

Which operators a converter translates is asked of its own registry. What a registry does not show, such as padding
modes and dtypes, is asked of the converter itself: it translates the float model, whose large weights are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bitwright._utils.module_mode import has_modes
from bitwright.artifact.sites import simulators_in
from bitwright.planning import Problem
from bitwright.program.protect import preserved_state

from .conversion import ConversionError
from .coreai import check_coreai_operators
from .coreml_package import check_coreml_operators
from .targets import target_named

__all__ = ["check_operators"]


def check_operators(
    model: nn.Module,
    target: str,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Return what a target's converter cannot translate of a float model.

    Args:
        model: the float model, which is not changed. Prepared models and modules of ``torch.export`` are not asked
            about, nor for Core ML those in bfloat16.
        target: its name in :data:`~bitwright.export.targets.TARGETS`. Only Core AI and Core ML are asked.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.

    Returns:
        An error for each operator that the converter lacks, or else for the first one that it refuses. Empty where the
        target's extra is not installed.

    Raises:
        KeyError: there is no such target.
    """
    missing = target_named(target).missing()
    if target not in ("coreai", "coreml") or missing is not None or simulators_in(model) or not has_modes(model):
        return []
    try:
        with preserved_state(model):
            if target == "coreai":
                check_coreai_operators(model, example_inputs, example_kwargs)
            elif not example_kwargs and not any(map(_is_bfloat16, (*model.parameters(), *model.buffers()))):
                check_coreml_operators(model, example_inputs)
    except ConversionError as error:
        return list(error.problems)
    return []


def _is_bfloat16(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16
