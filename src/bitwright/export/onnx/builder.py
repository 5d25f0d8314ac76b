"""Builds ONNX nodes in front of another node, with initializers made of torch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from bitwright.export.extras import require

__all__ = ["NodeBuilder", "drop_unread_initializers", "drop_unread_nodes", "onnx_type", "replace_value"]

_MADE = "bitwright.initializers"
"""Where a graph keeps the initializers that builders made, by prefix and name."""

_VIEWED = {
    torch.bfloat16: (torch.int16, "bfloat16"),
    torch.float8_e4m3fn: (torch.uint8, "float8_e4m3fn"),
    torch.float8_e5m2: (torch.uint8, "float8_e5m2"),
}


def onnx_type(dtype: torch.dtype) -> int:
    """Return the number of the ONNX type of floating-point values of a torch dtype."""
    types = require("onnx_ir", "onnx", "Export to ONNX").DataType
    return int({
        torch.float32: types.FLOAT, torch.float16: types.FLOAT16, torch.bfloat16: types.BFLOAT16,
        torch.float64: types.DOUBLE, torch.float8_e4m3fn: types.FLOAT8E4M3FN, torch.float8_e5m2: types.FLOAT8E5M2,
    }[dtype])  # fmt: skip


def replace_value(old: Any, new: Any) -> None:
    """Let all readers of a value, the graph's outputs too, read another one; without a type it gets the old one's."""
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    if new.shape is None:
        new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def drop_unread_initializers(graph: Any) -> None:
    """Drop the initializers that no node reads, and that are no outputs of the graph."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in graph.outputs:
            del graph.initializers[name]


def drop_unread_nodes(graph: Any) -> None:
    """Drop the nodes whose values no node reads, and that are no outputs of the graph."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value in graph.outputs for value in node.outputs):
            graph.remove(node, safe=True)


def _free_name(name: str, taken: Container[str]) -> str:
    """Return a name, with the first number that makes it free behind it where it is taken."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


class NodeBuilder:
    """Adds nodes and initializers to a graph.

    Args:
        graph: an ``onnx_ir.Graph``.
        before: the node in front of which nodes are added.
        prefix: start of the names of initializers; those of one name that builders made are shared.
        number: makes the names of nodes unique.
    """

    def __init__(self, graph: Any, before: Any, prefix: str, number: int | str) -> None:
        self._ir = require("onnx_ir", "onnx", "Export to ONNX")
        self._graph = graph
        self._before = before
        self._prefix = prefix
        self._number = number
        self._count = 0

    def initializer(self, tensor: torch.Tensor, name: str, narrow: str | None = None, *, shared: bool = True) -> Any:
        """Add an initializer, or return the one that a builder has made by this name.

        Its full name gets a number where a tensor of the model has that name.

        Args:
            tensor: its values.
            name: last part of its name.
            narrow: name of a 4-bit type to store the values in.
            shared: with builders of the same prefix; False for what belongs to this builder's nodes alone.
        """
        key = (self._prefix, name) if shared else (self._prefix, str(self._number), name)
        made: dict[tuple[str, ...], Any] = self._graph.meta.setdefault(_MADE, {})
        if key in made and self._graph.initializers.get(made[key].name) is made[key]:
            return made[key]
        full = _free_name("_".join(key), self._graph.initializers)
        tensor = tensor.detach().cpu().contiguous()
        if narrow is not None:
            ml_dtypes = require("ml_dtypes", "onnx", "Export to ONNX")
            array = tensor.numpy().astype(getattr(ml_dtypes, narrow))
        elif tensor.dtype in _VIEWED:
            ml_dtypes = require("ml_dtypes", "onnx", "Export to ONNX")
            bits, stored = _VIEWED[tensor.dtype]
            array = tensor.view(bits).numpy().view(getattr(ml_dtypes, stored))
        else:
            array = tensor.numpy()
        data = self._ir.Tensor(array, name=full)
        value = self._ir.Value(
            name=full, type=self._ir.TensorType(data.dtype), shape=self._ir.Shape(tensor.shape), const_value=data
        )
        self._graph.register_initializer(value)
        made[key] = value
        return value

    def __call__(
        self,
        op: str,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any] | None = None,
        *,
        like: Any = None,
        dtype: int | None = None,
        domain: str = "",
    ) -> Any:
        """Add a node and return its output.

        Args:
            op: its operator.
            inputs: values; None for an input that is left out.
            attributes: its attributes.
            like: a value whose shape the output has.
            dtype: number of the output's element type, if it is not that of ``like``.
            domain: the operator's domain.
        """
        self._count += 1
        name = f"{self._prefix}_{op}_{self._number}_{self._count}"
        node = self._ir.node(op, list(inputs), dict(attributes or {}), domain=domain, name=name)
        output = node.outputs[0]
        output.name = f"{name}_output"
        if like is not None:
            output.shape = like.shape
            output.type = like.type if dtype is None else self._ir.TensorType(self._ir.DataType(dtype))
        self._graph.insert_before(self._before, node)
        return output
