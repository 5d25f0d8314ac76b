"""A small pool of threads for kernels that release the GIL.

Numba's own threading layers do not suit a library: one is not safe when two threads enter it, another stops the
process after a fork. Here the calling thread does a part of the work itself and any number of callers may run at once.
After a fork the child starts its own threads when it first needs them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

__all__ = ["run_parts", "thread_count"]

_Done = SimpleQueue[BaseException | None]
_Task = tuple[Callable[..., object], tuple[Any, ...], object, _Done]


class _Pool:
    """Daemon threads that take tasks from one queue."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, task: _Task) -> None:
        self._tasks.put(task)

    def grow(self, threads: int) -> None:
        """Have at least this many threads."""
        if self._threads >= threads:
            return
        with self._lock:
            while self._threads < threads:
                name = f"bitwright-kernels-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._threads += 1

    def _work(self) -> None:
        while True:
            function, arguments, alive, done = self._tasks.get()
            try:
                function(*arguments)
            except BaseException as error:  # handed to the caller, which raises it
                done.put(error)
            else:
                done.put(None)
            # The last task must not keep its tensors alive until the next one comes.
            del function, arguments, alive, done


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def thread_count() -> int:
    """Number of threads that a kernel may use: torch's, so that DataLoader workers use one."""
    return torch.get_num_threads()


def run_parts(
    function: Callable[..., object], arguments: tuple[Any, ...], total: int, parts: int, alive: object
) -> None:
    """Call ``function(*arguments, begin, end)`` for equal parts of ``range(total)`` at the same time.

    Args:
        function: a compiled kernel; its result must not depend on the division into parts.
        arguments: what it gets before ``begin`` and ``end``.
        total: amount of work.
        parts: number of parts, at least 1.
        alive: owner of the memory that the arguments point to. The threads hold it, so that an interrupt of the caller
            cannot free memory that they still use.

    Raises:
        BaseException: whatever a part raised.
    """
    parts = min(parts, total)
    if parts <= 1:
        function(*arguments, 0, total)
        return
    pool = _pool
    pool.grow(parts - 1)
    done: _Done = SimpleQueue()
    bounds = [total * part // parts for part in range(parts + 1)]
    for part in range(1, parts):
        pool.submit((function, (*arguments, bounds[part], bounds[part + 1]), alive, done))
    function(*arguments, bounds[0], bounds[1])
    for _ in range(1, parts):
        problem = done.get()
        if problem is not None:
            raise problem
