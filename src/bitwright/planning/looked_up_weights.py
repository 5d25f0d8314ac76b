"""Weights that the model's forward looks up in ``_parameters``, where they are not once a simulator stands on them."""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.program import Program

from .plan import Placement, Problem, Severity

__all__ = ["looked_up_problems"]


def looked_up_problems(program: Program, placements: Iterable[Placement]) -> list[Problem]:
    """Return a problem for each weight under a simulator that the traced forward has looked up by its key.

    Args:
        program: the program.
        placements: of the plan.
    """
    states = [placement.state for placement in placements if placement.state is not None]
    return [_problem(name) for state in states for name in state.names if name in program.by_key]


def _problem(name: str) -> Problem:
    path, _, attribute = name.rpartition(".")
    message = (
        f"the model's forward looks this weight up in _parameters, where it is not once a simulator stands on it. Read "
        f"it as an attribute, module.{attribute}, or set op_state_spec to None for module {path or '<root>'!r}."
    )
    return Problem("looked-up-weight", name, message, Severity.ERROR)
