"""Measures of how far a compressed tensor is from its reference; streaming, in float64, with bounded memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MASKED",
    "PIECE",
    "SQNR_LIMIT_DB",
    "ErrorAccumulator",
    "ErrorMetrics",
    "Histogram",
    "HistogramAccumulator",
    "decibels",
    "parts_of",
    "pieces_of",
]

SQNR_LIMIT_DB = 200.0
"""SQNRs are reported between minus and plus this; plus this means that the two tensors are equal."""

PIECE = 1 << 20
"""Elements that are looked at at once, so that sums over a large tensor need little memory beside it."""

MASKED = 1e30
"""Values of this size and above stand for infinity: what masked positions hold, such as the least float32."""

_LOST = 0.5
_HIDDEN_DB = 10.0


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ErrorMetrics(_Report):
    """How far a tensor is from its reference.

    Attributes:
        sqnr_db: power of the reference over the power of the difference, in dB, at most 200 (equal). Entries that stand
            for infinity in both, such as the least float32 of masked positions, are left out.
        channel_sqnr_db: the same, where the relative noise is averaged over channels, each counted as 1 at most: low
            where channels drown that are small beside others.
        lost_channels: share of channels whose noise has more than half of their power.
        cosine: cosine of the angle between the two.
        max_error: largest absolute difference, in the unit of the tensor.
        not_finite: entries of the compressed tensor that are NaN or infinite; the SQNR is -200 where there are any.
    """

    sqnr_db: Annotated[float, Field(ge=-SQNR_LIMIT_DB, le=SQNR_LIMIT_DB)]
    channel_sqnr_db: Annotated[float, Field(ge=-SQNR_LIMIT_DB, le=SQNR_LIMIT_DB)]
    lost_channels: Annotated[float, Field(ge=0, le=1)] = 0.0
    cosine: float
    max_error: float
    not_finite: int = 0

    @property
    def relative_noise(self) -> float:
        """Power of the difference over the power of the reference."""
        return float(10 ** (-self.sqnr_db / 10))

    @property
    def hidden_noise(self) -> float:
        """Noise of channels that the SQNR hides, because others are far larger.

        The share of lost channels; or the relative noise averaged over channels, where that is more than 10 dB above
        the relative noise of the whole, if that is greater.
        """
        hidden = self.sqnr_db - self.channel_sqnr_db > _HIDDEN_DB
        return max(self.lost_channels, float(10 ** (-self.channel_sqnr_db / 10)) if hidden else 0.0)


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)`` between minus and plus 200; 200 where there is no noise."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -SQNR_LIMIT_DB
    if noise <= 0:
        return SQNR_LIMIT_DB
    if signal <= 0:
        return -SQNR_LIMIT_DB
    return max(-SQNR_LIMIT_DB, min(SQNR_LIMIT_DB, 10 * math.log10(signal / noise)))


class ErrorAccumulator:
    """Adds up errors over batches.

    Args:
        channel_axis: the dimension that channels run along; None where there are none.
    """

    def __init__(self, channel_axis: int | None = None) -> None:
        self.channel_axis = channel_axis
        self.batches = 0
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._max_error = 0.0
        self._not_finite = 0
        self._masked = MASKED
        self._channels: torch.Tensor | None = None

    def update(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Add one pair of tensors of equal shape.

        Raises:
            ValueError: the shapes differ.
        """
        if reference.shape != other.shape:
            raise ValueError(f"the shapes differ: {tuple(reference.shape)} and {tuple(other.shape)}")
        self.batches += 1
        if not reference.numel():
            return
        self._masked = torch.finfo(torch.float16).max if reference.dtype == torch.float16 else MASKED
        axis = self.channel_axis if reference.ndim > 1 else None
        sums = torch.zeros(2, 1 if axis is None else reference.shape[axis], dtype=torch.float64)
        pieces = zip(pieces_of(reference.detach(), axis), pieces_of(other.detach(), axis), strict=True)
        for expected, found in pieces:
            sums += self._add(expected.double(), found.double())
        self._sums[0] += float(sums[0].sum())
        self._sums[1] += float(sums[1].sum())
        if axis is not None:
            self._add_channels(sums)

    def result(self) -> ErrorMetrics | None:
        """Return the metrics; None if nothing was added."""
        if not self.batches:
            return None
        signal, noise, dot, power = self._sums
        norms = math.sqrt(signal) * math.sqrt(power)
        cosine = dot / norms if norms else float(signal == power)
        shares = self._channel_noise()
        broken = self._not_finite > 0
        return ErrorMetrics(
            sqnr_db=-SQNR_LIMIT_DB if broken else decibels(signal, noise),
            channel_sqnr_db=decibels(signal, noise) if shares is None else decibels(1.0, float(shares.mean())),
            lost_channels=0.0 if shares is None else float((shares > _LOST).double().mean()),
            cosine=cosine if math.isfinite(cosine) else 0.0,
            max_error=min(self._max_error, sys.float_info.max),
            not_finite=self._not_finite,
        )

    def _add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add a piece of shape ``[outer, channels, inner]``; return each channel's powers of signal and noise."""
        if not bool(torch.isfinite(x.sum() + y.sum())):
            finite = torch.isfinite(y) | ~torch.isfinite(x)
            self._not_finite += int((~finite).sum())
            y = torch.where(finite, y, 0.0)  # what is lost counts as an error of the size of the signal
            x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)  # masked attention scores
            y = torch.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)
        masked = (x.abs() >= self._masked) & (x == y)
        if bool(masked.any()):  # their power would hide every error beside them
            x, y = x.masked_fill(masked, 0.0), y.masked_fill(masked, 0.0)
        self._sums[2] += float((x * y).sum())
        self._sums[3] += float(y.square().sum())
        difference = y - x
        self._max_error = max(self._max_error, float(difference.abs().max()))
        return torch.stack([part.square().sum((0, 2)).cpu() for part in (x, difference)])

    def _add_channels(self, sums: torch.Tensor) -> None:
        if self._channels is None:
            self._channels = sums
        elif self._channels.shape == sums.shape:
            self._channels += sums

    def _channel_noise(self) -> torch.Tensor | None:
        """Relative noise of every channel that is not silent in both tensors, 1 at most."""
        if self._channels is None:
            return None
        signal, noise = self._channels
        used = (signal > 0) | (noise > 0)
        if not bool(used.any()):
            return torch.zeros(1, dtype=signal.dtype)
        share = torch.where(signal > 0, noise / signal.clamp_min(1e-300), torch.ones_like(noise)).nan_to_num(1.0)
        return share[used].clamp_max(1.0)


def parts_of(tensor: torch.Tensor, size: int, dim: int = 0) -> Iterator[torch.Tensor]:
    """Yield views of ``size`` entries, or of one if that is less, along a dimension; the last may be smaller."""
    size, total = max(1, size), tensor.shape[dim]
    for start in range(0, total, size):
        yield tensor.narrow(dim, start, min(size, total - start))


def pieces_of(tensor: torch.Tensor, axis: int | None) -> Iterator[torch.Tensor]:
    """Yield a tensor, if it has elements, in parts of about ``PIECE`` and shape ``[outer, channels, inner]``."""
    if not tensor.numel():
        return
    if axis is None:
        tensor = tensor.reshape(1, 1, -1)
    else:
        axis %= tensor.ndim
        outer, inner = math.prod(tensor.shape[:axis]), math.prod(tensor.shape[axis + 1 :])
        tensor = tensor.reshape(outer, tensor.shape[axis], inner)
    _, channels, inner = tensor.shape
    for part in parts_of(tensor, PIECE // (channels * inner)):
        yield from parts_of(part, PIECE // channels, dim=2) if len(part) == 1 else (part,)


class Histogram(_Report):
    """Counts of values in bins of equal width.

    Attributes:
        low: left edge of the first bin.
        high: right edge of the last one.
        counts: values in each bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]


class HistogramAccumulator:
    """A histogram whose range doubles, two bins becoming one, when values lie outside.

    Args:
        bins: number of bins, even.
    """

    def __init__(self, bins: int = 48) -> None:
        self.bins = bins
        self.low = self.high = 0.0
        self.counts = torch.zeros(bins, dtype=torch.int64)

    def update(self, values: torch.Tensor) -> None:
        """Count the finite values of a tensor."""
        pieces = list(parts_of(values.detach().reshape(-1), PIECE))
        edges = [torch.aminmax(finite) for piece in pieces if (finite := _finite(piece)).numel()]
        if not edges:
            return
        self._cover(min(float(low) for low, _ in edges), max(float(high) for _, high in edges))
        for piece in pieces:
            # torch's histc leaves out what rounding puts beyond the last edge
            kept = _finite(piece).double().clamp(self.low, self.high)  # edges may lie beyond float32
            self.counts += torch.histc(kept, self.bins, self.low, self.high).to("cpu", torch.int64)

    def result(self) -> Histogram | None:
        """Return the histogram; None if it is empty."""
        if not int(self.counts.sum()):
            return None
        return Histogram(low=self.low, high=self.high, counts=tuple(self.counts.tolist()))

    def _cover(self, low: float, high: float) -> None:
        if self.low == self.high:
            margin = 0.05 * (high - low) or 0.5 * max(abs(high), 1e-12)
            self.low, self.high = low - margin, high + margin
            return
        while low < self.low:
            self._merge(upper=True)
            self.low -= self.high - self.low
        while high > self.high:
            self._merge(upper=False)
            self.high += self.high - self.low

    def _merge(self, upper: bool) -> None:
        merged = self.counts.reshape(-1, 2).sum(1)
        empty = torch.zeros(self.bins - len(merged), dtype=torch.int64)
        self.counts = torch.cat([empty, merged] if upper else [merged, empty])


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Return the finite values in float32."""
    values = values.float()
    finite = torch.isfinite(values)
    return values if bool(finite.all()) else values[finite]
