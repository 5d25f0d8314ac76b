"""An fx graph as plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, treespec_leaf

__all__ = ["GraphRecord", "copy_graph"]

# Kept with a node: names and places. Fake tensors and tracing records refer to live objects and stay behind.
_KEPT_META = ("torch_fn", "nn_module_stack", "stack_trace", "bitwright")

_UNKNOWN_OP = (
    "the graph calls torch.ops.{self.namespace}.{self.name}, which nothing has registered in this process; before "
    "loading, import the package that does (coreai_torch for torch.ops.coreai)"
)


@dataclass(frozen=True, slots=True)
class _NodeReference:
    index: int


@dataclass(frozen=True, slots=True)
class _OpReference:
    """An op of ``torch.ops`` by name; ``overload`` is None for a higher-order op and for all overloads of an op."""

    namespace: str
    name: str
    overload: str | None

    def resolve(self) -> Callable[..., Any]:
        namespace = getattr(torch.ops, self.namespace)
        if not hasattr(namespace, self.name):
            raise RuntimeError(_UNKNOWN_OP.format(self=self))
        found = getattr(namespace, self.name)
        op: Callable[..., Any] = found if self.overload is None else getattr(found, self.overload)
        return op


@dataclass(frozen=True, slots=True)
class _MemoryFormatReference:
    """``torch.channels_last`` and its like by name, as the pickles that ``torch.save`` writes cannot hold them."""

    name: str

    def resolve(self) -> torch.memory_format:
        found: torch.memory_format = getattr(torch, self.name)
        return found


@dataclass(frozen=True, slots=True)
class _NodeRecord:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _CallRecord:
    parameters: tuple[str, ...]
    in_spec: Any
    out_spec: Any

    @classmethod
    def of(cls, codegen: CodeGen) -> _CallRecord | None:
        if not isinstance(codegen, _PyTreeCodeGen):
            return None
        names, in_spec, out_spec = codegen.pytree_info
        return cls(tuple(names), _encode_tree(in_spec), None if out_spec is None else _encode_tree(out_spec))

    def codegen(self) -> _PyTreeCodeGen:
        out_spec = None if self.out_spec is None else _decode_tree(self.out_spec)
        return _PyTreeCodeGen(_PyTreeInfo(list(self.parameters), _decode_tree(self.in_spec), out_spec))


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """The nodes of a graph and its calling convention.

    Attributes:
        nodes: in order.
        calling: argument names and tree structure of inputs and outputs; None for a plain graph.
    """

    nodes: tuple[_NodeRecord, ...]
    calling: _CallRecord | None

    @classmethod
    def of(cls, graph: fx.Graph) -> GraphRecord:
        """Record ``graph``."""
        index = {node: i for i, node in enumerate(graph.nodes)}

        def refer(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return _NodeReference(index[argument])
            return _encode(argument)

        return cls(
            tuple(
                _NodeRecord(
                    node.op,
                    node.name,
                    _encode(node.target),
                    map_aggregate(node.args, refer),
                    map_aggregate(node.kwargs, refer),
                    {key: node.meta[key] for key in _KEPT_META if key in node.meta},
                )
                for node in index
            ),
            _CallRecord.of(graph._codegen),
        )

    def graph(self) -> fx.Graph:
        """Build the graph anew."""
        graph = fx.Graph()
        made: list[fx.Node] = []

        def resolve(argument: Any) -> Any:
            return made[argument.index] if isinstance(argument, _NodeReference) else _decode(argument)

        for record in self.nodes:
            node = graph.create_node(
                record.op,
                _decode(record.target),
                map_aggregate(record.args, resolve),
                map_aggregate(record.kwargs, resolve),
                record.name,
            )
            node.meta = dict(record.meta)
            made.append(node)
        if self.calling is not None:
            graph.set_codegen(self.calling.codegen())
        return graph


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a graph with the same nodes, names and calling convention; metadata is copied one level deep."""
    twin = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twins[node] = twin.node_copy(node, twins.__getitem__)
        twins[node].name = node.name
    calling = graph._codegen
    twin.set_codegen(_PyTreeCodeGen(calling.pytree_info) if isinstance(calling, _PyTreeCodeGen) else type(calling)())
    return twin


def _encode(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _OpReference(namespace, name, target._overloadname)
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return _OpReference(namespace, name, None)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _OpReference("higher_order", target.__name__, None)
    if isinstance(target, torch.memory_format):
        return _MemoryFormatReference(str(target).removeprefix("torch."))
    return target


def _decode(target: Any) -> Any:
    return target.resolve() if isinstance(target, _OpReference | _MemoryFormatReference) else target


def _encode_tree(spec: TreeSpec) -> Any:
    """Return a tree structure as ``(type, context, children)``, and a leaf as ``()``."""
    return () if spec.is_leaf() else (spec.type, spec.context, tuple(map(_encode_tree, spec.children())))


def _decode_tree(record: Any) -> TreeSpec:
    return treespec_leaf() if not record else TreeSpec(record[0], record[1], list(map(_decode_tree, record[2])))
