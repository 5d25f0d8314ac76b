"""Names of ops in an exported graph: what a user calls them, and what their arguments are called."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

__all__ = ["aten_name", "canonical_name", "is_in_place", "op_spellings", "schema_names"]

# Functions that reach aten under another name, and aten ops that carry another name than their function.
_CANONICAL = {
    "concat": "cat",
    "concatenate": "cat",
    "log_sigmoid": "logsigmoid",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "__rsub__": "rsub",
    "__rdiv__": "div",
    "__radd__": "add",
    "__rmul__": "mul",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
    "split_with_sizes": "split",
    "tensor_split": "split",
    "special_softmax": "softmax",
    "_softmax": "softmax",
    "_grouped_mm": "grouped_mm",
    "grouped_mm_fallback": "grouped_mm",
}
_INTERPOLATIONS = (
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
    *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "upsample_trilinear3d",
    "upsample",
)
_CANONICAL |= dict.fromkeys(_INTERPOLATIONS, "interpolate")


def aten_name(target: Any) -> str:
    """Return the name of an op without namespace and overload (``"conv2d"``, ``"add_"``)."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", target))


@functools.lru_cache(maxsize=4096)
def canonical_name(name: str) -> str:
    """Return the one name for all spellings of a function: ``concat`` is ``cat``, ``relu_`` is ``relu``."""
    if name in _CANONICAL:
        return _CANONICAL[name]
    if is_in_place(name) and name != "__setitem__":
        return canonical_name(name[:-1])
    return name


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument: ``relu_``, ``x[0] = y``."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def op_spellings(node: fx.Node) -> tuple[str, ...]:
    """Return the type of an op, then the other spellings that a configuration may use for it.

    The type is the function that the user called (``"add"`` for ``a + b``, ``"concat"``); where that function is made
    of several ops (``multi_head_attention_forward``), the op's own name comes first and the function's among the rest.
    """
    own = aten_name(node.target)
    called = str(node.meta.get("torch_fn", ("", own))[1])
    if called.startswith("OpOverload"):
        called = own
    called = called.rpartition(".")[2]
    canonical = canonical_name(own)
    first = called if canonical_name(called) == canonical else canonical
    return tuple(dict.fromkeys((first, called, own, canonical)))


@functools.lru_cache(maxsize=4096)
def schema_names(target: Any) -> tuple[str, ...]:
    """Return the argument names of an aten overload in order, ``input`` first in place of ``self``."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    names = tuple(argument.name for argument in target._schema.arguments)
    return ("input", *names[1:]) if names[:1] in (("self",), ("x",)) else names
