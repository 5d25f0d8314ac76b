"""Whether a gradient belongs to nobody else, so that it may be changed in place.

Autograd hands most gradients on and forgets them; its engine itself adds to such a gradient in place. Whether one is
held elsewhere (by a hook, the caller of ``backward``, another branch of the graph, a view, a saved tensor) shows in the
counts of references to the tensor, its base and its memory. What the counts of an unshared gradient are depends on the
versions of Python and torch; they are found out by looking at gradients that are known to be unshared, in a function
that is called as the one that asks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["References", "has_memory", "is_forgotten", "is_unshared", "on_its_own", "owns_memory", "references_to"]

References = tuple[int, ...]
T = TypeVar("T")

_COUNTED = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def on_its_own(probe: Callable[[], T]) -> T | None:
    """Call a function on a thread of its own, for which no modes and no hooks on saved tensors are in force.

    Returns:
        What it returned; None if it raised.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(probe()))
    thread.start()
    thread.join()
    return found[0] if found else None


def has_memory(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a tensor whose elements lie in memory as its strides say.

    A sparse one does not, nor does one that stands for many (``is_grads_batched``).
    """
    found: bool = gradient.layout is torch.strided and torch._C._has_storage(gradient)
    return found


def references_to(gradient: torch.Tensor) -> References:
    """Return the counts of references by which ``is_unshared`` judges; to be called from ``backward`` itself."""
    if not _COUNTED or type(gradient) is not torch.Tensor or not has_memory(gradient):
        return ()
    storage = gradient.untyped_storage()
    own = getrefcount(gradient), gradient._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    base = gradient._base
    return own if base is None else (*own, getrefcount(base), base._use_count())  # type: ignore[attr-defined]


def is_unshared(gradient: torch.Tensor, references: References) -> bool:
    """Return whether nobody else holds the gradient or its memory.

    Args:
        gradient: what ``backward`` was given.
        references: what ``references_to`` returned for it, called from ``backward`` before anything else took hold of
            the gradient.
    """
    # Memory that torch did not allocate, such as that of a NumPy array, may have another owner.
    return references in _unshared_counts() and gradient.untyped_storage().resizable()


def owns_memory(x: torch.Tensor) -> bool:
    """Return whether no other tensor, such as one saved for the backward pass, lies in the memory of ``x``.

    A view of which ``x`` is the whole, and whose base nobody else holds, is no other tensor: such is what a linear
    layer returns for more than two dimensions.
    """
    alone = _counts_of_own_memory()
    if x._base is None:
        if _references_to_memory(x) != alone.plain:
            return False
    elif _references_to_memory(x) != alone.view or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return False
    return x.untyped_storage().resizable()


def is_forgotten(held: Sequence[torch.UntypedStorage], place: int) -> bool:
    """Return whether memory, of which nobody but ``held`` should know, is used no more.

    Args:
        held: the memory of tensors.
        place: which of them is asked about.
    """
    return _references_in(held, place) == _counts_of_own_memory().forgotten


class _Counts(NamedTuple):
    """References where nobody else has any; empty where they say nothing."""

    plain: References
    view: References
    forgotten: References


def _references_to_memory(x: torch.Tensor) -> References:
    """The references to the memory of a tensor, and to the base of a view."""
    if not _COUNTED:
        return (0,)
    storage = x.untyped_storage()
    own = torch._C._storage_Use_Count(storage._cdata), getrefcount(storage)
    base: Any = x._base
    return own if base is None else (*own, getrefcount(base), base._use_count())


def _references_in(held: Sequence[torch.UntypedStorage], place: int) -> References:
    return torch._C._storage_Use_Count(held[place]._cdata), getrefcount(held[place])


@functools.cache
def _counts_of_own_memory() -> _Counts:
    return (on_its_own(_counted) if _COUNTED else None) or _Counts((), (), ())


def _counted() -> _Counts:
    x = torch.zeros(2, device="cpu", requires_grad=True)
    with torch.enable_grad(), torch.inference_mode(False):
        plain, saved = _references_to_memory(torch.neg(x)), _references_to_memory(torch.relu(x))
        view, of_saved = _references_to_memory(torch.neg(x).view(2, 1)), _references_to_memory(torch.relu(x).view(2, 1))
        base = torch.neg(x)
        of_held = _references_to_memory(base.view(2, 1))
        held = [base.untyped_storage()]
        used = _references_in(held, 0)
        del base
        forgotten = _references_in(held, 0)
    return _Counts(
        () if plain == saved else plain,
        () if view in (of_saved, of_held) else view,
        () if used == forgotten else forgotten,
    )


class _Probe(torch.autograd.Function):
    """Notes the references to its gradient, in a function that is called as that of ``StraightThrough``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[References]) -> torch.Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None
        ctx.found.append(references_to(grad))
        return grad, None


@functools.cache
def _unshared_counts() -> frozenset[References]:
    """The counts for unshared gradients: a tensor of its own, and a view of one. Empty where they say nothing."""
    if not _COUNTED:
        return frozenset()
    unshared: list[References] = []
    shared: list[References] = []
    kept: list[torch.Tensor] = []
    with torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        probe = _Probe.apply
        (probe(x, unshared) * 2).sum().backward()  # type: ignore[no-untyped-call]
        (probe(x, unshared).flatten() * 2).sum().backward()  # type: ignore[no-untyped-call]
        ((probe(x, shared) + probe(x, shared)) * 2).sum().backward()  # type: ignore[no-untyped-call]
        for flat in (False, True):
            y = probe(x, shared)  # type: ignore[no-untyped-call]
            read = y.flatten() if flat else y
            read.register_hook(kept.append)
            (read * 2).sum().backward()
    return frozenset() if set(unshared) & set(shared) else frozenset(unshared)
