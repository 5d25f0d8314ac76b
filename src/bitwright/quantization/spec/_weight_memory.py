"""What a simulator remembers of a weight, so that the same weight is not observed and quantized twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bitwright._utils.sharded import may_change_unseen
from bitwright.kernels import Grid
from bitwright.kernels.dispatch import is_plain_torch, take_snapshot

__all__ = ["WeightMemory", "measurement", "watch"]

QParams = tuple[torch.Tensor | None, ...]
Holds = Callable[[torch.Tensor, QParams, Grid], bool]

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
        measured_with: ``measurement`` of the calculator that computed the parameters of the remembered state from its
            weight; None if they come from elsewhere.
        state: takes a weight, its parameters and the grid, and says whether they are in the remembered state.
        kept: the quantized weight of the remembered state, whether or not somebody has written to it since.
        kept_version: what its version was; 0 for an inference tensor.
    """

    __slots__ = ("kept", "kept_version", "measured_with", "state")

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[WeightMemory], tuple[()]]:
        return WeightMemory, ()

    def forget(self) -> None:
        """Forget everything."""
        self.state: Holds | None = None
        self.measured_with: tuple[Any, ...] | None = None
        self.drop_output()

    def drop_output(self) -> None:
        """Free the quantized weight."""
        self.kept: torch.Tensor | None = None
        self.kept_version = 0

    def knows(self, weight: torch.Tensor, qparams: QParams, grid: Grid) -> bool:
        """Return whether the remembered state is the present one."""
        return self.state is not None and self.state(weight, qparams, grid)

    def remember(
        self, weight: torch.Tensor, qparams: QParams, grid: Grid, measured_with: tuple[Any, ...] | None = None
    ) -> None:
        """Remember the present state in place of any other."""
        self.forget()
        self.state = watch(weight, qparams, grid)
        self.measured_with = measured_with if self.state is not None else None

    def keep(self, output: torch.Tensor) -> None:
        """Keep the quantized weight of the remembered state."""
        if self.state is not None:
            self.kept = output
            self.kept_version = 0 if output.is_inference() else output._version

    @property
    def output(self) -> torch.Tensor | None:
        """The quantized weight of the remembered state, if it is kept and nobody has written to it."""
        output = self.kept
        if output is None:
            return None
        if output.is_inference():  # unusable outside inference mode, and without a version counter
            return output if torch.is_inference_mode_enabled() else None
        return output if output._version == self.kept_version else None


def measurement(calculator: Any) -> tuple[Any, ...]:
    """Return what the parameters that a calculator computes depend on, besides the tensor."""
    return (
        calculator.qscheme,
        tuple(calculator.float_range),
        calculator.scale_dtype,
        calculator.quant_min,
        calculator.quant_max,
        calculator._modules["range_calculator"],
    )


def watch(weight: torch.Tensor, qparams: QParams, grid: Grid, switches: Sequence[torch.Tensor] = ()) -> Holds | None:
    """Return a function that takes a weight, its parameters and the grid, and says whether they are as they are now.

    Args:
        weight: what is quantized.
        qparams: scale, zero point and minval.
        grid: the codes.
        switches: buffers of one element whose values must also be as they are now.

    Returns:
        None where a change would go unnoticed.
    """
    if type(weight) is not nn.Parameter or weight.is_inference() or weight.is_meta or may_change_unseen():
        return None
    if not is_plain_torch():  # what is computed from a tensor here may be none that lies in memory
        return None
    scale, zero_point, minval = qparams
    written = [t for t in qparams if t is not None]
    if any(t.is_inference() for t in written):  # without a version counter
        return None
    first, second, third = (*written, *written[:1], *written[:1])[:3]
    total = first._version + second._version + third._version
    seen, version, address = weakref.ref(weight), weight._version, weight.data_ptr()
    sample = take_snapshot(*switches, *_sample(weight))

    def still(weight: torch.Tensor, qparams: QParams, now: Grid) -> bool:
        return (
            seen() is weight
            and weight._version == version
            and weight.data_ptr() == address
            and now is grid
            and qparams[0] is scale
            and qparams[1] is zero_point
            and qparams[2] is minval
            and first._version + second._version + third._version == total
            and sample.holds()
        )

    return still


def _sample(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return some elements, spread over a contiguous tensor in main memory, as integers; nothing of any other tensor.

    They must not be read when the tensor's memory has moved.
    """
    integers = _BITS_AS.get(weight.element_size())
    if integers is None or not weight.is_cpu or not weight.is_contiguous():
        return []
    elements = weight.detach().view(-1).view(integers)
    return [elements[:: max(1, elements.numel() // _SAMPLES)]]
