"""A float graph and a compressed one: the layers that both have, and their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from bitwright.artifact.graph_sites import simulator_of
from bitwright.config.matching import resolve_module_rules
from bitwright.planning.chains import Chain, find_chains
from bitwright.program import Argument, Program
from bitwright.quantization._graph.fold_insert import OP_NAME
from bitwright.quantization.config import QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._graph_run import GraphRun, attribute, evaluate
from ._probe import ComparedWeight, LayerSite, kind_axis

__all__ = ["GraphPair"]


class GraphPair:
    """One capture of the float model, beside the compressed graph.

    Args:
        reference: the float model's graph.
        program: its program.
        model: the float model.
        compressed: the compressed graph, its batch norms folded.
        unfolded: the compressed graph as it was given.
        names: names of the arguments of the model, in order.
        first: the capture whose layers are compared; None if this is the first.

    Attributes:
        reference: as given.
        run: runs it.
        layers: what both graphs have, in order of execution.
        missing: names of layers that the compressed graph lacks.
        ends: by layer, the nodes of both graphs that compute its output.
        names_by_end: the layers' names by their nodes in the float graph.
    """

    def __init__(
        self,
        reference: fx.GraphModule,
        program: Program,
        model: nn.Module,
        compressed: fx.GraphModule,
        unfolded: fx.GraphModule,
        names: Sequence[str],
        first: GraphPair | None = None,
    ) -> None:
        self.reference = reference
        self.compressed, self._unfolded = compressed, unfolded
        self.layers: list[LayerSite] = []
        self.missing: list[str] = []
        self.ends: dict[str, tuple[fx.Node, fx.Node]] = {}
        self._chains: dict[str, Chain] = {}
        self._weight_args: dict[str, tuple[str, fx.Node]] = {}
        self._folded: set[str] = set()
        self._names = {node.meta.get(OP_NAME, node.name): node for node in compressed.graph.nodes}
        self._first = first
        self._find_layers(program, model)
        self.names_by_end = {ends[0]: name for name, ends in self.ends.items()}
        self.run = GraphRun(reference, {ends[0]: self._outside(name) for name, ends in self.ends.items()}, names)

    def weight(self, name: str) -> ComparedWeight | None:
        """Return a weight, with batch norms folded into both where they are folded into one."""
        target, node = self._weight_args[name]
        compressed = evaluate(self.compressed, node, {})
        if not isinstance(compressed, torch.Tensor):
            return None
        reference = attribute(self.reference, target).detach()
        simulator = simulator_of(self.compressed, node)
        entering = reference
        alone = True
        if simulator is not None and isinstance(node.args[0], fx.Node):
            entering = evaluate(self.compressed, node.args[0], {})
            alone = node.args[0].op != "call_module"
            if name in self._folded:
                reference = self._folded_reference(node)
        if reference.shape != compressed.shape:
            return None
        return ComparedWeight(name, reference, compressed.detach(), entering.detach(), simulator, alone)

    def isolated(self, name: str, batch: int | None) -> Any:
        """Compute a layer by the compressed graph, from values that ``run`` has reached; None where it needs others.

        Args:
            name: of the layer.
            batch: of the inputs, where sizes in the compressed graph follow it.
        """
        known = {node.name: self.run.values[node] for node in self._outside(name) if node.op != "get_attr"}
        return evaluate(self.compressed, self.ends[name][1], known, batch)

    def _folded_reference(self, node: fx.Node) -> torch.Tensor:
        """The float model's weight and batch norm, folded as the compressed graph folds its own."""
        known = {}
        own = {str(entry.target) for entry in self.reference.graph.nodes if entry.op == "get_attr"}
        for entry in self._unfolded.graph.nodes:
            if entry.op == "get_attr" and str(entry.target) in own:
                known[entry.name] = attribute(self.reference, str(entry.target))
        calls = {entry.target: entry for entry in self._unfolded.graph.nodes if entry.op == "call_module"}
        weight: torch.Tensor = evaluate(self._unfolded, calls[node.target].args[0], known)
        return weight.detach()

    def _find_layers(self, program: Program, model: nn.Module) -> None:
        placed: set[int] = set()
        for chain in find_chains(program, resolve_module_rules(QuantizerConfig(), model)):
            op = chain.primary
            ends = self._matching_ends(chain)
            if ends is None:
                self.missing.append(op.name)
                continue
            site = LayerSite(op.name, op.type, op.module_path, kind_axis(op.type))
            head = self._names.get(op.name)
            folded_norm = chain.batch_norm is not None and chain.batch_norm.name not in self._names
            for argument in op.arguments:
                self._add_weight(site, argument, head, folded_norm)
            for name, simulator in self._simulators_at(head, ends[1]).items():
                if id(simulator) not in placed:
                    placed.add(id(simulator))
                    site.activations[name] = simulator
            if (site.weights or site.activations) and self._is_compared(site):
                self.layers.append(site)
                self._chains[site.name], self.ends[site.name] = chain, ends

    def _is_compared(self, site: LayerSite) -> bool:
        """Whether it is a layer of the first capture, too, and not another of the same name."""
        known = self._first.layers if self._first is not None else [site]
        return any(entry.name == site.name and entry.weights == site.weights for entry in known)

    def _matching_ends(self, chain: Chain) -> tuple[fx.Node, fx.Node] | None:
        """Return the nodes of both graphs that compute the chain's output, or as much of it as both have."""
        for op in reversed(chain.ops):
            other = self._names.get(op.name)
            if other is None:
                continue
            if op is chain.primary and chain.batch_norm is not None:  # the batch norm is folded into the layer
                return chain.batch_norm.handle, other
            return op.handle, other
        return None

    def _add_weight(self, site: LayerSite, argument: Argument, head: fx.Node | None, folded_norm: bool) -> None:
        state = argument.value.state
        if state is None or head is None or not state.tensor.is_floating_point() or not state.is_parameter:
            return
        own: fx.Node = argument.op.handle
        for entry, other in zip(_one_by_one(own.args), _one_by_one(head.args), strict=False):
            if isinstance(entry, fx.Node) and isinstance(other, fx.Node) and str(entry.target) in state.names:
                if state.tensor.ndim > 1 or simulator_of(self.compressed, other) is not None:
                    site.weights.append(state.name)
                    if folded_norm:
                        self._folded.add(state.name)
                    self._weight_args[state.name] = (str(entry.target), other)
                return

    def _simulators_at(self, head: fx.Node | None, end: fx.Node) -> dict[str, FakeQuantizeImplBase]:
        """Return activation quantizers in front of a layer, then those behind it."""
        found: dict[str, FakeQuantizeImplBase] = {}
        nodes = [*(head.all_input_nodes if head is not None else ()), *end.users]
        for node in nodes:
            simulator = simulator_of(self.compressed, node)
            source = node.args[0] if node.args else None
            if simulator is None or (isinstance(source, fx.Node) and source.op == "get_attr"):
                continue
            found[simulator.tensor_fqn or node.name] = simulator
        return found

    def _outside(self, name: str) -> list[fx.Node]:
        """Nodes of the float graph that a layer reads: they stay alive until it has run."""
        chain = self._chains[name]
        inside = {op.handle for op in chain.ops}
        return [node for op in chain.ops for node in op.handle.all_input_nodes if node not in inside]


def _one_by_one(arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield arguments, those in lists too: the weights of a recurrent layer are one."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument
