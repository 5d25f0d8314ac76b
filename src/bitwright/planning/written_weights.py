"""Weights that the model itself writes to in its forward: with a simulator on them, that would be lost."""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.program import Program

from .mutation import Aliases
from .plan import Placement, Problem

__all__ = ["written_weight_problems"]


def written_weight_problems(program: Program, placements: Iterable[Placement]) -> list[Problem]:
    """Return a problem for each weight under a simulator that the traced forward has written to.

    Args:
        program: the program.
        placements: of the plan.
    """
    written = _written_in_graph(program) if program.mode == "graph" else _written_in_eager(program)
    states = {placement.state.name: placement.state for placement in placements if placement.state is not None}
    return [
        _problem(program.mode, state.name, next(written[name] for name in state.names if name in written))
        for state in states.values()
        if not written.keys().isdisjoint(state.names)
    ]


def _written_in_eager(program: Program) -> dict[str, str]:
    found = dict.fromkeys(program.replaced, "its .data is set")
    for op in program.ops:
        found.update(dict.fromkeys(op.overwrites, f"by {op.name}"))
    return found


def _written_in_graph(program: Program) -> dict[str, str]:
    found: dict[str, str] = {}
    aliases = Aliases()
    for op in program.ops:
        states = [value.state for value in aliases.written_by(op) if value.state is not None]
        found.update((state.name, f"by {op.name}") for state in states)
        aliases.add(op)
    return found


def _problem(mode: str, name: str, how: str) -> Problem:
    path, _, attribute = name.rpartition(".")
    original = ".".join(part for part in (path, "parametrizations", attribute, "original") if part)
    instead = "the parameter" if mode == "graph" else f"{original!r}, which model.named_parameters() yields,"
    message = (
        f"the model's forward has written to this weight ({how}). Once a simulator stands on it, further writes reach "
        f"a copy only, and are lost. Write to {instead} between the steps instead, or set op_state_spec to None for "
        f"module {path or '<root>'!r}."
    )
    return Problem("written-weight", name, message)
