"""Evaluate a graph node by node, so that two graphs can advance together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from bitwright.program.free_batch import FREE_BATCH, FreeBatch
from bitwright.program.input_check import InputCheck

from ._probe import Inputs

__all__ = ["GraphRun", "attribute", "evaluate"]

_LIMIT = 400


class GraphRun:
    """Runs a graph module; values are freed after their last use.

    Args:
        module: the graph.
        keep: by node, further nodes whose values it needs, so that they live until it has run.
        names: names of the arguments of the model that was captured, in order; by these, arguments find their places
            where the graph takes by position what is given by name, or the other way round.
    """

    def __init__(
        self, module: fx.GraphModule, keep: Mapping[fx.Node, list[fx.Node]] | None = None, names: Sequence[str] = ()
    ) -> None:
        self.module = module
        self.names = names
        self.nodes = list(module.graph.nodes)
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self.nodes):
            for used in (*node.all_input_nodes, *((keep or {}).get(node, ()))):
                last[used] = place
        self.dying: dict[int, list[fx.Node]] = {}
        for node, place in last.items():
            self.dying.setdefault(place, []).append(node)
        self.values: dict[fx.Node, Any] = {}

    def check(self, inputs: Inputs) -> None:
        """Check that the graph holds for the shapes of inputs, as a call of the module would.

        Raises:
            ValueError: it does not.
        """
        check = getattr(self.module, "_input_check", None)
        if isinstance(check, InputCheck):
            check.check_leaves(self.module, _flat_inputs(self.module, inputs, self.names))

    def free_sizes(self, inputs: Inputs) -> set[tuple[int, int]] | None:
        """Return which sizes of inputs the graph takes as they come: the ``id`` of a tensor, and the dimension.

        None if the graph does not say.
        """
        check = getattr(self.module, "_input_check", None)
        leaves = _flat_inputs(self.module, inputs, self.names)
        if not isinstance(check, InputCheck) or len(leaves) != len(check.shapes):
            return None
        return {
            (id(leaf), dim)
            for leaf, shape in zip(leaves, check.shapes, strict=True)
            for dim, known in enumerate(shape.dimensions or ())
            if known.size is None
        }

    def batch_of(self, inputs: Inputs) -> int | None:
        """Return the batch that sizes in the graph follow; None where none do."""
        free: FreeBatch | None = vars(self.module).get(FREE_BATCH)
        return None if free is None else free.batch(_flat_inputs(self.module, inputs, self.names))

    def result(self, inputs: Inputs) -> Any:
        """Run all nodes and return the output."""
        for _ in self.steps(inputs):
            pass
        return self.output()

    def steps(self, inputs: Inputs) -> Iterator[fx.Node]:
        """Yield each node once its value is in ``values``; the last one is the output node.

        Values may be replaced between steps.
        """
        self.values = {}
        leaves, batch = iter(_flat_inputs(self.module, inputs.copied(), self.names)), self.batch_of(inputs)
        for place, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.values[node] = next(leaves)
            elif node.op == "output":
                result = _mapped(node.args[0], self.values.__getitem__)
                codegen: Any = self.module.graph._codegen
                self.values[node] = codegen.process_outputs(result)
            else:
                self.values[node] = call_node(self.module, node, self.values.__getitem__, batch)
            yield node
            for dead in self.dying.get(place, ()):
                self.values.pop(dead, None)

    def output(self) -> Any:
        """Return the model's output after the last step."""
        return self.values[self.nodes[-1]]


def call_node(
    module: fx.GraphModule, node: fx.Node, value_of: Callable[[fx.Node], Any], batch: int | None = None
) -> Any:
    """Return the value of a node, given those of its arguments, and the batch where sizes in the graph follow it."""
    if node.op == "get_attr":
        return attribute(module, str(node.target))
    free: FreeBatch | None = vars(module).get(FREE_BATCH)
    if free is None or batch is None:
        args, kwargs = _mapped(node.args, value_of), _mapped(node.kwargs, value_of)
    else:
        args, kwargs = free.arguments(node, batch, value_of)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def evaluate(module: fx.GraphModule, node: fx.Node, known: Mapping[str, Any], batch: int | None = None) -> Any:
    """Return the value of one node from values known by name; None where it needs others.

    What is in between is computed anew: simulators, folded weights and ops fused into one; for a batch, where sizes in
    the graph follow it.
    """
    found: dict[fx.Node, Any] = {}
    order: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending[-1]
        if current in found or current in order:
            pending.pop()
            continue
        if current.name in known and current is not node:
            found[current] = known[current.name]
            pending.pop()
            continue
        if current.op == "placeholder" or len(order) > _LIMIT:
            return None
        missing = [used for used in current.all_input_nodes if used not in found and used not in order]
        if missing:
            pending += missing
            continue
        order.append(current)
        pending.pop()
    for current in order:
        found[current] = call_node(module, current, found.__getitem__, batch)
    return found[node]


def attribute(module: torch.nn.Module, target: str) -> Any:
    """Return what a dotted name refers to."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _mapped(arguments: Any, value_of: Callable[[fx.Node], Any]) -> Any:
    return fx.node.map_arg(arguments, value_of)


def _flat_inputs(module: fx.GraphModule, inputs: Inputs, names: Sequence[str]) -> list[Any]:
    codegen: Any = module.graph._codegen
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        return [*inputs.args, *inputs.kwargs.values()]
    by_position, by_name = info.in_spec.children()
    count = len(by_position.children())
    args, kwargs = list(inputs.args[:count]), dict(inputs.kwargs)
    kwargs |= dict(zip(names[count:], inputs.args[count:], strict=False))
    for name in names[len(args) : count]:
        if name not in kwargs:
            break
        args.append(kwargs[name])
    kwargs = {key: kwargs[key] for key in by_name.context or () if key in kwargs}
    return list(torch.utils._pytree.tree_leaves((tuple(args), kwargs)))
