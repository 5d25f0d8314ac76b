"""Operators that coreai-torch translates wrongly, or not at all, written with others that it translates right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .coreai_convolutions import transposed_in_pictures
from .coreai_indexing import gather, index, index_put, scatter, scatter_add, scatter_number
from .dimensions import for_each_dimension
from .lacking import LACKING, equal_windows, log_of_sum
from .lacking_basics import LACKING_BASICS, added_to

__all__ = ["RIGHT_IN_COREAI"]

_aten = torch.ops.aten


def _add(x: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """``x + alpha * other``; coreai-torch forgets the factor, and the runtime has no sums of masks."""
    if _are_masks(x, other):
        return torch.logical_or(x, other)
    return _integers_with_number(_aten.add.Tensor)(x, other) if alpha == 1 else x + other * alpha


def _subtract(x: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """``x - alpha * other``; coreai-torch forgets the factor."""
    return _integers_with_number(_aten.sub.Tensor)(x, other) if alpha == 1 else x - other * alpha


def _multiply(x: Tensor, other: Any) -> Any:
    """``x * other``; the runtime has no products of masks."""
    return torch.logical_and(x, other) if _are_masks(x, other) else _integers_with_number(_aten.mul.Tensor)(x, other)


def _integers_with_number(op: Any) -> Callable[[Any, Any], Any]:
    """How integers or masks meet a number that is none: as floats; coreai-torch rounds both to half precision."""

    def met(x: Any, other: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype.is_floating_point or x.dtype.is_complex or not isinstance(other, float):
            return NotImplemented
        return op(x.to(torch.result_type(x, other)), other)

    return met


def _number_less_integers(x: Tensor, other: Any, alpha: Any = 1) -> Any:
    """``other - alpha * x``, of integers as floats."""
    if x.dtype.is_floating_point or not isinstance(other, float):
        return decomposition_table[_aten.rsub.Scalar](x, other, alpha)
    return torch.neg(x.to(torch.result_type(x, other)) * alpha) + other


def _are_masks(*tensors: Any) -> bool:
    return all(isinstance(tensor, Tensor) and tensor.dtype == torch.bool for tensor in tensors)


def _added_to_product(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """``addmm`` with a factor of zero, whose operand counts for nothing, NaN or not; coreai-torch multiplies it."""
    return NotImplemented if beta and alpha else added_to(x, torch.mm(left, right), beta, alpha)


def _squeeze(x: Tensor, dims: Sequence[int]) -> Any:
    """Leaves out dimensions of one, among others, which coreai-torch refuses."""
    ones = [dim for dim in dims if x.dim() and isinstance(x.shape[dim], int) and x.shape[dim] == 1]
    if not ones:
        return _aten.alias.default(x)
    return NotImplemented if len(ones) == len(dims) else _aten.squeeze.dims(x, ones)


def _view(x: Tensor, size: Sequence[int]) -> Any:
    """One number as a tensor without dimensions, which coreai-torch takes as a squeeze only."""
    if len(size) or not x.dim():
        return NotImplemented
    return _aten.squeeze.dims(x, list(range(x.dim())))


def _expand(x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    """A tensor without dimensions many times, which coreai-torch takes with dimensions only."""
    if x.dim():
        return NotImplemented
    return _aten.expand.default(_aten.unsqueeze.default(x, 0), size) if len(size) else _aten.alias.default(x)


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors one behind another without those that have no elements, which the runtime takes for others in size."""
    filled = [tensor for tensor in tensors if not any(isinstance(size, int) and size == 0 for size in tensor.shape)]
    if not filled or len(filled) == len(tensors):
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return torch.cat([tensor.to(dtype) for tensor in filled], dim)


def _padded(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    """Values around a tensor, as many as a free size asks for; coreai-torch wants to know how many.

    They stand where the first element is copied to. Joined to the tensor, none at all would be taken for some.
    """
    if all(isinstance(size, int) for size in pad):
        return NotImplemented
    known = [size if isinstance(size, int) else 0 for size in pad]
    x = _aten.constant_pad_nd.default(x, known, value) if any(known) else x
    around, first = x.new_full((), value), torch.zeros((), dtype=torch.int64, device=x.device)
    for number, sizes in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        before, after = (0 if isinstance(size, int) else size for size in sizes)
        if isinstance(before, int) and isinstance(after, int):
            continue
        dim = x.dim() - 1 - number
        length = x.shape[dim]
        places = torch.arange(before + length + after, device=x.device) - before
        inside = torch.logical_and(places >= 0, places < length)
        x = x.index_select(dim, torch.where(inside, places, first))
        x = torch.where(inside.reshape([-1] + [1] * number), x, around)
    return x


def _of_rows(op: Any) -> Callable[..., Any]:
    """How a number is reduced: as a row of one; coreai-torch ends the process where there is no dimension to reduce."""

    def reduced(x: Tensor, *args: Any, **options: Any) -> Any:
        return NotImplemented if x.dim() else op(x.reshape(1), *args, **options).reshape([])

    return reduced


def _max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """A pool over one picture, of which coreai-torch wants several; or one that has fewer windows than rounded up.

    coreai-torch counts windows too that would begin behind the values.
    """
    op = _aten.max_pool2d_with_indices.default
    kernel, steps, padding, dilation = (
        for_each_dimension(given, 2) for given in (kernel, stride or kernel, padding, dilation)
    )
    if x.dim() == 3:
        results = op(x.unsqueeze(0), kernel, steps, padding, dilation, ceil_mode)
        return tuple(result.squeeze(0) for result in results)
    if not ceil_mode or not x.is_floating_point():
        return NotImplemented
    lengths = [(length - 1) * space + 1 for length, space in zip(kernel, dilation, strict=True)]
    outside = list(map(_outside, x.shape[-2:], padding, lengths, steps))
    fewer = (
        more < 0 if isinstance(more, int) else pad + step > length
        for more, pad, step, length in zip(outside, padding, steps, lengths, strict=True)
    )
    if not any(fewer):
        return NotImplemented
    around = [(pad, pad + more) for pad, more in zip(padding, outside, strict=True)]
    padded = torch.nn.functional.pad(x, _flat(around), value=-math.inf)
    values, places = op(padded, kernel, steps, (0, 0), dilation)
    rows, columns = places // padded.shape[-1] - padding[0], places % padded.shape[-1] - padding[1]
    return values, rows * x.shape[-1] + columns


def _adaptive_average_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    """A pool over one picture, of which coreai-torch wants several; or with windows that overlap."""
    if x.dim() != 3:
        return _average_of_overlapping_windows(x, output_size)
    return _aten._adaptive_avg_pool2d.default(x.unsqueeze(0), output_size).squeeze(0)


def _extreme(op: Any) -> Callable[..., Any]:
    """How ``amax`` or ``amin`` goes over all dimensions, which coreai-torch wants to be listed."""

    def extreme(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        if not x.dim():
            return op(x.reshape(1), [0]).reshape([])
        return NotImplemented if len(dim) else op(x, list(range(x.dim())), keepdim)

    return extreme


def _number(
    value: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """One number as a tensor, such as ``torch.where`` makes, which coreai-torch rounds to half precision first."""
    if not isinstance(value, bool | int | float):
        return NotImplemented
    return torch.full([], value, dtype=dtype or torch.get_default_dtype(), device=device)


def _numbers_in_steps(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """``torch.arange`` of floats, which coreai-torch rounds to half precision first."""
    given = (start, end, step)
    if not all(isinstance(one, int | float) for one in given) or all(isinstance(one, int) for one in given):
        return NotImplemented
    dtype = dtype or torch.get_default_dtype()
    numbers = torch.arange(math.ceil((end - start) / step), device=device)
    return (numbers.to(torch.float32) * step + start).to(dtype)


def _with_tensor(op: Any) -> Callable[[Tensor, Any], Any]:
    """An operator with a number, as one with a tensor of it, both in the dtype that PyTorch computes in."""

    def with_tensor(x: Tensor, number: Any) -> Any:
        dtype = torch.result_type(x, number)
        return op(x.to(dtype), torch.full([], number, dtype=dtype, device=x.device))

    return with_tensor


def _complement(x: Tensor) -> Any:
    """``~x`` of bytes, which the runtime takes for masks."""
    return _with_tensor(_aten.bitwise_xor.Tensor)(x, 255) if x.dtype == torch.uint8 else NotImplemented


def _average_pool(op: Any, dims: int) -> Callable[..., Any]:
    """How a pool of one number of dimensions averages at borders.

    coreai-torch divides by the size of the window there. It cannot let windows stand out, nor leave a stride out.
    """

    def averaged(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Any:
        kernel, steps, padding = (for_each_dimension(given, dims) for given in (kernel, stride or kernel, padding))
        if x.dim() == dims + 1:
            return op(x[None], kernel, steps, padding, ceil_mode, count_include_pad, divisor)[0]
        if stride and not ceil_mode and (count_include_pad or not any(padding)):
            return NotImplemented
        sizes = list(x.shape[-dims:])
        outside = [0] * dims
        if ceil_mode:
            outside = list(map(_outside, sizes, padding, kernel, steps))
        around = [(pad, pad + more) for pad, more in zip(padding, outside, strict=True)]
        average = op(torch.nn.functional.pad(x, _flat(around)), kernel, steps)
        if divisor:
            return average * (math.prod(kernel) / divisor)
        if count_include_pad:
            sizes = [size + 2 * pad for size, pad in zip(sizes, padding, strict=True)]
            around = [(0, more) for more in outside]
        ones = torch.ones([1, 1, *sizes], dtype=x.dtype, device=x.device)
        return average / op(torch.nn.functional.pad(ones, _flat(around)), kernel, steps)

    return averaged


def _outside(size: Any, padding: int, length: int, step: int) -> Any:
    """How far the last window reaches past a padded dimension if sizes are rounded up.

    It is less than 0 where another one would only begin behind the values: so many of these are in no window.
    """
    around = size + 2 * padding
    count = torch.sym_min(-((length - around) // step) + 1, -(-(size + padding) // step))  # type: ignore[no-untyped-call]
    return (count - 1) * step + length - around


def _flat(around: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of ``torch.nn.functional.pad``, which begin with the last dimension."""
    return [number for pair in reversed(around) for number in pair]


def _nearest(x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None) -> Any:
    """Resizes to the nearest pixel, which coreai-torch takes from other places unless sizes are multiples."""
    sizes = x.shape[2:]
    if scale_factors is None:
        factors = [after / before for after, before in zip(output_size or (), sizes, strict=True)]
    else:
        factors = list(scale_factors)
    if not all(isinstance(factor, int | float) for factor in factors) or all(map(_is_whole, factors)):
        return NotImplemented
    return decomposition_table[_aten.upsample_nearest2d.vec](x, output_size, scale_factors)


def _is_whole(factor: float) -> bool:
    return float(factor).is_integer()


def _variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """The mean of squared distances from the mean, corrected for the number of values; in float32, as PyTorch's."""
    if not x.dim():
        variance, mean = _variance_and_mean(x.reshape(1), correction=correction)
        return variance.reshape([]), mean.reshape([])
    dims = list(dim) if dim else list(range(x.dim()))
    wide = x.float()
    mean = wide.mean(dims, keepdim=True)
    count = math.prod(x.shape[one] for one in dims)
    distance = wide - mean
    variance = (distance * distance).sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))
    return variance.to(x.dtype), (mean if keepdim else mean.squeeze(dims)).to(x.dtype)


def _windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """``x.unfold``, whose windows overlap in memory: a copy of each."""
    dim %= x.dim()
    count = (x.shape[dim] - size) // step + 1
    starts, steps = (torch.arange(length, device=x.device) for length in (count, size))
    places = starts[:, None] * step + steps
    windows = x.index_select(dim, places.flatten())
    return windows.reshape([*x.shape[:dim], count, size, *x.shape[dim + 1 :]]).movedim(dim + 1, -1)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = x.shape[dim1], x.shape[dim2]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    start = offset if offset >= 0 else -offset * columns
    places = torch.arange(count, device=x.device) * (columns + 1) + start
    return x.movedim((dim1, dim2), (-2, -1)).flatten(-2).index_select(-1, places)


def _products_of_three(
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """``aten._trilinear``, which ``torch.nn.functional.bilinear`` calls: products of all of them, summed."""
    one, two, three = (
        functools.reduce(torch.unsqueeze, sorted(dims), factor)
        for factor, dims in ((one, expand1), (two, expand2), (three, expand3))
    )
    return (one * two * three).sum(list(sumdim))


def _average_of_windows(x: Tensor, output_size: Sequence[int]) -> Any:
    """Adaptive pools, one operator if their windows are all of one size."""
    window = equal_windows(x, output_size)
    if window is None:
        return LACKING[_aten._adaptive_avg_pool3d.default](x, output_size)
    return _aten.avg_pool3d.default(x, window, window)


def _average_of_overlapping_windows(x: Tensor, output_size: Sequence[int]) -> Any:
    """An adaptive average pool with more windows than elements, which coreai-torch refuses."""
    sizes = zip(x.shape[-2:], output_size, strict=True)
    fewer = any(isinstance(size, int) and size < count for size, count in sizes)
    return LACKING[_aten._adaptive_avg_pool3d.default](x, output_size) if fewer else NotImplemented


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """All of the largest or smallest values; equal ones keep their order there."""
    if x.dim() == 0:
        return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)
    return torch.topk(x, x.shape[dim], dim, largest=descending)


def _sort_stably(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _sort(x, dim, descending)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """The tensor itself, as PyTorch's averages over all of it come out of a decomposition; or copies of its numbers."""
    moves = [(one, other) for length, one, other in zip(size, stride, x.stride(), strict=False) if length != 1]
    if list(size) == list(x.shape) and not storage_offset and all(one == other for one, other in moves):
        return _aten.alias.default(x)
    known = all(isinstance(number, int) for number in (*size, *stride, *x.shape))
    if not known or not x.is_contiguous() or x.storage_offset():
        return NotImplemented
    places = torch.full((), storage_offset or 0, dtype=torch.int64, device=x.device)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length, device=x.device) * step
    return x.reshape(-1).index_select(0, places.flatten()).reshape(size)


def _of_floats(function: Any) -> Callable[..., Any]:
    """How a function of floats is computed of integers, for which coreai-torch has the wrong type."""

    def of_floats(x: Tensor, *arguments: Any) -> Any:
        return NotImplemented if x.dtype.is_floating_point else function(x.float(), *arguments)

    return of_floats


def _power(x: Tensor, exponent: float) -> Any:
    """Powers of integers that are none, which the runtime computes in half precision."""
    whole = isinstance(exponent, int) or x.dtype.is_floating_point
    return NotImplemented if whole else torch.pow(x.float(), exponent)


def _norm(
    x: Tensor,
    ord: Any = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm of rows, in float32 as PyTorch's where it is one of halves, and of all dimensions where none are listed.

    coreai-torch wants the power to be a float, adds up in the rows' own dtype, forgets another one, and ends the
    process where the list of dimensions is empty.
    """
    norm = _aten.linalg_vector_norm.default
    wide = x.to(torch.promote_types(dtype or x.dtype, torch.float32))
    if wide.dtype == x.dtype and dtype is None and isinstance(ord, float) and (dim is None or len(dim)):
        return _of_rows(norm)(x, ord, dim, keepdim)
    found, result = norm(wide, float(ord), dim or None, keepdim), (dtype or x.dtype).to_real()
    return found if found.dtype == result else found.to(result)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention whose result has another shape than its queries, or that has no heads, which coreai-torch refuses.

    So it does where queries of three dimensions have a mask of as many.
    """
    sizes = [tensor.shape[:-2] for tensor in (query, key, value, attn_mask) if tensor is not None]
    broadcast = torch.Size() if enable_gqa else torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]
    if query.dim() == 3 and attn_mask is not None:
        batch = [tensor.unsqueeze(0) for tensor in (query, key, value, attn_mask)]
        attend = _aten.scaled_dot_product_attention.default
        return attend(*batch, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    if query.dim() > 2 and value.shape[-1] == query.shape[-1] and (enable_gqa or broadcast == sizes[0]):
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, -math.inf)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    made = _aten._scaled_dot_product_attention_math.default
    return made(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]


_FUNCTIONS_OF_FLOATS = [
    getattr(_aten, name).default
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1", "log", "log10",
        "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
    )
]  # fmt: skip


_COMPARISONS = [getattr(_aten, name).Scalar for name in ("eq", "ne", "gt", "ge", "lt", "le")]
_REDUCTIONS = [
    _aten.any.default, _aten.any.dim, _aten.any.dims, _aten.max.default,
    _aten.mean.default, _aten.mean.dim, _aten.min.default, _aten.prod.default, _aten.prod.dim_int,
    _aten.sum.dim_IntList,
]  # fmt: skip

RIGHT_IN_COREAI: dict[Any, Callable[..., Any]] = {
    **{function: _of_floats(function) for function in _FUNCTIONS_OF_FLOATS},
    **{reduction: _of_rows(reduction) for reduction in _REDUCTIONS},
    **{comparison: _integers_with_number(comparison) for comparison in _COMPARISONS},
    # translated wrongly for some arguments, for which these do not return NotImplemented
    _aten.add.Tensor: _add,
    _aten.addmm.default: _added_to_product,
    _aten.amax.default: _extreme(_aten.amax.default),
    _aten.amin.default: _extreme(_aten.amin.default),
    _aten.arange.start_step: _numbers_in_steps,
    _aten.avg_pool2d.default: _average_pool(_aten.avg_pool2d.default, 2),
    _aten.avg_pool3d.default: _average_pool(_aten.avg_pool3d.default, 3),
    _aten.bitwise_not.default: _complement,
    _aten.cat.default: _concatenated,
    _aten.constant_pad_nd.default: _padded,
    _aten.div.Tensor: _integers_with_number(_aten.div.Tensor),
    _aten.expand.default: _expand,
    _aten.gather.default: gather,
    _aten.index.Tensor: index,
    _aten.index_put.default: index_put,
    _aten.linalg_vector_norm.default: _norm,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.mul.Tensor: _multiply,
    _aten.pow.Tensor_Scalar: _power,
    _aten.scalar_tensor.default: _number,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.scatter.reduce: scatter,
    _aten.scatter.src: scatter,
    _aten.scatter.value: scatter_number,
    _aten.scatter.value_reduce: scatter_number,
    _aten.squeeze.dims: _squeeze,
    _aten.sub.Tensor: _subtract,
    _aten.upsample_nearest2d.vec: _nearest,
    _aten.view.default: _view,
    _aten._adaptive_avg_pool2d.default: _adaptive_average_pool,
    # not translated
    _aten.convolution.default: transposed_in_pictures,
    _aten._adaptive_avg_pool3d.default: _average_of_windows,
    _aten._trilinear.default: _products_of_three,
    _aten.bitwise_and.Scalar: _with_tensor(_aten.bitwise_and.Tensor),
    _aten.bitwise_or.Scalar: _with_tensor(_aten.bitwise_or.Tensor),
    _aten.bitwise_xor.Scalar: _with_tensor(_aten.bitwise_xor.Tensor),
    _aten.diagonal.default: _diagonal,
    _aten.erfc.default: lambda x: 1 - torch.erf(x),
    _aten.logaddexp.default: log_of_sum,
    _aten.remainder.Scalar: _with_tensor(_aten.remainder.Tensor),
    _aten.rsub.Scalar: _number_less_integers,
    _aten.embedding_bag.padding_idx: LACKING_BASICS[_aten.embedding_bag.padding_idx],
    _aten.scatter_reduce.two: LACKING_BASICS[_aten.scatter_reduce.two],
    _aten.floor_divide.default: LACKING[_aten.floor_divide.default],
    _aten.rrelu.default: LACKING[_aten.rrelu.default],
    _aten.scatter_add.default: scatter_add,
    _aten.as_strided.default: _as_strided,
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort_stably,
    _aten.unfold.default: _windows,
    _aten.var.correction: _variance,
    _aten.var_mean.correction: _variance_and_mean,
}
"""Decompositions of operators that coreai-torch gets wrong, or has no translation of."""
