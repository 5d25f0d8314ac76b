"""The palettized weights of a model, and what is done to all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from bitwright._utils.weight_simulators import SimulatorPlace, simulator_places, unique_simulators

from .kmeans_fake_palettize import _KMeansFakePalettize

__all__ = [
    "PalettizedPlace",
    "dense_weights",
    "gradients_of",
    "palettized_places",
    "settle_all",
    "settle_before_saving",
    "switch",
]

PalettizedPlace = SimulatorPlace[_KMeansFakePalettize]


def palettized_places(model: nn.Module) -> list[PalettizedPlace]:
    """Return the first place of each simulator."""
    return unique_simulators(model, _KMeansFakePalettize)


def switch(simulator: _KMeansFakePalettize, on: bool) -> None:
    """Turn palettization on or off; what was off has trained dense, so its palettes are made anew."""
    if on and not simulator.is_on:
        simulator.invalidate()
    simulator.enable_fake_palett(on)


def settle_all(places: Iterable[PalettizedPlace], num_workers: int) -> None:
    """Find palettes or indices where they are out of date."""
    from tqdm import tqdm

    places = list(places)
    title = f"Palettizing layers (num_workers={num_workers})"
    for place in tqdm(places, desc=title, delay=1.0, leave=False):
        try:
            place.simulator.settle(place.entering())
        except Exception as error:
            raise RuntimeError(f"Centroid calculation failed for weight {place.name!r}: {error}") from error


def settle_before_saving(model: nn.Module) -> None:
    """Let every later ``state_dict`` of ``model`` hold the indices of the weights that it holds."""
    for place in simulator_places(model, _KMeansFakePalettize):
        if place.in_module:
            place.chain.register_state_dict_pre_hook(_settle_chain)


def _settle_chain(chain: nn.Module, prefix: str, keep_vars: bool) -> None:
    weight: torch.Tensor = chain.original  # type: ignore[assignment]
    below: list[nn.Module] = []
    for simulator in chain.children():
        if isinstance(simulator, _KMeansFakePalettize):
            if simulator.is_unsaved_for(weight):
                with torch.no_grad():
                    for earlier in below:
                        weight = earlier(weight)
                    simulator.settle_saved(weight)
            return
        below.append(simulator)


@contextmanager
def dense_weights(places: list[PalettizedPlace]) -> Iterator[None]:
    """Let dense weights through, then switch palettization on; if the block raises, back to what it was."""
    afterwards = [place.simulator.is_on for place in places]
    for place in places:
        place.simulator.disable_fake_palett()
    try:
        yield
        afterwards = [True] * len(places)
    finally:
        for place, on in zip(places, afterwards, strict=True):
            place.simulator.enable_fake_palett(on)


@contextmanager
def gradients_of(model: nn.Module, places: list[PalettizedPlace]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the parameters that get gradients, palettized weights among them; put gradients back afterwards."""
    originals = [place.original for place in places if place.original.is_floating_point()]
    frozen = [original for original in originals if not original.requires_grad and original.is_leaf]
    for original in frozen:
        original.requires_grad_(True)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        for original in frozen:
            original.requires_grad_(False)
