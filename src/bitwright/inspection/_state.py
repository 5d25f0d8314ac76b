"""What a model keeps in buffers from call to call, so that extra runs leave no trace in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["Buffers", "buffers_preserved"]


class _Kept(NamedTuple):
    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    content: torch.Tensor


class Buffers:
    """Takes copies of the buffers of a model and puts them back.

    Args:
        model: the model.
        names: dotted names of the buffers; None for all. The others, such as packed weights, are left alone.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        self._slots = [
            (module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if names is None or (f"{path}.{name}" if path else name) in names
        ]

    def copied(self) -> list[_Kept]:
        """Return what the buffers hold now."""
        found = ((module, name, module._buffers.get(name)) for module, name in self._slots)
        return [
            _Kept(module, name, buffer, buffer._version, buffer.detach().clone())
            for module, name, buffer in found
            if buffer is not None and not buffer.is_inference()  # which has no version and is not written to
        ]

    def put_back(self, kept: list[_Kept]) -> None:
        """Give the buffers what they held when ``kept`` was made; those that nobody wrote to are not touched."""
        with torch.no_grad():
            for module, name, buffer, version, content in kept:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer.shape != content.shape:  # by ``buffer.data = ...``
                    buffer.data = content.clone()
                elif buffer._version != version:
                    buffer.copy_(content)


@contextmanager
def buffers_preserved(model: nn.Module, names: Collection[str] | None = None) -> Iterator[Buffers]:
    """Put the buffers back on exit; takes the arguments of ``Buffers``, which it yields."""
    buffers = Buffers(model, names)
    kept = buffers.copied()
    try:
        yield buffers
    finally:
        buffers.put_back(kept)
