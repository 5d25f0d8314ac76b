"""Histograms that add up exactly: how often values fall into the bins of nested grids of floating point numbers."""

from __future__ import annotations

import torch

__all__ = ["Histogram"]

_FINENESS = 7  # log2 of the bins of an octave
_OCTAVES = 24
_OCTAVES_OF_MANY = 8
_MANY = 256
_MANTISSA, _BIAS = 23, 127  # of float32
_SHIFT = _MANTISSA - _FINENESS
_SMALLEST_EXPONENT = -126


class Histogram:
    """Counts of the elements of each block over bins of ``[-2**e, 2**e)``, with ``e`` per block.

    Each of the 24 octaves (8 for many blocks) below ``2**e`` is divided evenly, so that bins are narrow where values
    are small: a few large elements do not hide how the others are distributed. The bins beside zero hold what is
    smaller still. A bin is a run of float32 numbers that begin with the same bits.

    ``e`` is the smallest that holds all elements. A larger ``e`` joins the bins next to zero, so that the histogram of
    many tensors does not depend on their order or on how they were split: merging is exact, associative, commutative.

    Attributes:
        counts: int64 ``[blocks, bins]``.
        exponents: int64 ``[blocks]``.
        low: smallest element of each block, float32 ``[blocks]``.
        high: largest element.
    """

    __slots__ = ("counts", "exponents", "high", "low")

    def __init__(self, counts: torch.Tensor, exponents: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        self.counts, self.exponents, self.low, self.high = counts, exponents, low, high

    @staticmethod
    def bins_for(rows: int) -> int:
        """Return the number of bins of a histogram of ``rows`` blocks."""
        return 2 * (_OCTAVES if rows <= _MANY else _OCTAVES_OF_MANY) << _FINENESS

    @staticmethod
    def extremes(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``low`` and ``high`` of the histogram of ``blocks``, without counting."""
        return _extremes(_finite(blocks)[0])

    @classmethod
    def of(cls, blocks: torch.Tensor, bins: int | None = None) -> Histogram:
        """Return the histogram of ``blocks [blocks, elements]``; NaN and infinities are not counted.

        Args:
            blocks: floating point.
            bins: number of bins; ``bins_for`` as many blocks unless these are part of more.
        """
        values, finite = _finite(blocks)
        rows = len(values)
        half = (cls.bins_for(rows) if bins is None else bins) // 2
        low, high = _extremes(values)
        largest = torch.maximum(-low, high)
        exponents = torch.frexp(largest).exponent.long().clamp(min=_SMALLEST_EXPONENT)
        exponents = torch.where(largest > 0, exponents, _SMALLEST_EXPONENT)
        leading = (values.abs().view(torch.int32) >> _SHIFT).long()
        size = (leading - _first(exponents, half)[:, None]).clamp(min=0)
        index = torch.where(values < 0, half - 1 - size, half + size)
        index += torch.arange(rows, device=index.device)[:, None] * (2 * half)
        counts = torch.bincount(index[finite], minlength=rows * 2 * half).reshape(rows, 2 * half)
        return cls(counts, exponents, low, high)

    @property
    def bins(self) -> int:
        """Number of bins, the same on both sides of zero."""
        return self.counts.shape[1]

    @property
    def edges(self) -> torch.Tensor:
        """Edges of the bins, ascending, float64 ``[blocks, bins + 1]``."""
        half = self.bins // 2
        steps = torch.arange(half + 1, device=self.counts.device)
        leading = (_first(self.exponents, half)[:, None] + steps).clamp(min=0)
        edges = (leading << _SHIFT).to(torch.int32).view(torch.float32).double()
        edges = torch.where(edges.isinf(), 2.0 ** (_BIAS + 1), edges)
        edges[:, 0] = 0.0
        return torch.cat([-edges[:, 1:].flip(1), edges], 1)

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
        if torch.equal(exponents, self.exponents):
            return self.counts
        half = self.bins // 2
        shift = (exponents - self.exponents)[:, None] << _FINENESS
        places = (torch.arange(half, device=shift.device) - shift).clamp(min=0)
        above = torch.zeros_like(self.counts[:, half:]).scatter_add_(1, places, self.counts[:, half:])
        below = torch.zeros_like(above).scatter_add_(1, places, self.counts[:, :half].flip(1))
        return torch.cat([below.flip(1), above], 1)

    def to_tensor(self) -> torch.Tensor:
        """Return everything in one int64 tensor, for checkpoints and other processes."""
        extremes = torch.stack([self.low, self.high]).view(torch.int32).long()
        shape = torch.tensor(self.counts.shape, device=self.counts.device)
        return torch.cat([shape, self.exponents, extremes.flatten(), self.counts.flatten()])

    @classmethod
    def from_tensor(cls, data: torch.Tensor) -> Histogram:
        """Return what ``to_tensor`` wrote.

        Raises:
            ValueError: the bins are not those of this class, as in checkpoints of earlier versions.
        """
        rows, bins = int(data[0]), int(data[1])
        if bins not in (2 * _OCTAVES << _FINENESS, 2 * _OCTAVES_OF_MANY << _FINENESS):
            raise ValueError(
                f"A checkpoint holds a range finder's histogram of {bins} bins, which is another version's. "
                "Calibrate again, or leave the _extra_state of range calculators out of the checkpoint."
            )
        exponents, low, high, counts = torch.split(data[2:], [rows, rows, rows, rows * bins])
        extremes = [part.to(torch.int32).view(torch.float32) for part in (low, high)]
        return cls(counts.reshape(rows, bins), exponents, *extremes)


def _finite(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements in float32, with zeros for those that do not count, and which do."""
    values = blocks.detach().to(torch.float32)
    finite = values.isfinite()
    return torch.where(finite, values, 0.0), finite


def _extremes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.amin(1) + 0.0, values.amax(1) + 0.0  # no negative zero


def _first(exponents: torch.Tensor, half: int) -> torch.Tensor:
    """Return the leading bits of the smallest number of ``half`` bins below ``2**exponents``, as an integer."""
    return ((exponents + _BIAS) << _FINENESS) - half
