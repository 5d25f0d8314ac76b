"""When palettization starts in training."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from bitwright.config._strict import StrictModel

__all__ = ["PATSchedule"]


class PATSchedule(StrictModel):
    """The step, counted in calls of ``palettizer.step()``, from which on weights are palettized in training.

    Until then they train dense; then the palettes are made anew from what they have become.

    Attributes:
        enable_fake_palettize: first step with palettized weights, 0 or more.
    """

    model_config = ConfigDict(frozen=True)

    enable_fake_palettize: int = Field(default=0, ge=0)

    def _compute_state(self, step_count: int) -> bool:
        """Return whether weights are palettized at step ``step_count``."""
        return step_count >= self.enable_fake_palettize
