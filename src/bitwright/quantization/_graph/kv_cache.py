"""Keep a key-value cache in codes: what comes out of a cache-update op is dequantized, not what goes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from bitwright.program.aten_names import op_spellings

__all__ = ["keep_caches_quantized"]


def keep_caches_quantized(module: fx.GraphModule, caches: Mapping[str, Any] | None) -> None:
    """Move the dequantize op in front of each cache-update op behind it, and retype the cache.

    Args:
        module: a graph with Core AI's quantize and dequantize ops. Changed in place.
        caches: ``kv_cache_quant_configs`` of the configuration.

    Raises:
        RuntimeError: the chosen input of an op is not quantized.
        NotImplementedError: an op has not exactly one cache among its inputs, or more than one result.
    """
    if not caches:
        return
    found = [
        (node, caches[name].quant_input_idx)
        for node in list(module.graph.nodes)
        if node.op == "call_function"
        for name in op_spellings(node)
        if name in caches
    ]
    for node, index in dict(found).items():
        _keep_quantized(module, node, index)
    module.recompile()


def _keep_quantized(module: fx.GraphModule, node: fx.Node, index: int) -> None:
    read = node.all_input_nodes[index]
    behind, dequantize = _path_to_dequantize(read)
    if dequantize is None:
        raise RuntimeError(
            f"Input {index} of the cache-update op {node.name!r} is not quantized ({read.name!r}): there is no "
            "coreai.quantize and coreai.dequantize in front of it. Finalize a model that prepare() returned."
        )
    cache = _cache_of(node)
    quantize: Any = dequantize.args[0]
    dtype: torch.dtype = quantize.args[2]
    readers = list(node.users)
    node.replace_input_with(read, quantize)
    last = node
    for step in (dequantize, *behind):
        with module.graph.inserting_after(last):
            copied = module.graph.create_node(step.op, step.target, (last, *step.args[1:]), dict(step.kwargs))
        copied.meta = {**step.meta, "val": node.meta.get("val")}
        last = copied
    for reader in readers:
        reader.replace_input_with(node, last)
    for step in (*reversed(behind), dequantize):
        if not step.users:
            module.graph.erase_node(step)
    for retyped in (cache, node):
        value = retyped.meta.get("val")
        if isinstance(value, torch.Tensor):
            retyped.meta["val"] = value.to(dtype)


def _path_to_dequantize(read: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the casts between a dequantize op and ``read``, in order, and that op."""
    behind: list[fx.Node] = []
    node: Any = read
    while isinstance(node, fx.Node) and node.target is torch.ops.aten.to.dtype:
        behind.insert(0, node)
        node = node.args[0]
    is_dequantize = isinstance(node, fx.Node) and "coreai.dequantize" in str(node.target)
    return behind, node if is_dequantize else None


def _cache_of(node: fx.Node) -> fx.Node:
    inputs = [source for source in node.all_input_nodes if source.op == "placeholder"]
    caches = [source for source in inputs if isinstance(source.meta.get("val"), torch.Tensor)]
    if len(caches) != 1:
        raise NotImplementedError(
            f"The cache-update op {node.name!r} reads {len(caches)} inputs of the model; a quantized cache must be the "
            "only one among them."
        )
    if any(getattr(user.target, "__name__", "") == "getitem" for user in node.users):
        raise NotImplementedError(
            f"The cache-update op {node.name!r} returns several results; only ops with one can keep a quantized cache."
        )
    return caches[0]
