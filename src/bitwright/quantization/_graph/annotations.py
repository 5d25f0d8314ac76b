"""What stands around each op of a prepared graph, noted at its node as PT2E does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from bitwright import _torchao
from bitwright.planning import Placement
from bitwright.planning.graph import GraphDecisions
from bitwright.program import Op, Value
from bitwright.quantization.spec import QuantizationSpec

from ._qspec_resolution import torchao_spec
from .fold_insert import OP_NAME

__all__ = ["ANNOTATION", "Annotation", "annotate"]

ANNOTATION = "quantization_annotation"
"""Key of ``node.meta``, the same as torchao's ``Q_ANNOTATION_KEY``."""

_Place: TypeAlias = "fx.Node | tuple[fx.Node, fx.Node]"


@dataclass(eq=False, slots=True)
class _Entry:
    """A simulator at a place; ``anchor`` is the first place of a simulator that stands at several."""

    placement: Placement
    anchor: _Place | None

    def spec(self) -> Any:
        if self.anchor is not None:
            return _torchao.pt2e_quantizer().SharedQuantizationSpec(self.anchor)
        assert isinstance(self.placement.spec, QuantizationSpec)
        return torchao_spec(self.placement.spec, self.placement.target)


@dataclass(eq=False, slots=True)
class Annotation:
    """Has the fields of torchao's ``QuantizationAnnotation``; specs are built when they are read.

    So a graph can be prepared without importing torchao.

    Attributes:
        inputs: the simulators in front of the op, by the node whose value they take.
        output: the simulator behind the op.
    """

    inputs: dict[fx.Node, _Entry] = field(default_factory=dict)
    output: _Entry | None = None
    allow_implicit_sharing: bool = True
    _annotated: bool = True

    @property
    def input_qspec_map(self) -> dict[fx.Node, Any]:
        """torchao specs of the inputs."""
        return {node: entry.spec() for node, entry in self.inputs.items()}

    @property
    def output_qspec(self) -> Any:
        """torchao spec of the output; None where nothing stands behind the op."""
        return None if self.output is None else self.output.spec()


def annotate(module: fx.GraphModule, decisions: GraphDecisions) -> None:
    """Note at every op that is quantized which simulators stand around it; batch norms that were folded have no node.

    Args:
        module: the graph with its simulators.
        decisions: what they were inserted by.
    """
    _Annotator(module, decisions).run()


class _Annotator:
    def __init__(self, module: fx.GraphModule, decisions: GraphDecisions) -> None:
        self.decisions = decisions
        self.nodes = {node.meta.get(OP_NAME, node.name): node for node in module.graph.nodes}
        self.produced: dict[int, _Entry] = {}

    def run(self) -> None:
        for chain in self.decisions.chains:
            for op in chain.ops:
                self._annotation(op)
        for placement in self.decisions.plan.placements:
            self._annotate(placement)
        for chain in self.decisions.chains:
            self._annotate_readers(chain.primary)

    def _annotate(self, placement: Placement) -> None:
        anchor: _Place | None = None
        for source, reader, value in self._places(placement):
            entry = _Entry(placement, anchor)
            if reader is None:
                self._annotation_of(source).output = entry
                self.produced[id(value)] = _Entry(placement, source if anchor is None else anchor)
            else:
                self._annotation_of(reader).inputs[source] = entry
            if anchor is None:
                anchor = source if reader is None else (source, reader)

    def _annotate_readers(self, op: Op) -> None:
        """Note the simulators that stand behind the ops whose results this one reads."""
        reader = self.nodes.get(op.name)
        for argument in op.arguments:
            entry, source = self.produced.get(id(argument.value)), self.nodes.get(argument.value.name)
            if entry is not None and reader is not None and source is not None:
                self._annotation_of(reader).inputs.setdefault(source, entry)

    def _places(self, placement: Placement) -> Iterator[tuple[fx.Node, fx.Node | None, Value]]:
        uses = [] if placement.state is None else placement.state.uses
        places = [(use.value, use.op) for use in uses]
        places += [(site.value, None if site.argument is None else site.op) for site in placement.sites]  # type: ignore[misc]
        for value, op in places:
            source, reader = self.nodes.get(value.name), None if op is None else self.nodes.get(op.name)
            if source is not None and (op is None or reader is not None):
                yield source, reader, value

    def _annotation(self, op: Op) -> None:
        if op.name in self.nodes:
            self._annotation_of(self.nodes[op.name])

    @staticmethod
    def _annotation_of(node: fx.Node) -> Annotation:
        found: Annotation = node.meta.setdefault(ANNOTATION, Annotation())
        return found
