"""A hash of what a sweep depends on, by which it knows its own results again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from bitwright.config import CompressionConfig

from .fidelity import Metric

__all__ = ["fingerprint"]

_VALUES = (torch.Tensor, np.ndarray, str, bytes, int, float, type(None))


def fingerprint(
    model: nn.Module,
    candidates: Mapping[str, CompressionConfig[Any]],
    batches: list[Any],
    calibration: list[Any],
    metric: Metric | None,
) -> str:
    """A hash of the model, configurations, data, and the metric."""
    digest = hashlib.sha256()
    digest.update(_shown(model))
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        _hash(digest, value)
    for name, config in candidates.items():
        digest.update(f"{name}{type(config).__name__}".encode())
        digest.update(config.to_json(indent=None).encode())
    _hash(digest, batches)
    if calibration is not batches:
        _hash(digest, calibration)
    if metric is not None:
        _hash_function(digest, metric, set())
    return digest.hexdigest()


def _hash(digest: Any, value: Any) -> None:
    """Hash tensors and arrays by dtype, shape and content, containers by their parts, anything else as it prints."""
    if isinstance(value, torch.Tensor):
        _hash_tensor(digest, value)
        return
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        return
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    leaves, spec = tree_flatten(value, is_leaf=lambda entry: isinstance(entry, Mapping))
    if len(leaves) == 1 and leaves[0] is value:
        digest.update(_shown(value))
        return
    digest.update(str(spec).encode())
    for leaf in leaves:
        _hash(digest, leaf)


def _hash_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.layout}{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.layout != torch.strided:
        sparse = tensor.detach().to_sparse().coalesce()
        _hash_tensor(digest, sparse.indices())
        _hash_tensor(digest, sparse.values())
        return
    data = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(data.view(torch.uint8).numpy() if data.numel() else b"")


def _hash_function(digest: Any, function: Any, seen: set[int]) -> None:
    """Hash what a function does: its code, its defaults and what it closes over.

    What it calls counts by name, and objects, which may keep something from call to call, by their class.
    """
    if id(function) in seen:  # it calls itself
        return
    seen.add(id(function))
    if isinstance(function, MethodType):
        digest.update(type(function.__self__).__qualname__.encode())
        function = function.__func__
    digest.update(str(getattr(function, "__qualname__", type(function).__qualname__)).encode())
    if isinstance(function, FunctionType):
        _hash_code(digest, function.__code__)
    for part in _parts(function):
        if isinstance(part, _VALUES):
            _hash(digest, part)
        else:
            _hash_function(digest, part, seen)


def _parts(function: Any) -> Iterator[Any]:
    """Yield what is bound to a function before it is called."""
    if isinstance(function, partial):
        yield from (function.func, *function.args, *(part for pair in function.keywords.items() for part in pair))
    elif isinstance(function, FunctionType):
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue


def _hash_code(digest: Any, value: Any) -> None:
    """Hash the code of a function, or a constant in it, whose lines and order in sets say nothing."""
    if isinstance(value, CodeType):
        digest.update(value.co_code + repr(value.co_names).encode())
        value = value.co_consts
    if isinstance(value, frozenset):
        value = tuple(sorted(value, key=repr))
    if not isinstance(value, tuple):
        digest.update(repr(value).encode())
        return
    for part in value:
        _hash_code(digest, part)


def _shown(value: Any) -> bytes:
    """How an object prints, without addresses, which differ from run to run."""
    return re.sub(r"\b0x[0-9a-f]+", "", repr(value)).encode()
