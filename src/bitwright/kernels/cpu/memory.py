"""Memory for results: a large result takes that of an earlier one, in huge pages where the system has them.

A tensor of many megabytes gets fresh memory from the system at every call, and the system clears it page by page while
the kernel writes, which takes as long as the kernel itself, or longer. Memory that nobody uses any more is therefore
kept for the next results, unless they turn out to be of other sizes.

Smaller results gain in another way. In training they come and go, or stay until the backward pass, between the
tensors of other operations, and what these leave are holes in the allocator's memory that fit none of them later: the
memory of a step then grows far beyond what is alive. So what a result was made from, if it dies soon, leaves no hole:
its memory is held for a little while, to become that of a later result of the same size. And where there is none, a
result is asked for without alignment, for then it fits a hole of its own size; torch asks for more. Masks and codes
that wait for the backward pass lie in blocks of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitwright.kernels.environment import idle_megabytes
from bitwright.kernels.ownership import is_forgotten, owns_memory

__all__ = [
    "CPU",
    "LARGE",
    "backward_goes_unnoticed",
    "empty_flat",
    "empty_like",
    "forget_sources",
    "idle_bytes",
    "lasting_bytes",
    "over",
    "release_idle",
    "result_from",
    "unaligned_like",
]

LARGE = 1 << 18
# A block that none of so many further results had the size of goes back to the system, in training after one step.
_PATIENCE = 256
_HUGE_PAGE = 2 << 20
_SMALL_UNIT = 1 << 16
# Pieces of at least the first and at most the second size are cut from common blocks of the third.
_LEAST_PIECE, _MOST_PIECE, _COMMON = 1 << 13, 1 << 18, 1 << 20
_ALIGNMENT = 64
_MOST_IDLE = idle_megabytes() << 20
# For so many further results the tensor that one was made from is watched for its end.
_WATCHED_FOR = 5
# One of so many results has a node in the graph that calls Python, which tells that the backward pass has begun.
_TELLING = 16
# Larger tensors gain more from huge pages, which only blocks of our own have.
_MOST_UNALIGNED = 4 << 20
_MADV_HUGEPAGE = 14
# Memory for compiled code is asked for by device: torch.set_default_device may name another.
CPU = torch.device("cpu")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's ``madvise`` where asking for huge pages has an effect.

    ``BITWRIGHT_HUGE_PAGES=0`` turns it off.
    """
    if not sys.platform.startswith("linux") or os.environ.get("BITWRIGHT_HUGE_PAGES") == "0":
        return None
    try:
        if "[madvise]" not in _SETTING.read_text():
            return None
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    advise: Callable[[int, int, int], int] = function
    return advise


class _Block:
    """Memory of its own; whole huge pages start at one."""

    __slots__ = ("idle_since", "lent_at", "memory", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle_since = self.lent_at = 0
        huge = size % _HUGE_PAGE == 0
        length = size + _HUGE_PAGE if huge else size
        whole = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(whole)
        if not huge:
            return
        address = np.frombuffer(whole, dtype=np.uint8).ctypes.data
        first = -address % _HUGE_PAGE
        self.memory = self.memory[first : first + size]
        advise = _advise()
        if advise is not None:
            advise(address + first, size, _MADV_HUGEPAGE)


class _Loan(weakref.ref[memoryview]):
    """Tells of the end of what was lent."""

    __slots__ = ("block",)
    block: _Block


class _Blocks:
    """Blocks in use and idle ones.

    A block comes back when the last tensor on its memory dies, which may be on any thread and in the midst of anything
    here; so there are no locks, and each operation on a collection is one that nothing can interrupt.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Block]] = {}  # by size, the longest idle first
        self._lent: dict[int, _Loan] = {}  # by identity, for one cannot hash them
        self._count = itertools.count(1)
        self._now = self._backward_before = 0

    def idle_bytes(self) -> int:
        total = 0
        for size, blocks in tuple(self._idle.items()):
            total += size * len(blocks)
        return total

    def release_idle(self) -> None:
        for blocks in tuple(self._idle.values()):
            blocks.clear()

    def lend(self, size: int, longest_idle: bool = False) -> memoryview:
        """Memory of so many bytes, the latest in use or the longest idle; it comes back when the view dies."""
        if self._now % _PATIENCE == 0:
            self._give_back()
        unit = _HUGE_PAGE if size >= 2 * _HUGE_PAGE else _SMALL_UNIT
        whole = -(-size // unit) * unit
        try:
            blocks = self._idle[whole]
            block = blocks.popleft() if longest_idle else blocks.pop()
        except (KeyError, IndexError):
            block = _Block(whole)
        block.lent_at = self._now = next(self._count)
        view = block.memory[:size]
        loan = _Loan(view, self._take_back)
        loan.block = block
        self._lent[id(loan)] = loan
        return view

    def begin_backward(self) -> None:
        """Give back what neither the backward pass before nor the forward pass after it had a use for."""
        for blocks in tuple(self._idle.values()):
            with contextlib.suppress(IndexError):
                for _ in range(len(blocks)):
                    block = blocks.popleft()
                    if block.lent_at >= self._backward_before:
                        blocks.append(block)
        self._backward_before = self._now + 1

    def _give_back(self) -> None:
        for blocks in tuple(self._idle.values()):
            with contextlib.suppress(IndexError):
                while self._now - blocks[0].idle_since > _PATIENCE:
                    blocks.popleft()

    def _take_back(self, loan: Any) -> None:
        block: _Block = self._lent.pop(id(loan)).block
        block.idle_since = self._now
        excess = self.idle_bytes() + block.size - _MOST_IDLE
        if excess > 0:
            self._drop(excess)
        self._idle.setdefault(block.size, deque()).append(block)

    def _drop(self, excess: int) -> None:
        """Give back blocks of so many bytes, the longest idle of each size first."""
        for blocks in tuple(self._idle.values()):
            while excess > 0:
                try:
                    excess -= blocks.popleft().size
                except IndexError:
                    break


_blocks = _Blocks()


def release_idle() -> None:
    """Give the memory kept for later results back to the system."""
    _blocks.release_idle()


def idle_bytes() -> int:
    """Number of bytes kept for later results, at most ``BITWRIGHT_IDLE_MEGABYTES`` (256) MiB."""
    return _blocks.idle_bytes()


class _Common(threading.local):
    """The block that a thread cuts pieces from. The pieces keep it alive; with the last one it is idle again."""

    def __init__(self) -> None:
        self.block: Callable[[], Any] = lambda: None
        self.used = 0


_common = _Common()
_HAS_BLOCKS = hasattr(mmap, "MAP_ANONYMOUS")


def lasting_bytes(size: int) -> torch.Tensor:
    """Return a 1-D ``uint8`` tensor with arbitrary content for something that is kept until the backward pass."""
    if size < _LEAST_PIECE or size > _MOST_IDLE or not (_COMMON <= _MOST_IDLE and _HAS_BLOCKS):
        return torch.empty(size, dtype=torch.uint8, device=CPU)
    if size > _MOST_PIECE:
        return torch.frombuffer(_blocks.lend(size), dtype=torch.uint8)
    common = _common
    block = common.block()
    if block is None or common.used + size > _COMMON:
        block = _blocks.lend(_COMMON)
        common.block, common.used = weakref.ref(block), 0
    piece = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=common.used)
    common.used += -(-size // _ALIGNMENT) * _ALIGNMENT
    return piece


def empty_like(
    x: torch.Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    longest_idle: bool = False,
) -> torch.Tensor:
    """``torch.empty_like`` for a plain CPU tensor without holes, for results that a kernel writes in full.

    The latest block in use may still be in a cache. In training the longest idle one is taken, for the forward and the
    backward pass have one each, and what both leave is given back.
    """
    kind = x.dtype if dtype is None else dtype
    size = x.numel() * kind.itemsize
    if not _has_block(size):
        return torch.empty_like(x, dtype=dtype, device=device)
    y = torch.frombuffer(_blocks.lend(size, longest_idle), dtype=kind)
    if x.is_contiguous():
        return y.resize_(x.shape)
    return y.set_(y.untyped_storage(), 0, x.shape, x.stride())


def _has_block(size: int) -> bool:
    """Whether a result of so many bytes gets a block."""
    return LARGE <= size <= _MOST_IDLE and _HAS_BLOCKS


def empty_flat(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """``empty_like`` for one dimension."""
    size = numel * dtype.itemsize
    if not _has_block(size):
        return torch.empty(numel, dtype=dtype, device=CPU)
    return torch.frombuffer(_blocks.lend(size), dtype=dtype)


class _Sources(threading.local):
    """Memory of tensors from which this thread has made results, and which no operation had saved then."""

    def __init__(self) -> None:
        self._watched: deque[torch.UntypedStorage] = deque()
        self._since: deque[int] = deque()  # the number of the result that was made from each
        self._bytes = self._results = 0
        self.untold = 0  # results whose nodes do not tell, since the last whose node does
        self._forward = False

    def watch(self, x: torch.Tensor) -> None:
        """Hold the memory of a tensor that nothing else lies in."""
        storage = x.untyped_storage()
        if storage.nbytes() != x.numel() * x.dtype.itemsize or storage.is_shared():
            return
        self._watched.append(storage)
        self._since.append(self._results)
        self._bytes += storage.nbytes()
        while self._bytes > _MOST_IDLE:
            self._drop_first()

    def _drop_first(self) -> None:
        self._since.popleft()
        self._bytes -= self._watched.popleft().nbytes()

    def take(self, size: int) -> torch.UntypedStorage | None:
        """Memory of so many bytes that nobody uses any more; None if there is none."""
        self._forward = True
        self._results += 1
        watched = self._watched
        while watched and self._results - self._since[0] > _WATCHED_FOR:
            self._drop_first()
        for place in range(len(watched)):
            if watched[place].nbytes() == size and is_forgotten(watched, place):
                found = watched[place]
                del watched[place], self._since[place]
                self._bytes -= size
                return found
        return None

    def forget(self) -> None:
        if self._forward:
            self._forward = False
            _blocks.begin_backward()
        self._watched.clear()
        self._since.clear()
        self._bytes = 0


_sources = _Sources()


def result_from(x: torch.Tensor) -> torch.Tensor:
    """``empty_like`` for a result that is kept until the backward pass, while ``x`` probably is not."""
    size = x.numel() * x.dtype.itemsize
    if not LARGE <= size <= _MOST_IDLE:
        return empty_like(x)
    found = _sources.take(size)
    if x.grad_fn is not None and owns_memory(x):
        _sources.watch(x)
    if found is None:
        return unaligned_like(x)
    return torch.empty(0, dtype=x.dtype, device=CPU).set_(found, 0, x.shape, x.stride())


def unaligned_like(x: torch.Tensor) -> torch.Tensor:
    """``empty_like`` on memory as ``malloc`` aligns it, for what lives among torch's own tensors."""
    size = x.numel() * x.dtype.itemsize
    if not LARGE <= size <= _MOST_UNALIGNED:
        return empty_like(x, device=CPU, longest_idle=True)
    memory = torch.from_numpy(np.empty(size, dtype=np.uint8))
    return torch.empty(0, dtype=x.dtype, device=CPU).set_(memory.untyped_storage(), 0, x.shape, x.stride())


def forget_sources() -> None:
    """Hold no memory of this thread's tensors any more: the backward pass has begun, which frees what was saved."""
    _sources.forget()


def backward_goes_unnoticed() -> bool:
    """Return whether the next result must have a node that calls ``forget_sources``: for one in ``_TELLING`` calls."""
    _sources.untold = (_sources.untold + 1) % _TELLING
    return _sources.untold == 0


def over(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own on the memory of ``x``, which nobody may read any more; gradients are off."""
    y: Any = torch.empty(0, dtype=x.dtype, device=CPU)
    found: torch.Tensor = y.set_(x)
    return found
