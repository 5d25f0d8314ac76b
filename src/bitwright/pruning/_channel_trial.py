"""Whether a model computes the same without some channels, tried on a copy; and which layers are to blame if not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from bitwright.program import preserved_state

__all__ = ["OutputDiffersError", "Trial", "run"]

_TOLERANCE = 1e-4
_ROUNDINGS = 8  # of the output's dtype that a folded constant may cost

_Cut = TypeVar("_Cut")


class OutputDiffersError(Exception):
    """The output with fewer channels is another one; the message says in what."""


def run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of the output in eval mode, in order, whatever holds them."""
    with preserved_state(model):
        output = model(*args, **kwargs)
    found: list[torch.Tensor] = []
    _collect(output, found, set())
    return found


def _collect(entry: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(entry, torch.Tensor):
        found.append(entry)
        return
    if isinstance(entry, nn.Module | type) or id(entry) in seen:
        return
    seen.add(id(entry))
    if isinstance(entry, Mapping):
        members = list(entry.values())
    elif isinstance(entry, list | tuple | set):
        members = list(entry)
    else:
        members = list(getattr(entry, "__dict__", {}).values())
    for member in members:
        _collect(member, found, seen)


@dataclass(frozen=True, slots=True)
class Trial(Generic[_Cut]):
    """Takes channels out of a copy of the model and compares its output.

    Attributes:
        model: the model, which stays as it is.
        apply: makes the given cuts in a model.
        before: the output with all channels.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: nn.Module
    apply: Callable[[nn.Module, Sequence[_Cut]], None]
    before: list[torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def failure(self, cuts: Sequence[_Cut]) -> Exception | None:
        """Return what goes wrong with these cuts: what the forward raised, or how far the output is off."""
        trial = copy.deepcopy(self.model)
        self.apply(trial, cuts)
        try:
            after = run(trial, self.args, self.kwargs)
        except Exception as error:
            return error
        return _difference(self.before, after)

    def to_blame(self, cuts: Sequence[_Cut]) -> list[_Cut]:
        """Return the cuts, of some that fail together, that fail by themselves; all of them where none does."""
        if len(cuts) == 1:
            return list(cuts)
        middle = len(cuts) // 2
        found: list[_Cut] = []
        for half in (cuts[:middle], cuts[middle:]):
            if self.failure(half) is not None:
                found += self.to_blame(half)
        return found or list(cuts)


def _difference(before: list[torch.Tensor], after: list[torch.Tensor]) -> OutputDiffersError | None:
    """Return an error that describes the first outputs that differ."""
    if len(before) != len(after):
        return OutputDiffersError(f"it returns {len(after)} tensors, and not {len(before)}")
    for old, new in zip(before, after, strict=True):
        if old.shape != new.shape:
            return OutputDiffersError(f"an output has the shape {tuple(new.shape)}, and not {tuple(old.shape)}")
        if not (old.is_floating_point() or old.is_complex()):
            if not torch.equal(old, new):
                return OutputDiffersError("integers that it returns differ")
            continue
        finite = old.isfinite()
        if not torch.equal(finite, new.isfinite()):
            return OutputDiffersError("other entries of an output are finite")
        if not bool(finite.any()):
            continue
        scale, off = float(old[finite].abs().max()), float((old - new)[finite].abs().max())
        rounding = _ROUNDINGS * torch.finfo(old.dtype).eps
        if off > max(_TOLERANCE, rounding) * scale + rounding:
            return OutputDiffersError(f"the output is off by {off:.3g} (largest value {scale:.3g})")
    return None
