"""Run a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

__all__ = ["contents", "preserved_state", "refill", "without_fake_tensors"]


@contextmanager
def preserved_state(model: nn.Module, writable: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put ``model`` in eval mode under ``no_grad`` and restore modes, buffers and random state on exit.

    Only those buffers are copied back that the forward wrote to.

    Args:
        model: the model.
        writable: submodules whose buffers keep what the forward writes into them (simulators that observe).
    """
    free = {id(module) for root in writable for module in root.modules()}
    modes = [(module, module.training) for module in model.modules()]
    slots = [
        (module, name, buffer)
        for module in model.modules()
        if id(module) not in free
        for name, buffer in module._buffers.items()
    ]
    unique = {id(buffer): buffer for _, _, buffer in slots if buffer is not None and not buffer.is_inference()}
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in unique.values()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, version, saved in buffers:
                if buffer.shape != saved.shape:  # by ``buffer.data = ...``
                    buffer.data = saved
                elif buffer._version != version or _differs(buffer, saved):
                    buffer.copy_(saved)
        for module, name, buffer_slot in slots:
            if name in module._buffers and module._buffers[name] is not buffer_slot:
                module._buffers[name] = buffer_slot


def _differs(buffer: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a buffer has other numbers than before: what is written through ``buffer.data`` counts no version."""
    comparable = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta
    if not comparable or torch.equal(buffer, saved):
        return False
    return not bool(torch.isclose(buffer, saved, rtol=0.0, atol=0.0, equal_nan=True).all())


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


def contents(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the dictionaries, lists and sets in a model's attributes, inner ones too, each with a copy of it."""
    held: dict[int, tuple[Any, Any]] = {}
    values: list[Any] = [vars(module) for module in model.modules()]
    for value in values:
        if type(value) in (dict, list, set) and id(value) not in held:
            held[id(value)] = value, type(value)(value)
            values += _entries(value)
    return list(held.values())


def refill(value: Any, content: Any) -> None:
    """Give a dictionary, list or set the content of ``content``."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)


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
