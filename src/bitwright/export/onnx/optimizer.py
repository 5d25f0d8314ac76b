"""The optimizer of torch.onnx, kept from dropping small numbers, and from failing at parts of computed lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bitwright.export.extras import require

__all__ = ["computed_splits", "exact_constants"]


@contextlib.contextmanager
def exact_constants() -> Iterator[None]:
    """Let onnxscript's rules for ``x + 0`` and ``x * 1`` match these numbers only.

    They take numbers up to 1e-8 for zero, and those within 1e-5 of one for one, so that ``x / (x.sum() + 1e-8)`` is
    NaN in the file where PyTorch has zeros.
    """
    constants = _zeros_and_ones()
    tolerances = [(constant._rel_tol, constant._abs_tol) for constant in constants]
    for constant in constants:
        constant._rel_tol = constant._abs_tol = 0.0
    try:
        yield
    finally:
        for constant, (relative, absolute) in zip(constants, tolerances, strict=True):
            constant._rel_tol, constant._abs_tol = relative, absolute


def _zeros_and_ones() -> list[Any]:
    """Numbers in the patterns of the rules that are applied by default; none where onnxscript keeps them otherwise."""
    rules = getattr(require("onnxscript.rewriter", "onnx", "Export to ONNX"), "_DEFAULT_REWRITE_RULES", ())
    nodes = [node for rule in rules for node in getattr(rule, "_target_pattern", ())]
    values = {id(value): value for node in nodes for value in node.inputs if hasattr(value, "_abs_tol")}
    return [value for value in values.values() if getattr(value, "value", None) in (0, 1)]


@contextlib.contextmanager
def computed_splits() -> Iterator[None]:
    """Let onnxscript leave splits into parts whose one length is computed, as ``chunk`` of a dynamic size makes them.

    It reads the length's value, which there is none of. ONNX Runtime has the operator that stays.
    """
    folding = require("onnxscript.optimizer._constant_folding", "onnx", "Export to ONNX")
    evaluators = getattr(getattr(folding, "registry", None), "op_evaluators", {}).get(("", "SplitToSequence"), [])
    functions = [evaluator.function for evaluator in evaluators]
    for evaluator in evaluators:
        evaluator.function = partial(_split, evaluator.function)
    try:
        yield
    finally:
        for evaluator, function in zip(evaluators, functions, strict=True):
            evaluator.function = function


def _split(fold: Callable[..., Any], node: Any, *state: Any) -> Any:
    length = node.inputs[1] if len(node.inputs) > 1 else None
    if length is not None and length.const_value is None and length.shape is not None and len(length.shape) == 0:
        return None
    return fold(node, *state)
