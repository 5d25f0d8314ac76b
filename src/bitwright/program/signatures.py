"""Argument names of torch functions, in positional order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.operator_schemas import get_signature_for_torch_op

__all__ = ["argument_names"]

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_BINARY = ("input", "other")
_RNN = ("input", "hx", "weight", "bias", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_POOL = ("input", "kernel_size", "stride", "padding")
_MAX_POOL = (*_POOL, "dilation", "ceil_mode", "return_indices")
_AVERAGE = (*_POOL, "ceil_mode", "count_include_pad", "divisor_override")

# Built-in functions carry no Python signature; these are the documented names.
_BUILTIN_NAMES: dict[str, tuple[str, ...]] = {
    **{f"conv{d}d": _CONV for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _CONV_TRANSPOSE for d in (1, 2, 3)},
    **dict.fromkeys(("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "matmul", "true_divide"), _BINARY),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RNN),
    **{f"avg_pool{d}d": _AVERAGE for d in (1, 2, 3)},
    **{f"max_pool{d}d": _MAX_POOL for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d": ("input", "output_size") for d in (1, 2, 3)},
    "linear": ("input", "weight", "bias"),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmm": ("input", "mat1", "mat2"),
    "__rsub__": _BINARY,
    "__rdiv__": _BINARY,
    "rsub": _BINARY,
    "cat": ("tensors", "dim"),
    "concat": ("tensors", "dim"),
    "concatenate": ("tensors", "dim"),
    "stack": ("tensors", "dim"),
    "einsum": ("equation", "operands"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "squeeze": ("input", "dim"),
    "unsqueeze": ("input", "dim"),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), ("input", "dim0", "dim1")),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}


@functools.lru_cache(maxsize=4096)
def argument_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameter names of ``func`` in order; ``input`` first for tensor methods; empty when unknown.

    Overloads of ATen ops, which exported graphs call, have the names of their schema.
    """
    if isinstance(func, torch._ops.OpOverload):
        return _with_input(tuple(argument.name for argument in func._schema.arguments))
    name = getattr(func, "__name__", "")
    if name in _BUILTIN_NAMES:
        return _BUILTIN_NAMES[name]
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ("input",) if _is_tensor_method(func) else _schema_names(func)
    return _with_input(tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))


def _schema_names(func: Callable[..., Any]) -> tuple[str, ...]:
    signatures = get_signature_for_torch_op(func)
    if not signatures:
        return ()
    return _with_input(tuple(signatures[0].parameters))


def _with_input(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("input", *names[1:]) if names[:1] == ("self",) else names


def _is_tensor_method(func: Callable[..., Any]) -> bool:
    return getattr(func, "__objclass__", None) in (torch.Tensor, torch._C.TensorBase)
