"""What a simulator remembers of a weight, so that the same weight is not observed and quantized twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from bitwright.kernels import Grid
from bitwright.kernels.dispatch import same_elements

from ._sharded import may_change_unseen

__all__ = ["WeightMemory"]

QParams = tuple[torch.Tensor | None, ...]

_SAMPLES = 64
_BITS_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightMemory:
    """Remembers one state of a weight and its parameters, and what was done with it.

    A state is recognised by the tensor's identity, address and version counter (which optimizers, ``load_state_dict``
    and every other in-place write advance) and by the version of the parameters. A write through ``.data`` advances no
    counter; it is noticed by comparing some of the elements where they can be read at once, that is on the CPU. On
    other devices call ``forget`` after writing through ``.data``. While FSDP may be in use nothing is remembered.

    Copies and pickles of a memory are empty.

    Attributes:
        observed: whether the parameters of the remembered state were computed from its weight.
    """

    __slots__ = ("_output", "_output_version", "_state", "observed")

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[WeightMemory], tuple[()]]:
        return WeightMemory, ()

    def forget(self) -> None:
        """Forget everything."""
        self._state: _State | None = None
        self.observed = False
        self.drop_output()

    def drop_output(self) -> None:
        """Free the quantized weight."""
        self._output: torch.Tensor | None = None
        self._output_version = 0

    def knows(self, weight: torch.Tensor, qparams: QParams, grid: Grid) -> bool:
        """Return whether the remembered state is the present one."""
        return self._state is not None and self._state.matches(weight, qparams, grid)

    def remember(self, weight: torch.Tensor, qparams: QParams, grid: Grid, observed: bool) -> None:
        """Remember the present state in place of any other."""
        self.forget()
        self._state = _State.of(weight, qparams, grid)
        self.observed = observed and self._state is not None

    def keep(self, output: torch.Tensor) -> None:
        """Keep the quantized weight of the remembered state."""
        if self._state is not None:
            self._output = output
            self._output_version = 0 if output.is_inference() else output._version

    @property
    def kept_state(self) -> _State | None:
        """The remembered state."""
        return self._state

    @property
    def output(self) -> torch.Tensor | None:
        """The quantized weight of the remembered state, if it is kept and nobody has written to it."""
        output = self._output
        if output is None:
            return None
        if output.is_inference():  # unusable outside inference mode, and without a version counter
            return output if torch.is_inference_mode_enabled() else None
        return output if output._version == self._output_version else None


class _State:
    """A weight and its parameters at one moment."""

    __slots__ = ("_same", "address", "grid", "qparams", "qparams_version", "version", "weight")

    def __init__(self, weight: torch.Tensor, qparams: QParams, grid: Grid) -> None:
        self.weight = weakref.ref(weight)
        self.version = weight._version
        self.address = weight.data_ptr()
        self.qparams = qparams
        self.qparams_version = _total_version(qparams)
        self.grid = grid
        self._same = _comparison(weight)

    @classmethod
    def of(cls, weight: torch.Tensor, qparams: QParams, grid: Grid) -> _State | None:
        """Return the present state, or None where later changes could not be noticed."""
        if type(weight) is not nn.Parameter or weight.is_inference() or weight.is_meta or may_change_unseen():
            return None
        try:
            return cls(weight, qparams, grid)
        except RuntimeError:  # parameters without a version counter
            return None

    def matches(self, weight: torch.Tensor, qparams: QParams, grid: Grid) -> bool:
        """Return whether nothing has changed since."""
        scale, zero_point, minval = self.qparams
        return (
            self.weight() is weight
            and weight._version == self.version
            and weight.data_ptr() == self.address
            and grid is self.grid
            and qparams[0] is scale
            and qparams[1] is zero_point
            and qparams[2] is minval
            and _total_version(qparams) == self.qparams_version
            and self._same()
        )


def _total_version(tensors: QParams) -> int:
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total += tensor._version
    return total


def _comparison(weight: torch.Tensor) -> Callable[[], bool]:
    """Return a function that compares some elements, spread over a contiguous tensor in main memory, with now.

    It must not be called when the tensor's memory has moved. For any other tensor it returns True.
    """
    integers = _BITS_AS.get(weight.element_size())
    if integers is None or not weight.is_cpu or not weight.is_contiguous():
        return lambda: True
    elements = weight.detach().view(-1).view(integers)
    step = max(1, elements.numel() // _SAMPLES)
    return same_elements(elements[::step])
