"""Weights that only ops inside ``torch.vmap``, ``torch.cond`` and the like read, where no simulator can stand."""

from __future__ import annotations

from collections.abc import Callable, Collection

from bitwright.config.matching import OpRule, lookup_spec
from bitwright.program import Op, Program, StateTensor

from .ops import state_keys
from .plan import Problem

__all__ = ["enclosed_weight_problems"]

_NAMED = 3


def enclosed_weight_problems(
    program: Program,
    op_rule_of: Callable[[Op], OpRule | None],
    compressed: Collection[str],
    keys_of: Callable[[StateTensor, Op], tuple[str, ...]] = state_keys,
) -> list[Problem]:
    """Return one problem for all weights that should be compressed but are read out of reach alone.

    Args:
        program: the program.
        op_rule_of: the rule of an op, None for one that is not compressed.
        compressed: names of weights that are compressed; the ops inside read them so.
        keys_of: the keys under which a state's spec is looked up in an op's rule.
    """
    places: dict[str, str] = {}
    for place, op in program.enclosed:
        rule = op_rule_of(op)
        for argument in op.arguments:
            state = argument.value.state
            if rule is None or state is None or state.name in compressed or not state.tensor.is_floating_point():
                continue
            if lookup_spec(rule.op_state_spec, keys_of(state, op)).spec is not None:
                places.setdefault(state.name, place)
    if not places:
        return []
    named = [f"{name} ({place})" for name, place in places.items()]
    listed = ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")
    message = (
        f"{len(named)} weight(s) are read only where nothing can be inserted, and stay as they are: {listed}. "
        f"Call these layers outside of it{_REMEDY[program.mode]}, or set op_state_spec to None for their modules."
    )
    return [Problem("enclosed-weight", next(iter(places)), message)]


_REMEDY = {
    "eager": "",
    "graph": (
        "; or, for all but torch.vmap, name the weights in the module_state_spec of their modules, or set "
        'execution_mode="eager", which sees what runs under autocast and no_grad'
    ),
}
