"""Run a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from .states import contents, refill, states_preserved

__all__ = ["evaluated", "preserved_state", "without_fake_tensors"]


@contextmanager
def preserved_state(model: nn.Module, writable: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put ``model`` in eval mode under ``no_grad``; restore modes, buffers, attributes and random state on exit.

    What of these is known, and that only what the forward wrote to is copied back, is told at ``States``.

    Args:
        model: the model.
        writable: submodules that keep what the forward writes into them (simulators that observe).
    """
    with states_preserved(model, without=writable), evaluated(model):
        yield


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in eval mode under ``no_grad``; restore the modes of its modules and the random state on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_fake_tensors(model: nn.Module) -> Iterator[None]:
    """Take back what a capture leaves in a model that keeps results: in buffers, attributes, and lists and dicts.

    They would be tensors without numbers, which the next call of the model fails on.

    Args:
        model: has on exit no fake tensors that it did not have before; all else is as the block left it.
    """
    kept = [
        (module, {name: (value, _copied(value)) for name, value in vars(module).items()}) for module in model.modules()
    ]
    not_persistent = [set(module._non_persistent_buffers_set) for module in model.modules()]
    held = contents(model)
    try:
        yield
    finally:
        for (module, before), names in zip(kept, not_persistent, strict=True):
            _take_back_fake_tensors(vars(module), before)
            module._non_persistent_buffers_set &= names | set(module._buffers)
        for value, content in held:
            if any(isinstance(entry, FakeTensor) for entry in _entries(value)):
                refill(value, content)


def _entries(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list) else None


def _take_back_fake_tensors(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    """Give attributes the values that they had; torch.export puts copies of lists and dicts in their places."""
    for name, (value, content) in before.items():
        if content is not None and _holds_fake_tensors(value):
            refill(value, content)
            attributes[name] = value
    for name in [name for name, value in attributes.items() if _holds_fake_tensors(value)]:
        if name in before:
            attributes[name] = before[name][0]
        else:
            del attributes[name]


def _holds_fake_tensors(value: Any) -> bool:
    leaves = tree_leaves(value) if type(value) in (dict, list, tuple) else [value]
    return any(isinstance(leaf, FakeTensor) for leaf in leaves)


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    return sorted(index for index in devices if index is not None)
