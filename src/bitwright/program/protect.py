"""Run a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["preserved_state"]


@contextmanager
def preserved_state(model: nn.Module, writable: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put ``model`` in eval mode under ``no_grad`` and restore modes, buffers and random state on exit.

    Buffers are compared by version, so that only those that the forward wrote to are copied back.

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
                if buffer._version != version:
                    buffer.copy_(saved)
        for module, name, buffer_slot in slots:
            if name in module._buffers and module._buffers[name] is not buffer_slot:
                module._buffers[name] = buffer_slot


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    return sorted(index for index in devices if index is not None)
