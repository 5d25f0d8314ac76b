"""Operators that several converters have no translation of, written with others that they have."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .decomposing import decomposed

__all__ = [
    "LACKING",
    "composed",
    "equal_windows",
    "float_result_type",
    "is_negative",
    "log_of_sum",
    "places_in_order",
    "scanned",
    "without_lacking",
]

_aten = torch.ops.aten
_MOST_WINDOWS = 256
"""Windows of different sizes that a pool may have, each of which is an operator of its own."""


def without_lacking(
    program: torch.export.ExportedProgram, table: dict[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram | None:
    """Return a program without the operators of a table; None where none can be written with others.

    Args:
        program: not changed.
        table: decompositions, which return NotImplemented for arguments that they have no form for.
    """
    before = _calls(program, table)
    if not before:
        return None
    with contextlib.suppress(Exception):  # of torch's, for sizes that depend on values: the operators are lacking
        written = decomposed(program, table)
        return written if _calls(written, table) < before else None
    return None


def _calls(program: torch.export.ExportedProgram, table: dict[Any, Callable[..., Any]]) -> int:
    """How often a program calls operators of a table, or their forms that write in place."""
    return sum(node.op == "call_function" and _without_write(node.target) in table for node in program.graph.nodes)


def _without_write(op: Any) -> Any:
    """What an operator that writes in place becomes in a program that is functional; others as they are."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or not op._schema.is_mutable:
        return op
    name = op._schema.name.removeprefix("aten::")
    name = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")
    return getattr(getattr(_aten, name, None), op._overloadname, op)


def composed(op: Any) -> Callable[..., Any]:
    """Return what PyTorch itself calls for an operator that is made of others."""

    def of_others(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return of_others


def _or_composed(op: Any, made: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Return an operator that is made of others, and its decomposition: ours, or where it has no form PyTorch's."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        result = made(*args, **kwargs)
        return composed(op)(*args, **kwargs) if result is NotImplemented else result

    return op, decomposition


def _hypot(x: Tensor, other: Tensor) -> Tensor:
    """The root of the sum of two squares, which are not computed: they overflow long before the root does."""
    largest, smallest = torch.maximum(x.abs(), other.abs()), torch.minimum(x.abs(), other.abs())
    ratio = smallest / torch.where(largest > 0, largest, torch.ones_like(largest))
    return torch.where(largest == math.inf, largest, largest * torch.sqrt(1 + ratio * ratio))


def _number_less(x: Tensor, other: float, alpha: float = 1) -> Any:
    """``other - alpha * x``, where PyTorch changes the dtype of ``x``, or multiplies it."""
    dtype = torch.result_type(x, other)
    if dtype == x.dtype and alpha == 1:
        return NotImplemented
    return torch.sub(torch.full([], other, dtype=dtype, device=x.device), x.to(dtype), alpha=alpha)


def _whole_quotient(x: Any, other: Any) -> Any:
    """``//`` with a number on one side."""
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return NotImplemented
    dtype = torch.result_type(x, other)
    x, other = (
        one.to(dtype) if isinstance(one, Tensor) else torch.full([], one, dtype=dtype, device=device)
        for one, device in ((x, getattr(other, "device", None)), (other, getattr(x, "device", None)))
    )
    return torch.div(x, other, rounding_mode="floor")


def log_of_sum(x: Tensor, other: Tensor) -> Tensor:
    """``logaddexp``, and where both are the same infinity that."""
    largest, smallest = torch.maximum(x, other), torch.minimum(x, other)
    return torch.where(largest == smallest, largest + math.log(2), largest + torch.log1p(torch.exp(smallest - largest)))


def _with_sign_of_number(x: Tensor, other: float) -> Tensor:
    magnitude = _float_magnitude(x, other)
    return magnitude if math.copysign(1, other) > 0 else -magnitude


def is_negative(x: Tensor) -> Tensor:
    """``torch.signbit``, which tells zeros of both signs apart; of NaN it is False."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.dtype.is_floating_point else x < 0


def _with_sign_of(x: Tensor, other: Tensor) -> Tensor:
    magnitude = _float_magnitude(x, other)
    return torch.where(is_negative(other), -magnitude, magnitude)


def _float_magnitude(x: Tensor, other: Any) -> Tensor:
    return x.to(float_result_type(x, other)).abs()


def float_result_type(x: Tensor, other: Any) -> torch.dtype:
    """Return the dtype of what an operator on floats makes of two operands: of integers, floats."""
    dtype = torch.result_type(x, other)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _largest_number(x: Tensor, other: Tensor) -> Tensor:
    return torch.where(x != x, other, torch.where(other != other, x, torch.maximum(x, other)))


def _smallest_number(x: Tensor, other: Tensor) -> Tensor:
    return torch.where(x != x, other, torch.where(other != other, x, torch.minimum(x, other)))


def _distances(x: Tensor, other: Tensor, p: float = 2, compute_mode: int | None = None) -> Tensor:
    """``torch.cdist``: Euclidean ones of many rows from a product, as in PyTorch, all others from differences."""
    are_many = any(isinstance(count, int) and count > 25 for count in (x.shape[-2], other.shape[-2]))
    if p == 2 and compute_mode != 2 and (compute_mode == 1 or are_many):
        squares, others = ((one * one).sum(-1, keepdim=True) for one in (x, other))
        left = torch.cat([-2 * x, squares, torch.ones_like(squares)], -1)
        right = torch.cat([other, torch.ones_like(others), others], -1)
        return (left @ right.mT).clamp(min=0).sqrt()
    distance = (x.unsqueeze(-2) - other.unsqueeze(-3)).abs()
    if p == 0:
        return (distance != 0).to(x.dtype).sum(-1)
    if p == 1:
        return distance.sum(-1)
    if p == 2:
        return (distance * distance).sum(-1).sqrt()
    return distance.amax(-1) if p == math.inf else distance.pow(p).sum(-1).pow(1 / p)


def scanned(combine: Callable[..., Sequence[Tensor]], values: Sequence[Tensor], dim: int) -> Any:
    """Combine every place with all before it, in as many steps as its number has bits."""
    length, step = values[0].shape[dim], 1
    if not isinstance(length, int):
        return NotImplemented
    while step < length:
        earlier, later = ([one.narrow(dim, start, length - step) for one in values] for start in (0, step))
        combined = combine(*earlier, *later)
        values = [torch.cat([one.narrow(dim, 0, step), new], dim) for one, new in zip(values, combined, strict=True)]
        step *= 2
    return values


def _running_product(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    x = x.to(dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64))
    products = scanned(lambda earlier, later: [earlier * later], [x], dim) if x.dim() else [x]
    return products if products is NotImplemented else products[0]


def _running_extreme(is_further: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """``cummax`` or ``cummin``, whose places are the last ones of equal values; NaN stays from where it is."""

    def later_if_further(first: Tensor, place: Tensor, second: Tensor, other_place: Tensor) -> list[Tensor]:
        further = is_further(second, first) | (second != second)
        return [torch.where(further, second, first), torch.where(further, other_place, place)]

    def running(x: Tensor, dim: int) -> Any:
        if not x.dim():
            return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
        places = torch.arange(x.shape[dim], device=x.device)
        places = places.reshape([-1, *[1] * (x.dim() - 1 - dim % x.dim())]).expand(x.shape)
        found = scanned(later_if_further, [x, places], dim)
        return found if found is NotImplemented else tuple(found)

    return running


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest value; NaN where there is any."""
    if not x.dim():
        return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
    if not isinstance(x.shape[dim], int):
        return NotImplemented
    values, places = (one.narrow(dim, k - 1, 1) for one in torch.topk(x, k, dim, largest=False))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median_of(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """The median of one dimension, the lower one of two."""
    if not x.dim() or not isinstance(x.shape[dim], int):
        return _kth(x, 1, dim, keepdim)
    values, places = _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.dtype.is_floating_point:
        largest = x.amax(dim, keepdim)  # which is NaN where there is any
        values = torch.where(largest != largest, largest, values)
    return values, places


def _median(x: Tensor) -> Any:
    found = _median_of(x.reshape(-1), 0)
    return found if found is NotImplemented else found[0]


def _most_frequent(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.mode``: the smallest of the most frequent values, and the last place that it has."""
    if not x.dim():
        return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
    x = x.movedim(dim, -1)
    comparable = x.float() if x.itemsize < 4 else x
    counts = (comparable.unsqueeze(-1) == comparable.unsqueeze(-2)).sum(-1)
    largest = math.inf if comparable.dtype.is_floating_point else torch.iinfo(x.dtype).max
    frequent = torch.where(counts == counts.amax(-1, keepdim=True), comparable, torch.full_like(comparable, largest))
    value = frequent.amin(-1, keepdim=True)
    places = torch.arange(x.shape[-1], device=x.device)
    place = torch.where(comparable == value, places, torch.zeros_like(places)).amax(-1, keepdim=True)
    found = (value.to(x.dtype).movedim(-1, dim), place.movedim(-1, dim))
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def places_in_order(
    ordered: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """``torch.searchsorted``: how many values lie below each one."""
    if not isinstance(x, Tensor):
        ordered = ordered.to(torch.result_type(ordered, x))
        x = torch.full([], x, dtype=ordered.dtype, device=ordered.device)
    if sorter is not None:
        ordered = ordered.gather(-1, sorter)
    boundaries = ordered if ordered.dim() == 1 else ordered.unsqueeze(-2)
    others = x.unsqueeze(-1)
    above = boundaries > others if right or side == "right" else boundaries >= others
    return torch.logical_not(above).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _leaky(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    """``torch.nn.functional.rrelu``, whose slope is random in training only."""
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _reduced(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Tensor:
    """``torch.scatter`` that adds or multiplies."""
    return torch.scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def _reduced_number(x: Tensor, dim: int, index: Tensor, value: float, *, reduce: str) -> Tensor:
    number = torch.full([], value, dtype=x.dtype, device=x.device)
    return _reduced(x, dim, index, number.expand(index.shape), reduce=reduce)


def _rows_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``torch.index_reduce``: each row has one place for all that it holds."""
    if not x.dim():
        return torch.scatter_reduce(x, 0, index.reshape([]), source.reshape([]), reduce, include_self=include_self)
    places = index.reshape([-1, *[1] * (x.dim() - 1 - dim % x.dim())]).expand(source.shape)
    return torch.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


def equal_windows(x: Tensor, output_size: Sequence[int]) -> list[int] | None:
    """Return the size of an adaptive pool's windows if they all have one."""
    sizes = x.shape[-len(output_size) :]
    if any(not isinstance(size, int) or size % count for size, count in zip(sizes, output_size, strict=True)):
        return None
    return [size // count for size, count in zip(sizes, output_size, strict=True)]


def _windows(size: Any, count: int) -> list[tuple[int, int]]:
    """First and last place, the latter excluded, of the windows of an adaptive pool over one dimension."""
    return [(number * size // count, -(-(number + 1) * size // count)) for number in range(count)]


def _adaptive_average(x: Tensor, output_size: Sequence[int]) -> Any:
    """Averages over one dimension after the other."""
    count = len(output_size)
    if not all(isinstance(size, int) for size in x.shape[-count:]):
        return NotImplemented
    for dim, length in zip(range(-count, 0), output_size, strict=True):
        parts = [x.narrow(dim, start, end - start) for start, end in _windows(x.shape[dim], length)]
        x = torch.cat([part.mean(dim, keepdim=True) for part in parts], dim)
    return x


def _adaptive_maximum(x: Tensor, output_size: Sequence[int]) -> Any:
    """The largest value of each window, and its place in the input; one operator for equal windows of a picture."""
    count = len(output_size)
    sizes = x.shape[-count:]
    equal = equal_windows(x, output_size)
    if count == 2 and equal is not None:
        return _aten.max_pool2d_with_indices.default(x, equal, equal)
    if not all(isinstance(size, int) for size in sizes) or math.prod(output_size) > _MOST_WINDOWS:
        return NotImplemented
    found = []
    windows = (_windows(size, length) for size, length in zip(sizes, output_size, strict=True))
    for window in itertools.product(*windows):
        part = x
        for dim, (start, end) in zip(range(-count, 0), window, strict=True):
            part = part.narrow(dim, start, end - start)
        value, inside = part.flatten(-count).max(-1)
        found.append((value, _place(inside, window, sizes)))
    return tuple(torch.stack(of, -1).reshape([*x.shape[:-count], *output_size]) for of in zip(*found, strict=True))


def _adaptive_maximum_of_rows(x: Tensor, output_size: Sequence[int]) -> Any:
    found = _adaptive_maximum(x.unsqueeze(-2), [1, *output_size])
    return found if found is NotImplemented else tuple(one.squeeze(-2) for one in found)


def _place(inside: Tensor, window: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Tensor:
    """The number of a value in the whole input, from its number in a window."""
    place, behind = torch.zeros_like(inside), 1
    for (start, end), size in zip(reversed(window), reversed(sizes), strict=True):
        place = place + (inside % (end - start) + start) * behind
        inside, behind = inside // (end - start), behind * size
    return place


LACKING: dict[Any, Callable[..., Any]] = {
    **dict(
        [
            _or_composed(_aten.adaptive_avg_pool3d.default, _adaptive_average),
            _or_composed(_aten.adaptive_max_pool1d.default, _adaptive_maximum_of_rows),
            _or_composed(_aten.rrelu.default, _leaky),
        ]
    ),
    _aten._adaptive_avg_pool3d.default: _adaptive_average,
    _aten._cdist_forward.default: _distances,
    _aten.adaptive_max_pool2d.default: _adaptive_maximum,
    _aten.adaptive_max_pool3d.default: _adaptive_maximum,
    _aten.cdist.default: _distances,
    _aten.copysign.Scalar: _with_sign_of_number,
    _aten.copysign.Tensor: _with_sign_of,
    _aten.cross_entropy_loss.default: composed(_aten.cross_entropy_loss.default),
    _aten.cummax.default: _running_extreme(torch.ge),
    _aten.cummin.default: _running_extreme(torch.le),
    _aten.cumprod.default: _running_product,
    _aten.floor_divide.default: _whole_quotient,
    _aten.fmax.default: _largest_number,
    _aten.fmin.default: _smallest_number,
    _aten.hypot.default: _hypot,
    _aten.index_reduce.default: _rows_reduced,
    _aten.kthvalue.default: _kth,
    _aten.median.default: _median,
    _aten.median.dim: _median_of,
    _aten.mode.default: _most_frequent,
    _aten.rsub.Scalar: _number_less,
    _aten.scatter.reduce: _reduced,
    _aten.scatter.value_reduce: _reduced_number,
    _aten.searchsorted.Scalar: places_in_order,
    _aten.searchsorted.Tensor: places_in_order,
}
"""Decompositions of operators that torch.onnx, ExecuTorch or coreai-torch have no translation of."""
