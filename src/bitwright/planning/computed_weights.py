"""Weights that ops make: from parameters, such as normalized ones, or from what an earlier ``finalize`` left.

They are told, because they are not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from bitwright.config.matching import OpRule, lookup_spec
from bitwright.program import Argument, Op, Program, Value, ValueKind

from .ops import operand_axes
from .plan import Problem
from .simulated_states import is_unpacked, simulator_called
from .weight_views import state_read_by

__all__ = ["computed_weight_problems", "finalized_weight_problems"]


_NAMED = 3


def computed_weight_problems(
    program: Program,
    op_rule_of: Callable[[Op], OpRule | None],
    model: nn.Module,
    compressed: Collection[str] = (),
) -> list[Problem]:
    """Return a problem for each op whose weight should be compressed but is made of parameters by other ops.

    Args:
        program: the program, with views linked.
        op_rule_of: the rule of an op, None for one that is not compressed.
        model: the model that ``program`` was made from; what its simulators make is no problem.
        compressed: names of weights that are compressed themselves; what is made of them is no problem either.
    """
    sources: dict[int, str] = {}
    problems: list[Problem] = []
    for op in program.ops:
        for argument in op.arguments:
            made_of = sources.get(id(argument.value))
            if (
                not made_of
                or made_of in compressed
                or is_unpacked(argument.value)
                or not _is_wanted(argument, op_rule_of(op))
            ):
                continue
            problems.append(_computed(op, argument.value, made_of))
        parameter = _only_parameters(op, sources)
        if parameter is not None and simulator_called(op, model) is None:
            sources.update((id(output), parameter) for output in op.outputs)
    return problems


def finalized_weight_problems(program: Program, op_rule_of: Callable[[Op], OpRule | None]) -> list[Problem]:
    """Return one problem for all weights that should be quantized but were finalized before.

    Args:
        program: the program, with views linked.
        op_rule_of: the rule of an op, None for one that is not quantized.
    """
    unpacked = ((op, argument) for op in program.ops for argument in op.arguments if is_unpacked(argument.value))
    return _finalized([op.name for op, argument in unpacked if _is_wanted(argument, op_rule_of(op))])


def _only_parameters(op: Op, sources: dict[int, str]) -> str | None:
    """Return a parameter that ``op`` computes with if it reads nothing but parameters, buffers and what they make.

    An empty string if these are buffers alone, None if there is something else or nothing at all.
    """
    if not op.arguments:
        return None
    found = ""
    for argument in op.arguments:
        state = argument.value.state
        if state is None and id(argument.value) not in sources:
            return None
        if state is None:
            found = found or sources[id(argument.value)]
        elif state.is_parameter and state.tensor.is_floating_point():
            found = found or state.name
    return found


def _is_wanted(argument: Argument, rule: OpRule | None) -> bool:
    if rule is None or argument.name != "weight" or argument.value.kind is ValueKind.STATE:
        return False
    if operand_axes(argument, products=False) is None or state_read_by(argument) is not None:
        return False
    return lookup_spec(rule.op_state_spec, ("weight",)).spec is not None


def _finalized(ops: list[str]) -> list[Problem]:
    if not ops:
        return []
    named = ", ".join(ops[:_NAMED]) + (", ..." if len(ops) > _NAMED else "")
    message = (
        f"the weights of {len(ops)} op(s) were finalized for a backend before and stay as they are: {named}. Their "
        "activations can still be quantized. To quantize the weights, begin with the model before finalize; if this is "
        "meant, set op_state_spec to None."
    )
    return [Problem("finalized-weight", ops[0], message)]


def _computed(op: Op, value: Value, parameter: str) -> Problem:
    maker = value.producer.name if value.producer is not None else parameter
    message = (
        f"its weight of shape {value.shape} is computed by {maker} from {parameter} and so on, not read from a "
        "parameter, so it stays as it is. Make the result a parameter first (for weight normalization: "
        "torch.nn.utils.parametrize.remove_parametrizations), or set op_state_spec to None for this op."
    )
    return Problem("computed-weight", op.name, message)
