"""Saved tensors as codes: what the next operation keeps of a fake-quantized tensor takes one byte per element.

A linear layer keeps its input and its weight for the backward pass. Where both come out of a fake quantizer, every
element is one of at most 256 values, so that a byte and the quantizer's parameters are enough. Inside
``saved_as_codes`` the kernels mark their results, and saved tensors that bear a mark (or are views of one that does)
are encoded when they are saved and decoded when the backward pass asks for them. Every element is checked while
encoding: decoding gives the same bits, or the tensor is kept as it is. Once an operation has saved a result of a
prepared call, its next results come with their codes, which then cost one byte more to write and nothing to read.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .grid import Grid

__all__ = ["Codes", "mark", "mark_as_made", "marking", "pack", "replace_saved", "saved_as_codes", "versions_of"]

_MARK = "_bitwright_codes"
_local = threading.local()

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Coded:
    """A fake-quantized tensor as codes, made when first needed and shared by all that save the tensor."""

    def __init__(
        self,
        y: torch.Tensor,
        made: Parameters,
        block_size: tuple[int, ...],
        grid: Grid,
        form: Any,
        noted: Callable[[], object] | None = None,
    ) -> None:
        self.version = y._version
        self._noted = noted
        self._made = made
        self._made_versions = versions_of(made)
        self._options: dict[str, Any] = {"block_size": block_size, "grid": grid}
        self._form = form
        self.data: torch.Tensor | None = None
        self._failed = False
        self._decoded: weakref.ref[torch.Tensor] | None = None

    def encode(self, y: torch.Tensor) -> bool:
        """Make the codes; False if the tensor must be kept as it is."""
        if self.data is None and not self._failed:
            if y._version != self.version or versions_of(self._made) != self._made_versions:
                self._failed = True
                return False
            # The quantizer's buffers may change before the backward pass.
            self._made = tuple(None if t is None else t.detach().clone() for t in self._made)  # type: ignore[assignment]
            self.data = self._form.encode(y.detach(), *self._made, **self._options)
            self._failed = self.data is None
            if self._noted is not None:
                self._noted()
                self._noted = None
            self._like = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        return not self._failed

    def decode(self) -> torch.Tensor:
        """The tensor again; operations that ask at the same time share it."""
        y: torch.Tensor | None = None if self._decoded is None else self._decoded()
        if y is None:
            assert self.data is not None
            y = self._form.decode(self.data, self._like, *self._made, **self._options)
            self._decoded = weakref.ref(y)
        return y


class Codes:
    """The bytes of a fake-quantized tensor, written together with it.

    Args:
        maker: the prepared call that writes them; ``decode`` makes the elements of the bytes and the parameters.
        data: memory for a byte for each element.
    """

    __slots__ = ("_decoded", "_made", "_maker", "_parameters", "_version", "data")

    def __init__(self, maker: Any, data: torch.Tensor) -> None:
        self._maker, self.data = maker, data
        self._made: Any = None
        self._parameters = self._version = 0
        self._decoded: weakref.ref[torch.Tensor] | None = None

    def written(self, made: Any, parameters: int, whole: bool) -> None:
        """Note that the bytes are there.

        Args:
            made: owner of the parameters.
            parameters: their address.
            whole: whether there is a byte for every element.
        """
        if whole:
            self._made, self._parameters = made, parameters

    def mark(self, y: torch.Tensor) -> None:
        """Note on the tensor that these are its bytes."""
        if self._made is not None:
            self._version = y._version
            setattr(y, _MARK, self)

    def encode(self, y: torch.Tensor) -> bool:
        """Whether the bytes are still those of the tensor."""
        return y._version == self._version

    def decode(self) -> torch.Tensor:
        """The elements of the tensor in the order of memory; operations that ask at the same time share them."""
        y: torch.Tensor | None = None if self._decoded is None else self._decoded()
        if y is not None:
            return y
        made: torch.Tensor = self._maker.decode(self.data, self._parameters)
        self._decoded = weakref.ref(made)
        return made


def versions_of(made: Parameters) -> tuple[int, ...]:
    """The versions of parameters, -1 for one that there is not."""
    return tuple(-1 if t is None else t._version for t in made)


class _View:
    """What is kept in place of a saved tensor: the codes, and which view of the tensor it was."""

    __slots__ = ("coded", "geometry")

    def __init__(self, coded: Any, saved: torch.Tensor) -> None:
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


def mark(
    y: torch.Tensor,
    made: Parameters,
    block_size: tuple[int, ...],
    grid: Grid,
    form: Any,
    noted: Callable[[], object] | None = None,
) -> None:
    """Note on a fake-quantized tensor how it was made, unless its bytes are there already.

    Args:
        y: the tensor.
        made: scale, zero point and minval.
        block_size: shape of one block.
        grid: the codes.
        form: module whose ``encode`` and ``decode`` take the tensor.
        noted: called when an operation has saved the tensor.
    """
    if not hasattr(y, _MARK):
        setattr(y, _MARK, _Coded(y, made, block_size, grid, form, noted))


def mark_as_made(y: torch.Tensor, making: Any) -> None:
    """Note on a tensor what is kept where an operation saves it, in place of its codes.

    Args:
        y: the tensor.
        making: ``encode`` says whether it can make the tensor that it is given, ``decode`` makes it.
    """
    setattr(y, _MARK, making)


def pack(saved: torch.Tensor) -> Any:
    """What ``saved_as_codes`` keeps in place of a tensor that an operation saves."""
    coded: Any = getattr(saved, _MARK, None)
    whole = saved
    if coded is None and saved._base is not None:
        whole = saved._base
        coded = getattr(whole, _MARK, None)
    if coded is not None and whole.storage_offset() == 0 and coded.encode(whole):
        return _View(coded, saved)
    if saved.grad_fn is None:  # no operation's result, so that it cannot hold itself
        return saved, saved._version
    return _Kept(saved)


def _unpack(kept: _View | _Kept | tuple[torch.Tensor, int]) -> torch.Tensor:
    if isinstance(kept, _View):
        decoded: torch.Tensor = kept.coded.decode()
        return decoded.as_strided(*kept.geometry)
    if isinstance(kept, tuple):
        saved, version = kept
    elif kept.saved is not None:
        saved, version = kept.saved, kept.version
    else:
        assert kept.remake is not None
        return kept.remake()
    if saved._version != version:
        raise RuntimeError(
            "A tensor needed for the gradient has been changed by an in-place operation since it was saved: it has "
            f"shape {tuple(saved.shape)} and is at version {saved._version}, expected version {version}."
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
