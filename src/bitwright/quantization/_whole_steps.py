"""Steps of running ranges, each of which is a forward of the model, also behind a forward that ended early."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bitwright._utils.forward_scope import PassingScope, in_force

from .spec import RunningRangeMixin

__all__ = ["steps_with_forwards"]


class _StepsWithForwards(PassingScope):
    """Begins the steps of running ranges with each forward of a model.

    Args:
        module: the model.
        ranges: of its modules that are called more than once in a forward.
    """

    def __init__(self, module: nn.Module, ranges: Sequence[RunningRangeMixin]) -> None:
        super().__init__(module)
        self._ranges = ranges
        self._is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_over or self._is_running or torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        for running in self._ranges:
            running.begin_step()
        self._is_running = True
        try:
            return self.run(*args, **kwargs)
        finally:
            self._is_running = False


def steps_with_forwards(model: nn.Module) -> AbstractContextManager[None]:
    """Have a forward of ``model`` that raised, or left calls out, put no later one out of step.

    Without modules that are called more than once in a forward there is nothing to do.
    """
    ranges = [part for part in model.modules() if isinstance(part, RunningRangeMixin) and part.tensors_per_step > 1]
    return in_force(_StepsWithForwards(model, ranges)) if ranges else nullcontext()
