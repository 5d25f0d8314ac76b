"""Labels, means and errors in torch operations, for tensors that are not on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 1 << 26
"""Entries of the largest temporary tensor."""


def _pieces(length: int, width: int) -> list[slice]:
    step = max(1, _ELEMENTS // width)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def label_scalars(values: Tensor, palettes: Tensor) -> Tensor:
    """Indices uint8 ``[P, N]`` of the nearest entries of ``palettes`` float64 ``[P, K]``, lower on a tie."""
    ladder, places = palettes.sort(dim=1, stable=True)
    places = places.gather(1, torch.searchsorted(ladder, ladder))  # equal entries: the one that stood first
    middles = 0.5 * ladder[:, :-1] + 0.5 * ladder[:, 1:]
    labels = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    above = torch.cat([middles, torch.full_like(ladder[:, :1], torch.inf)], 1)
    for piece in _pieces(values.shape[1], 4 * values.shape[0]):
        block = values[:, piece].double().contiguous()
        found = torch.searchsorted(middles.contiguous(), block)
        label = places.gather(1, found)
        tied = block == above.gather(1, found)
        other = places.gather(1, (found + 1).clamp(max=ladder.shape[1] - 1))
        labels[:, piece] = torch.where(tied, torch.minimum(label, other), label)
    return labels


def label_vectors(values: Tensor, palettes: Tensor) -> Tensor:
    """Indices uint8 ``[P, N]`` of the nearest rows of ``palettes`` float64 ``[P, K, D]``, lower on a tie."""
    groups, length, dims = values.shape
    labels = torch.empty((groups, length), dtype=torch.uint8, device=values.device)
    reach = torch.maximum(palettes.abs().amax((1, 2)), values.abs().amax((1, 2)).double())
    scale = torch.ldexp(torch.ones_like(reach), -torch.frexp(reach.clamp_min(1e-300)).exponent).view(groups, 1, 1)
    scaled = palettes * scale
    for piece in _pieces(length, groups * palettes.shape[1] * dims):
        block = values[:, piece].double() * scale
        far = (block.unsqueeze(2) - scaled.unsqueeze(1)).square().sum(3)
        labels[:, piece] = far.argmin(2)
    return labels


def moments_by_label(
    values: Tensor, weights: Tensor | None, labels: Tensor, palettes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weight ``[P, K]``, Σ weight · offset and Σ weight · offset² ``[P, K, D]`` of each label, float64.

    Sums are matrix products with indicators, which unlike scattered additions come out the same every time.
    """
    groups, length, dims = values.shape
    count = palettes.shape[1]
    masses = palettes.new_zeros((groups, count))
    offsets, squares = torch.zeros_like(palettes), torch.zeros_like(palettes)
    for piece in _pieces(length, groups * max(count, dims)):
        places = labels[:, piece].long()
        belongs = torch.nn.functional.one_hot(places, count).transpose(1, 2).double()
        if weights is not None:
            belongs *= weights[:, None, piece]
        near = palettes.gather(1, places.unsqueeze(2).expand(-1, -1, dims))
        off = values[:, piece].double() - near
        masses += belongs.sum(2)
        offsets += belongs @ off
        squares += belongs @ off.square()
    return masses, offsets, squares


def errors(values: Tensor, weights: Tensor | None, labels: Tensor, palettes: Tensor) -> Tensor:
    """Squared errors float64 ``[P]`` of ``values [P, N, D]`` around ``palettes`` float64 ``[P, K, D]``."""
    total = palettes.new_zeros(values.shape[0])
    for piece in _pieces(values.shape[1], values.shape[0] * values.shape[2]):
        places = labels[:, piece].long().unsqueeze(2).expand(-1, -1, values.shape[2])
        off = (values[:, piece].double() - palettes.gather(1, places)).square().sum(2)
        total += (off if weights is None else off * weights[:, piece]).sum(1)
    return total
