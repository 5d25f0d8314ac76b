"""Give free memory that the C library holds back to the system.

glibc takes large blocks from the system and returns them when they are freed, but each freed one raises the size from
which on it does so, up to 32 MiB; tensors below that come from its heap from then on. There, small objects that stay
alive between them keep the heap from shrinking, so that a process that goes from layer to layer grows with each one,
though no tensor stays alive (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["FreeMemory"]

_PATIENCE = 16 << 20


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None for other C libraries."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_size_t,)
    function.restype = ctypes.c_int
    trim: Callable[[int], int] = function
    return trim


class FreeMemory:
    """Returns free memory to the system from time to time.

    Args:
        patience: bytes of passing tensors after which it does so.
    """

    def __init__(self, patience: int = _PATIENCE) -> None:
        self.patience = patience
        self.passed = 0

    def saw(self, size: int) -> None:
        """Count ``size`` bytes of tensors that pass by, and return free memory when they are enough."""
        self.passed += size
        if self.passed >= self.patience:
            self.release()

    def release(self) -> None:
        """Return free memory now; without effect where the C library cannot."""
        self.passed = 0
        trim = _trim()
        if trim is not None:
            trim(0)
