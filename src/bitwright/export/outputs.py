"""Outputs of exported programs that converters have no words for: what is no tensor, and one tensor twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import TensorArgument

from bitwright.planning import Problem, Severity

from .conversion import ConversionError
from .widened import call

__all__ = ["refuse_numbers", "tensors_apart"]


def refuse_numbers(program: torch.export.ExportedProgram, converter: str) -> None:
    """Refuse a program that returns numbers or strings.

    Args:
        program: the program.
        converter: its name, to begin the message with.

    Raises:
        ConversionError: the program returns something that is neither a tensor nor None.
    """
    for number, output in enumerate(_outputs(program)):
        if output is not None and not (isinstance(output, fx.Node) and isinstance(output.meta["val"], torch.Tensor)):
            what = "a size" if isinstance(output, fx.Node) else repr(output)
            message = f"{converter} cannot take this model: its output {number} is {what}. Return tensors only."
            raise ConversionError(message, (Problem("target", "the model itself", message, Severity.ERROR),))


def tensors_apart(program: torch.export.ExportedProgram) -> None:
    """Leave out outputs that are None, and make tensors that are returned before others, in place.

    The second of two equal outputs would be lost; a maximum of it and itself is what no optimizer takes for the same.

    Args:
        program: whose signature then has fewer outputs than its Python form.
    """
    aten, graph, signature = torch.ops.aten, program.graph, program.graph_signature
    output, latest = graph.output_node(), dict[Any, Any]()
    kept, specs = list[Any](), list[Any]()
    for value, spec in zip(_outputs(program), signature.output_specs, strict=True):
        if value is None:
            continue
        again = value in latest
        if again:
            with graph.inserting_before(output):
                either = aten.logical_or if value.meta["val"].dtype == torch.bool else aten.maximum
                same = call(graph, either.default, latest[value], latest[value])
        latest[value] = same if again else value
        kept.append(latest[value])
        specs.append(dataclasses.replace(spec, arg=TensorArgument(same.name)) if again else spec)
    output.args = (tuple(kept),)
    signature.output_specs[:] = specs


def _outputs(program: torch.export.ExportedProgram) -> tuple[Any, ...]:
    outputs: Any = program.graph.output_node().args[0]
    return tuple(outputs)
