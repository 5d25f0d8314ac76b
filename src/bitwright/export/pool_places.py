"""The places that max pools find their results at, for converters that have only the results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .dimensions import for_each_dimension
from .graph_edits import argument, call, replace

__all__ = ["spell_out_places"]

_aten = torch.ops.aten
_WINDOW = ("kernel_size", "stride", "padding", "dilation")


def spell_out_places(module: fx.GraphModule) -> None:
    """Compute the places that max pools over pictures return beside their results, in place, where they are read.

    Of equal values the first one counts, and of several NaN the last one, as in PyTorch. Pools of pictures whose size
    is unknown stay as they are.
    """
    graph = module.graph
    for pool in graph.find_nodes(op="call_function", target=_aten.max_pool2d_with_indices.default):
        places = next((user for user in pool.users if user.args[1] == 1 and user.users), None)
        if places is not None and all(isinstance(size, int) for size in places.meta["val"].shape[-2:]):
            with places.meta["val"].fake_mode, graph.inserting_before(places):
                found = _places(graph, pool, places.meta["val"].shape[-2:])
            replace(places, found)
    module.recompile()


def _places(graph: fx.Graph, pool: fx.Node, counts: Sequence[int]) -> fx.Node:
    """The number of each result in its picture."""
    x: fx.Node = argument(pool, "self")
    height, width = x.meta["val"].shape[-2:]
    kernel, stride, padding, dilation = (argument(pool, name) for name in _WINDOW)
    sizes, steps, paddings, gaps = (
        for_each_dimension(given, 2) for given in (kernel, stride or kernel, padding, dilation)
    )
    parts = list(zip((height, width), counts, sizes, steps, paddings, gaps, strict=True))
    behind = [(n - 1) * step + (k - 1) * gap + 1 - size - before for size, n, k, step, before, gap in parts]
    lowest = torch.finfo(x.meta["val"].dtype).min
    padded = call(graph, _aten.clamp.default, x, lowest)  # so that every value of the picture is above the padding
    border = [paddings[1], max(behind[1], 0), paddings[0], max(behind[0], 0)]
    padded = call(graph, _aten.constant_pad_nd.default, padded, border, -torch.inf)
    place = None
    for offset, seen in _windows(graph, padded, parts, width):
        if place is None:
            largest, place = seen, call(graph, _aten.full_like.default, seen, offset, dtype=torch.int64)
            continue
        is_nan = call(graph, _aten.ne.Tensor, seen, seen)
        further = call(graph, _aten.logical_or.default, call(graph, _aten.gt.Tensor, seen, largest), is_nan)
        largest = call(graph, _aten.where.self, further, seen, largest)
        here = call(graph, _aten.full_like.default, place, offset)
        place = call(graph, _aten.where.self, further, here, place)
    rows, columns = (_starts(graph, n, step, before) for _, n, _, step, before, _ in parts)
    rows = call(graph, _aten.unsqueeze.default, call(graph, _aten.mul.Tensor, rows, width), 1)
    return call(graph, _aten.add.Tensor, place, call(graph, _aten.add.Tensor, rows, columns))


def _windows(
    graph: fx.Graph, padded: fx.Node, parts: Sequence[tuple[int, ...]], width: int
) -> Iterator[tuple[int, Any]]:
    """For each place in a window its number from the window's start, and what all windows have there."""
    (_, rows, high, down, _, row_gap), (_, columns, wide, right, _, gap) = parts
    for row, column in itertools.product(range(high), range(wide)):
        top, left = row * row_gap, column * gap
        seen = call(graph, _aten.slice.Tensor, padded, -2, top, top + (rows - 1) * down + 1, down)
        seen = call(graph, _aten.slice.Tensor, seen, -1, left, left + (columns - 1) * right + 1, right)
        yield top * width + left, seen


def _starts(graph: fx.Graph, count: int, step: int, before: int) -> fx.Node:
    """Where the windows along one side start; the first one in the padding."""
    numbers = call(graph, _aten.arange.default, count, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
    return call(graph, _aten.sub.Tensor, call(graph, _aten.mul.Tensor, numbers, step), before)
