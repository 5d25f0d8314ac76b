"""How pieces of a clustering are run: plain threads over compiled functions that release the interpreter lock.

The pieces are fixed by the size of the work alone: the pieces, hence the sums, are the same with any number of threads,
and no Numba threading layer (each with its own rules on forking and nesting) is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["run_all"]

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def run_all(function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
    """Apply ``function`` to every task with up to ``torch.get_num_threads()`` threads; results in task order."""
    workers = min(torch.get_num_threads(), len(tasks))
    if workers <= 1:
        return [function(task) for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, tasks))
