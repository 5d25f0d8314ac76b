"""Forward passes in training that keep less for their backward passes, where that is worth its time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from bitwright._utils.forward_scope import PassingScope, in_force
from bitwright.kernels.dispatch import undisturbed
from bitwright.kernels.saved import may_save_as_codes, saved_as_codes

__all__ = ["SavedAsCodes", "activations_as_codes"]

# What codes must free in one forward pass. Hooks cost about 3 microseconds for each tensor that is saved, of any size.
_WORTHWHILE = 8 << 20
# How many forward passes after one that was not worth it the next one is tried.
_TRIED_AGAIN_AFTER = 100


class SavedAsCodes(PassingScope):
    """Runs the forward passes of a model in training under ``saved_as_codes``.

    A pass of which codes free little costs more than it saves: the next ones keep their tensors as they are.

    Args:
        module: the model.
        on_gpu: on a CUDA device too, not only on a CPU.
    """

    def __init__(self, module: nn.Module, on_gpu: bool = False) -> None:
        super().__init__(module)
        self._on_gpu = on_gpu
        self._passed_over = _TRIED_AGAIN_AFTER

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (self._applies() and self._is_worth_trying()):
            return self.run(*args, **kwargs)
        with saved_as_codes() as freed:
            y = self.run(*args, **kwargs)
        if freed.bytes < _WORTHWHILE:
            self._passed_over = 0
        return y

    def _is_worth_trying(self) -> bool:
        self._passed_over += 1
        return self._passed_over > _TRIED_AGAIN_AFTER

    def _applies(self) -> bool:
        if self.is_over or not (self.module.training and may_save_as_codes() and undisturbed()):
            return False
        parameter = next(self.module.parameters(), None)
        return parameter is not None and (parameter.is_cpu or (self._on_gpu and parameter.is_cuda))


def activations_as_codes(model: nn.Module, on_gpu: bool = False) -> AbstractContextManager[None]:
    """Run the forward passes of ``model``, but not of copies of it, under ``saved_as_codes`` where that frees much."""
    return in_force(SavedAsCodes(model, on_gpu))
