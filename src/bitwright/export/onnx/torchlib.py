"""What translations to ONNX are made of: ONNX's operators, and torch's own translations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bitwright.export.extras import require

__all__ = ["operators", "registry_kept", "torchs_registry", "torchs_translation"]

_known_operators = 0


def operators() -> Any:
    """Return the operators of opset 18, which a translation calls to record them."""
    return require("onnxscript", "onnx", "Export to ONNX").opset18


def torchs_translation(op: Any, opset: int | None) -> Callable[..., Any]:
    """Return torch's translation of an operator for a version of the operator set.

    Args:
        op: an overload of one of PyTorch's operators.
        opset: version of the operator set; None for torch's choice.
    """
    found: Callable[..., Any] = torchs_registry(opset).get_decomps(op)[0].onnx_function
    return found


@functools.cache
def torchs_registry(opset: int | None) -> Any:
    """Return torch's translations for a version of the operator set; not to be changed.

    Args:
        opset: version of the operator set; None for torch's choice.
    """
    return _from_torchlib()() if opset is None else _from_torchlib()(opset)


@contextlib.contextmanager
def registry_kept() -> Iterator[None]:
    """Have ``torch.onnx.export`` take copies of one registry, which it puts together from source texts at every call.

    That takes most of the time of writing a small model. Torch leaves translations out whose operators are not there,
    so that it is put together anew when packages have brought some.
    """
    global _known_operators
    _from_torchlib()
    operators_now = len(torch._C._dispatch_get_all_op_names())
    if operators_now != _known_operators:
        torchs_registry.cache_clear()
        _known_operators = operators_now
    registry_class = _registry_class()
    before = registry_class.__dict__["from_torchlib"]

    def copy(_: Any, opset_version: int | None = None) -> Any:
        registry = registry_class()
        registry._opset_version = torchs_registry(opset_version)._opset_version
        registry.functions = {name: list(found) for name, found in torchs_registry(opset_version).functions.items()}
        return registry

    registry_class.from_torchlib = classmethod(copy)
    try:
        yield
    finally:
        registry_class.from_torchlib = before


@functools.cache
def _from_torchlib() -> Callable[..., Any]:
    """The function that puts a registry together."""
    function: Callable[..., Any] = _registry_class().from_torchlib
    return function


def _registry_class() -> Any:
    return require("torch.onnx._internal.exporter._registration", "onnx", "Export to ONNX").ONNXRegistry
