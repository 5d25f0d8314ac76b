"""Threads for kernels that release the GIL: torch's own team, and a small pool where there is none.

Numba's own threading layers do not suit a library: one is not safe when two threads enter it, another stops the
process after a fork. In the pool the calling thread does a part of the work itself, and any number of callers may run
at once. After a fork the child starts its own threads when it first needs them.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from .compiling import machine_code
from .team import run_in_team, team_runs

__all__ = ["part_count", "run_parts", "thread_count", "threads_for"]

_Done = SimpleQueue[BaseException | None]
_Task = tuple[Callable[..., object], tuple[Any, ...], object, _Done]

# Below this number of elements, handing work to another thread costs more than it saves.
GRAIN = 1 << 16
# More parts than threads: what a thread that is held up leaves over is done by the others.
_PARTS_PER_THREAD = 4


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


thread_count = torch.get_num_threads
"""Number of threads that a kernel may use: torch's, so that DataLoader workers use one."""


def threads_for(elements: int) -> int:
    """Number of threads that a pass over so many elements is worth."""
    return 1 if elements < 2 * GRAIN else min(thread_count(), elements // GRAIN)


def part_count(threads: int) -> int:
    """Number of parts into which ``run_parts`` divides a job."""
    return 1 if threads == 1 else threads * _PARTS_PER_THREAD


def run_parts(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int, alive: object) -> None:
    """Run a compiled kernel on several threads, the calling one among them.

    The threads take the parts of the job from a shared counter (``walking.first_part``). The caller waits for parts
    that others have begun, never for a thread that has not come yet.

    Args:
        kernel: compiled function that takes ``parts`` and ``control`` as its last arguments and whose result does not
            depend on the division into parts.
        arguments: what it takes before them.
        threads: number of threads; 1 runs it here.
        alive: owner of the memory that the arguments point to. The threads hold it, so that neither an interrupt of
            the caller nor a thread that comes late finds memory that is gone.

    Raises:
        BaseException: whatever the kernel raised.
    """
    if threads == 1:
        machine_code(kernel, len(arguments) + 2)(*arguments, 1, 0)
        return
    parts = part_count(threads)
    control = array("q", (0, 0))
    job = (*arguments, parts, control.buffer_info()[0])
    if team_runs() and threads <= thread_count():
        run_in_team(kernel, job, thread_count())
        return
    done: _Done = SimpleQueue()
    pool = _pool
    pool.grow(threads - 1)
    for _ in range(1, threads):
        pool.submit((kernel, job, (alive, control), done))
    kernel(*job)
    while control[1] < parts:
        problem = done.get()
        if problem is not None:
            raise problem
