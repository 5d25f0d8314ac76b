"""Histograms that add up exactly: how often values fall into the bins of nested grids."""

from __future__ import annotations

import torch

__all__ = ["Histogram"]

_BINS = 4096
_BINS_OF_MANY = 1024
_MANY = 256
_SMALLEST_EXPONENT = -126


class Histogram:
    """Counts of the elements of each block over ``bins`` even bins of ``[-2**e, 2**e)``, with ``e`` per block.

    ``e`` is the smallest that holds all elements. A larger ``e`` joins bins in pairs, so that the histogram of many
    tensors does not depend on their order or on how they were split: merging is exact, associative and commutative.

    Attributes:
        counts: int64 ``[blocks, bins]``.
        exponents: int64 ``[blocks]``.
        low: smallest element of each block, float32 ``[blocks]``.
        high: largest element.
    """

    __slots__ = ("counts", "exponents", "high", "low")

    def __init__(self, counts: torch.Tensor, exponents: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        self.counts, self.exponents, self.low, self.high = counts, exponents, low, high

    @classmethod
    def of(cls, blocks: torch.Tensor) -> Histogram:
        """Return the histogram of ``blocks [blocks, elements]``; NaN and infinities are not counted."""
        values = blocks.detach().to(torch.float64)
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        rows, bins = len(values), _BINS if len(values) <= _MANY else _BINS_OF_MANY
        low, high = values.amin(1).float() + 0.0, values.amax(1).float() + 0.0  # no negative zero
        largest = torch.maximum(-low, high)
        exponents = torch.frexp(largest).exponent.long().clamp(min=_SMALLEST_EXPONENT)
        exponents = torch.where(largest > 0, exponents, _SMALLEST_EXPONENT)
        half = bins // 2
        # Scaling by a power of two and floor are exact, so an element's bin is the same whichever grid counts it first.
        scale = _power_of_two(float(half), -exponents)
        index = (torch.floor(values * scale[:, None]).long() + half).clamp(0, bins - 1)
        index += torch.arange(rows, device=index.device)[:, None] * bins
        counts = torch.bincount(index[finite], minlength=rows * bins).reshape(rows, bins)
        return cls(counts, exponents, low, high)

    @property
    def bins(self) -> int:
        """Number of bins."""
        return self.counts.shape[1]

    @property
    def width(self) -> torch.Tensor:
        """Width of a bin, float64 ``[blocks]``."""
        return _power_of_two(2.0 / self.bins, self.exponents)

    @property
    def edges(self) -> torch.Tensor:
        """Left edge of every bin, float64 ``[blocks, bins]``."""
        steps = torch.arange(self.bins, device=self.counts.device, dtype=torch.float64) - self.bins // 2
        return steps * self.width[:, None]

    def merged(self, other: Histogram) -> Histogram:
        """Return the histogram of the elements of both.

        Raises:
            ValueError: another number of blocks.
        """
        if other.counts.shape != self.counts.shape:
            raise ValueError(
                f"Cannot merge histograms of {len(self.counts)} and {len(other.counts)} blocks; use a granularity "
                "whose number of blocks does not depend on the batch, or reset_statistics()."
            )
        device = self.counts.device
        exponents = torch.maximum(self.exponents, other.exponents.to(device))
        counts = self._on(exponents) + other._on(exponents.to(other.counts.device)).to(device)
        low = torch.minimum(self.low, other.low.to(device))
        return Histogram(counts, exponents, low, torch.maximum(self.high, other.high.to(device)))

    def _on(self, exponents: torch.Tensor) -> torch.Tensor:
        """Return the counts on the grid of larger exponents."""
        counts, missing = self.counts, exponents - self.exponents
        # Once everything lies in the two middle bins, joining bins changes nothing more.
        for _ in range(min(int(missing.max()), self.bins.bit_length())):
            rows = missing > 0
            joined = torch.zeros_like(counts)
            quarter = self.bins // 4
            joined[:, quarter : 3 * quarter] = counts.reshape(len(counts), -1, 2).sum(-1)
            counts = torch.where(rows[:, None], joined, counts)
            missing = missing - 1
        return counts

    def to_tensor(self) -> torch.Tensor:
        """Return everything in one int64 tensor, for checkpoints and other processes."""
        extremes = torch.stack([self.low, self.high]).view(torch.int32).long()
        shape = torch.tensor(self.counts.shape, device=self.counts.device)
        return torch.cat([shape, self.exponents, extremes.flatten(), self.counts.flatten()])

    @classmethod
    def from_tensor(cls, data: torch.Tensor) -> Histogram:
        """Return what ``to_tensor`` wrote."""
        rows, bins = int(data[0]), int(data[1])
        exponents, low, high, counts = torch.split(data[2:], [rows, rows, rows, rows * bins])
        extremes = [part.to(torch.int32).view(torch.float32) for part in (low, high)]
        return cls(counts.reshape(rows, bins), exponents, *extremes)


def _power_of_two(factor: float, exponents: torch.Tensor) -> torch.Tensor:
    factors = torch.full(exponents.shape, factor, dtype=torch.float64, device=exponents.device)
    return torch.ldexp(factors, exponents)
