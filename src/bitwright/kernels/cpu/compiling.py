"""How the CPU kernels are compiled: without the GIL, without fast math, kept on disk between processes."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import llvmlite.binding
import numba
from numba.core import config as numba_config

__all__ = ["called", "compiled", "entry", "inlined", "unsupported_reason"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def unsupported_reason() -> str | None:
    """Return why the compiled kernels cannot run here, or None.

    Half precision is converted by the processor; LLVM would otherwise call a library function that is not there.
    """
    if numba_config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    if x86 and not llvmlite.binding.get_host_cpu_features().get("f16c", False):
        return "the processor has no half-precision conversion (F16C)"
    return None


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into the compiled functions that call it. Division by zero follows IEEE 754."""
    built: Callable[P, R] = numba.njit(error_model="numpy", forceinline=True)(function)
    return built


def called(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that compiled functions call and that is not worth inlining."""
    built: Callable[P, R] = numba.njit(error_model="numpy")(function)
    return built


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls: it releases the GIL, and its machine code is kept on disk.

    Numba notices a change of the file that holds the function, not of the files it imports. The folder of the cache
    therefore carries a digest of this package's sources.
    """
    folder = _cache_folder()
    if folder is None:
        built: Callable[P, R] = numba.njit(nogil=True, error_model="numpy")(function)
        return built
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = folder
    try:
        built = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    finally:
        numba_config.CACHE_DIR = before
    return built


def entry(function: Callable[P, R], arguments: int) -> Callable[P, R]:
    """Return the machine code of a compiled function of integers as a callable.

    A call through Numba's dispatcher first looks at the type of each argument.

    Args:
        function: what ``compiled`` returned.
        arguments: number of its arguments.
    """
    dispatcher: Any = function
    signature = (numba.types.int64,) * arguments
    dispatcher.compile(signature)
    found: Callable[P, R] = dispatcher.overloads[signature].entry_point
    return found


@functools.cache
def _cache_folder() -> str | None:
    """Writable folder of the machine code, or None when there is none."""
    digest = hashlib.sha256(numba.__version__.encode())
    here = Path(__file__).parent
    for source in (here.parent / "layout.py", *sorted(here.glob("*.py"))):
        digest.update(source.read_bytes())
    chosen = os.environ.get("BITWRIGHT_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitwright"
    folder = base / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        logger.warning(
            "Compiled kernels cannot be kept in %s (%s): every process compiles them again. "
            "Set BITWRIGHT_CACHE_DIR to a writable folder.",
            folder,
            error,
        )
        return None
    return str(folder)
