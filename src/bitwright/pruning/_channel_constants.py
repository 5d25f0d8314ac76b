"""What layers read of channels that are said to be constant, and whether it is the same everywhere."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ._channel_spaces import Reader
from ._channel_trial import run

__all__ = ["Constants"]

_TOLERANCE = 1e-4
_ROUNDINGS = 32  # of the dtype, that the same constant may come out with
_PIECE = 4096


class Constants:
    """The inputs of layers at one place, and where they are the same at all places.

    Whether a number in the forward, such as a size or a mean, is always the same does not show in a trace: the model
    runs on further inputs, if it takes them. These are twice the batch with half the values, and for each size of the
    example inputs such of half or twice that size, in all tensors and dimensions that have it.

    Args:
        model: the model, which stays as it is.
        readers: layers that sum over channels.
        args: positional inputs.
        kwargs: keyword inputs.

    Attributes:
        values: by path of a reader, each entry of its input at one place, along its channel dimension.

    Raises:
        ValueError: an input holds no sample.
    """

    def __init__(
        self, model: nn.Module, readers: Sequence[Reader], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._all = readers
        self._readers = {reader.path: reader for reader in readers}
        self.values: dict[str, torch.Tensor] = {}
        self._steady: dict[str, torch.Tensor] = {}
        self._watch(model, args, kwargs)
        inputs = args, dict(kwargs)
        self._watch_one_of((_twice_and_half, _half), model, inputs)
        for size in _sizes(inputs):
            other = [functools.partial(_resized, size=size, wanted=wanted) for wanted in (size // 2, 2 * size)]
            self._watch_one_of(other[size == 1 :], model, inputs)

    def is_steady(self, reader: Reader) -> torch.Tensor:
        """Return which channels of a reader's input were the same wherever they were seen, bool ``[C]``."""
        steady = self._steady[reader.path].cpu()[reader.entries]
        return steady.view(len(reader.constant), reader.repeats).all(1)

    def _is_anything_steady(self) -> bool:
        """Whether channels that are said to be constant were the same so far."""
        return any(bool((self.is_steady(reader) & reader.constant.cpu()).any()) for reader in self._all)

    def _watch_one_of(self, changes: Sequence[Callable[[Any], Any]], model: nn.Module, inputs: tuple[Any, Any]) -> None:
        """Run the model on the inputs after the first change that it takes, if there is anything to look at."""
        for change in changes if self._is_anything_steady() else ():
            known = dict(self._steady)
            try:  # a copy, as a forward may keep something of the batch that it saw
                self._watch(copy.deepcopy(model), *_pytree.tree_map(change, inputs))
            except Exception:  # the model takes no other inputs of this kind
                self._steady = known
            else:
                return

    def _watch(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as hooks:
            for path, reader in self._readers.items():
                handle = model.get_submodule(path).register_forward_pre_hook(self._note(reader), with_kwargs=True)
                hooks.callback(handle.remove)
            run(model, args, kwargs)

    def _note(self, reader: Reader) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> None:
            source = (inputs[0] if inputs else named["input"]).detach()
            moved = source.movedim(reader.dim, -1)
            samples = math.prod(moved.shape[:-1])
            if samples == 0:
                raise ValueError(
                    f"With the example inputs {reader.path} gets an input of shape {tuple(source.shape)}, which does "
                    "not show what its channels are. Give example_inputs with at least one sample."
                )
            rows = moved.reshape(samples, moved.shape[-1])
            first = self.values.setdefault(reader.path, rows[0].clone())
            same = _are_equal(rows, first)
            self._steady[reader.path] = self._steady.get(reader.path, same) & same

        return hook


def _are_equal(rows: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return which entries of ``[N, C]`` rows are those of ``[C]``, up to rounding, bool ``[C]``."""
    rounding = _ROUNDINGS * torch.finfo(rows.dtype).eps
    known = first.double().abs()
    limits = max(_TOLERANCE, rounding) * known + rounding * known[known.isfinite()].sum() / max(1, len(known))
    off = [(part.double() - first.double()).abs().amax(0) for part in torch.split(rows, _PIECE)]
    return torch.stack(off).amax(0) <= limits


def _twice_and_half(entry: Any) -> Any:
    """Twice the batch; the second half of it has half the values."""
    if not isinstance(entry, torch.Tensor) or entry.ndim == 0:
        return entry
    return torch.cat([entry, _half(entry)])


def _sizes(inputs: Any) -> list[int]:
    """Return the sizes of all dimensions of the tensors among the inputs, each once."""
    tensors = [entry for entry in _pytree.tree_leaves(inputs) if isinstance(entry, torch.Tensor)]
    return sorted({int(size) for tensor in tensors if not tensor.is_nested for size in tensor.shape} - {0})


def _resized(entry: Any, size: int, wanted: int) -> Any:
    """Cut the dimensions of one size to the first entries, or repeat the entries along them."""
    if not isinstance(entry, torch.Tensor) or size not in entry.shape:
        return entry
    for dim in [dim for dim, present in enumerate(entry.shape) if present == size]:
        places = torch.arange(wanted, device=entry.device) % size
        entry = entry.index_select(dim, places)
    return entry


def _half(entry: Any) -> Any:
    return entry * 0.5 if isinstance(entry, torch.Tensor) and entry.is_floating_point() else entry
