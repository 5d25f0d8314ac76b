"""Work on quantized activations in ONNX graphs that changes no code, done on fewer elements or not at all.

A maximum is that of the codes as well as of what was quantized, so a max pool moves in front of quantizers, where
fewer elements are left to quantize, and where ONNX Runtime's pool is one for floats: its pool for codes takes ten times
as long, other than beside an integer convolution with the channels last.

Where every operator has quantizers of its own, many quantize what another has quantized with the same parameters, and
perhaps a transposition has moved; their codes are those of the first. With other parameters a code stands for a code.
ONNX Runtime looks these up in a table where a leaky ReLU stands between the two, here one with a slope of one, which
does nothing, or of zero, which is a ReLU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .builder import NodeBuilder, drop_unread_initializers, drop_unread_nodes, replace_value
from .fusion import keep_apart, quantized_by

__all__ = ["join_quantizers", "move_pools", "use_tables"]

_MOVES = ("Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_ELEMENTWISE = ("Clip", "LeakyRelu", "Max", "Min", "Relu")
_BYTES = ("INT8", "UINT8")


def move_pools(graph: Any, *, integer_kernels: bool) -> None:
    """Move max pools in front of the quantizers of their inputs, and let others compute in floating point.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
        integer_kernels: whether operators between quantizers run on codes, so that pools must not part them. A pool
            behind such a convolution stays on codes.
    """
    for number, pool in enumerate(list(graph)):
        if pool.op_type != "MaxPool" or any(value.uses() or value in graph.outputs for value in pool.outputs[1:]):
            continue
        place = _place_above(graph, pool, integer_kernels)
        if place is not None:
            pool = _moved(graph, pool, place, number)
            for use in [use for use in pool.outputs[0].uses() if use.node.op_type == "QuantizeLinear"]:
                keep_apart(graph, pool, use.node)  # else ONNX Runtime quantizes in front of it
        quantizer = quantized_by(pool.inputs[0])
        if quantizer is not None and not (integer_kernels and _is_convolved(quantizer.inputs[0])):
            keep_apart(graph, quantizer, pool)


def _place_above(graph: Any, pool: Any, integer_kernels: bool) -> Any:
    """The first value that a pool may pool in place of its input; None if there is none in front of a quantizer."""
    value, found, is_quantized, are_codes = pool.inputs[0], None, False, False
    while _is_monotone(value.producer()) and len(value.uses()) == 1 and value not in graph.outputs:
        node = value.producer()
        value = node.inputs[0]
        is_quantized = is_quantized or node.op_type == "QuantizeLinear"
        are_codes = node.op_type == "DequantizeLinear" or (are_codes and node.op_type != "QuantizeLinear")
        maker = value.producer()
        is_parted = integer_kernels and not _is_monotone(maker) and _runs_on_codes(maker)
        if is_quantized and not are_codes and not is_parted:
            found = value
    return found


def _is_monotone(node: Any) -> bool:
    """Whether a node maps every element by itself, and larger ones to no smaller ones."""
    if node is None:
        return False
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return node.inputs[0].const_value is None
    if node.op_type == "LeakyRelu":
        return "alpha" not in node.attributes or node.attributes["alpha"].value >= 0
    bounds = [value for value in node.inputs[1:] if value is not None]
    return node.op_type in _ELEMENTWISE and all(
        value.const_value is not None and value.const_value.size == 1 for value in bounds
    )


def _runs_on_codes(node: Any) -> bool:
    """Whether ONNX Runtime has an operator in mind that takes codes and returns codes."""
    return node is not None and all(quantized_by(value) is not None for value in node.inputs[:2])


def _is_convolved(codes: Any) -> bool:
    """Whether codes are those of a convolution that runs on codes."""
    node = codes.producer()
    while node is not None and node.op_type in ("Max", "QuantizeLinear"):
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Conv" and _runs_on_codes(node)


def _moved(graph: Any, pool: Any, place: Any, number: int) -> Any:
    """Pool a value that elementwise nodes lead from to a pool's input; return the new pool."""
    result, shape = pool.inputs[0], pool.outputs[0].shape
    passed = [result]
    while passed[-1].producer().inputs[0] is not place:
        passed.append(passed[-1].producer().inputs[0])
    reader = passed[-1].producer()
    pooled = NodeBuilder(graph, reader, pool.outputs[0].name, number)("MaxPool", [place], _attributes(pool), like=place)
    reader.replace_input_with(0, pooled)
    for value in (pooled, *passed):
        value.shape = None if value.shape is None else shape
    replace_value(pool.outputs[0], result)
    graph.remove(pool, safe=True)
    return pooled.producer()


def join_quantizers(graph: Any) -> None:
    """Take the codes of what was quantized with the same parameters before, moved as it was since.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    for number, node in enumerate(list(graph)):
        if node.op_type != "QuantizeLinear" or node.outputs[0] in graph.outputs:
            continue
        path, source = _path_from_codes(node)
        if source is not None and _same_parameters(source, node) and all(map(_is_alone, path)):
            codes, build = source.inputs[0], NodeBuilder(graph, node, f"{node.name}_joined", number)
            for step in reversed(path):
                codes = _on_codes(build, step, codes, node.inputs[2])
            replace_value(node.outputs[0], codes)
    drop_unread_nodes(graph)
    drop_unread_initializers(graph)


def _path_from_codes(quantize: Any) -> tuple[list[Any], Any]:
    """The nodes that only move or rectify what a quantizer quantizes, and the ``DequantizeLinear`` in front, if any."""
    path: list[Any] = []
    node = quantize.inputs[0].producer()
    while node is not None and node.op_type != "DequantizeLinear":
        is_barrier = node.op_type == "Max" and len(node.inputs) == 1
        on_codes = node.op_type == "MaxPool" and quantized_by(node.inputs[0]) is not None
        if not (is_barrier or on_codes or node.op_type in (*_MOVES, "Relu")):
            return path, None
        path += [] if is_barrier else [node]
        node = node.inputs[0].producer()
    return path, node if node is not None and node.inputs[0].const_value is None else None


def _same_parameters(dequantize: Any, quantize: Any) -> bool:
    """Whether both have the same one scale and zero point."""
    pairs = list(zip(dequantize.inputs[1:], quantize.inputs[1:], strict=False))
    if len(pairs) < 2 or any(value is None or value.const_value is None for pair in pairs for value in pair):
        return False
    arrays = [(one.const_value.numpy(), other.const_value.numpy()) for one, other in pairs]
    return all(one.dtype == other.dtype and one.ndim == 0 and np.array_equal(one, other) for one, other in arrays)


def _is_alone(node: Any) -> bool:
    """Whether nothing is computed twice if a node is repeated on codes, since nothing else reads its result."""
    return len(node.outputs[0].uses()) == 1 or node.op_type not in ("MaxPool", "Slice", "Transpose")


def _on_codes(build: NodeBuilder, step: Any, codes: Any, zero_point: Any) -> Any:
    """What a step of a path does, done on codes."""
    if step.op_type == "Relu":
        zeros = zero_point.const_value.numpy()
        is_lowest = bool((zeros == np.iinfo(zeros.dtype).min).all())
        return codes if is_lowest else build("Max", [codes, zero_point], like=codes)
    moved = build(step.op_type, [codes, *step.inputs[1:]], _attributes(step), like=step.outputs[0])
    moved.type = codes.type
    return moved


def use_tables(graph: Any) -> None:
    """Let ONNX Runtime look codes up that codes of 8 bits are quantized to again.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place, after all barriers were put in.
    """
    for number, node in enumerate(list(graph)):
        barrier = node.inputs[0].producer() if node.op_type == "QuantizeLinear" else None
        if barrier is None or barrier.op_type != "Max" or len(barrier.inputs) != 1:
            continue
        path, source = _path_from_codes(node)
        if source is None or not _has_table(source, node):
            continue
        build = NodeBuilder(graph, barrier, f"{barrier.name}_table", number)
        rectifies = bool(path) and path[0].op_type == "Relu" and len(path[0].outputs[0].uses()) == 1
        x = path[0].inputs[0] if rectifies else barrier.inputs[0]
        alpha = 0.0 if rectifies else 1.0
        table = build("LeakyRelu", [x], {"alpha": alpha}, like=barrier.outputs[0])
        node.replace_input_with(0, table)
    drop_unread_nodes(graph)


def _has_table(dequantize: Any, quantize: Any) -> bool:
    """Whether both have one scale, and codes of 8 bits of the same type."""
    types = [value.const_value.dtype.name for value in (dequantize.inputs[2], quantize.inputs[2])]
    scales = (*dequantize.inputs[1:3], *quantize.inputs[1:3])
    return types[0] == types[1] and types[0] in _BYTES and all(len(value.shape) == 0 for value in scales)


def _attributes(node: Any) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
