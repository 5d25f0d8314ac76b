"""Places that would share a range, but have numbers of quite different size, get simulators of their own.

What a concatenation reads and writes has one range, and so has everything that is tied to it by further ones. Where
pictures and activations a thousand times as large are joined in that way, as segmentation networks do that hand small
copies of their input on, the one scale rounds the smaller ones to zero.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from bitwright.config.spec import CompressionTargetTensor
from bitwright.formats import format_of
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .initialise import simulators_of_graph
from .insert import GraphInsertion

__all__ = ["magnitudes_seen", "part_by_magnitude"]

_logger = logging.getLogger(__name__)

_RATIO = 16.0  # int8 keeps as many codes of numbers that are so many times smaller, int4 hardly one

Seen = Mapping[FakeQuantizeImplBase, Sequence[torch.Tensor]]


@contextlib.contextmanager
def magnitudes_seen(module: fx.GraphModule) -> Iterator[Seen]:
    """Note the largest magnitude of each tensor that shared simulators of activations are called with, in order."""
    seen: dict[FakeQuantizeImplBase, list[torch.Tensor]] = {}
    for simulator, places in Counter(simulator for _, simulator in simulators_of_graph(module)).items():
        of_activation = simulator.quantization_target == CompressionTargetTensor.ACTIVATION
        keeps_range = places > 1 and not simulator.is_stateless
        if of_activation and keeps_range and format_of(simulator.dtype).kind == "int":
            seen[simulator] = []

    def note(simulator: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        (tensor,) = arguments
        assert isinstance(simulator, FakeQuantizeImplBase)
        largest = tensor.detach().abs().amax() if tensor.numel() else torch.zeros((), device=tensor.device)
        seen[simulator].append(largest.to(torch.float32))

    handles = [simulator.register_forward_pre_hook(note) for simulator in seen]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def part_by_magnitude(insertion: GraphInsertion, seen: Seen) -> list[FakeQuantizeImplBase]:
    """Give places simulators of their own where a shared range would leave them few codes; return the new ones.

    Args:
        insertion: what has put the simulators into the graph.
        seen: the magnitudes of a forward, in which the simulators were initialised.
    """
    module, made = insertion.module, []
    nodes: dict[FakeQuantizeImplBase, list[fx.Node]] = {}
    for node, simulator in simulators_of_graph(module):
        nodes.setdefault(simulator, []).append(node)
    for simulator, tensors in seen.items():
        places = nodes.get(simulator, [])
        if len(places) != len(tensors):  # a place was taken out, or is not passed
            continue
        sizes = torch.stack(list(tensors)).tolist()
        for part in _parts(sizes)[1:]:
            made.append(insertion.replace_at([places[place] for place in part]))
            _logger.warning(
                "%s%s would share a range with %s, where numbers are %.0f times as large; it has one of its own.",
                made[-1].tensor_fqn,
                f" (with {len(part) - 1} further places)" if len(part) > 1 else "",
                simulator.tensor_fqn,
                max(sizes) / (sizes[part[0]] or 1.0),
            )
    return made


def _parts(sizes: Sequence[float]) -> list[list[int]]:
    """Group places, the largest first, so that sizes within a group differ by less than 16 times; zeros go along."""
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    if not all(0 <= size < float("inf") for size in sizes):
        return [order]
    parts: list[list[int]] = []
    for place in order:
        if parts and (sizes[place] == 0 or sizes[place] * _RATIO > sizes[parts[-1][0]]):
            parts[-1].append(place)
        else:
            parts.append([place])
    return parts
