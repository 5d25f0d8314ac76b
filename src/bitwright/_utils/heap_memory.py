"""Memory that a training step frees, for the next step.

A step frees, from its backward pass on, what its forward pass has kept. glibc then shortens its heap if more than twice
the size of the largest freed tensor lies at the end, and the next step gets that memory from the system again, page by
page, each of which the system clears. Whether this happens depends on what happens to lie at the end; where it does, a
step of a convolutional network takes 5 to 10 % longer. So while a model is trained, the heap is not shortened.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bitwright.kernels.environment import idle_megabytes

__all__ = ["heap_kept"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# What the C library itself comes to in a process that has freed a tensor of 32 MiB, the most that it takes for one.
_LARGEST_IN_HEAP = 32 << 20
_AFTERWARDS = 2 * _LARGEST_IN_HEAP
_NEVER = (1 << 31) - 1
_SETTINGS = ("trim_threshold", "mmap_threshold", "top_pad", "mmap_max")


def _is_set_up() -> bool:
    """Whether somebody has chosen for this process when the heap grows and shrinks."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in tunables for name in _SETTINGS)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """The function of glibc; None for other C libraries, and where somebody has set up glibc for this process."""
    if _is_set_up() or idle_megabytes() == 0:
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        function = library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    mallopt: Callable[[int, int], int] = function
    return mallopt


_lock = threading.Lock()
_users = 0


@contextmanager
def heap_kept() -> Iterator[None]:
    """Keep what is freed in the process, for what comes next, until the last such block ends."""
    global _users
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    with _lock:
        _users += 1
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                mallopt(_TRIM_THRESHOLD, _AFTERWARDS)
