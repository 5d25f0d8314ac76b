"""Side by side in graph mode: ops of the same name in two graphs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim

from bitwright.artifact.from_graph import folded
from bitwright.artifact.graph_sites import simulator_of
from bitwright.config.matching import resolve_module_rules
from bitwright.planning.chains import Chain, find_chains
from bitwright.program import Argument, Program
from bitwright.program.graph import capture_graph
from bitwright.program.graph_program import build_program
from bitwright.quantization._graph.fold_insert import OP_NAME
from bitwright.quantization.config import QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._graph_run import GraphRun, attribute, evaluate
from ._probe import ComparedWeight, Inputs, LayerHook, LayerSite, PairProbe, kind_axis

__all__ = ["GraphProbe"]


class GraphProbe(PairProbe):
    """Compares the ops of a compressed graph with those of the float model's own graph.

    Args:
        reference: the float model; it is captured.
        compressed: a graph module, prepared or finalized.
        example: inputs to capture the float model with.
    """

    mode = "graph"

    def __init__(self, reference: nn.Module, compressed: fx.GraphModule, example: Inputs) -> None:
        super().__init__()
        module = folded(compressed)
        assert isinstance(module, fx.GraphModule)
        self.compressed, self._unfolded = module, compressed
        self.reference, program = _captured(reference, example)
        self._chains: dict[str, Chain] = {}
        self._ends: dict[str, tuple[fx.Node, fx.Node]] = {}
        self._weight_args: dict[str, tuple[str, fx.Node]] = {}
        self._folded: set[str] = set()
        self._shown: set[str] = set()
        self._names = {node.meta.get(OP_NAME, node.name): node for node in self.compressed.graph.nodes}
        self._find_layers(program, reference)
        self._by_end = {ends[0]: site for site in self.layers if (ends := self._ends.get(site.name))}
        keep = {self._ends[site.name][0]: self._outside(site) for site in self.layers if site.name in self._ends}
        names = [] if isinstance(reference, fx.GraphModule) else list(inspect.signature(reference.forward).parameters)
        self._own = GraphRun(self.reference, keep, names)
        self._other = GraphRun(self.compressed, names=names)

    def run(self, inputs: Inputs, on_layer: LayerHook) -> tuple[Any, Any]:
        """Run the graphs node by node, in step at the layers that both have; see the base class."""
        other = self._other.steps(inputs)
        done: set[fx.Node] = set()
        pending: dict[fx.Node, Any] = {}
        wanted = {ends[1] for ends in self._ends.values()}
        for node in self._own.steps(inputs):
            site = self._by_end.get(node)
            if site is None:
                continue
            end = self._ends[site.name][1]
            isolated = self._isolated(site)
            self._show_to_outputs(site, self._own.values[node])
            while end not in done:
                self.recording = True
                try:
                    reached = next(other)
                finally:
                    self.recording = False
                done.add(reached)
                if reached in wanted:
                    pending[reached] = self._other.values[reached]
            on_layer(site, self._own.values[node], isolated, pending.pop(end, None))
        self.recording = True
        try:
            for _ in other:
                pass
        finally:
            self.recording = False
        return self._own.output(), self._other.output()

    def _show_to_outputs(self, site: LayerSite, output: Any) -> None:
        """Let the quantizers behind a layer see the float model's tensor once."""
        if site.name in self._shown or not isinstance(output, torch.Tensor):
            return
        self._shown.add(site.name)
        for node in self._ends[site.name][1].users:
            simulator = simulator_of(self.compressed, node)
            if simulator is not None and simulator in site.activations.values():
                simulator(output)

    def run_with_only(self, site: LayerSite, inputs: Inputs) -> Any:
        """Run the float graph with one layer's output computed by the compressed graph's nodes."""
        if site.name not in self._ends:
            return None
        end = self._ends[site.name][0]
        for node in self._own.steps(inputs):
            if node is end:
                replaced = self._isolated(site)
                if replaced is None:
                    return None
                self._own.values[node] = replaced
        return self._own.output()

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
        unmatched = []
        for chain in find_chains(program, resolve_module_rules(QuantizerConfig(), model)):
            op = chain.primary
            ends = self._matching_ends(chain)
            if ends is None:
                unmatched.append(op.name)
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
            if site.weights or site.activations:
                self.layers.append(site)
                self._chains[site.name], self._ends[site.name] = chain, ends
        if unmatched:
            self.notes.append(f"Not in the compressed graph: {', '.join(unmatched)}.")

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

    def _outside(self, site: LayerSite) -> list[fx.Node]:
        """Nodes of the float graph that a layer reads: they stay alive until it has run."""
        chain = self._chains[site.name]
        inside = {op.handle for op in chain.ops}
        return [node for op in chain.ops for node in op.handle.all_input_nodes if node not in inside]

    def _isolated(self, site: LayerSite) -> Any:
        known = {node.name: self._own.values[node] for node in self._outside(site) if node.op != "get_attr"}
        return evaluate(self.compressed, self._ends[site.name][1], known)


def _one_by_one(arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield arguments, those in lists too: the weights of a recurrent layer are one."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _captured(model: nn.Module, example: Inputs) -> tuple[fx.GraphModule, Program]:
    if isinstance(model, fx.GraphModule):
        return model, build_program(model, model)
    shapes = _all_dynamic(example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return capture_graph(model, example.args, example.kwargs, shapes)
        except RuntimeError:
            return capture_graph(model, example.args, example.kwargs)


def _all_dynamic(example: Inputs) -> tuple[Any, ...] | None:
    """Let every dimension vary that can, as batches of other sizes may follow."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {dim: Dim.AUTO for dim, size in enumerate(value.shape) if size > 1}
        if isinstance(value, Mapping):
            return {key: of(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(of(entry) for entry in value)
        return None

    return None if example.kwargs else tuple(map(of, example.args))
