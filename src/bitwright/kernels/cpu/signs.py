"""The signs of a ReLU's result, in place of which autograd takes a tensor: its gradient needs no more.

``threshold_backward`` writes a gradient anew from another and from the result. With the signs alone it need only zero
what does not pass, in the gradient's own memory where that is nobody else's: a third of the traffic, and no memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from bitwright.kernels.layout import LANES
from bitwright.kernels.ownership import References, on_its_own, references_to

from .arithmetic import load, store
from .compiling import compiled
from .lanes import from_mask, load_mask, select, splat
from .memory import lasting_bytes, unaligned_like
from .native import DTYPES
from .threads import run_parts, threads_for
from .walking import VECTOR, copy, element_bytes, first_part, next_part, staged, vector_room

__all__ = ["Signs"]

_aten = torch.ops.aten


@compiled
def passed_part(signs: int, gradient: int, out: int, dtype: int, count: int, parts: int, control: int) -> None:
    """Write a gradient, and 0 where a bit is set.

    Args:
        signs: address of the bits that ``relu.signs_part`` wrote.
        gradient: address of the gradient of a ReLU's result.
        out: address of that of its argument, which may be the same.
        dtype: of both gradients.
        count: number of elements.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    size, words, nothing = element_bytes(dtype), (count + LANES - 1) // LANES, splat(np.float32(0))
    room = vector_room()
    part = first_part(control)
    while part < parts:
        for word in range(words * part // parts, words * (part + 1) // parts):
            at, rest = size * LANES * word, count - LANES * word
            bits = load_mask(signs + 2 * word)
            if rest >= LANES:
                store(out + at, select(bits, nothing, load(gradient + at, dtype)), dtype)
            else:
                last = load(staged(gradient + at, room, size * rest), dtype)
                store(room + VECTOR, select(bits, nothing, last), dtype)
                copy(room + VECTOR, out + at, size * rest)
        part = next_part(control, part)


@compiled
def values_part(mask: int, y: int, dtype: int, count: int, parts: int, control: int) -> None:
    """Write 0 where a bit is set, and 1 elsewhere.

    Args:
        mask: address of the bits that ``relu.signs_part`` wrote.
        y: address of the elements.
        dtype: their dtype.
        count: number of elements.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    size, words = element_bytes(dtype), (count + LANES - 1) // LANES
    one = splat(np.float32(1))
    room = vector_room()
    part = first_part(control)
    while part < parts:
        for word in range(words * part // parts, words * (part + 1) // parts):
            at, rest = y + size * LANES * word, count - LANES * word
            values = one - from_mask(load_mask(mask + 2 * word))
            if rest >= LANES:
                store(at, values, dtype)
            else:
                store(room + VECTOR, values, dtype)
                copy(room + VECTOR, at, size * rest)
        part = next_part(control, part)


class Signs(torch.Tensor):
    """The result of a ReLU of which only the signs are known. Other operations than its gradient see zeros and ones.

    Args:
        bits: what ``relu.signs_part`` wrote, in the order of the result's memory.
        like: a tensor of the shape, strides and dtype of the result, without memory.
        found: where to note the references to the gradient that the ReLU is given, for ``_unshared``.
    """

    bits: torch.Tensor
    like: torch.Tensor
    found: list[References] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, bits: torch.Tensor, like: torch.Tensor, found: list[References] | None = None) -> Signs:
        """Make a tensor without memory of its own."""
        made: Signs = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.bits, made.like, made.found = bits, like, found
        return made

    def values(self) -> torch.Tensor:
        """Return 0 where the result is at most 0, and 1 elsewhere."""
        y = unaligned_like(self.like)
        arguments = self.bits.data_ptr(), y.data_ptr(), DTYPES[y.dtype], y.numel()
        run_parts(values_part, arguments, threads_for(y.numel()), (self.bits, y))
        return y

    def suits(self, gradient: torch.Tensor) -> bool:
        """Return whether ``passed`` takes a gradient."""
        like, plain = self.like, type(gradient) is torch.Tensor and gradient.is_cpu and not gradient.is_neg()
        return plain and gradient.dtype == like.dtype and gradient.stride() == like.stride()

    def passed(self, gradient: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Return the gradient of the ReLU's argument.

        Args:
            gradient: that of its result, in the order of the result's memory.
            in_place: it may be changed.
        """
        out = gradient if in_place else unaligned_like(gradient)
        arguments = self.bits.data_ptr(), gradient.data_ptr(), out.data_ptr(), DTYPES[out.dtype], out.numel()
        run_parts(passed_part, arguments, threads_for(out.numel()), (self.bits, gradient, out))
        return out

    @staticmethod
    def prepare() -> None:
        """Find out what an unshared gradient looks like; within a backward pass it would look otherwise."""
        _unshared()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle the gradient of the ReLU."""
        if func is _aten.threshold_backward.default and type(args[1]) is cls:
            gradient, signs = args[0], args[1]
            references = references_to(gradient)
            if signs.found is not None:
                signs.found.append(references)
            elif signs.suits(gradient) and args[2] == 0:
                mine = references in _unshared() and gradient.untyped_storage().resizable()
                return signs.passed(gradient, mine)
        if func is _aten.detach.default:
            return cls(args[0].bits, args[0].like, args[0].found)
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _HandedOn(torch.autograd.Function):
    """Hands its gradient on as fake quantizers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        references_to(grad)
        return grad


@functools.cache
def _unshared() -> frozenset[References]:
    """The references to gradients that nobody else holds, as ``Signs`` sees them. Empty where they say nothing."""
    if not hasattr(torch.Tensor, "_use_count"):
        return frozenset()
    return on_its_own(_probe) or frozenset()


def _probe() -> frozenset[References]:
    unshared: list[References] = []
    shared: list[References] = []
    kept: list[torch.Tensor] = []

    def probed(x: torch.Tensor, found: list[References]) -> torch.Tensor:
        y = torch.relu(x)
        node: Any = y.grad_fn
        bits = lasting_bytes(2 * LANES).zero_()
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        node._raw_saved_result.register_hooks(lambda _: None, lambda _: Signs(bits, like, found))
        return y

    apply: Any = _HandedOn.apply
    with torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        (probed(x, unshared) * 2).sum().backward()  # type: ignore[no-untyped-call]
        (apply(probed(x, unshared)) * 2).sum().backward()
        ((probed(x, shared) + probed(x, shared)) * 2).sum().backward()  # type: ignore[no-untyped-call]
        del shared[1:]  # the other is done with the gradient then
        for handed_on in (False, True):
            y = probed(x, shared)
            read = apply(y) if handed_on else y
            read.register_hook(kept.append)
            (read * 2).sum().backward()
            y = probed(x, shared)
            y.register_hook(kept.append)  # type: ignore[no-untyped-call]
            ((apply(y) if handed_on else y) * 2).sum().backward()
    return frozenset() if set(unshared) & set(shared) else frozenset(unshared)
