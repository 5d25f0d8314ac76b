"""Operators in a wider type between casts, where the runtime has no kernels for their own, or rounds otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.export.extras import require

__all__ = ["cast_around"]

# They hand on values of any type, or say in an attribute what they make.
_ANY_TYPE = {"Cast", "Constant", "Identity", "If", "Loop", "Scan"}

_ORIGIN = "pkg.torch.onnx.fx_node"

# Which input has the type of the output, where it is not the first one; and whose output has the type of none.
_SOURCE = {"CastLike": 1, "DequantizeLinear": 1, "Where": 1}
_OTHER_TYPE = {"ArgMax", "ArgMin", "NonZero", "OneHot", "QuantizeLinear", "Shape", "Size"}
_BOOLS = {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}


def cast_around(model: Any, narrow: str, wide: str, only: Callable[[Any], bool] | None = None) -> None:
    """Let operators on values of one type compute in another one.

    Inputs, outputs and weights stay as they are, and so does a model without such values.

    Args:
        model: an ``onnx_ir.Model``; changed in place.
        narrow: ONNX's name of the type.
        wide: of the other one.
        only: which nodes do so; None for all, which then round what is one operator in PyTorch once.
    """
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    _name_types(ir, model.graph.all_nodes())
    end = {"FLOAT": "float32"}.get(wide, wide.lower())
    for number, graph in enumerate((model.graph, *model.graph.subgraphs())):
        _Casts(ir, graph, narrow, wide, f"_{end}_{number}" if number else f"_{end}").insert(only)


def _name_types(ir: Any, nodes: Any) -> None:
    """Give values without a type theirs; ONNX's own inference stops at operators that know no bfloat16."""
    for node in nodes:
        source = node.inputs[_SOURCE.get(node.op_type, 0)] if node.inputs else None
        for value in node.outputs:
            if value.type is not None:
                continue
            if node.op_type == "Cast":
                value.type = ir.TensorType(ir.DataType(node.attributes["to"].value))
            elif node.op_type in _BOOLS:
                value.type = ir.TensorType(ir.DataType.BOOL)
            elif node.op_type not in _OTHER_TYPE and source is not None:
                value.type = source.type


class _Casts:
    """Puts casts around the operators of one graph, without those of the graphs inside it.

    Args:
        ir: the module ``onnx_ir``.
        graph: the graph.
        narrow: type of the values to be cast.
        wide: what they are cast to.
        suffix: ends the names of values in the wide type; a graph may not use a name of the graph around it again.
    """

    def __init__(self, ir: Any, graph: Any, narrow: str, wide: str, suffix: str) -> None:
        self._ir = ir
        self._narrow, self._wider = ir.DataType[narrow], ir.DataType[wide]
        self._graph = graph
        self._suffix = suffix
        self._widened: dict[Any, Any] = {}

    def insert(self, only: Callable[[Any], bool] | None) -> None:
        for node in list(self._graph):
            if node.domain == "" and node.op_type in _ANY_TYPE:
                continue
            if only is not None and not only(node):
                continue
            for index, value in enumerate(node.inputs):
                if self._is_narrow(value):
                    node.replace_input_with(index, self._wide(value, node))
            for value in node.outputs:
                if self._is_narrow(value) and only is None and self._is_inside(value, node):
                    value.type = self._ir.TensorType(self._wider)
                elif self._is_narrow(value):
                    self._round(value, node)
            if node.op_type == "ConstantOfShape":
                self._widen_constant(node)

    def _is_inside(self, value: Any, node: Any) -> bool:
        """Whether a value stays inside what was one operator in PyTorch, which rounds its result only."""
        readers = [user for user, _ in value.uses()]
        return (
            _ORIGIN in node.metadata_props
            and all(user.graph is self._graph and user.op_type not in _ANY_TYPE for user in readers)
            and all(user.metadata_props.get(_ORIGIN) == node.metadata_props[_ORIGIN] for user in readers)
            and not any(value is output for output in self._graph.outputs)
        )

    def _is_narrow(self, value: Any) -> bool:
        return value is not None and isinstance(value.type, self._ir.TensorType) and value.dtype == self._narrow

    def _wide(self, value: Any, reader: Any) -> Any:
        """A value in the wide type, cast in front of its first reader."""
        if value not in self._widened:
            node = self._cast(value, self._wider, f"{value.name}{self._suffix}")
            self._graph.insert_before(reader, node)
            self._widened[value] = node.outputs[0]
        return self._widened[value]

    def _round(self, value: Any, node: Any) -> None:
        """Make an output wide, and let all that reads it read its rounded value, which takes its name."""
        name = value.name
        readers = list(value.uses())
        cast = self._cast(value, self._narrow, name)
        rounded = cast.outputs[0]
        value.name, value.type = f"{name}_unrounded", self._ir.TensorType(self._wider)
        for reader, index in readers:
            reader.replace_input_with(index, rounded)
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = rounded
        self._graph.insert_after(node, cast)

    def _cast(self, value: Any, dtype: Any, name: str) -> Any:
        node = self._ir.node("Cast", [value], {"to": int(dtype)}, name=f"{name}_Cast")
        node.outputs[0].name = name
        node.outputs[0].shape, node.outputs[0].type = value.shape, self._ir.TensorType(dtype)
        return node

    def _widen_constant(self, node: Any) -> None:
        """Make the value that ``ConstantOfShape`` repeats wide."""
        given = node.attributes.get("value")
        if given is not None and given.value.dtype == self._narrow:
            wide = self._ir.Tensor(given.value.numpy().astype(self._wider.numpy()))
            node.attributes["value"] = self._ir.AttrTensor("value", wide)
