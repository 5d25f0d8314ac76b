"""Measures of how far a compressed tensor is from its reference; streaming, in float64, with bounded memory."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SQNR_LIMIT_DB", "ErrorAccumulator", "ErrorMetrics", "Histogram", "HistogramAccumulator", "decibels"]

SQNR_LIMIT_DB = 200.0
"""SQNRs are reported between minus and plus this; plus this means that the two tensors are equal."""

_LOST = 0.5


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ErrorMetrics(_Report):
    """How far a tensor is from its reference.

    Attributes:
        sqnr_db: power of the reference over the power of the difference, in dB, at most 200 (equal).
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
        x, y = reference.detach().float(), other.detach().float()
        finite = torch.isfinite(y) | ~torch.isfinite(x)
        broken = int((~finite).sum())
        self._not_finite += broken
        if broken:  # what is lost counts as an error of the size of the signal
            y = torch.where(finite, y, torch.zeros_like(y))
        x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)  # masked attention scores
        y = torch.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)
        difference = y - x
        squares = [x.square(), difference.square(), x * y, y.square()]
        for place, product in enumerate(squares):
            self._sums[place] += float(product.sum(dtype=torch.float64))
        self._max_error = max(self._max_error, float(difference.abs().max()))
        self._add_channels(squares[0], squares[1])

    def result(self) -> ErrorMetrics | None:
        """Return the metrics; None if nothing was added."""
        if not self.batches:
            return None
        signal, noise, dot, power = self._sums
        norms = math.sqrt(signal * power)
        shares = self._channel_noise()
        broken = self._not_finite > 0
        return ErrorMetrics(
            sqnr_db=-SQNR_LIMIT_DB if broken else decibels(signal, noise),
            channel_sqnr_db=decibels(signal, noise) if shares is None else decibels(1.0, float(shares.mean())),
            lost_channels=0.0 if shares is None else float((shares > _LOST).double().mean()),
            cosine=dot / norms if norms else float(signal == power),
            max_error=self._max_error,
            not_finite=self._not_finite,
        )

    def _add_channels(self, signal: torch.Tensor, noise: torch.Tensor) -> None:
        if self.channel_axis is None or signal.ndim < 2:
            return
        others = [dim for dim in range(signal.ndim) if dim != self.channel_axis % signal.ndim]
        sums = torch.stack([part.sum(others, dtype=torch.float64).cpu() for part in (signal, noise)])
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
            return torch.zeros(1)
        share = torch.where(signal > 0, noise / signal.clamp_min(1e-300), torch.ones_like(noise))
        return share[used].clamp_max(1.0)


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
        values = values.detach().float().reshape(-1)
        values = values[torch.isfinite(values)]
        if not values.numel():
            return
        low, high = (float(edge) for edge in torch.aminmax(values))
        self._cover(low, high)
        # torch's histc leaves out what rounding puts beyond the last edge
        counted = torch.histc(values.clamp(self.low, self.high), self.bins, self.low, self.high)
        self.counts += counted.to("cpu", torch.int64)

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
