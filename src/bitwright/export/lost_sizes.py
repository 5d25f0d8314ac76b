"""Dynamic sizes that rewriting a program has fixed to those of the example inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitwright._utils.replacing import replaced

from .conversion import ConversionError

__all__ = ["sizes_kept"]


@contextlib.contextmanager
def sizes_kept(program: torch.export.ExportedProgram, converter: str) -> Iterator[None]:
    """Refuse a rewriting of a program that leaves a dynamic size of its inputs with fewer values than it had.

    Decompositions that ask for a size as a number fix it. PyTorch, which knows that no guard would be checked any more,
    only logs that.

    Args:
        program: as captured.
        converter: its name, to begin the message with.

    Raises:
        ConversionError: sizes were lost; it names the inputs, their dimensions and the operators.
    """
    inputs = set(program.graph_signature.user_inputs)
    sizes = [
        (f"dimension {axis} of the input {node.name!r}", size, size.node.expr)
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in inputs and isinstance(node.meta.get("val"), torch.Tensor)
        for axis, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt)
    ]
    operators: dict[str, None] = {}
    with replaced(ShapeEnv, "_set_replacement", lambda replace: _noting(replace, operators)):
        yield
    lost = [f"{place} ({size.node.expr} in the file)" for place, size, expr in sizes if size.node.expr != expr]
    if lost:
        raise ConversionError(
            f"{converter} cannot take this model: in its operators the program holds for fewer sizes than "
            f"dynamic_shapes has, because of {', '.join(operators) or 'a decomposition'}: {', '.join(lost)}. Leave "
            "such a size out of dynamic_shapes, which makes it the example's, or write the operator with others in the "
            "float model."
        )


def _noting(replace: Callable[..., Any], operators: dict[str, None]) -> Callable[..., Any]:
    """Have the calls that symbols are replaced for noted."""

    def noted(env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        origins = traceback.get_current_meta().get("from_node")
        if origins:
            operators[str(origins[-1].target)] = None
        return replace(env, *args, **kwargs)

    return noted
