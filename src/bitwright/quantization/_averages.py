"""Averages of a model over its training: what must not be averaged, and what such a copy computes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bitwright.errors import BitwrightWarning

from .spec import RunningRangeMixin
from .spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["refuse_averaged_buffers", "take_over_progress", "warn_of_switches"]


def refuse_averaged_buffers(model: nn.Module, where: str) -> None:
    """See that no average in ``model`` averages the buffers of simulators.

    Args:
        model: an average, or a model that holds some.
        where: who asks, for the error.

    Raises:
        ValueError: one does.
    """
    for name, module in model.named_modules():
        if isinstance(module, AveragedModel) and module.use_buffers and _simulators(module):
            raise ValueError(
                f"{where}: {name or 'the model'} is an AveragedModel with use_buffers=True. It averages whole numbers "
                "too and cuts off the rest: a simulator's switch that was off stays off, and a zero point does not "
                "belong to its scale. Pass use_buffers=False: the average then takes over the buffers of the model."
            )


def warn_of_switches(copy: nn.Module, model: nn.Module, stacklevel: int) -> None:
    """Warn if simulators of ``copy`` let tensors pass that those of ``model``, which it was made of, quantize."""
    own, originals = _simulators(copy), _simulators(model)
    if len(own) != len(originals):
        return
    off = [
        name
        for (name, simulator), original in zip(own.items(), originals.values(), strict=True)
        if original.is_quantizing() and not simulator.is_quantizing()
    ]
    if off:
        warnings.warn(
            f"{len(off)} simulators of this copy ({', '.join(off[:3])}{', ...' if len(off) > 3 else ''}) do not "
            "quantize, and those of the model do: the copy was made before a schedule turned them on, or it averages "
            "the switches. Copy the model's buffers, as AveragedModel(use_buffers=False).update_parameters() does.",
            BitwrightWarning,
            stacklevel=stacklevel,
        )


def take_over_progress(copy: nn.Module, model: nn.Module) -> None:
    """Let ranges of ``copy`` that are those of ``model``, which it was made of, count as measured where these do.

    An average takes over the buffers of the model in training, and with them the ranges; what they were measured on is
    no buffer.
    """
    own, originals = _simulators(copy), _simulators(model)
    if len(own) != len(originals):
        return
    for simulator, original in zip(own.values(), originals.values(), strict=True):
        mine: Any = simulator.qparams_calculator
        its: Any = original.qparams_calculator
        if not (isinstance(mine, RunningRangeMixin) and isinstance(its, RunningRangeMixin)):
            continue
        was_measured = its._progress.calibrated and not its._progress.restart
        if was_measured and _has_same_range(mine, its):
            mine._progress.calibrated, mine._progress.restart = True, False


def _has_same_range(one: Any, other: Any) -> bool:
    pairs = ((one.running_min, other.running_min), (one.running_max, other.running_max))
    return all(
        mine.dtype == its.dtype and mine.shape == its.shape and torch.equal(mine.to(its.device), its)
        for mine, its in pairs
    )


def _simulators(model: nn.Module) -> dict[str, FakeQuantizeImplBase]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantizeImplBase)}
