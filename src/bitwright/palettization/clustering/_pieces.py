"""How work is cut into pieces: by sizes alone, so that sums come out the same with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 1 << 19
"""Points that one task works through; longer rows are cut."""

SHORT = 1 << 13
"""Rows below this length are handled many at a time, and never counted."""

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
Sweep = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Apply a function to every slice (or other task), in one thread or in several; results in order."""

NO_WEIGHTS = np.empty(0, np.float32)


def in_turn(function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
    """The :data:`Sweep` of a single thread."""
    return [function(task) for task in tasks]


def slices_of(length: int, size: int) -> list[slice]:
    """Cut ``range(length)`` into slices of ``size``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def row_slices(rows: int, length: int) -> list[slice]:
    """Cut ``rows`` rows of ``length`` points into slices of about half a chunk."""
    return slices_of(rows, max(1, CHUNK // 2 // length))


class _Memory:
    """The memory of a CPU tensor, which lives as long as arrays of it do."""

    def __init__(self, tensor: Tensor, kind: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"{kind}{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def as_numpy(values: Tensor) -> npt.NDArray[np.floating]:
    """A CPU tensor as an array: shared memory for float32 and float64, a float32 copy for 16-bit dtypes.

    It is made from the address, since ``Tensor.numpy`` fixes the size of the memory for good: FSDP2 frees weights by
    setting it to zero.
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    return np.asarray(_Memory(values.resolve_neg(), "f"))


def codes_of(values: Tensor) -> npt.NDArray[np.unsignedinteger]:
    """The bit patterns of a CPU tensor of 16 or 32 bits per element, in shared memory."""
    return np.asarray(_Memory(values.resolve_neg(), "u"))
