"""How the compiled kernels of this package are built and run.

Numba is imported here and nowhere else in the package, so it is loaded when the first kernel module is, not
by ``import bitwright``. Kernels release the interpreter lock and are run by plain threads over fixed pieces of
the work: the pieces, hence the sums, are the same with any number of threads, and no Numba threading layer
(each with its own rules on forking and nesting) is involved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import torch

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()

_F = TypeVar("_F", bound=Callable[..., Any])
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def _kept(dispatcher: Any) -> Any:
    """Make the cached machine code of a kernel depend on the whole package, not only on its own file.

    Numba looks at the file of the kernel alone, and would keep code that contains an older version of a kernel
    that it calls from another file.
    """
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, _SOURCES)
    return dispatcher


def kernel(function: _F) -> _F:
    """Compile ``function`` at its first call; the machine code is cached on disk."""
    return cast(_F, _kept(numba.njit(nogil=True, cache=True, error_model="numpy")(function)))


def inlined(function: _F) -> _F:
    """Compile ``function`` into every kernel that calls it."""
    return cast(_F, numba.njit(error_model="numpy", forceinline=True)(function))


def reordering(function: _F) -> _F:
    """Like :func:`kernel`, with float sums that the compiler may reorder to fill vector registers."""
    flags = {"reassoc", "contract", "nsz"}
    return cast(_F, _kept(numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=flags)(function)))


def run_all(function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
    """Apply ``function`` to every task with up to ``torch.get_num_threads()`` threads; results in task order."""
    workers = min(torch.get_num_threads(), len(tasks))
    if workers <= 1:
        return [function(task) for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, tasks))
