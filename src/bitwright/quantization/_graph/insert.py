"""Put the simulators of a plan into a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from bitwright._utils.module_copy import replicate_module
from bitwright.config.spec import CompressionTargetTensor
from bitwright.planning import Placement
from bitwright.planning.chains import Chain
from bitwright.planning.graph import GraphDecisions
from bitwright.planning.mutation import mutated_roots, writes_to
from bitwright.program import Argument, Op, Program, StateTensor, Value
from bitwright.program.graph_module import TracedGraphModule
from bitwright.quantization.spec import QuantizationComponentFactory, QuantizationSpec
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .fold_insert import Fold, fold_batch_norms, unfold_weights
from .mode_ops import install_mode_ops

__all__ = ["SIMULATOR_PREFIX", "GraphInsertion"]

SIMULATOR_PREFIX = "activation_post_process_"
STACK_PREFIX = "weight_simulator_"

_OWN_PACKAGE = "bitwright."

# Keys of what stands on a node: its weight's simulator, its output's; a reader's has the placement's id.
_WEIGHT, _OUTPUT = 0, -1


@dataclass(eq=False, slots=True)
class GraphInsertion:
    """Simulators in a graph.

    Names are those of PT2E: ``activation_post_process_<n>``, counted over the places where simulators stand, for each
    op first in front of its inputs, then behind its output. A simulator that stands at several places has several
    names. One that is left out because its blocks do not fit leaves its numbers unused, as in coreai-opt, which inserts
    it first: the state of a model that was calibrated there finds its places.

    Attributes:
        simulators: by name, with the placement that each came from.
    """

    module: TracedGraphModule
    program: Program
    decisions: GraphDecisions
    simulators: dict[str, tuple[FakeQuantizeImplBase, Placement]] = field(default_factory=dict)
    _built: dict[tuple[int, tuple[str, ...]], FakeQuantizeImplBase] = field(default_factory=dict)
    _prototypes: dict[tuple[QuantizationSpec, CompressionTargetTensor], FakeQuantizeImplBase] = field(
        default_factory=dict
    )
    # The same by the identity of a spec, which spares hashing its fields.
    _prototypes_of: dict[tuple[int, CompressionTargetTensor], FakeQuantizeImplBase] = field(default_factory=dict)
    _states: dict[int, Placement] = field(default_factory=dict)
    _readers: dict[int, Placement] = field(default_factory=dict)
    _producers: dict[int, Placement] = field(default_factory=dict)
    _nodes: dict[str, fx.Node] = field(default_factory=dict)
    _folds: dict[fx.Node, Fold] = field(default_factory=dict)
    _written: set[Value] = field(default_factory=set)
    _changing: dict[int, Value] = field(default_factory=dict)
    _folded: set[fx.Node] = field(default_factory=set)
    _placed: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    _stacked: set[str] = field(default_factory=set)
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _unfit: set[int] = field(default_factory=set)
    _numbered: int = 0

    def run(self, attention_dropout: Mapping[str, float]) -> None:
        """Insert everything that is planned; see ``install_mode_ops`` for the argument."""
        plan = self.decisions.plan
        self._unfit = set(map(id, plan.unfit))
        for placement in (*plan.placements, *plan.unfit):
            if placement.state is not None:
                self._states[id(placement.state)] = placement
            for site in placement.sites:
                if site.argument is not None:
                    self._readers[id(site.argument)] = placement
                else:
                    self._producers[id(site.value)] = placement
        self._nodes = {node.name: node for node in self.module.graph.nodes}
        self._written = {a.value for op in self.program.ops for a in op.arguments if writes_to(op, a)}
        self._changing = mutated_roots(self.program)
        self._folds = fold_batch_norms(self.module, self.foldable())
        self._folded = {fold.weight for fold in self._folds.values()}
        self._nodes.update({fold.name: fold.output for fold in self._folds.values()})
        for op in self.program.ops:
            for argument in op.arguments:
                self._insert_input(op, argument)
            for value in op.outputs:
                if id(value) in self._producers:
                    self._insert_output(value, self._producers[id(value)])
        unfold_weights(self.module, self._folds.values())
        install_mode_ops(self.module, attention_dropout)
        self.module.recompile()

    def join_ranges(self) -> None:
        """Have a simulator that stands at several places move its range once in a forward, by the union of all."""
        for simulator, places in Counter(simulator for simulator, _ in self.simulators.values()).items():
            simulator.note_places(places)

    def replace_at(self, nodes: Sequence[fx.Node]) -> FakeQuantizeImplBase:
        """Have a new simulator, which has seen nothing, stand at places where one stands now, and return it."""
        _, placement = self.simulators[str(nodes[0].target)]
        simulator = self._make(placement)
        simulator.tensor_fqn = f"{nodes[0].args[0]}[output 0]"
        for node in nodes:
            name = str(node.target)
            self.module._modules[name] = simulator
            self.simulators[name] = (simulator, placement)
        return simulator

    def foldable(self) -> list[Chain]:
        """Return the chains without masks and palettes on their weights, which hold for the weight as it is."""
        weights = ({argument.value.state for argument in chain.primary.arguments} for chain in self.decisions.chains)
        stacked = [any(s is not None and s.name in self.decisions.stacks for s in states) for states in weights]
        return [chain for chain, under in zip(self.decisions.chains, stacked, strict=True) if not under]

    def _insert_input(self, op: Op, argument: Argument) -> None:
        state = argument.value.state
        if state is not None and state.name in self.decisions.stacks and state.name not in self._stacked:
            self._insert_stack(argument.value, state)
        if state is not None and id(state) in self._states:
            self._insert_weight(op, argument, state)
        elif id(argument) in self._readers:
            self._insert_reader(op, argument)

    def _insert_weight(self, op: Op, argument: Argument, state: StateTensor) -> None:
        placement = self._states[id(state)]
        fold = self._folds.get(op.handle)
        if fold is not None and argument.name == "weight":
            if (fold.weight, _WEIGHT) not in self._placed:
                self._placed[fold.weight, _WEIGHT] = self._stand(placement, fold.weight, op.handle, None, fold.variant)
            return
        source = self._nodes[argument.value.name]
        readers = [user for user in source.users if user not in self._folded]
        if (source, _WEIGHT) not in self._placed and readers:
            # Right in front of its first reader, so that not all quantized weights of a model are alive at once.
            self._placed[source, _WEIGHT] = self._stand(placement, source, min(readers), readers)

    def _insert_stack(self, value: Value, state: StateTensor) -> None:
        """Put the simulators that the model had on a weight before into the graph, in front of its first reader."""
        source = self._nodes[value.name]
        readers = list(source.users)
        self._stacked.add(state.name)
        for simulator in self.decisions.stacks[state.name]:
            if simulator not in self._names:
                self._names[simulator] = f"{STACK_PREFIX}{len(self._names)}"
                self.module._modules[self._names[simulator]] = simulator
            with self.module.graph.inserting_before(min(readers)):
                node = self.module.graph.create_node("call_module", self._names[simulator], (source,))
            _describe(node, source)
            source = node
        for reader in readers:
            reader.replace_input_with(self._nodes[value.name], source)
        self._nodes[value.name] = source

    def _insert_reader(self, op: Op, argument: Argument) -> None:
        node = self._nodes[op.name]
        placement = self._readers[id(argument)]
        source = self._current(argument.value)
        if source is None or source not in node.all_input_nodes:  # done for an earlier argument with the same tensor
            return
        key = (source, id(placement))
        at_once = writes_to(op, argument) or id(argument.value) in self._changing
        standing = None if at_once else self._placed.get(key)
        if standing is None:
            before = node if at_once or argument.value in self._written else self._behind(source)
            standing = self._stand(placement, source, before, [node])
            if not at_once:
                self._placed[key] = standing
        else:
            node.replace_input_with(source, standing)

    def _behind(self, source: fx.Node) -> fx.Node:
        """Return the node in front of which a simulator of ``source`` stands: the next one, behind all inputs."""
        after = source.next
        while after.op in ("placeholder", "get_attr"):
            after = after.next
        return after

    def _insert_output(self, value: Value, placement: Placement) -> None:
        source = self._nodes[value.name]
        self._placed[source, _OUTPUT] = self._stand(placement, source, source.next, list(source.users))

    def _current(self, value: Value) -> fx.Node | None:
        """Return the node that readers of ``value`` read now."""
        source = self._nodes.get(value.name)
        return None if source is None else self._placed.get((source, _OUTPUT), source)

    def _build(self, placement: Placement, variant: tuple[str, ...]) -> FakeQuantizeImplBase:
        key = (id(placement), variant)
        if key not in self._built:
            self._built[key] = simulator = self._make(placement)
            simulator.tensor_fqn = placement.name
        return self._built[key]

    def _make(self, placement: Placement) -> FakeQuantizeImplBase:
        """Return a new simulator with fake quantization off, as it is while simulators are initialised.

        Bitwright's own classes are built once for each spec and copied then.
        """
        spec, target = placement.spec, placement.target
        assert isinstance(spec, QuantizationSpec)
        known = self._prototypes_of.get((id(spec), target))  # placements, which hold the specs, outlive this
        if known is None:
            known = self._prototypes.get((spec, target))
        if known is None:
            known = QuantizationComponentFactory.create_fake_quantizer(spec, target)
            known.disable_fake_quant()
            known.train(self.module.training)  # in eval mode quantized weights are kept
            if not all(type(part).__module__.startswith(_OWN_PACKAGE) for part in known.modules()):
                return known
            self._prototypes[spec, target] = known
        self._prototypes_of[id(spec), target] = known
        twin = replicate_module(known)
        assert isinstance(twin, FakeQuantizeImplBase)
        return twin

    def _stand(
        self,
        placement: Placement,
        source: fx.Node,
        before: fx.Node,
        readers: list[fx.Node] | None = None,
        variant: tuple[str, ...] = (),
    ) -> fx.Node:
        """Put a simulator on what ``readers`` (all if None) read of ``source``, in front of ``before``.

        Returns the node that they read then: ``source`` itself for a simulator whose blocks do not fit.
        """
        name = f"{SIMULATOR_PREFIX}{self._numbered}"
        self._numbered += 1
        if id(placement) in self._unfit:
            return source
        simulator = self._build(placement, variant)
        self.module._modules[name] = simulator
        self.simulators[name] = (simulator, placement)
        readers = list(source.users) if readers is None else readers
        with self.module.graph.inserting_before(before):
            node = self.module.graph.create_node("call_module", name, (source,), name=name)
        _describe(node, source)
        for reader in readers:
            reader.replace_input_with(source, node)
        return node


def _describe(node: fx.Node, source: fx.Node) -> None:
    node.meta = {key: source.meta[key] for key in ("val", "nn_module_stack") if key in source.meta}
