"""What shows that a tensor was spoilt, and not merely compressed: a wrong range, values in wrong places, a channel
that drowns the others.

Compression in good order has marks by which it can be told from these, whatever the bits. Rounding to the nearest code
never adds more noise than the signal has power, and neither does pruning. What remains is of the right size: for
palettes of centroids and for masks, the projection of the float tensor on the compressed one is the compressed one
(Gersho and Gray, Vector Quantization and Signal Compression, 1992, section 6.2), and rounding comes near to it. And a
quantizer whose range is found anew on the float tensor does about as well as the one in the model.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .metrics import MASKED, SQNR_LIMIT_DB, decibels, pieces_of

__all__ = ["Evidence", "Usual", "activation_evidence", "problems_of", "usual_evidence", "weight_evidence"]

_WORSE_THAN_NOTHING = 1.2
_TRAINED_ANEW = 0.8
_WRONG_SIZE = 3.0
_NOISY = 0.3
_ALIKE = 0.5
_VISIBLE = 0.01
_LOST = 0.5
_BEYOND = 10.0
_EXCESS = {"weight": 10.0, "activation": 100.0}
_OUTLYING = 200.0
_FEW = 0.05
_CHANNELS = 3
_ENTRIES = 8
_SILENT = 1e-10

_X, _XY, _Y = range(3)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Second moments of a tensor and of its compressed form.

    Attributes:
        kind: ``"weight"`` or ``"activation"``.
        size: elements.
        moments: sums of ``x²``, ``x·y`` and ``y²``, float64 ``[3, channels]``, by dimension that channels run along;
            under ``None`` those of the whole, ``[3, 1]``.
        expected: the same where ``y`` comes from a quantizer that finds its range anew; empty where there is none.
    """

    kind: str
    size: int
    moments: Mapping[int | None, torch.Tensor]
    expected: Mapping[int | None, torch.Tensor]

    def noise(self) -> float:
        """Power of the difference over the power of ``x``; infinite where ``x`` is zero and ``y`` is not."""
        return float(_noise(self.moments[None]))

    def excess(self) -> float | None:
        """Noise over that of the quantizer that finds its range anew; None where there is none."""
        if None not in self.expected:
            return None
        floor = 10 ** (-SQNR_LIMIT_DB / 10)
        return max(self.noise(), floor) / max(float(_noise(self.expected[None])), floor)


def weight_evidence(
    reference: torch.Tensor, compressed: torch.Tensor, simulator: FakeQuantizeImplBase | None
) -> Evidence:
    """Compare a weight with its compressed form, as a whole and by channels of its first two dimensions."""
    axes = [axis for axis in range(min(2, reference.ndim)) if reference.ndim > 1 and reference.shape[axis] >= _CHANNELS]
    anew = None if simulator is None else _quantized_anew(simulator, reference)
    moments, expected = (_all_moments(reference, other, axes) for other in (compressed, anew))
    return Evidence("weight", reference.numel(), moments, expected)


def activation_evidence(x: torch.Tensor, y: torch.Tensor, simulator: FakeQuantizeImplBase) -> Evidence:
    """Compare what enters a quantizer with what leaves it; entries that stand for infinity are left out."""
    plain = x.detach().float().reshape(-1)
    kept = plain.abs() < MASKED  # false for NaN
    quantized = y.detach().float().reshape(-1)
    anew = _quantized_anew(simulator, x)
    if not bool(kept.all()):
        plain, quantized, anew = plain[kept], quantized[kept], None
    moments, expected = (_all_moments(plain, other, []) for other in (quantized, anew))
    return Evidence("activation", x.numel(), moments, expected)


@dataclass(frozen=True, slots=True)
class Usual:
    """What most tensors of a kind have in a model; training, for one, moves all weights away from the float ones."""

    noise: float = 0.0
    excess: float = 1.0


def usual_evidence(found: Iterable[Evidence]) -> dict[str, Usual]:
    """Return the lower median of noise and excess by kind, where there are several of the kind."""
    by_kind: dict[str, list[Evidence]] = {}
    for evidence in found:
        by_kind.setdefault(evidence.kind, []).append(evidence)
    usual = {}
    for kind, several in by_kind.items():
        excesses = [excess for evidence in several if (excess := evidence.excess()) is not None]
        noise = statistics.median_low([evidence.noise() for evidence in several]) if len(several) > 1 else 0.0
        usual[kind] = Usual(noise, max(1.0, statistics.median_low(excesses)) if len(excesses) > 1 else 1.0)
    return usual


def problems_of(evidence: Evidence, usual: Mapping[str, Usual]) -> tuple[str, ...]:
    """Return what is broken in words; nothing for a tensor that was compressed in good order.

    Args:
        evidence: of the tensor.
        usual: of :func:`usual_evidence`.
    """
    if evidence.noise() == 0:
        return ()
    common = usual.get(evidence.kind, Usual())
    allowed = _EXCESS[evidence.kind] * common.excess
    whole = _wrong_values(evidence, common)
    if whole is not None:
        return (whole,)
    by_channel = [
        _outlying_channel(moments, axis)
        or _lost_channel(moments, evidence.expected.get(axis), axis, allowed, evidence.size // moments.shape[1])
        for axis, moments in evidence.moments.items()
        if axis is not None and bool(torch.isfinite(moments).all()) and bool(moments[_X].any())
    ]
    problems = tuple(problem for problem in by_channel if problem is not None)
    return problems or tuple(_wrong_range(evidence, allowed))


def _wrong_range(evidence: Evidence, allowed: float) -> Iterator[str]:
    noise, excess = evidence.noise(), evidence.excess()
    if excess is not None and excess > allowed and noise > _VISIBLE:
        found, expected = decibels(1.0, noise), decibels(1.0, noise / excess)
        yield f"its SQNR is {found:.1f} dB, where a range found anew gives {expected:.1f} dB"


def _wrong_values(evidence: Evidence, usual: Usual) -> str | None:
    signal, product, power = evidence.moments[None].flatten().tolist()
    noise = evidence.noise()
    if not math.isfinite(signal + power):
        return "it has entries that are NaN or infinite"
    if not signal:
        return None
    if not power:
        return "all of its values became 0"
    gain = product / power
    if noise > _NOISY and gain > _WRONG_SIZE:
        return f"its values are {gain:.3g} times too small"
    if noise > _BEYOND and product * product > _ALIKE * signal * power and gain > 0:
        return f"its values are {1 / gain:.3g} times too large"
    if noise > (_WORSE_THAN_NOTHING if usual.noise < _TRAINED_ANEW else _EXCESS[evidence.kind] * usual.noise):
        return (
            f"its error is greater than the tensor itself (SQNR {decibels(1.0, noise):.1f} dB), as if its values stood "
            "in other places"
        )
    return None


def _outlying_channel(moments: torch.Tensor, axis: int) -> str | None:
    power = moments[_X]
    ratio = (power / _median_power(power)).sqrt()
    outlying = int((ratio > _OUTLYING).sum())
    if not 0 < outlying <= max(1, int(_FEW * len(power))):
        return None
    worst = int(ratio.argmax())
    return f"channel {worst} of dimension {axis} is {float(ratio[worst]):,.0f} times as large as the median channel"


def _lost_channel(
    moments: torch.Tensor, expected: torch.Tensor | None, axis: int, allowed: float, entries: int
) -> str | None:
    if entries < _ENTRIES:
        return None
    power, noise = moments[_X], _noise(moments)
    median = _median_power(power)
    usual = _usual_noise(power, noise) if expected is None else _noise(expected)
    beyond = (noise > _BEYOND) & (power > 0.01 * median)
    lost = (noise > _LOST) & (power > 0.25 * median)
    found = (beyond | lost) & (noise > allowed * usual)
    if not bool(found.any()):
        return None
    worst = int(torch.where(found, noise, 0.0).argmax())
    return (
        f"channel {worst} of dimension {axis} has an SQNR of {decibels(1.0, float(noise[worst])):.1f} dB, where "
        f"{decibels(1.0, float(usual[worst])):.1f} dB are usual"
    )


def _usual_noise(power: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Noise of a channel with the median error; a table that all channels share errs as much in quiet ones."""
    alive = power > 0
    error = (noise * power)[alive].median()
    return torch.where(alive, torch.maximum(error / power, noise[alive].median()), 0.0)


def _median_power(power: torch.Tensor) -> torch.Tensor:
    """Median over the channels that are not dead."""
    return power[power > _SILENT * power.max()].median()


def _noise(moments: torch.Tensor) -> torch.Tensor:
    difference = (moments[_X] - 2 * moments[_XY] + moments[_Y]).clamp_min(0)
    return torch.where(difference > 0, difference / moments[_X], 0.0)


def _all_moments(x: torch.Tensor, y: torch.Tensor | None, axes: Iterable[int]) -> dict[int | None, torch.Tensor]:
    return {} if y is None else {axis: _moments(x, y, axis) for axis in (None, *axes)}


def _moments(x: torch.Tensor, y: torch.Tensor, axis: int | None) -> torch.Tensor:
    sums = torch.zeros(3, 1 if axis is None else x.shape[axis], dtype=torch.float64)
    for a, b in zip(pieces_of(x.detach(), axis), pieces_of(y.detach(), axis), strict=True):
        a, b = a.double(), b.double()
        sums += torch.stack([part.sum((0, 2)).cpu() for part in (a * a, a * b, b * b)])
    return sums


def _quantized_anew(simulator: FakeQuantizeImplBase, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor quantized with a range found on it alone; None where that cannot be done."""
    try:
        fresh = copy.deepcopy(simulator)
        fresh._forward_hooks.clear()
        fresh._forward_pre_hooks.clear()
        with torch.no_grad():
            if not fresh.is_stateless:
                fresh.set_export_mode(False)
                fresh.reset_statistics()
                fresh.enable_observer()
            fresh.enable_fake_quant()
            y = fresh(tensor.detach().clone())
    except (RuntimeError, TypeError, ValueError):
        return None
    return y if y.shape == tensor.shape else None
