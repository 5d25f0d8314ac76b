"""Dynamic sizes of models that torch.onnx captures: as asked for, not fewer without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from bitwright.export.extras import require

__all__ = ["sizes_as_asked"]


@contextlib.contextmanager
def sizes_as_asked() -> Iterator[list[str]]:
    """Keep ``torch.onnx.export`` from fixing a dynamic size, or tying it to another number, without a word.

    It follows what torch.export suggests for sizes that it refuses. A range may become narrower, as position embeddings
    make it. A number in its place, a multiple or another input's size is refused, as it is for other targets: the model
    takes other sizes by other branches, which the file does not have.

    Where a program asserts such a thing instead, torch.onnx leaves the assertion out of the file.

    Yields:
        Those assertions, once the program is written: the file is wrong for sizes that were asked for.
    """
    shapes: Any = torch.export.dynamic_shapes
    passes: Any = require("torch.onnx._internal.exporter._fx_passes", "onnx", "Export to ONNX")
    refine_before, remove_before = shapes.refine_dynamic_shapes_from_suggested_fixes, passes.remove_assertion_nodes
    found: list[str] = []

    def refine(message: str, dynamic_shapes: Any) -> Any:
        refined = refine_before(message, dynamic_shapes)
        pairs = zip(tree_leaves(dynamic_shapes), tree_leaves(refined), strict=True)
        if any(getattr(old, "__name__", None) != getattr(new, "__name__", None) for old, new in pairs):
            raise ValueError("a dynamic size would be another one")  # the caller raises what torch.export has said
        return refined

    def remove(graph_module: fx.GraphModule) -> Any:
        found.extend(_fixing(graph_module.graph))
        return remove_before(graph_module)

    shapes.refine_dynamic_shapes_from_suggested_fixes, passes.remove_assertion_nodes = refine, remove
    try:
        yield found
    finally:
        shapes.refine_dynamic_shapes_from_suggested_fixes = refine_before
        passes.remove_assertion_nodes = remove_before


def _fixing(graph: fx.Graph) -> list[str]:
    """Assertions that hold for a size of the example, but for neither of its neighbours that were asked for."""
    sizes = dict(_sizes_of_inputs(graph))
    example = {symbol: sympy.Integer(size.node.hint) for symbol, size in sizes.items()}
    asserted = [
        node.args[0].meta.get("val")
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
        if isinstance(node.args[0], fx.Node)
    ]
    conditions = {one.node.expr for one in asserted if isinstance(one, torch.SymBool)}
    return [str(one) for one in conditions if any(_fixes(one, symbol, sizes[symbol], example) for symbol in sizes)]


def _fixes(condition: Any, symbol: Any, size: torch.SymInt, example: dict[Any, Any]) -> bool:
    if symbol not in condition.free_symbols:
        return False
    asked = size.node.shape_env.bound_sympy(symbol)
    around = [example[symbol] + step for step in (-1, 1)]
    others = [{**example, symbol: other} for other in around if max(asked.lower, 1) <= other <= asked.upper]
    return bool(others) and all(condition.xreplace(sizes) == sympy.false for sizes in others)


def _sizes_of_inputs(graph: fx.Graph) -> Iterator[tuple[Any, torch.SymInt]]:
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                yield size.node.expr, size
