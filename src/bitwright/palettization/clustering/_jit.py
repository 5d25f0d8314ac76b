"""How the compiled kernels of this package are built and run.

Numba is imported here and nowhere else in the package, so it is loaded when the first kernel module is, not
by ``import bitwright``. Kernels release the interpreter lock and are run by plain threads over fixed pieces of
the work: the pieces, hence the sums, are the same with any number of threads, and no Numba threading layer
(each with its own rules on forking and nesting) is involved.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import torch
from numba.core import config as numba_config

_logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@functools.cache
def _cache_folder() -> str | None:
    """Writable folder of the machine code of this package's present sources, or None when there is none.

    Numba by itself looks at the file of a kernel alone, and would keep code that contains an older version of a kernel
    that it calls from another file.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    chosen = os.environ.get("BITWRIGHT_CACHE_DIR")
    try:
        base = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitwright")
        folder = base / f"clustering-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        _logger.warning(
            "Compiled clustering kernels cannot be kept (%s): every process compiles them again. Set "
            "BITWRIGHT_CACHE_DIR to a writable folder.",
            error,
        )
        return None
    return str(folder)


def _compiled(function: _F, **options: Any) -> _F:
    """Compile at the first call, to machine code that is kept on disk where that is possible."""
    folder = _cache_folder()
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = folder or before
    try:
        return cast(_F, numba.njit(nogil=True, cache=folder is not None, error_model="numpy", **options)(function))
    finally:
        numba_config.CACHE_DIR = before


def kernel(function: _F) -> _F:
    """Compile ``function`` at its first call; the machine code is cached on disk."""
    return _compiled(function)


def called(function: _F) -> _F:
    """Compile ``function`` for the kernels that call it, without what a call from Python would need."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(_F, numba.njit(error_model="numpy", **options)(function))


def inlined(function: _F) -> _F:
    """Compile ``function`` into every kernel that calls it."""
    return cast(_F, numba.njit(error_model="numpy", forceinline=True)(function))


def reordering(function: _F) -> _F:
    """Like :func:`kernel`, with float sums that the compiler may reorder to fill vector registers."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def run_all(function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
    """Apply ``function`` to every task with up to ``torch.get_num_threads()`` threads; results in task order."""
    workers = min(torch.get_num_threads(), len(tasks))
    if workers <= 1:
        return [function(task) for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, tasks))
