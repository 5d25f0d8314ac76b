"""Numbers moved into a 16-bit float format: what fits, what is clamped, what is refused."""

from __future__ import annotations

import math
from typing import Final

import torch

#: Finite magnitudes from here on stand for "infinity" in masks (``finfo(float32).min`` and the like).
STANDS_FOR_INFINITY: Final = 1e38

_PART: Final = 1 << 22


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite magnitude of ``dtype``."""
    return float(torch.finfo(dtype).max)


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive (subnormal) magnitude of ``dtype``."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)


def fits_scalar(value: float, dtype: torch.dtype) -> bool:
    """Tell whether ``value`` keeps its meaning in ``dtype``: it is in range, not finite, or stands for infinity."""
    return not math.isfinite(value) or abs(value) <= largest(dtype) or abs(value) >= STANDS_FOR_INFINITY


def is_beyond(value: float, dtype: torch.dtype) -> bool:
    """Tell whether ``value`` is finite and larger than every finite number of ``dtype``."""
    return math.isfinite(value) and abs(value) > largest(dtype)


def narrow_scalar(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` as ``dtype`` holds it.

    Infinities and NaN stay. A finite value that stands for infinity becomes the largest finite one, so that a
    mask made of ``finfo(float32).min`` stays finite. A non-zero value never becomes zero: an epsilon keeps
    protecting its division.

    Args:
        value: a value for which :func:`fits_scalar` holds.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    if not math.isfinite(value):
        return value
    limit = largest(dtype)
    if abs(value) > limit:
        return math.copysign(limit, value)
    rounded = float(torch.tensor(value, dtype=torch.float64).to(dtype))
    if rounded == 0.0 and value != 0.0:
        return math.copysign(smallest(dtype), value)
    return rounded


def narrow_bound(value: float, dtype: torch.dtype) -> float:
    """Return ``value``, which bounds or shifts results, as ``dtype`` holds it: as :func:`narrow_scalar`, but not one.

    A number that only comes near 1 or -1 guards the pole of a logarithm, an arctangent or a quotient, so that it takes
    the next number of ``dtype`` on its own side.
    """
    return float(narrow_bounds(torch.tensor(value, dtype=torch.float64), dtype))


def narrow_threshold(
    value: float, dtype: torch.dtype, *, above: bool, stands_for: float = float(torch.finfo(torch.float32).max)
) -> float:
    """Return a number of ``dtype`` with which its numbers compare as they do with ``value``.

    Args:
        value: any number.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        above: whether ``value`` itself is on the upper side, as for ``<`` and ``>=``; it is on the lower one for ``<=``
            and ``>``.
        stands_for: magnitude of the mask number that the largest finite number of ``dtype`` is compared as, when
            ``dtype`` does not hold ``value``.
    """
    if is_beyond(value, dtype):
        limit = math.copysign(largest(dtype), value)
        if abs(value) >= stands_for:
            return limit if abs(value) == stands_for else math.copysign(math.inf, value)
        return limit if above == (value > 0) else _neighbour(limit, 0.0, dtype)
    narrowed = narrow_scalar(value, dtype)
    if not math.isfinite(value):
        return narrowed
    if above and narrowed < value:
        return _neighbour(narrowed, math.inf, dtype)
    if not above and narrowed > value:
        return _neighbour(narrowed, -math.inf, dtype)
    return narrowed


def _neighbour(value: float, toward: float, dtype: torch.dtype) -> float:
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(toward, dtype=dtype)))


def fits_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether every entry of a float32 ``tensor`` keeps its meaning in ``dtype`` (see :func:`fits_scalar`)."""
    for part in _parts(tensor):
        magnitude = part.abs()
        if bool(((magnitude > largest(dtype)) & (magnitude < STANDS_FOR_INFINITY)).any()):
            return False
    return True


def holds_mask_numbers(tensor: torch.Tensor) -> bool:
    """Tell whether a float32 ``tensor`` holds infinities, or finite numbers that stand for them."""
    return tensor.dtype == torch.float32 and any(
        bool((part.abs() >= STANDS_FOR_INFINITY).any()) for part in _parts(tensor)
    )


def loses_precision(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether ``dtype`` would lose more of a float32 ``tensor`` than rounding explains.

    Rounding a normal number costs at most half of the machine epsilon. A relative error (Frobenius norm) above
    one epsilon means that most of the tensor lies among the subnormal numbers or below, as small quantization
    scales do.
    """
    energy = lost = 0.0
    for part in _parts(tensor):
        narrow = part.to(dtype).double()
        exact = torch.where(narrow.isfinite(), part.double(), 0.0)
        energy += float(exact.square().sum())
        lost += float((torch.where(narrow.isfinite(), narrow, 0.0) - exact).square().sum())
    return lost > energy * float(torch.finfo(dtype).eps) ** 2


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``tensor`` in pieces, so that checking a large one takes little memory."""
    return torch.split(tensor.detach().reshape(-1), _PART)


def narrow_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a float ``tensor`` in ``dtype``, entry by entry as :func:`narrow_scalar` does; the argument stays."""
    values = tensor.detach()
    limit = largest(dtype)
    saturated = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    narrow = saturated.to(dtype)
    vanished = (narrow == 0) & (values != 0)
    if bool(vanished.any()):
        narrow = torch.where(vanished, torch.copysign(torch.full_like(narrow, smallest(dtype)), narrow), narrow)
    return narrow


def narrow_bounds(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a ``tensor`` of float32 or float64 in ``dtype``, entry by entry as :func:`narrow_bound` does."""
    narrow, magnitude = narrow_tensor(tensor, dtype), tensor.detach().abs()
    rounded = (narrow.abs() == 1.0) & (magnitude != 1.0)
    if bool(rounded.any()):
        beside = torch.where(magnitude > 1.0, _neighbour(1.0, math.inf, dtype), _neighbour(1.0, 0.0, dtype))
        narrow = torch.where(rounded, torch.copysign(beside.to(dtype), narrow), narrow)
    return narrow
