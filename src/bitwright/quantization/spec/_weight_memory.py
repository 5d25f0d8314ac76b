"""What a simulator remembers of a weight, so that the same weight is not observed and quantized twice."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import nn

from bitwright.kernels import Grid

__all__ = ["WeightMemory"]

_PROBES = 4
_PROBE_BYTES = 16


class WeightMemory:
    """Remembers which state of a weight the parameters came from, and that state's quantized values.

    A state is recognised by the tensor's identity, its version counter (which optimizers, ``load_state_dict`` and any
    other in-place write advance), its address, the version of the parameters, and, since a write through ``.data``
    advances no counter, by a few bytes of its contents where they can be read at no cost, that is on the CPU. On other
    devices call ``clear`` after writing through ``.data``.

    Copies and pickles of it are empty.
    """

    __slots__ = ("_observed", "_output", "_output_state")

    def __init__(self) -> None:
        self._observed: _State | None = None
        self._output: torch.Tensor | None = None
        self._output_state: _State | None = None

    def __reduce__(self) -> tuple[type[WeightMemory], tuple[()]]:
        return WeightMemory, ()

    def clear(self) -> None:
        """Forget everything."""
        self._observed = None
        self.drop_output()

    def drop_output(self) -> None:
        """Free the quantized weight."""
        self._output = self._output_state = None

    def was_observed(self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> bool:
        """Return whether ``qparams`` are those that were computed from ``weight`` as it is now."""
        return self._observed is not None and self._observed.matches(weight, qparams, grid)

    def note_observed(self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> None:
        """Remember that ``qparams`` were computed from ``weight`` as it is now."""
        self._observed = _State.of(weight, qparams, grid)

    def output(self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> torch.Tensor | None:
        """Return the quantized weight if it is kept and still valid."""
        state, output = self._output_state, self._output
        if state is None or output is None or not state.matches(weight, qparams, grid):
            return None
        if output.is_inference():
            return output if torch.is_inference_mode_enabled() else None
        return output if output._version == state.output_version else None

    def keep_output(
        self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid, output: torch.Tensor
    ) -> None:
        """Keep the quantized weight."""
        self._output_state = state = _State.of(weight, qparams, grid)
        if state is not None:
            state.output_version = 0 if output.is_inference() else output._version
            self._output = output


class _State:
    """A weight and its parameters at one moment."""

    __slots__ = ("address", "grid", "output_version", "probe", "qparams", "qparams_version", "version", "weight")

    def __init__(self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> None:
        self.weight = weakref.ref(weight)
        self.version = weight._version
        self.address = weight.data_ptr()
        self.probe = _probe(weight)
        self.qparams = qparams
        self.qparams_version = _total_version(qparams)
        self.grid = grid
        self.output_version = 0

    @classmethod
    def of(cls, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> _State | None:
        """Return the present state, or None where later changes could not be noticed."""
        if type(weight) is not nn.Parameter or weight.is_inference() or weight.is_meta:
            return None
        try:
            return cls(weight, qparams, grid)
        except RuntimeError:  # no version counter, or no address, as with fake and functional tensors
            return None

    def matches(self, weight: torch.Tensor, qparams: tuple[torch.Tensor | None, ...], grid: Grid) -> bool:
        mine = self.qparams
        return (
            self.weight() is weight
            and weight._version == self.version
            and grid is self.grid
            and qparams[0] is mine[0]
            and qparams[1] is mine[1]
            and qparams[2] is mine[2]
            and _total_version(qparams) == self.qparams_version
            and weight.data_ptr() == self.address
            and _probe(weight) == self.probe
        )


def _total_version(tensors: tuple[torch.Tensor | None, ...]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total += tensor._version
    return total


def _probe(weight: torch.Tensor) -> bytes:
    """Return bytes from a few places of a contiguous tensor in main memory; nothing for any other."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return b""
    size = weight.numel() * weight.element_size()
    address = weight.data_ptr()
    if size <= _PROBES * _PROBE_BYTES:
        return ctypes.string_at(address, size) if size else b""
    stride = (size - _PROBE_BYTES) // (_PROBES - 1)
    return b"".join(ctypes.string_at(address + i * stride, _PROBE_BYTES) for i in range(_PROBES))
