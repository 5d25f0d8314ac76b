"""Operators on half precision in float32 between casts.

ONNX Runtime has next to no bfloat16 kernels on the CPU. Operators on float16 it runs in float32 there, and rounds
results at the end of a chain of operators only; so codes of activations come out otherwise. PyTorch's own CPU kernels
compute in float32 and round each result: with casts that say so the numbers are the same but for the order of sums.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.export.graph_signature import OutputKind, TensorArgument

from bitwright.export.extras import require

from .builder import onnx_type

__all__ = ["compute_in_float32", "round_outputs"]

# They hand on values of any type, or say in an attribute what they make.
_ANY_TYPE = {"Cast", "Constant", "Identity", "If", "Loop", "Scan"}

_ORIGIN = "pkg.torch.onnx.fx_node"

# Which input has the type of the output, where it is not the first one; and whose output has the type of none.
_SOURCE = {"CastLike": 1, "DequantizeLinear": 1, "Where": 1}
_OTHER_TYPE = {"QuantizeLinear", "Shape", "Size"}


def compute_in_float32(
    model: Any, dtype: Literal["bfloat16", "float16"], *, accumulating_writes_only: bool = False
) -> None:
    """Let every operator on values in half precision compute in float32, with results rounded to half precision.

    Inputs, outputs and weights stay as they are, and so does a model without such values.

    Args:
        model: an ``onnx_ir.Model``; changed in place.
        dtype: of the values.
        accumulating_writes_only: leave all operators but indexed writes that add or multiply, which ONNX Runtime takes
            in float16, and then cannot run.
    """
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    _name_types(ir, model.graph.all_nodes())
    for number, graph in enumerate((model.graph, *model.graph.subgraphs())):
        casts = _Casts(ir, graph, dtype.upper(), f"_float32_{number}" if number else "_float32")
        casts.insert(accumulating_writes_only)


def round_outputs(program: Any) -> None:
    """Give outputs in half precision their type: torch.onnx leaves sums, and other results of reductions, in float32.

    Args:
        program: torch's ONNX program; changed in place.
    """
    exported, graph = program.exported_program, program.model.graph
    if exported is None:
        return
    outputs: Any = exported.graph.output_node().args[0]  # the signature keeps the names before torch.onnx put casts in
    dtypes = [
        output.meta["val"].dtype
        for output, spec in zip(outputs, exported.graph_signature.output_specs, strict=False)
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]
    if len(dtypes) != len(graph.outputs):
        return
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    for number, (dtype, value) in enumerate(zip(dtypes, list(graph.outputs), strict=True)):
        if dtype in (torch.float16, torch.bfloat16) and value.dtype == ir.DataType.FLOAT:
            cast = ir.node("Cast", [value], {"to": onnx_type(dtype)}, name=f"{value.name}_rounded")
            rounded = cast.outputs[0]
            rounded.shape, rounded.type = value.shape, ir.TensorType(ir.DataType(onnx_type(dtype)))
            value.name, rounded.name = f"{value.name}_float32", value.name
            graph.append(cast)
            graph.outputs[number] = rounded


def _name_types(ir: Any, nodes: Any) -> None:
    """Give values without a type theirs; ONNX's own inference stops at operators that know no bfloat16."""
    for node in nodes:
        source = node.inputs[_SOURCE.get(node.op_type, 0)] if node.inputs else None
        for value in node.outputs:
            if value.type is not None:
                continue
            if node.op_type == "Cast":
                value.type = ir.TensorType(ir.DataType(node.attributes["to"].value))
            elif node.op_type not in _OTHER_TYPE and source is not None:
                value.type = source.type


def _accumulates(node: Any) -> bool:
    how = node.attributes.get("reduction")
    return node.op_type in ("ScatterElements", "ScatterND") and how is not None and how.value in ("add", "mul")


class _Casts:
    """Puts casts around the operators of one graph, without those of the graphs inside it.

    Args:
        ir: the module ``onnx_ir``.
        graph: the graph.
        dtype: which values are in half precision.
        suffix: ends the names of values in float32; a graph may not use a name of the graph around it again.
    """

    def __init__(self, ir: Any, graph: Any, dtype: str, suffix: str) -> None:
        self._ir = ir
        self._narrow = ir.DataType[dtype]
        self._graph = graph
        self._suffix = suffix
        self._widened: dict[Any, Any] = {}

    def insert(self, accumulating_writes_only: bool) -> None:
        for node in list(self._graph):
            if node.domain == "" and node.op_type in _ANY_TYPE:
                continue
            if accumulating_writes_only and not _accumulates(node):
                continue
            for index, value in enumerate(node.inputs):
                if self._is_narrow(value):
                    node.replace_input_with(index, self._wide(value, node))
            for value in node.outputs:
                if self._is_narrow(value) and not accumulating_writes_only and self._is_inside(value, node):
                    value.type = self._ir.TensorType(self._ir.DataType.FLOAT)
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
        """A value in float32, cast in front of its first reader."""
        if value not in self._widened:
            node = self._cast(value, self._ir.DataType.FLOAT, f"{value.name}{self._suffix}")
            self._graph.insert_before(reader, node)
            self._widened[value] = node.outputs[0]
        return self._widened[value]

    def _round(self, value: Any, node: Any) -> None:
        """Make an output float32, and let all that reads it read its rounded value, which takes its name."""
        name = value.name
        readers = list(value.uses())
        cast = self._cast(value, self._narrow, name)
        rounded = cast.outputs[0]
        value.name, value.type = f"{name}_unrounded", self._ir.TensorType(self._ir.DataType.FLOAT)
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
        """Make the value that ``ConstantOfShape`` repeats float32."""
        given = node.attributes.get("value")
        if given is not None and given.value.dtype == self._narrow:
            wide = self._ir.Tensor(given.value.numpy().astype("float32"))
            node.attributes["value"] = self._ir.AttrTensor("value", wide)
