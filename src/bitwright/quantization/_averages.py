"""Averages of a model over its training: what must not be averaged, and what such a copy computes."""

from __future__ import annotations

import warnings

from torch import nn
from torch.optim.swa_utils import AveragedModel

from bitwright.errors import BitwrightWarning

from .spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["refuse_averaged_buffers", "warn_of_switches"]


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


def _simulators(model: nn.Module) -> dict[str, FakeQuantizeImplBase]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantizeImplBase)}
