"""Side by side in graph mode: ops of the same name in two graphs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from bitwright.artifact.from_graph import folded
from bitwright.artifact.graph_sites import simulator_of
from bitwright.program import Program
from bitwright.program.graph import capture_graph
from bitwright.program.graph_program import build_program
from bitwright.program.protect import preserved_state
from bitwright.program.states import states_preserved
from bitwright.quantization._graph.fold_insert import OP_NAME

from ._batches import dynamic_shapes
from ._graph_pair import GraphPair
from ._graph_run import GraphRun
from ._probe import ComparedWeight, Inputs, LayerHook, LayerSite, PairProbe, float_tensors

__all__ = ["GraphProbe"]


class GraphProbe(PairProbe):
    """Compares the ops of a compressed graph with those of the float model's own graph.

    Sizes may be constants in a graph. So the float model is captured anew for inputs of sizes that no capture holds
    for: what is compared is always what the model itself computes.

    Args:
        reference: the float model; it is captured, unless it is a graph.
        compressed: a graph module, prepared or finalized.
        example: inputs to capture the float model with.

    Raises:
        ValueError: here or later, a graph that was given does not hold for the shapes of inputs.
        TraceError: the float model cannot be captured.
    """

    mode = "graph"

    def __init__(self, reference: nn.Module, compressed: fx.GraphModule, example: Inputs) -> None:
        super().__init__()
        module = folded(compressed)
        assert isinstance(module, fx.GraphModule)
        self._model = reference
        self._compressed, self._unfolded = module, compressed
        is_graph = isinstance(reference, fx.GraphModule)
        self._names = [] if is_graph else list(inspect.signature(reference.forward).parameters)
        self._other = GraphRun(module, names=self._names)
        self._pairs: list[GraphPair] = []
        self._pair_by_kind: dict[Hashable, GraphPair] = {}
        self._is_reproducible = not is_graph
        self._may_free_all = True
        self._shown: set[str] = set()
        first = self._pair_for(example)
        self.layers = first.layers
        if first.missing:
            self.notes.append(f"Not in the compressed graph: {', '.join(first.missing)}.")
        self._sites = {site.name: site for site in self.layers}

    def run(self, inputs: Inputs, on_layer: LayerHook) -> tuple[Any, Any]:
        """Run the graphs node by node, in step at the layers that both have; see the base class."""
        pair = self._pair_for(inputs)
        own, other = pair.run, self._other.steps(inputs)
        done, batch = set[fx.Node](), self._other.batch_of(inputs)
        pending: dict[fx.Node, Any] = {}
        wanted = {ends[1] for ends in pair.ends.values()}
        for node in own.steps(inputs):
            site = self._site_at(node, pair)
            if site is None:
                continue
            end = pair.ends[site.name][1]
            isolated = pair.isolated(site.name, batch)
            self._show_to_outputs(site, end, own.values[node])
            while end not in done:
                self.recording = True
                try:
                    reached = next(other)
                finally:
                    self.recording = False
                done.add(reached)
                if reached in wanted:
                    pending[reached] = self._other.values[reached]
            on_layer(site, own.values[node], isolated, pending.pop(end, None))
        self.recording = True
        try:
            for _ in other:
                pass
        finally:
            self.recording = False
        return own.output(), self._other.output()

    def _site_at(self, node: fx.Node, pair: GraphPair) -> LayerSite | None:
        """Return the layer whose output a node of the float graph computes."""
        name = pair.names_by_end.get(node)
        return None if name is None else self._sites.get(name)

    def _show_to_outputs(self, site: LayerSite, end: fx.Node, output: Any) -> None:
        """Let the quantizers behind a layer see the float model's tensor once."""
        if site.name in self._shown or not isinstance(output, torch.Tensor):
            return
        self._shown.add(site.name)
        for node in end.users:
            simulator = simulator_of(self._compressed, node)
            if simulator is not None and simulator in site.activations.values():
                simulator(output)

    def run_with_only(self, site: LayerSite, inputs: Inputs) -> Any:
        """Run the float graph with one layer's output computed by the compressed graph's nodes."""
        pair = self._pair_for(inputs)
        if site.name not in pair.ends:
            return None
        end = pair.ends[site.name][0]
        for node in pair.run.steps(inputs):
            if node is end:
                replaced = pair.isolated(site.name, self._other.batch_of(inputs))
                if replaced is None:
                    return None
                pair.run.values[node] = replaced
        return pair.run.output()

    def weight(self, name: str) -> ComparedWeight | None:
        """Return a weight, with batch norms folded into both where they are folded into one."""
        return self._pairs[0].weight(name)

    def _pair_for(self, inputs: Inputs) -> GraphPair:
        """Return a capture of the float model that holds for inputs of such shapes."""
        kind = _kind_of(inputs)
        if kind not in self._pair_by_kind:
            self._other.check(inputs)
            with states_preserved(self._model):
                self._pair_by_kind[kind] = self._pair_that_holds(inputs)
        return self._pair_by_kind[kind]

    def _pair_that_holds(self, inputs: Inputs) -> GraphPair:
        if isinstance(self._model, fx.GraphModule):
            if not self._pairs:
                self._pairs.append(self._pair(self._model, build_program(self._model, self._model)))
            self._pairs[0].run.check(inputs)
            return self._pairs[0]
        own = inputs.copied()
        with preserved_state(self._model):
            output = self._model(*own.args, **own.kwargs)
            expected = [tensor.clone() for tensor in float_tensors(output)]
        for pair in self._pairs:
            if self._holds(pair, inputs, expected):
                return pair
        pair = self._captured(inputs, expected)
        self._pairs.append(pair)
        left_out = [site.name for site in self._pairs[0].layers if site.name not in pair.ends]
        if left_out:
            self.notes.append(f"Not in the float model's graph for {_described(inputs)}: {', '.join(left_out)}.")
        return pair

    def _captured(self, inputs: Inputs, expected: list[torch.Tensor]) -> GraphPair:
        """Capture the model with all sizes free that can be, or with those of the compressed graph, or with none.

        Arithmetic on free sizes takes names of operations, so that later ones have others than in the compressed graph.
        """
        everything, free = dynamic_shapes(inputs, self._model), self._other.free_sizes(inputs)
        ways = [everything] if self._may_free_all else []
        if free:
            ways.append(dynamic_shapes(inputs, self._model, is_free=lambda tensor, dim: (id(tensor), dim) in free))
        for shapes in (*ways, None):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    graph, program = capture_graph(self._model, inputs.args, inputs.kwargs, shapes)
            except RuntimeError:
                if shapes is None:
                    raise
                continue
            if shapes is everything and free is not None and not self._has_all(program):
                self._may_free_all = False
                continue
            pair = self._pair(graph, program)
            if self._holds(pair, inputs, expected):
                return pair
        self._is_reproducible = False
        self.notes.append(_OTHER_OUTPUT)
        warnings.warn(_OTHER_OUTPUT, stacklevel=2)
        return pair

    def _has_all(self, program: Program) -> bool:
        """Whether the compressed graph has all operations of a program by name, but for batch norms, which it folds."""
        known = {node.meta.get(OP_NAME, node.name) for node in self._compressed.graph.nodes}
        return all(op.name in known or "batch_norm" in op.type for op in program.ops)

    def _pair(self, graph: fx.GraphModule, program: Program) -> GraphPair:
        first = self._pairs[0] if self._pairs else None
        return GraphPair(graph, program, self._model, self._compressed, self._unfolded, self._names, first)

    def _holds(self, pair: GraphPair, inputs: Inputs, expected: list[torch.Tensor]) -> bool:
        """Whether a capture computes for inputs what the model does."""
        try:
            pair.run.check(inputs)
            if not self._is_reproducible:
                return True
            with preserved_state(self._model):
                return _agree(expected, float_tensors(pair.run.result(inputs)))
        except Exception:  # any error of any op: constants do not fit
            return False


_OTHER_OUTPUT = (
    "The float model's graph has another output than the float model itself, and the graph is what is compared with. "
    "Does forward depend on what is not among its inputs, such as state that it keeps from call to call? Then compare "
    'in eager mode: QuantizerConfig(execution_mode="eager").'
)


def _kind_of(inputs: Inputs) -> Hashable:
    """What a capture may depend on: shapes and dtypes of tensors, and what is no tensor."""
    leaves, spec = tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
    return str(spec), tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:1000] for leaf in leaves
    )


def _described(inputs: Inputs) -> str:
    leaves = tree_leaves((tuple(inputs.args), dict(inputs.kwargs)))
    return "inputs of shape " + ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _agree(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether outputs are the same but for rounding: to half of the digits that their dtype has."""
    if [first.shape for first in expected] != [second.shape for second in found]:
        return False
    for first, second in zip(expected, found, strict=True):
        numbers = torch.nan_to_num(first, 0, 0, 0)
        distance = _norm(numbers - torch.nan_to_num(second, 0, 0, 0))
        if distance > 3 * torch.finfo(first.dtype).eps ** 0.5 * max(_norm(numbers), torch.finfo(first.dtype).tiny):
            return False
    return True


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
