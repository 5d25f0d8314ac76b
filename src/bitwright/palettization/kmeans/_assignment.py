"""What indices were assigned to, so that they are assigned anew once other hands have written to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

__all__ = ["Assignment"]

_SAMPLES = 64


class Assignment:
    """Remembers the weight, the palettes and the indices of an assignment.

    Averages of weights write to them, often through ``.data``, which advances no version: elements of the weight are
    compared as well. Nobody waits for those of a GPU, nor for those of a weight there that is computed anew at every
    call. Deep copies and pickles keep the elements.

    Args:
        weight: what the indices belong to.
        palettes: the palettes.
        indices: the indices.
    """

    def __init__(self, weight: torch.Tensor, palettes: torch.Tensor, indices: torch.Tensor) -> None:
        self._weight = _Noted(weight, may_change_unseen=True)
        self._states = [_Noted(state, may_change_unseen=False) for state in (palettes, indices)]

    def holds(self, weight: torch.Tensor, palettes: torch.Tensor | None, indices: torch.Tensor | None) -> bool:
        """Return whether these are the tensors noted, as far as that can be seen at once."""
        is_seen = weight.is_cpu or type(weight) is nn.Parameter
        if is_seen and not self._weight.fits(weight):
            return False
        states = zip(self._states, (palettes, indices), strict=True)
        return all(state is None or noted.fits(state) for noted, state in states)


class _Noted:
    """Elements of a tensor, spread over it, and which tensor it was.

    Args:
        tensor: the tensor.
        may_change_unseen: compare elements of main memory though the version is the same; another version then means
            other elements. False for buffers, whose versions processes that train together advance without a change.
    """

    def __init__(self, tensor: torch.Tensor, may_change_unseen: bool) -> None:
        self._places = _places(tensor)
        self._elements = tensor.detach().take(self._places)
        self._may_change_unseen = may_change_unseen
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        self._seen: Any = weakref.ref(tensor)
        self._version = _version(tensor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def fits(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return True
        if self._seen is not None and self._seen() is tensor:
            if _version(tensor) != self._version:
                if self._may_change_unseen:
                    return False
            elif not (self._may_change_unseen and tensor.is_cpu):
                return True
        elements = tensor.detach().take(self._places.to(tensor.device))
        if not torch.equal(elements, self._elements.to(elements)):
            return False
        self._note(tensor)
        return True


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Indices from the first to the last element, in steps that are no whole number of rows."""
    count = tensor.numel()
    chosen = min(count, _SAMPLES)
    return torch.arange(chosen, device=tensor.device) * (count - 1) // max(1, chosen - 1)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
