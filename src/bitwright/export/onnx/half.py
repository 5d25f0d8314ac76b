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
from .casts import cast_around

__all__ = ["compute_in_float32", "round_outputs"]


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
    cast_around(model, dtype.upper(), "FLOAT", _accumulates if accumulating_writes_only else None)


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


def _accumulates(node: Any) -> bool:
    how = node.attributes.get("reduction")
    return node.op_type in ("ScatterElements", "ScatterND") and how is not None and how.value in ("add", "mul")
