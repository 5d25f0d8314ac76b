"""What a packed weight reads as: a tensor that is decoded when an operation wants its numbers.

Linear layers that are given few vectors, as when a language model writes token after token, are bound by the bytes of
their weights; they multiply with the codes, and on processors with AVX-512 so do those with 2 or 4 bits that are given
some hundred, and products with weights of 4 bits that have a row for each input. Others decode a part after the other,
which stays in a cache until it was multiplied with. Embeddings decode the rows that are looked up. All else sees the
decoded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from bitwright._utils.call_frames import run_by_itself
from bitwright._utils.packed_weights import refuse_write
from bitwright._utils.weight_writes import NO_WRITES
from bitwright.kernels import reference
from bitwright.kernels.dispatch import form_of
from bitwright.kernels.packed import TILE_ROWS, PackedMatrix

__all__ = ["FEW_VECTORS", "MANY_COLUMN_VECTORS", "MANY_VECTORS", "SMALL_WEIGHT", "LazyWeight"]

FEW_VECTORS = 4
"""Up to so many vectors are multiplied with the codes always."""

MANY_VECTORS = 256
"""Up to so many, large weights are multiplied or decoded a part after the other; for more, that costs too much."""

MANY_COLUMN_VECTORS = 2048
"""The same for weights with a row for each input where codes are multiplied. With 768 x 3072 and 3072 x 768 numbers
that took 0.4 to 0.75 of the time of the float weight, from one vector up to here (one thread, AMD Zen 5)."""

SMALL_WEIGHT = 1 << 16
"""Weights of fewer elements are always decoded: multiplying with codes saves nothing while they fit into a cache."""

# What can be answered without the numbers.
_DESCRIBING = {
    getter
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_cpu", "is_cuda", "is_sparse")
    for getter in (getattr(torch.Tensor, name).__get__,)
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__}

# What writes to its first argument, beside functions whose names end with "_".
_WRITERS = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_DATA: Any = torch.Tensor.data


class LazyWeight(torch.Tensor):
    """A weight that stands for packed codes. Use it like a tensor; it cannot be written to.

    Functions that would write to it raise ``PackedWeightError``. Views and ``data`` of it are those of a decoded copy.

    Args:
        matrix: the codes.
        dtype: what they are decoded to.
        exact: decode for more than a few vectors, so that products are those of the decoded weight bit for bit.
    """

    matrix: PackedMatrix
    exact: bool

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, dtype: torch.dtype, exact: bool = False) -> LazyWeight:
        """Make the tensor; see the class."""
        make: Any = torch.Tensor._make_wrapper_subclass
        weight: LazyWeight = make(cls, matrix.shape, dtype=dtype, device=matrix.scale.device)
        weight.matrix, weight.exact = matrix, exact
        return weight

    def decoded(self) -> torch.Tensor:
        """Return the plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        with torch._C._DisableFuncTorch():  # a constant to every function transform, which would wrap new memory
            return self.matrix.decode(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute with the codes where that pays, else with the decoded tensor."""
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func) if kwargs.keys() <= _NAMES else None
        result = special(*args, **kwargs) if special is not None else None
        if result is not None:
            return result
        _check_unwritten(func, args, kwargs)
        return func(*_plain(args), **_plain(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the function
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute with the decoded tensor: operators that are called from C++."""
        _check_unwritten(func, args, kwargs or {})
        return func(*_plain(args), **_plain(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the decoded tensor."""
        return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Return the decoded tensor."""
        return self.decoded()


# A module that torch.compile runs as it is, for a break in its graph or too many sizes, reads such weights. Compiling
# how they are read would ask for their attributes, which are read so, without end.
for _method in (LazyWeight.__torch_function__, LazyWeight.__torch_dispatch__):
    run_by_itself(_method, with_calls=True)


def _check_unwritten(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a function writes to packed weights."""
    if any(isinstance(leaf, LazyWeight) for leaf in tree_leaves(_written(func, args, kwargs))):
        refuse_write("A packed weight")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a function writes to: by the operator's schema, or by the names that torch gives such functions."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
        return [given.get(argument.name) for argument in schema.arguments if argument.is_write]
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in NO_WRITES
    if in_place or name in _WRITERS or func == _DATA.__set__:
        return [*args[:1], kwargs.get("tensor"), kwargs.get("input"), kwargs.get("out")]
    return [kwargs.get("out")]


def _plain(values: Any) -> Any:
    return tree_map_only(LazyWeight, LazyWeight.decoded, values)


def _linear(x: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """The layer, None where it is better computed with the decoded weight."""
    if type(weight) is not LazyWeight or len(weight.shape) != 2 or not _fits(x, weight, weight.matrix.shape[1]):
        return None
    rows, length = weight.matrix.shape
    vectors = x.numel() // length
    if not _is_bias(bias, x, rows):
        return None
    most = MANY_VECTORS if _multiplies_many(weight) else FEW_VECTORS
    if weight.matrix.multiplies() and x.dtype == torch.float32 and vectors <= most:
        y = weight.matrix.multiply(x.detach().reshape(vectors, length)).view(*x.shape[:-1], rows)
        return y if bias is None else y + bias
    if vectors > MANY_VECTORS or rows <= TILE_ROWS or _wants_gradient(bias):
        return None
    return weight.matrix.linear(x.detach().reshape(vectors, length), bias).view(*x.shape[:-1], rows)


def _multiplies_many(weight: LazyWeight) -> bool:
    return not weight.exact and weight.matrix.multiplies_many()


def _addmm(
    bias: Any, x: Any, weight: Any, *more: Any, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> torch.Tensor | None:
    """``bias + x @ weight``, as layers write it whose weights have a row for each input; None as for a linear layer.

    Sums are added in another order, and in parts that are rounded: numbers of fewer digits than float32 are decoded.
    """
    if more or type(weight) is not LazyWeight or len(weight.shape) != 2 or not _fits(x, weight, weight.matrix.shape[0]):
        return None
    rows, length = weight.matrix.shape
    plain = beta == 1 and alpha == 1 and out is None and x.ndim == 2 and x.dtype == torch.float32
    if not plain or x.shape[0] > _most_columns(weight) or not _is_bias(bias, x, length):
        return None
    if weight.matrix.multiplies_columns():
        y = weight.matrix.multiply_columns(x.detach())
        return y if bias is None else y.add_(bias)
    if rows <= TILE_ROWS or _wants_gradient(bias):
        return None
    return weight.matrix.times(x.detach(), bias)


def _most_columns(weight: LazyWeight) -> int:
    if weight.exact:
        return FEW_VECTORS
    return MANY_COLUMN_VECTORS if weight.matrix.multiplies_columns() else MANY_VECTORS


def _mm(x: Any, weight: Any, *more: Any, out: Any = None) -> torch.Tensor | None:
    return _addmm(None, x, weight, *more, out=out)


def _matmul(x: Any, weight: Any, *, out: Any = None) -> torch.Tensor | None:
    """``x @ weight`` with a vector, or vectors in any number of dimensions."""
    if type(weight) is not LazyWeight or len(weight.shape) != 2 or not _fits(x, weight, weight.matrix.shape[0]):
        return None
    y = _addmm(None, x.reshape(-1, x.shape[-1]), weight, out=out)
    return None if y is None else y.view(*x.shape[:-1], -1)


def _fits(x: Any, weight: LazyWeight, inputs: int) -> bool:
    """Whether a product with a weight may be computed from its codes: it is large, and nothing wants a gradient."""
    if type(x) is not torch.Tensor or x.is_nested or x.dtype != weight.dtype or x.shape[-1:] != (inputs,):
        return False
    if not x.is_cpu or form_of(x) is reference or weight.numel() < SMALL_WEIGHT:
        return False
    return not (_wants_gradient(x) or torch.is_autocast_enabled("cpu"))


def _is_bias(bias: Any, x: torch.Tensor, outputs: int) -> bool:
    """Whether a bias is none, or numbers that can be added to results without torch's checks."""
    if bias is None:
        return True
    plain = form_of(bias) is not reference and bias.is_cpu
    return plain and bias.shape == (outputs,) and bias.dtype == x.dtype


def _wants_gradient(x: torch.Tensor | None) -> bool:
    """Whether what is computed with a tensor may be differentiated."""
    return x is not None and ((torch.is_grad_enabled() and x.requires_grad) or _is_dual(x))


def _is_dual(x: torch.Tensor) -> bool:
    """Return whether forward-mode differentiation carries a tangent along with the tensor."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _embedding(ids: Any, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The rows that are looked up, None where the operation does more than that."""
    given: Mapping[str, Any] = dict(zip(_EMBEDDING, args, strict=False)) | kwargs
    if type(weight) is not LazyWeight or type(ids) is not torch.Tensor or not ids.is_cpu or ids.is_nested:
        return None
    if ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        return None
    if any(given.get(name) for name in ("max_norm", "sparse", "scale_grad_by_freq")):
        return None
    count, padding, numbers = weight.matrix.shape[0], given.get("padding_idx"), ids.reshape(-1).long()
    low, high = torch.aminmax(numbers)
    if int(low) < 0 or int(high) >= count or not (padding is None or -count <= padding < count):
        return None  # torch has the error message
    return weight.matrix.rows(numbers).decode(weight.dtype).view(*ids.shape, *weight.matrix.shape[1:])


_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
# Arguments that are known by name; with others an operation computes with the decoded weight.
_NAMES = {"weight", "bias", "beta", "alpha", "out", *_EMBEDDING}


def _aten_embedding(weight: Any, ids: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    return _embedding(ids, weight)


_SPECIAL: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    F.linear: _linear,
    torch.ops.aten.linear.default: _linear,
    torch.addmm: _addmm,
    torch.ops.aten.addmm.default: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.ops.aten.mm.default: _mm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.ops.aten.matmul.default: _matmul,
    F.embedding: _embedding,
    torch.embedding: _aten_embedding,
    torch.ops.aten.embedding.default: _aten_embedding,
}
