"""When observers and fake quantization run during quantization-aware training."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from bitwright.config._strict import StrictModel

__all__ = ["QATSchedule"]


class _ScheduleState(NamedTuple):
    """What is switched on at one step: observers (``obs_on``), fake quantization (``fq_on``)."""

    obs_on: bool
    fq_on: bool


class QATSchedule(StrictModel):
    """Steps, counted in calls of ``quantizer.step()``, at which observers and fake quantization are switched.

    Attributes:
        enable_observer: first step with observers on; 0 or more.
        enable_fake_quant: first step with fake quantization on; not before ``enable_observer``.
        disable_observer: first step with observers off again; after ``enable_observer`` and not before
            ``enable_fake_quant``. None keeps them on, but for activation ranges that a calibration has searched for
            (``mse`` and its like), which stay as they are unless this or ``enable_observer`` is set.
        freeze_batch_norm: first step at which batch norms use their running statistics and no longer change them. None
            lets them learn to the end.
        least_bits: smallest number of bits of integer codes, by the first step that it holds from; before the first
            entry and where it is below the spec's own number, the spec's holds. ``{0: 8, 500: 6, 1000: 1}`` starts with
            8 bits, goes on with 6, and ends with what the spec says.

    Raises:
        pydantic.ValidationError: the steps are out of order or negative, or there is an unknown field.

    Example:
        >>> QATSchedule(enable_fake_quant=500, disable_observer=1500).enable_observer
        0
    """

    model_config = ConfigDict(frozen=True)

    enable_observer: int = Field(default=0, ge=0)
    enable_fake_quant: int = Field(default=0, ge=0)
    disable_observer: int | None = Field(default=None, gt=0)
    freeze_batch_norm: int | None = Field(default=None, ge=0)
    least_bits: dict[int, int] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        start, quantize, stop = self.enable_observer, self.enable_fake_quant, self.disable_observer
        if quantize < start:
            raise ValueError(f"enable_fake_quant ({quantize}) must be >= enable_observer ({start}).")
        if stop is not None and stop <= start:
            raise ValueError(f"disable_observer ({stop}) must be > enable_observer ({start}).")
        if stop is not None and stop < quantize:
            raise ValueError(f"disable_observer ({stop}) must be >= enable_fake_quant ({quantize}).")
        return self

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        for step, bits in (self.least_bits or {}).items():
            if step < 0:
                raise ValueError(f"least_bits has the step {step}; steps are counted from 0.")
            if not 1 <= bits <= 8:
                raise ValueError(f"least_bits[{step}] is {bits}; codes have 1 to 8 bits.")
        return self

    def __hash__(self) -> int:
        fields = dict(self)
        bits = fields.pop("least_bits") or {}
        return hash((*fields.values(), frozenset(bits.items())))

    @property
    def _leaves_observers(self) -> bool:
        """Whether nothing is said about observers."""
        return self.enable_observer == 0 and self.disable_observer is None

    def _bits_at(self, step_count: int) -> int:
        """Return the least number of bits at step ``step_count``."""
        begun = [step for step in self.least_bits or {} if step <= step_count]
        return self.least_bits[max(begun)] if begun and self.least_bits else 1

    def _compute_state(self, step_count: int) -> _ScheduleState:
        """Return what is switched on at step ``step_count``."""
        stop = math.inf if self.disable_observer is None else self.disable_observer
        return _ScheduleState(self.enable_observer <= step_count < stop, step_count >= self.enable_fake_quant)
