"""Constants that several operators read, for XNNPACK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from bitwright.export.constants import add_constant, fixed_states
from bitwright.export.graph_edits import argument

from .graph import DEQUANTIZE, DEQUANTIZE_CHANNELS, op_name

__all__ = ["constants_for_each_use"]


def constants_for_each_use(program: ExportedProgram) -> None:
    """Give operators a constant of their own that read it in another way than its first reader does.

    XNNPACK packs the weights and biases of layers, and then frees what they were packed from: an operator in the same
    sub-graph that reads the numbers, or turns them for another layer, ends the process. And layers that pack the same
    constant in different orders, or quantize it as a bias with different scales, get that of the first. ExecuTorch
    writes equal bytes once for all that XNNPACK reads, and once for all other operators.

    Args:
        program: changed in place; a constant and its copies share their memory. States that are written to stay one.
    """
    constants = fixed_states(program)
    for node, values in constants.items():
        calls = [user for user in node.users if user.op == "call_function"]
        uses = {(user, place): _use(user, place, constants) for user in calls for place in _places(user, node)}
        copies: dict[Any, fx.Node] = {}
        for (user, place), use in uses.items():
            if use not in copies:
                copies[use] = add_constant(program, node, node.name, values) if copies else node
            _read(user, place, node, copies[use])
    program.graph_module.recompile()


def _places(user: fx.Node, constant: fx.Node) -> list[int]:
    """Where among a call's arguments a constant is, or is in a list."""
    return [place for place, one in enumerate(user.args) if constant in _nodes(one)]


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def _use(user: fx.Node, place: int, constants: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """What a constant is to a call, or to those that read it dequantized.

    Whether XNNPACK takes a layer depends on what the layer reads besides, and how it packs a kernel on the groups. What
    is read beside quantized numbers, as a bias is, may be quantized with their scales.
    """
    if op_name(user) in (DEQUANTIZE, DEQUANTIZE_CHANNELS):
        readers = [(reader, where) for reader in user.users for where in _places(reader, user)]
        how: tuple[Any, ...] = tuple(dict.fromkeys(_use(reader, where, constants) for reader, where in readers))
    else:
        others = [one for one in user.args if isinstance(one, fx.Node)]
        how = tuple("constant" if one in constants else _dequantizing(one) for one in others)
        direct = not constants.keys().isdisjoint(_nodes(user.args[place]))
        how += (user,) if direct and any(map(_dequantizing, others)) else ()
    if "conv" in op_name(user):
        how += (argument(user, "groups"),)
        how += (argument(user, "transposed"),) if op_name(user).startswith("aten::convolution") else ()
    return (user.target, place, *how)


def _dequantizing(node: fx.Node) -> str:
    """The name of an op if it dequantizes, else an empty one."""
    return op_name(node) if "dequantize" in op_name(node) else ""


def _read(user: fx.Node, place: int, constant: fx.Node, copy: fx.Node) -> None:
    """Let an argument of a call be a copy of the constant that it is, or that is in it."""
    replaced = fx.map_arg(user.args[place], lambda node: copy if node is constant else node)
    user.update_arg(place, replaced)
