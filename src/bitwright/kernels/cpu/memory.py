"""Memory for results: on Linux a large result asks for huge pages before it is first written.

A tensor of many megabytes gets fresh memory from the system at every call, and the system fills it page by page while
the kernel writes: for 4 KiB pages that takes longer than the kernel itself. Pages of 2 MiB are 512 times fewer.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["LARGE", "empty_like"]

LARGE = 4 << 20
_PAGE = 4096
_MADV_HUGEPAGE = 14
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


def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.empty_like`` for a plain CPU tensor, with the advice to use huge pages where it is large."""
    out = torch.empty_like(x) if dtype is None else torch.empty_like(x, dtype=dtype)
    size = out.nbytes
    if size >= LARGE:
        advise = _advise()
        if advise is not None:
            first = -(-out.data_ptr() // _PAGE) * _PAGE
            # The result does not matter: without huge pages the memory is as good, only slower to fill.
            advise(first, (out.data_ptr() + size - first) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return out
