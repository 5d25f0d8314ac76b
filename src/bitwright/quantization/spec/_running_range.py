"""Calculators' state for ranges that are gathered over many tensors."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ._calculator_base import QParams

if TYPE_CHECKING:
    from ._calculator_state import StatefulQParamsCalculatorBase as _Base
else:
    _Base = object

__all__ = ["RunningRangeMixin"]


class _Progress:
    """How far a running range has come; apart from the module, whose attributes are slow to set."""

    __slots__ = ("calibrated", "observations", "restart")

    def __init__(self) -> None:
        self.observations = 0
        self.restart = False
        self.calibrated = False  # whether the range began anew with calibration data

    def count(self) -> None:
        """Count a tensor, the first one after a restart anew."""
        self.observations = 1 if self.restart else self.observations + 1
        self.calibrated = self.calibrated or self.restart
        self.restart = False


class _Step:
    """The tensors of one step of a running range: how many so far, the range before it, and the union of theirs.

    Between two steps all of it is as it was at first, so that a compiled graph of a whole step holds for the next.
    """

    __slots__ = ("before", "position", "union")

    def __init__(self) -> None:
        self.position = 0
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None
        self.union: tuple[torch.Tensor, torch.Tensor] | None = None


class RunningRangeMixin(_Base):
    """Adds a range that runs along with the tensors; implement ``update_running_range`` to say how.

    Must stand before ``StatefulQParamsCalculatorBase`` among the bases of a class.

    Attributes:
        running_min: buffer, one entry per block, in the dtype of the tensors; empty until the first tensor.
        running_max: like ``running_min``.
        tensors_per_step: so many tensors, the calls of one module in a forward of the model, move the range once, by
            the union of their ranges; 1 by default.
    """

    running_min: torch.Tensor
    running_max: torch.Tensor
    tensors_per_step: int = 1

    _TAKES_SINGLE_RANGES = True
    _STATE_BUFFERS = ("scale", "zero_point", "minval", "running_min", "running_max")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.inference_mode(False):
            self.register_buffer("running_min", torch.empty(0, dtype=torch.float32, device="cpu"))
            self.register_buffer("running_max", torch.empty(0, dtype=torch.float32, device="cpu"))
        self._progress = _Progress()
        self._step = _Step()

    @abstractmethod
    def update_running_range(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the running range after a further tensor.

        Args:
            min_val: smallest value of each block of that tensor, at most 0.
            max_val: largest value of each block, at least 0.
        """

    def merge_running_range(
        self, other_min: torch.Tensor, other_max: torch.Tensor, other_share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the union of this running range and that of another calculator.

        Args:
            other_min: the other's ``running_min``.
            other_max: the other's ``running_max``.
            other_share: the other's share of all tensors seen, between 0 and 1.
        """
        return torch.minimum(self.running_min, other_min), torch.maximum(self.running_max, other_max)

    def reset_statistics(self) -> None:
        """Start anew with the next tensor; until then the parameters stay as they are."""
        self._progress.restart = True

    def begin_step(self) -> None:
        """Take the next tensor for the first one of a forward of the model, whatever became of the forward before."""
        self._step = _Step()

    def compute_qparams(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> QParams:
        """Update the running range and return its parameters. The first tensor's range is taken as it is."""
        if self._progress.restart and self.running_min.dtype != min_val.dtype:
            self._initialize_state(tensor, min_val, max_val)
        if self.tensors_per_step > 1:
            low, high = self._in_step(min_val, max_val)
        else:
            low, high = self._moved(min_val, max_val)
        if not torch.compiler.is_compiling():
            self._progress.count()
        elif self._progress.restart:  # no counting: a number that changes would have the graph compiled anew each time
            self._progress.restart, self._progress.calibrated = False, True
        if torch.is_grad_enabled() and (low.requires_grad or high.requires_grad):
            # The graph may hold the running range, which an in-place write would destroy.
            self.running_min, self.running_max = low.detach().clone(), high.detach().clone()
        else:
            self._store_buffer("running_min", low)
            self._store_buffer("running_max", high)
        return self._compute_scale_zero_point_minval(tensor, low, high)

    def _moved(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._initialized and not self._progress.restart:
            return self.update_running_range(low, high)
        return low, high

    def _in_step(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the running range after one of the tensors that move it together."""
        step = self._step
        low, high = low.detach(), high.detach()
        if self._progress.restart or step.position == 0 or step.union is None or step.union[0].shape != low.shape:
            is_begun = self._initialized and not self._progress.restart
            step.before = (self.running_min.clone(), self.running_max.clone()) if is_begun else None
            step.position, union = 0, (low, high)
        else:
            union = torch.minimum(step.union[0], low), torch.maximum(step.union[1], high)
        before = step.before
        step.position = (step.position + 1) % self.tensors_per_step
        if step.position:
            step.union = union
        else:
            step.before = step.union = None
        if before is None:
            return union
        self._store_buffer("running_min", before[0])
        self._store_buffer("running_max", before[1])
        return self.update_running_range(*union)

    def _initialize_state(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.running_min = torch.empty_like(min_val, requires_grad=False)
            self.running_max = torch.empty_like(max_val, requires_grad=False)

    def _fit_state(
        self, tensor: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = super()._fit_state(tensor, low, high)
        if low.shape == self.running_min.shape:
            return low, high
        if self._progress.restart:
            self._initialize_state(tensor, low, high)
            return low, high
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} has {tuple(low.shape)} blocks, but the running range was "
            f"gathered over tensors with {tuple(self.running_min.shape)} blocks. Use a granularity whose number of "
            "blocks does not depend on the batch, the 'dynamic' calculator, or reset_statistics()."
        )

    def _adopt(self, other: Any) -> None:
        super()._adopt(other)
        self.running_min, self.running_max = other.running_min.clone(), other.running_max.clone()
        self._progress.observations = other._progress.observations

    def _merge_statistics(self, other: Any) -> None:
        mine, theirs = max(self._progress.observations, 1), max(other._progress.observations, 1)
        device, dtype = self.running_min.device, self.running_min.dtype
        low, high = self.merge_running_range(
            other.running_min.to(device, dtype), other.running_max.to(device, dtype), theirs / (mine + theirs)
        )
        self._store_buffer("running_min", low)
        self._store_buffer("running_max", high)
        self._progress.observations = mine + theirs
        self._store(self._compute_scale_zero_point_minval(low, low, high))

    def extra_repr(self) -> str:
        """Return the parameters and the running range as text."""
        return f"{super().extra_repr()}\nrunning_min={self.running_min}, running_max={self.running_max}"
