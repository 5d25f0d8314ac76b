"""Quantized weights are not kept for the backward pass, but made again in it.

A layer keeps its weight for the gradient of its input. Without quantization that costs nothing, for the weight is there
anyway; a quantized one takes as much memory again. So the operation that read it is made to keep how it came about: the
weight, which must not change before the backward pass, and copies of the few parameters. Quantizing once more takes no
longer than encoding and decoding would, and the memory of a quantized weight serves the next layer while it is in a
cache.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling

from .dispatch import fake_quantize
from .grid import Grid
from .layout import SMALL
from .saved import Substitute, are_unchanged, hooked_by_others, mark, marking, replace_saved, versions_of
from .straight_through import is_straight_through

__all__ = ["forget_weight", "quantized_weights_kept", "remember_making"]

# Operations that keep their weight: the name under which they do, and the weight's place among the arguments.
_KEEPS = {
    "AddmmBackward0": ("mat2", 2),
    "BaddbmmBackward0": ("batch2", 2),
    "BmmBackward0": ("mat2", 1),
    "ConvolutionBackward0": ("weight", 1),
    "MmBackward0": ("mat2", 1),
}
# What a linear layer does to the result of a product of matrices, and to a weight before it.
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})
_TURNS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0"})
_MAKING = "bitwright_making"

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Remake = Callable[[torch.Tensor], torch.Tensor]


class _Waiting(threading.local):
    """Whether this thread has quantized a weight that no operation was asked about since."""

    weight = False
    kept = False


_waiting = _Waiting()


class _Making(Substitute):
    """How a weight was quantized."""

    __slots__ = ("_copies", "_made", "_options", "_ready", "_seen", "_versions", "_weight", "at")

    def __init__(
        self, y: torch.Tensor, weight: torch.Tensor, made: Parameters, ready: Remake | None, **options: Any
    ) -> None:
        super().__init__(y._version)
        self.at = y.data_ptr()
        self._weight, self._seen = weight.detach(), weight._version
        # The quantizer's buffers may change before the backward pass.
        self._copies: list[Any] = [None if t is None else t.detach().clone() for t in made]
        self._made, self._versions, self._ready = made, versions_of(made), ready
        self._options = options

    def _frees(self, y: torch.Tensor) -> int:
        return 0  # a quantized weight is not kept in any case

    def make(self) -> torch.Tensor:
        """Quantize the weight once more."""
        weight = self._weight
        if weight._version != self._seen or weight.untyped_storage().nbytes() < weight.numel() * weight.itemsize:
            raise RuntimeError(
                f"A weight of shape {tuple(weight.shape)} that is needed for the gradient has been changed since the "
                f"forward pass: it is at version {weight._version}, expected version {self._seen}. Run backward() "
                "before the weight changes, or the forward pass inside bitwright.kernels.quantized_weights_kept()."
            )
        with torch.no_grad():
            if self._ready is not None and are_unchanged(self._made, self._versions):
                return self._ready(weight)
            return fake_quantize(weight, *self._copies, **self._options)


def remember_making(
    y: torch.Tensor,
    weight: torch.Tensor,
    made: Parameters,
    block_size: tuple[int, ...],
    grid: Grid,
    ready: Remake | None = None,
) -> None:
    """Note on a quantized weight how it was made, for ``forget_weight``.

    Args:
        y: the quantized weight, as ``fake_quantize`` returned it.
        weight: what it was made of.
        made: scale, zero point and minval.
        block_size: shape of one block.
        grid: the codes.
        ready: a prepared call that makes it again, of the parameters as they lie in ``made`` then.
    """
    node = y.grad_fn
    if y.numel() >= SMALL and weight.is_leaf and is_straight_through(node) and not _waiting.kept:
        making = _Making(y, weight, made, ready, block_size=block_size, grid=grid)
        if marking(y):
            mark(y, making)  # which any operation takes that saves the weight
            return
        setattr(node, _MAKING, making)
        _waiting.weight = True


def forget_weight(result: Any) -> None:
    """Have the operation that made ``result`` keep how its quantized weight was made, in place of that weight.

    Nothing happens if there is none, or if somebody else sees to what is saved (``saved_tensors_hooks``).

    Args:
        result: what an operation has returned, such as a linear layer or a convolution.
    """
    if is_compiling() or not _waiting.weight:
        return
    _waiting.weight = False
    if hooked_by_others():  # asking a checkpoint for what it keeps would compute all of it anew
        return
    node: Any = result.grad_fn if type(result) is torch.Tensor else None
    while node is not None and type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    name, place = _KEEPS.get(type(node).__name__, ("", 0))
    making = _making_of(node.next_functions[place][0]) if name else None
    if making is None:
        return
    try:
        saved = getattr(node, f"_saved_{name}")
    except RuntimeError:  # it has been changed since, which the backward pass will say
        return
    if saved is None or saved.data_ptr() != making.at:
        return
    geometry = saved.shape, saved.stride(), saved.storage_offset()
    del saved

    def remake() -> torch.Tensor:
        return making.make().as_strided(*geometry)

    replace_saved(getattr(node, f"_raw_saved_{name}"), lambda: remake)


def _making_of(node: Any) -> _Making | None:
    """How the result of a node, or what it turned over, was made; None if nobody has noted it."""
    if type(node).__name__ in _TURNS:
        node = node.next_functions[0][0]
    return getattr(node, _MAKING, None)


@contextlib.contextmanager
def quantized_weights_kept() -> Iterator[None]:
    """Keep the quantized weights of the forward passes inside until their backward pass.

    That takes as much memory as the weights. It is needed only where weights change between the forward and the
    backward pass, which a layer without quantization refuses.
    """
    before, _waiting.kept = _waiting.kept, True
    try:
        yield
    finally:
        _waiting.kept = before
