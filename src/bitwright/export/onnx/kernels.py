"""Kernels that ONNX Runtime lacks on the CPU: found while planning, by opening a file without its large weights."""

from __future__ import annotations

import ast
import re
from typing import Any

from bitwright.export.conversion import ConversionError
from bitwright.export.extras import require
from bitwright.planning import Problem, Severity

from .fusion import keep_moved_batches_apart
from .half import compute_in_float32
from .narrow_integers import widen_integers

__all__ = ["check_kernels"]

_LARGE = 1 << 16
_REMEDY = "Write the float model with other operators or types; files for another runtime need no plan for ONNX."
_NAMED = re.compile(r"[Nn]ode (?:with name '|\()([^')]+)")
_SCOPES = "pkg.torch.onnx.name_scopes"


def check_kernels(model: Any) -> None:
    """Check that ONNX Runtime opens a model.

    Args:
        model: an ``onnx_ir.Model`` as torch.onnx made it of a float model; changed in place, of no use afterwards.

    Raises:
        MissingExtraError: the onnx extra is not installed.
        ConversionError: there is no kernel for an operator on values of its types; with the module that calls it.
    """
    runtime, ir = (require(name, "onnx", "Export to ONNX") for name in ("onnxruntime", "onnx_ir"))
    places = {node.name: _place(node) for node in model.graph.all_nodes()}
    compute_in_float32(model, "bfloat16")
    widen_integers(model)
    keep_moved_batches_apart(model.graph)
    _take_weights(model.graph)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    file = ir.serde.serialize_model(model).SerializeToString()
    try:
        runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        named = _NAMED.search(str(error))
        place = places.get(named[1] if named else "", "the model itself")
        words = " ".join(str(error).split())
        message = f"ONNX Runtime cannot run this model on the CPU: {words} (in {place}). {_REMEDY}"
        raise ConversionError(message, (Problem("target", place, message, Severity.ERROR),)) from error


def _take_weights(graph: Any) -> None:
    """Make inputs of large weights, whose numbers decide nothing."""
    for value in list(graph.initializers.values()):
        if value.const_value is not None and value.const_value.nbytes > _LARGE:
            del graph.initializers[value.name]
            value.const_value = None
            graph.inputs.append(value)


def _place(node: Any) -> str:
    """The module that calls an operator: the last but one of the scopes, which end with the operator itself."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    return (scopes[-2] if len(scopes) > 1 else "") or "the model itself"
