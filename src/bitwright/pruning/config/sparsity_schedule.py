"""Schedules: how sparse a weight is at each step of training."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field

from bitwright._utils.registered_model import RegisteredModel

__all__ = [
    "ConstantSparsitySchedule",
    "CosineDecaySchedule",
    "PolynomialDecaySchedule",
    "SparsityScheduleBase",
]


class SparsityScheduleBase(RegisteredModel, ABC):
    """Base class of schedules. Frozen; written as a mapping with a ``type`` key.

    Steps are counted in calls of ``pruner.step()``. A subclass may leave ``prev_sparsity`` out, as those written for
    coreai-opt 0.4 do.
    """

    @abstractmethod
    def compute_sparsity(self, step_count: int, target_sparsity: float, prev_sparsity: float | None = None) -> float:
        """Return the sparsity at one step.

        Args:
            step_count: steps so far, 0 or more.
            target_sparsity: what the schedule leads to, in [0, 1].
            prev_sparsity: sparsity at the step before; needed by schedules that hold it between updates.

        Raises:
            ValueError: ``prev_sparsity`` is needed and None.
        """

    def sparsity_at(self, step_count: int, target_sparsity: float, before: float) -> float:
        """Return what ``compute_sparsity`` says, ``before`` being the sparsity at the step before."""
        compute: Any = self.compute_sparsity
        parameters = inspect.signature(compute).parameters
        takes_more = len(parameters) > 2 or any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        sparsity: float = compute(step_count, target_sparsity, *([before] if takes_more else []))
        return sparsity


@SparsityScheduleBase.register("constant")
class ConstantSparsitySchedule(SparsityScheduleBase):
    """Dense up to ``begin_step``, the target from then on.

    Attributes:
        begin_step: first step with the target sparsity.
    """

    begin_step: int = Field(default=0, ge=0)

    def compute_sparsity(self, step_count: int, target_sparsity: float, prev_sparsity: float | None = None) -> float:
        """Return 0 before ``begin_step`` and the target from then on."""
        return target_sparsity if step_count >= self.begin_step else 0.0


class _GradualSchedule(SparsityScheduleBase):
    """A way from one sparsity to another in equal numbers of steps.

    Attributes:
        begin_step: step at which the way begins.
        total_iters: number of steps that it takes; the target holds from ``begin_step + total_iters`` on.
        initial_sparsity: sparsity up to ``begin_step``.
        update_frequency: steps between two changes; the target is reached at the last change.
    """

    begin_step: int = Field(default=0, ge=0)
    total_iters: int = Field(gt=0)
    initial_sparsity: float = Field(default=0.0, ge=0.0, le=1.0)
    update_frequency: int = Field(default=1, gt=0)

    def compute_sparsity(self, step_count: int, target_sparsity: float, prev_sparsity: float | None = None) -> float:
        """Return the sparsity at one step; between two updates that is ``prev_sparsity``.

        Raises:
            ValueError: ``prev_sparsity`` is None between two updates.
        """
        offset = step_count - self.begin_step
        if offset < 0:
            return self.initial_sparsity
        if offset >= self.total_iters:
            return target_sparsity
        update, since = divmod(offset, self.update_frequency)
        if since:
            if prev_sparsity is None:
                raise ValueError(
                    f"Step {step_count} lies between two updates of {type(self).__name__} (update_frequency="
                    f"{self.update_frequency}), so prev_sparsity is needed."
                )
            return prev_sparsity
        updates = (self.total_iters - 1) // self.update_frequency + 1
        remaining = self._remaining(update / max(updates - 1, 1))
        return target_sparsity + (self.initial_sparsity - target_sparsity) * remaining

    @abstractmethod
    def _remaining(self, progress: float) -> float:
        """Return the share of the way that is left, for the share of updates that has passed."""


@SparsityScheduleBase.register("polynomial_decay")
class PolynomialDecaySchedule(_GradualSchedule):
    """What is left of the way falls as (1 - t)^power (Zhu and Gupta, arXiv 1710.01878, equation 1).

    Attributes:
        power: 3 prunes fast at first; 1 is a straight line.

    Example:
        >>> PolynomialDecaySchedule(total_iters=11, power=1.0).compute_sparsity(5, target_sparsity=0.8)
        0.4
    """

    power: float = Field(default=3.0, gt=0.0)

    def _remaining(self, progress: float) -> float:
        remaining: float = (1.0 - progress) ** self.power
        return remaining


@SparsityScheduleBase.register("cosine_decay")
class CosineDecaySchedule(_GradualSchedule):
    """What is left of the way falls as half a cosine: slow at both ends."""

    def _remaining(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))
