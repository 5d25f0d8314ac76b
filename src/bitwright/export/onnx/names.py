"""Names of the inputs and outputs of a file, which nothing else in it may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bitwright.export.extras import require

__all__ = ["check_names", "distinct_output_names", "give_names"]


def distinct_output_names(graph: Any) -> list[str]:
    """Return the names of the outputs of a graph that torch.onnx made.

    Raises:
        ValueError: an input has the same name as another input or an output.
    """
    names = [value.name for value in graph.outputs]
    check_names([*(value.name for value in graph.inputs), *names])
    return names


def check_names(names: Iterable[str]) -> None:
    """Check names of inputs and outputs.

    Raises:
        ValueError: one stands there twice.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        listed = ", ".join(map(repr, repeated))
        raise ValueError(
            f"Inputs and outputs of an ONNX file need a name each, but several are called {listed}. "
            "Give others in input_names or output_names."
        )


def give_names(model: Any, output_names: Sequence[str]) -> None:
    """Give the outputs of a model these names, and other names to what else in it has one of an input or output.

    Args:
        model: an ``onnx_ir.Model``; changed in place.
        output_names: one for each output.
    """
    ir, graph = require("onnx_ir", "onnx", "Export to ONNX"), model.graph
    named: set[Any] = set()
    for number, (name, value) in enumerate(zip(output_names, list(graph.outputs), strict=True)):
        output = value
        if value.name != name and (value in named or value.is_initializer() or value.is_graph_input()):
            node = ir.node("Identity", [value], name=f"{name}_Identity")
            output = node.outputs[0]
            output.shape, output.type = value.shape, value.type
            graph.append(node)
            graph.outputs[number] = output
        output.name = name
        named.add(output)
    require("onnx_ir.passes.common", "onnx", "Export to ONNX").NameFixPass()(model)
