"""One call of each kind that a program makes: what a converter is shown of a model that repeats its layers."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves

from .conversion import captured

__all__ = ["specimens"]


def specimens(program: ExportedProgram) -> ExportedProgram:
    """Return a program that makes one call of each kind.

    Calls are of one kind if they have the same operator on tensors of the same shapes, strides and dtypes, and the same
    other arguments; calls of sub-graphs are of a kind of their own. What reads the result of a later call reads that of
    the first one, so what the program computes means nothing.

    Args:
        program: captured with fixed shapes, not decomposed; not changed.
    """
    states = {**program.state_dict, **program.constants}
    inputs = {spec.arg.name: states.get(spec.target) for spec in program.graph_signature.input_specs}
    collection = _Collection(program.graph_module)
    used = _used(program.graph)
    for node in program.graph.nodes:
        if node not in used:
            continue
        if node.op == "placeholder" and isinstance(state := inputs.get(node.name), torch.Tensor):
            collection.add_state(node, state)
        elif node.op != "output":
            collection.add(node)
    return captured(collection.module(), tuple(tree_leaves(program.example_inputs)))


def _used(graph: fx.Graph) -> set[fx.Node]:
    """Inputs, outputs, what changes something, and all that they read; converters see no other calls."""
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in used or node.is_impure():
            used.update((node, *node.all_input_nodes))
    return used


@dataclass
class _Collection:
    """The specimens found so far.

    Attributes:
        source: the module that sub-graphs belong to.
        graph: the specimens.
        root: their states.
        stand_ins: the specimen of each node.
        found: specimens by kind.
    """

    source: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    stand_ins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    found: dict[Hashable, fx.Node] = field(default_factory=dict)

    def add_state(self, node: fx.Node, state: torch.Tensor) -> None:
        """Numbers of floating-point weights decide nothing in a conversion; other numbers, and single ones, may."""
        kind = _look(state) if state.is_floating_point() and state.ndim else node
        if kind not in self.found:
            name = f"state_{len(self.root._buffers)}"
            self.root.register_buffer(name, state.detach())
            self.found[kind] = self.graph.get_attr(name)
            self.found[kind].meta.update(node.meta)
        self.stand_ins[node] = self.found[kind]

    def add(self, node: fx.Node) -> None:
        kind = self._kind(node)
        if kind not in self.found:
            if node.op == "get_attr":
                setattr(self.root, str(node.target), getattr(self.source, str(node.target)))
            self.found[kind] = self.graph.node_copy(node, self.stand_ins.__getitem__)
        self.stand_ins[node] = self.found[kind]

    def module(self) -> fx.GraphModule:
        """Return a module that makes the calls, and returns what no other call reads."""
        nodes = self.graph.nodes
        ends = [node for node in nodes if not node.users and isinstance(node.meta.get("val"), torch.Tensor)]
        self.graph.output(tuple(ends))
        return fx.GraphModule(self.root, self.graph)

    def _kind(self, node: fx.Node) -> Hashable:
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            return node
        leaves, structure = tree_flatten((node.args, node.kwargs))
        return (node.target, str(structure), *map(self._argument, leaves))

    def _argument(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, fx.Node):
            return (type(leaf), str(leaf))
        value = leaf.meta.get("val")
        return _look(value) if isinstance(value, torch.Tensor) else self.stand_ins[leaf]


def _look(tensor: torch.Tensor) -> Hashable:
    return (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
