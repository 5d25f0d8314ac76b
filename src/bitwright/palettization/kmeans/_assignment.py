"""What indices were assigned to, so that they are assigned anew once other hands have written to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from bitwright.kernels.dispatch import is_plain_torch

__all__ = ["Assignment"]

_SAMPLES = 64


class Assignment:
    """Remembers the weight, the palettes and the indices of an assignment by some of their elements.

    Averages of weights write all elements of a tensor, often through ``.data``, which advances no version: elements are
    compared. Nobody waits for those of a GPU while the tensor is the same object with the same version, nor for those
    of a weight that is computed anew at every call. Deep copies and pickles keep the elements.

    Args:
        weight: what the indices belong to.
        palettes: the palettes.
        indices: the indices.
    """

    def __init__(self, weight: torch.Tensor, palettes: torch.Tensor, indices: torch.Tensor) -> None:
        self._noted = [_Noted(tensor) for tensor in (weight, palettes, indices)]

    def holds(self, weight: torch.Tensor, palettes: torch.Tensor | None, indices: torch.Tensor | None) -> bool:
        """Return whether these are the tensors noted, as far as that can be seen at once."""
        if torch.compiler.is_compiling() or not is_plain_torch():
            return True
        computed = not (weight.is_cpu or type(weight) is nn.Parameter)
        tensors = (None if computed else weight, palettes, indices)
        return all(now is None or noted.fits(now) for noted, now in zip(self._noted, tensors, strict=True))


class _Noted:
    """Elements of a tensor, spread over it, and which tensor it was."""

    __slots__ = ("_elements", "_seen", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._elements = _sample(tensor)
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        self._seen: Any = weakref.ref(tensor)
        self._version = _version(tensor)

    def __getstate__(self) -> torch.Tensor:
        return self._elements

    def __setstate__(self, elements: torch.Tensor) -> None:
        self._elements, self._seen, self._version = elements, None, 0

    def fits(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return True
        seen = None if self._seen is None else self._seen()
        if seen is tensor and _version(tensor) == self._version and not tensor.is_cpu:
            return True
        elements = _sample(tensor)
        if not torch.equal(elements, self._elements.to(elements)):
            return False
        self._note(tensor)
        return True


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    places = torch.arange(0, count, max(1, count // _SAMPLES), device=tensor.device)
    return tensor.detach().take(places)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
