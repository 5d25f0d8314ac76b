"""Calls of a program that compute again what an earlier one computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from .constants import repeats

__all__ = ["merge_repeated_calls"]


def merge_repeated_calls(program: ExportedProgram) -> None:
    """Let calls of PyTorch's operators with the same arguments be one call, in place.

    Core AI's optimizer finds them too, but its runtime then misses values of dynamic sizes that two experts' layers
    share, as in JetMoE. What a program returns stays, since it is known by name.

    Args:
        program: functional, as decomposed programs are.
    """
    first: dict[tuple[Any, str, str], torch.fx.Node] = {}
    output = program.graph.output_node()
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not repeats(node) or getattr(node.target, "namespace", "aten") != "aten":
            continue
        one = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if one is not node and output not in node.users:
            node.replace_all_uses_with(one)
            program.graph.erase_node(node)
    program.graph_module.recompile()
