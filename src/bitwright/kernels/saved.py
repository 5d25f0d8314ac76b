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

__all__ = [
    "CodesOnDemand",
    "Freed",
    "Substitute",
    "WrittenCodes",
    "are_unchanged",
    "copies_of",
    "hooked_by_others",
    "mark",
    "marking",
    "may_save_as_codes",
    "pack",
    "replace_saved",
    "saved_as_codes",
    "saved_tensor_hooks",
    "versions_of",
]

_MARK = "_bitwright_codes"
_local = threading.local()
#: The hooks that are in force for saved tensors, called with True; None if there are none.
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Freed:
    """What a ``saved_as_codes`` has saved so far.

    Attributes:
        bytes: by how much codes are smaller than the tensors in whose place they are kept.
    """

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Substitute:
    """What is kept in place of a saved tensor. Whoever marks the tensor with it sets ``version``.

    Attributes:
        version: the version that the tensor must have for it.
    """

    __slots__ = ("_is_counted", "_made_before", "version")

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._is_counted = False
        self._made_before: weakref.ref[torch.Tensor] | None = None

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        # A copy of the tensor, in a file too, has another memory. An empty set is what every loader takes.
        return set, ()

    def stands_for(self, y: torch.Tensor) -> bool:
        """Whether the marked tensor, which is as it was then, can be made again; False if it must be kept as it is."""
        return True

    def count(self, y: torch.Tensor, freed: Freed) -> None:
        """Count what is saved by it, once."""
        if not self._is_counted:
            self._is_counted = True
            freed.bytes += self._frees(y)

    def _frees(self, y: torch.Tensor) -> int:
        return y.numel() * (y.itemsize - 1)

    def tensor(self) -> torch.Tensor:
        """The tensor again; operations that ask at the same time share it."""
        y = None if self._made_before is None else self._made_before()
        if y is None:
            y = self.make()
            self._made_before = weakref.ref(y)
        return y

    def make(self) -> torch.Tensor:
        """Make the tensor, in the order of its memory, of any shape."""
        raise NotImplementedError


class CodesOnDemand(Substitute):
    """A fake-quantized tensor as codes, made when an operation saves the tensor.

    Args:
        y: the tensor.
        made: scale, zero point and minval.
        block_size: shape of one block.
        grid: the codes.
        form: module whose ``encode`` and ``decode`` take the tensor.
        noted: called when an operation has saved the tensor.
    """

    __slots__ = ("_failed", "_form", "_like", "_noted", "_options", "_parameters", "_versions", "data")

    def __init__(
        self,
        y: torch.Tensor,
        made: Parameters,
        block_size: tuple[int, ...],
        grid: Grid,
        form: Any,
        noted: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(y._version)
        self._parameters, self._versions = made, versions_of(made)
        self._options: dict[str, Any] = {"block_size": block_size, "grid": grid}
        self._form, self._noted = form, noted
        self.data: torch.Tensor | None = None
        self._failed = False

    def stands_for(self, y: torch.Tensor) -> bool:
        """Make the codes, if they are not there; False if the tensor must be kept as it is."""
        if self.data is None and not self._failed:
            if not are_unchanged(self._parameters, self._versions):
                self._failed = True
                return False
            # The quantizer's buffers may change before the backward pass.
            self._parameters = copies_of(self._parameters)
            self.data = self._form.encode(y.detach(), *self._parameters, **self._options)
            self._failed = self.data is None
            if self._noted is not None:
                self._noted()
                self._noted = None
            self._like = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        return not self._failed

    def make(self) -> torch.Tensor:
        """Decode."""
        made: torch.Tensor = self._form.decode(self.data, self._like, *self._parameters, **self._options)
        return made


class WrittenCodes(Substitute):
    """A fake-quantized tensor as codes, written together with it.

    Args:
        maker: the prepared call that writes them; ``decode`` makes the elements of the codes and the parameters.
        data: memory for a byte for each element.
    """

    __slots__ = ("_maker", "_owner", "_parameters", "data")

    def __init__(self, maker: Any, data: torch.Tensor) -> None:
        super().__init__()
        self._maker, self.data = maker, data
        self._owner: Any = None
        self._parameters = 0

    def written(self, owner: Any, parameters: int) -> None:
        """Note that there is a byte for every element.

        Args:
            owner: owner of the memory of the parameters.
            parameters: its address.
        """
        self._owner, self._parameters = owner, parameters

    def mark(self, y: torch.Tensor) -> None:
        """Mark the tensor, if there is a byte for every element."""
        if self._owner is not None:
            self.version = y._version
            mark(y, self)

    def make(self) -> torch.Tensor:
        """Decode."""
        made: torch.Tensor = self._maker.decode(self.data, self._parameters)
        return made


def versions_of(made: Parameters) -> tuple[int, ...] | None:
    """The versions of parameters, -1 for one that is missing; None if they have none, being made in inference mode."""
    scale, zero_point, minval = made
    if scale.is_inference():
        return None
    return (
        scale._version,
        -1 if zero_point is None else zero_point._version,
        -1 if minval is None else minval._version,
    )


def are_unchanged(made: Parameters, versions: tuple[int, ...] | None) -> bool:
    """Whether parameters are known to be what they were when ``versions_of`` returned these versions."""
    return versions is not None and versions_of(made) == versions


def copies_of(made: Parameters) -> Parameters:
    """Return copies of parameters, whose quantizer may change its own before the backward pass."""
    scale, zero_point, minval = (None if t is None else t.detach().clone() for t in made)
    assert scale is not None
    return scale, zero_point, minval


class _View:
    """What autograd holds for a saved tensor: the substitute, and which view of its tensor it was."""

    __slots__ = ("geometry", "substitute")

    def __init__(self, substitute: Substitute, saved: torch.Tensor) -> None:
        self.substitute = substitute
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


def mark(y: torch.Tensor, substitute: Substitute) -> None:
    """Note on a tensor what is kept where an operation saves it."""
    setattr(y, _MARK, substitute)


def pack(saved: torch.Tensor) -> Any:
    """What ``saved_as_codes`` keeps in place of a tensor that an operation saves."""
    substitute: Substitute | None = getattr(saved, _MARK, None)
    whole = saved
    if not substitute and saved._base is not None:
        whole = saved._base
        substitute = getattr(whole, _MARK, None)
    if (
        substitute
        and whole._version == substitute.version
        and whole.storage_offset() == 0
        # A view may read the elements as complex numbers, or with another sign.
        and saved.dtype == whole.dtype
        and not saved.is_neg()
        and substitute.stands_for(whole)
    ):
        freed: Freed | None = getattr(_local, "freed", None)
        if freed is not None:
            substitute.count(whole, freed)
        return _View(substitute, saved)
    if saved.grad_fn is None:  # no operation's result, so that it cannot hold itself
        return saved, saved._version
    return _Kept(saved)


def _unpack(kept: _View | _Kept | tuple[torch.Tensor, int]) -> torch.Tensor:
    if isinstance(kept, _View):
        return kept.substitute.tensor().as_strided(*kept.geometry)
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
def saved_as_codes(minimum: int = 1 << 12) -> Iterator[Freed]:
    """Keep what operations save of fake-quantized tensors as one byte per element.

    Wrap the forward pass; the backward pass may run outside. Gradients are the same bits as without.
    ``Quantizer.training_mode`` sees to it by itself.

    Args:
        minimum: number of elements below which a tensor is kept as it is.

    Yields:
        What the forward passes inside save by it.

    Example:
        >>> layer = torch.nn.Linear(8, 8)
        >>> with saved_as_codes():
        ...     loss = layer(torch.ones(2, 8)).sum()
        >>> loss.backward()
    """
    before = getattr(_local, "minimum", None), getattr(_local, "freed", None)
    _local.minimum, _local.freed = minimum, Freed()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield _local.freed
    finally:
        _local.minimum, _local.freed = before


def hooked_by_others() -> bool:
    """Return whether hooks of somebody else are in force for saved tensors, such as those of a checkpoint."""
    hooks = saved_tensor_hooks(True)
    return hooks is not None and hooks[0] is not pack


def may_save_as_codes() -> bool:
    """Return whether ``saved_as_codes`` would do something here.

    Not where no gradient is wanted, where hooks of somebody else see to what is saved, or none may be set.
    """
    return (
        torch.is_grad_enabled()
        and saved_tensor_hooks(True) is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    )
