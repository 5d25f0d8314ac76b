"""How compiled functions are built: without the GIL, kept on disk between processes.

Nothing else imports ``numba.njit``. The kernels of quantization and the clustering of palettization are compiled here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import llvmlite.binding
import numba
from numba.core import config as numba_config
from numba.core import event as numba_events
from numba.core import sigutils as numba_signatures
from numba.core.compiler_lock import global_compiler_lock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "c_address",
    "called",
    "compiled",
    "entry",
    "has_feature",
    "has_fused_multiply_add",
    "inlined",
    "machine_code",
    "reordering",
    "unsupported_reason",
]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

# What the machine code of every package depends on besides the package's own sources.
_SHARED_SOURCES = (Path(__file__), Path(__file__).parent.parent / "layout.py")

_SHORT_WAIT = 1.0  # seconds; loading machine code takes less
_LONGEST_WAIT = 300.0  # seconds, for one function of another process, which takes some tens of them at the most


def unsupported_reason() -> str | None:
    """Return why the compiled kernels cannot run here, or None.

    Half precision is converted by the processor; LLVM would otherwise call a library function that is not there.
    """
    if numba_config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    if x86 and not has_feature("f16c"):
        return "the processor has no half-precision conversion (F16C)"
    return None


@functools.cache
def has_feature(name: str) -> bool:
    """Return whether the processor has a feature, by LLVM's name for it."""
    return bool(llvmlite.binding.get_host_cpu_features().get(name, False))


def has_fused_multiply_add() -> bool:
    """Return whether the processor multiplies and adds with one rounding; elsewhere LLVM calls a slow function."""
    return platform.machine().lower() in ("aarch64", "arm64") or has_feature("fma")


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into the compiled functions that call it. Division by zero follows IEEE 754."""
    built: Callable[P, R] = numba.njit(error_model="numpy", forceinline=True)(function)
    return built


def called(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that only compiled functions call and that is not worth inlining."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    built: Callable[P, R] = numba.njit(error_model="numpy", **options)(function)
    return built


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls: it releases the GIL, and its machine code is kept on disk.

    Numba notices a change of the file that holds the function, not of the files it imports. The folder of the cache
    therefore carries a digest of the sources of the function's package.
    """
    return _kept(function)


def reordering(function: Callable[P, R]) -> Callable[P, R]:
    """Like :func:`compiled`, with float sums that the compiler may reorder to fill vector registers."""
    return _kept(function, fastmath={"reassoc", "contract", "nsz"})


def _kept(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    folder = _cache_folder(Path(inspect.getfile(function)).parent)
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = folder or before
    try:
        jit = numba.njit(nogil=True, error_model="numpy", cache=folder is not None, **options)
        built: Callable[P, R] = jit(function)
    finally:
        numba_config.CACHE_DIR = before
    if folder is not None:
        _keep_if_possible(built, Path(folder))
        _compile_in_turn(built, Path(folder) / f"{Path(inspect.getfile(function)).stem}.{function.__name__}.lock")
    return built


def _keep_if_possible(dispatcher: Any, folder: Path) -> None:
    """Have a function compiled and used whatever is wrong with the files of its machine code.

    The folder may be gone, full or another user's by the time that a function is compiled; a file may be cut off.
    """
    cache = dispatcher._cache
    load, save = cache.load_overload, cache.save_overload

    def load_if_possible(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except Exception as error:  # what was cut off may raise anything
            logger.info("Machine code in %s cannot be read and is made anew (%s).", folder, error)
            with contextlib.suppress(OSError):
                cache.flush()  # else it would stand in the way of what is saved
            return None

    def save_if_possible(signature: Any, made: Any) -> None:
        try:
            save(signature, made)
        except Exception as error:  # of the disk, or numba's, which may not find again what it has compiled
            _say_not_kept(folder.name.rpartition("-")[0], str(error))

    cache.load_overload, cache.save_overload = load_if_possible, save_if_possible


@functools.cache
def _say_not_kept(package: str, reason: str) -> None:
    """Warn once that every process must compile the functions of a package."""
    logger.warning(
        "Compiled functions of %s cannot be kept (%s): every process compiles them again. "
        "Set BITWRIGHT_CACHE_DIR to a writable folder.",
        package,
        reason,
    )


def _compile_in_turn(dispatcher: Any, path: Path) -> None:
    """Let one process at a time compile a function; those that waited find its machine code on disk.

    That saves work and nothing else: where files cannot be locked, or a process keeps others waiting for longer than
    ``_LONGEST_WAIT``, each compiles for itself. The operating system takes the lock from a process that ends.
    """
    compile_now = dispatcher.compile

    def compile_in_turn(signature: Any) -> Any:
        arguments, _ = numba_signatures.normalize_signature(signature)
        if tuple(arguments) in dispatcher.overloads:
            return compile_now(signature)
        # Compiling takes numba's own lock. Taken behind the file's, threads of two processes could wait for each other.
        with contextlib.ExitStack() as until_compiled, global_compiler_lock:
            with contextlib.suppress(OSError):
                _wait_for_lock(until_compiled.enter_context(path.open("ab")))
            return compile_now(signature)

    dispatcher.compile = compile_in_turn


def _wait_for_lock(file: IO[bytes]) -> None:
    """Lock a file until it is closed.

    Locks of ``lockf`` belong to the process: a fork does not keep them, threads do not wait for each other.

    Raises:
        OSError: files of this file system cannot be locked.
    """
    if fcntl is None:
        return
    begin, pause = time.monotonic(), 0.001
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process has it
            waited = time.monotonic() - begin
            if waited > _LONGEST_WAIT:
                return
            if waited > _SHORT_WAIT:
                _notice.on_wait()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        else:
            return


def entry(function: Callable[P, R], arguments: int) -> Callable[P, R]:
    """Return the machine code of a compiled function of integers as a callable.

    A call through Numba's dispatcher first looks at the type of each argument.

    Args:
        function: what ``compiled`` returned.
        arguments: number of its arguments.
    """
    found: Callable[P, R] = _compiled_for_integers(function, arguments).entry_point
    return found


machine_code = functools.cache(entry)


@functools.cache
def c_address(function: Callable[..., object], arguments: int) -> int:
    """Return the address of a compiled function of integers, for callers from C; takes the arguments of ``entry``."""
    result = _compiled_for_integers(function, arguments)
    address: int = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    return address


def _compiled_for_integers(function: Callable[..., object], arguments: int) -> Any:
    dispatcher: Any = function
    signature = (numba.types.int64,) * arguments
    with numba_events.install_listener("numba:compile", _notice):
        dispatcher.compile(signature)
    return dispatcher.overloads[signature]


class _Notice(numba_events.Listener):  # type: ignore[misc]
    """Says once that something is compiled, which nobody hears of otherwise; what lies on disk is not compiled."""

    def __init__(self) -> None:
        self.given = False
        self.waiting = False

    def on_start(self, event: numba_events.Event) -> None:
        if self.given:
            return
        self.given = True
        folder = _cache_folder(Path(__file__).parent)
        kept = f"The code is kept in {Path(folder).parent}." if folder else "The code cannot be kept."
        _say(f"Bitwright compiles its CPU kernels for this processor, which takes up to a minute or two. {kept}")

    def on_end(self, event: numba_events.Event) -> None:
        """Nothing is to be said then."""

    def on_wait(self) -> None:
        """Say once that another process is waited for, unless this one has said that it compiles."""
        if self.given or self.waiting:
            return
        self.waiting = True
        _say("Bitwright waits for another process that compiles its CPU kernels, which takes up to a minute or two.")


def _say(text: str) -> None:
    logger.info("%s", text)
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr)


_notice = _Notice()


@functools.cache
def _cache_folder(package: Path) -> str | None:
    """Writable folder of the machine code of a package's present sources, or None when there is none."""
    digest = hashlib.sha256(numba.__version__.encode())
    chosen = os.environ.get("BITWRIGHT_CACHE_DIR")
    try:
        for source in (*_SHARED_SOURCES, *sorted(package.glob("*.py"))):
            digest.update(source.read_bytes())
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitwright"
        base = Path(chosen).expanduser() if chosen else usual
        folder = base / f"{package.name}-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        _say_not_kept(package.name, str(error))
        return None
    return str(folder)
