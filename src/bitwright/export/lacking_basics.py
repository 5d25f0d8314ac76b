"""Operators that torch.onnx translates, and ExecuTorch or coreai-torch lack, written with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .lacking import composed, float_result_type, is_negative, log_of_sum, places_in_order, scanned
from .scattering import reduced_at_places

__all__ = ["LACKING_BASICS", "added_to"]

_aten = torch.ops.aten
_MEAN, _LARGEST = 1, 2
"""Modes of ``embedding_bag``."""


def _norm_of_difference(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(x - other, p)
    return distance


def _rounded(x: Tensor, *, decimals: int) -> Tensor:
    tens = 10.0 ** abs(decimals)
    return torch.round(x * tens) / tens if decimals >= 0 else torch.round(x / tens) * tens


def _variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(dim) if dim else list(range(x.dim()))
    options: dict[str, Any] = {"correction": 1 if correction is None else correction, "keepdim": keepdim}
    return torch.var(x, dims, **options), x.mean(dims, keepdim=keepdim)


def _deviation_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _variance_and_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def _of_dimension(function: Callable[..., Any]) -> Callable[..., Any]:
    """The overload of ``var_mean`` or ``std_mean`` that knows corrections of 1 and 0 only."""

    def of_dimension(x: Tensor, dim: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Any:
        return function(x, dim, correction=int(unbiased), keepdim=keepdim)

    return of_dimension


def _product_with_vector(x: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added_to(x, matrix @ vector, beta, alpha)


def _sum_of_products(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added_to(x, torch.bmm(left, right).sum(0), beta, alpha)


def added_to(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Return ``beta * x + alpha * product``, where what a factor of zero stands before counts for nothing, NaN or not.

    Args:
        x: broadcastable to ``product``.
        product: of matrices, shape (rows, columns), or of a matrix with a vector, shape (rows,).
        beta: a number.
        alpha: a number.
    """
    if not alpha:
        return (beta * x).expand(product.shape) if beta else torch.zeros_like(product)
    product = product if alpha == 1 else alpha * product
    return beta * x + product if beta else product


def _power_of_two(x: Tensor) -> Tensor:
    return torch.pow(2.0, x if x.dtype.is_floating_point else x.float())


def _times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    return (x * _power_of_two(exponent)).to(float_result_type(x, exponent))


def _log_of_sum_of_powers_of_two(x: Tensor, other: Tensor) -> Tensor:
    return log_of_sum(x * math.log(2), other * math.log(2)) / math.log(2)


def _running_log_of_sum(x: Tensor, dim: int) -> Any:
    if not x.dim():
        return x.clone()
    found = scanned(lambda earlier, later: [log_of_sum(earlier, later)], [x], dim)
    return found if found is NotImplemented else found[0]


def _bucket(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return places_in_order(boundaries, x, out_int32=out_int32, right=right)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    selected: Tensor = x.expand(shape)[mask.expand(shape)]
    return selected


def _bilinear(one: Tensor, two: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    outputs, left, right = weight.shape
    halves: Tensor = one @ weight.permute(1, 0, 2).reshape(left, outputs * right)
    result: Tensor = (halves.reshape([*one.shape[:-1], outputs, right]) * two.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """Rows are gathered and added up at their bags. Of the results, nothing reads those behind the first."""
    indices, offsets = indices.long(), (offsets[:-1] if include_last_offset else offsets).long()
    count, bags, dtype = indices.shape[0], offsets.shape[0], weight.dtype
    rows = torch.embedding(weight, indices)
    rows = rows.float() if rows.itemsize < 4 else rows
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    # The bag of a position: how many bags begin at it or before it. An empty one at the end begins behind all of them.
    begins = offsets.new_zeros(count + 1).scatter_add(0, offsets, torch.ones_like(offsets))
    bag = begins.cumsum(0)[:count] - 1
    counted = indices != (-1 if padding_idx is None else padding_idx % weight.shape[0])
    sizes = rows.new_zeros(bags).scatter_add(0, bag, counted.to(rows.dtype)).unsqueeze(1)
    if mode == _LARGEST:
        belongs = (bag == torch.arange(bags, device=bag.device).unsqueeze(1)) & counted
        largest = torch.where(belongs.unsqueeze(-1), rows, -math.inf).amax(1)
        result = torch.where(sizes > 0, largest, torch.zeros_like(largest))
    else:
        rows = torch.where(counted.unsqueeze(1), rows, torch.zeros_like(rows))
        result = rows.new_zeros(bags, rows.shape[1]).scatter_add(0, bag.unsqueeze(1).expand_as(rows), rows)
        result = result / sizes.clamp(min=1) if mode == _MEAN else result
    return result.to(dtype), bag, sizes, sizes


def _shifted_left(x: Tensor, bits: int) -> Tensor:
    """``x << bits``; few bits are cut off by a remainder, because a product that is too large may saturate."""
    info = torch.iinfo(x.dtype)
    if not 0 <= bits < info.bits:
        return torch.zeros_like(x)
    if info.bits < 32:
        return (torch.remainder(x.int() * 2**bits - info.min, 2**info.bits) + info.min).to(x.dtype)
    shifted: Tensor = x * 2**bits
    return shifted


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """``x >> bits``; all bits of a type, and more, leave its sign alone."""
    info = torch.iinfo(x.dtype)
    bits = bits if 0 <= bits < info.bits else info.bits
    if info.bits < 32:
        return torch.div(x.int(), 2**bits, rounding_mode="floor").to(x.dtype)
    return torch.div(x, 2**bits, rounding_mode="floor") if bits < info.bits - 1 else -(x < 0).to(x.dtype)


def _place_of_smallest(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """``argmin``, of integers by their complements: the smallest of a type has no negative."""
    if x.dtype.is_floating_point:
        return torch.argmax(-x, dim, keepdim)
    return torch.argmax(torch.bitwise_not(x.int() if x.itemsize < 4 else x), dim, keepdim)


_QUANTILES = [
    getattr(packet, overload) for packet in (_aten.quantile, _aten.nanquantile) for overload in ("default", "scalar")
]
"""They sort, which has to be seen to be written with others."""

LACKING_BASICS: dict[Any, Callable[..., Any]] = {
    _aten._is_all_true.default: lambda x: torch.all(x),
    _aten._is_any_true.default: lambda x: torch.any(x),
    _aten.__lshift__.Scalar: _shifted_left,
    _aten.__rshift__.Scalar: _shifted_right,
    _aten.addbmm.default: _sum_of_products,
    _aten.addmv.default: _product_with_vector,
    _aten.argmin.default: _place_of_smallest,
    _aten.bilinear.default: _bilinear,
    _aten.bucketize.Tensor: _bucket,
    _aten.dist.default: _norm_of_difference,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten.exp2.default: _power_of_two,
    _aten.ldexp.Tensor: _times_power_of_two,
    _aten.logaddexp2.default: _log_of_sum_of_powers_of_two,
    _aten.logcumsumexp.default: _running_log_of_sum,
    _aten.masked_select.default: _masked_select,
    _aten.msort.default: lambda x: torch.sort(x, 0)[0],
    **{quantile: composed(quantile) for quantile in _QUANTILES},
    _aten.round.decimals: _rounded,
    _aten.scatter_reduce.two: reduced_at_places,
    _aten.signbit.default: is_negative,
    _aten.std_mean.correction: _deviation_and_mean,
    _aten.std_mean.dim: _of_dimension(_deviation_and_mean),
    _aten.var_mean.correction: _variance_and_mean,
    _aten.var_mean.dim: _of_dimension(_variance_and_mean),
}
"""Decompositions of operators that ExecuTorch or coreai-torch has no translation or no kernel of."""
