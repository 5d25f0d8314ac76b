"""Saved tensors as codes: what the next operation keeps of a fake-quantized tensor takes one byte per element.

A linear layer keeps its input and its weight for the backward pass. Where both come out of a fake quantizer, every
element is one of at most 256 values, so that a byte and the quantizer's parameters are enough. Inside
``saved_as_codes`` the kernels mark their results, and saved tensors that bear a mark (or are views of one that does)
are encoded when they are saved and decoded when the backward pass asks for them. Every element is checked while
encoding: decoding gives the same bits, or the tensor is kept as it is.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .grid import Grid

__all__ = ["mark", "marking", "pack", "replace_saved", "saved_as_codes", "versions_of"]

_MARK = "_bitwright_codes"
_local = threading.local()

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Coded:
    """A fake-quantized tensor as codes, made when first needed and shared by all that save the tensor."""

    def __init__(self, y: torch.Tensor, made: Parameters, block_size: tuple[int, ...], grid: Grid, form: Any) -> None:
        self.version = y._version
        self._made = made
        self._made_versions = versions_of(made)
        self._options: dict[str, Any] = {"block_size": block_size, "grid": grid}
        self._form = form
        self._codes: torch.Tensor | None = None
        self._failed = False
        self._decoded: weakref.ref[torch.Tensor] | None = None

    def encode(self, y: torch.Tensor) -> bool:
        """Make the codes; False if the tensor must be kept as it is."""
        if self._codes is None and not self._failed:
            if y._version != self.version or versions_of(self._made) != self._made_versions:
                self._failed = True
                return False
            # The quantizer's buffers may change before the backward pass.
            self._made = tuple(None if t is None else t.detach().clone() for t in self._made)  # type: ignore[assignment]
            self._codes = self._form.encode(y.detach(), *self._made, **self._options)
            self._failed = self._codes is None
            self._like = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        return not self._failed

    def decode(self) -> torch.Tensor:
        """The tensor again; operations that ask at the same time share it."""
        y: torch.Tensor | None = None if self._decoded is None else self._decoded()
        if y is None:
            assert self._codes is not None
            y = self._form.decode(self._codes, self._like, *self._made, **self._options)
            self._decoded = weakref.ref(y)
        return y


def versions_of(made: Parameters) -> tuple[int, ...]:
    """The versions of parameters, -1 for one that there is not."""
    return tuple(-1 if t is None else t._version for t in made)


class _View:
    """What is kept in place of a saved tensor: the codes, and which view of the tensor it was."""

    __slots__ = ("coded", "geometry")

    def __init__(self, coded: _Coded, saved: torch.Tensor) -> None:
        self.coded = coded
        self.geometry = (saved.shape, saved.stride(), saved.storage_offset())


class _Kept:
    """A saved tensor that is kept as it is, until ``replace_saved`` finds a smaller form."""

    __slots__ = ("remake", "saved", "version")

    def __init__(self, saved: torch.Tensor) -> None:
        # Detached, because an operation may save its own result, which would then hold itself through the graph.
        self.saved: torch.Tensor | None = saved.detach()
        self.version = saved._version
        self.remake: Callable[[], torch.Tensor] | None = None


def replace_saved(saved_tensor: Any, shrink: Callable[[], Callable[[], torch.Tensor]]) -> None:
    """Keep something smaller in place of a tensor that an operation has saved already.

    Nothing happens where hooks of somebody else are in force for it.

    Args:
        saved_tensor: the ``_raw_saved_...`` attribute of a node of the graph.
        shrink: notes what is kept, and returns the function that makes a tensor of it, of the same shape, strides and
            dtype, which the operation may take for its own.
    """
    once = [shrink]
    del shrink  # autograd holds on to the hook, which must not hold on to the tensor
    try:
        saved_tensor.register_hooks(lambda _: once.pop()(), _remade)
    except RuntimeError:
        own = getattr(saved_tensor, "data", None)  # what `pack` returned
        if type(own) is _Kept and own.saved is not None:
            own.remake, own.saved = once.pop()(), None


def _remade(remake: Callable[[], torch.Tensor]) -> torch.Tensor:
    return remake()


def marking(y: torch.Tensor) -> bool:
    """Return whether a result is to be marked: ``saved_as_codes`` is in force here, and the result is large enough."""
    least: int | None = getattr(_local, "minimum", None)
    return least is not None and y.numel() >= least


def mark(y: torch.Tensor, made: Parameters, block_size: tuple[int, ...], grid: Grid, form: Any) -> None:
    """Note on a fake-quantized tensor how it was made.

    Args:
        y: the tensor.
        made: scale, zero point and minval.
        block_size: shape of one block.
        grid: the codes.
        form: module whose ``encode`` and ``decode`` take the tensor.
    """
    setattr(y, _MARK, _Coded(y, made, block_size, grid, form))


def pack(saved: torch.Tensor) -> Any:
    """What ``saved_as_codes`` keeps in place of a tensor that an operation saves."""
    coded: _Coded | None = getattr(saved, _MARK, None)
    whole = saved
    if coded is None and saved._base is not None:
        whole = saved._base
        coded = getattr(whole, _MARK, None)
    if coded is not None and whole.storage_offset() == 0 and coded.encode(whole):
        return _View(coded, saved)
    return _Kept(saved)


def _unpack(kept: _View | _Kept) -> torch.Tensor:
    if isinstance(kept, _View):
        return kept.coded.decode().as_strided(*kept.geometry)
    saved = kept.saved
    if saved is None:
        assert kept.remake is not None
        return kept.remake()
    if saved._version != kept.version:
        raise RuntimeError(
            "A tensor needed for the gradient has been changed by an in-place operation since it was saved: it has "
            f"shape {tuple(saved.shape)} and is at version {saved._version}, expected version {kept.version}."
        )
    return saved


@contextlib.contextmanager
def saved_as_codes(minimum: int = 1 << 12) -> Iterator[None]:
    """Keep what operations save of fake-quantized tensors as one byte per element.

    Wrap the forward pass; the backward pass may run outside. Gradients are the same bits as without.

    Args:
        minimum: number of elements below which a tensor is kept as it is.

    Example:
        >>> layer = torch.nn.Linear(8, 8)
        >>> with saved_as_codes():
        ...     loss = layer(torch.ones(2, 8)).sum()
        >>> loss.backward()
    """
    before = getattr(_local, "minimum", None)
    _local.minimum = minimum
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _local.minimum = before
