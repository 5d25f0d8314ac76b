"""Whether a model computes with the size of its batch, as ``x / x.shape[0]`` does: two runs without numbers tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .exporting import one_at_a_time
from .protect import preserved_state
from .states import contents, refill

__all__ = ["computes_with_sizes"]

# Functions whose integers are sizes of the result: as many times as large where the batch is.
_SHAPED = (
    *("view", "reshape", "expand", "broadcast_to", "unflatten", "repeat", "tile", "as_strided"),
    *(prefix + name for prefix in ("", "new_") for name in ("empty", "ones", "zeros")),
    *("rand", "randn", "empty_strided", "new_empty_strided"),
)

_FULL = ("full", "new_full")

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def computes_with_sizes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Mapping[int, tuple[int, ...]],
    sizes: tuple[int, int],
) -> bool | None:
    """Return whether a model gives torch's functions other numbers with one batch size than with another.

    Sizes of views and of new tensors may follow the batch; factors, bounds of slices and the functions themselves may
    not. The model is run with fake tensors, and is left as it is.

    Args:
        model: the model that was captured, in any mode; looked at in eval mode.
        args: positional inputs, of the other batch size.
        kwargs: keyword inputs.
        before: captured shapes of the inputs that had another one, by ``id``.
        sizes: the batch size that was captured, and the other.

    Returns:
        None if the model cannot be run so, keeps something from call to call, or has hooks, which would see the fake
        tensors.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None
    shapes = dict(before)

    def captured(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(shapes[id(tensor)]) if id(tensor) in shapes else tensor

    first_args, first_kwargs = tree_map_only(torch.Tensor, captured, (tuple(args), dict(kwargs)))
    with one_at_a_time, preserved_state(model), _preserved_attributes(model):
        try:
            first, again = (_calls(model, first_args, first_kwargs) for _ in range(2))
        except Exception:  # the model reads numbers, or an operator has no form without them
            return None
        if not _all_alike(first, again, (1, 1)):  # it keeps something from call to call
            return None
        try:
            second = _calls(model, args, kwargs)
        except Exception:  # it is made for the one size only
            return True
    return not _all_alike(first, second, sizes)


@contextmanager
def _preserved_attributes(model: nn.Module) -> Iterator[None]:
    """Give modules the attributes back that they had, with what lists and dictionaries held."""
    held = contents(model)
    try:
        yield
    finally:
        for value, content in held:
            refill(value, content)


def _calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """The functions of torch that a model calls, with their arguments."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
        recorder = _Recorder()
        with recorder:
            model(*fake_args, **fake_kwargs)
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Notes functions as the model calls them: how they go on depends on contiguity, and on sizes of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _all_alike(ones: Sequence[Call], others: Sequence[Call], sizes: tuple[int, int]) -> bool:
    return len(ones) == len(others) and all(_alike(*pair, sizes) for pair in zip(ones, others, strict=True))


def _alike(one: Call, other: Call, sizes: tuple[int, int]) -> bool:
    """Whether two calls are the same but for sizes of results, which may follow the batch."""
    name = getattr(one[0], "__name__", "")
    if name in _SHAPED:
        return _follows(one[1:], other[1:], sizes)
    if name in _FULL:
        (one_size, *one_rest), (other_size, *other_rest) = map(_size_first, (one, other))
        return _follows(one_size, other_size, sizes) and _equal(one_rest, other_rest)
    return bool(one[0] == other[0]) and _equal(one[1:], other[1:])


def _size_first(call: Call) -> tuple[Any, ...]:
    """The size of a call of ``full`` or ``new_full``, and what else it was given."""
    name, args, kwargs = getattr(call[0], "__name__", ""), list(call[1]), dict(call[2])
    place = 1 if name == "new_full" else 0
    size = kwargs.pop("size", None) if len(args) <= place else args.pop(place)
    return size, args, kwargs


def _follows(one: Any, other: Any, sizes: tuple[int, int]) -> bool:
    """Whether arguments are the same, or sizes that are as many times as large as the batch."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_follows(*pair, sizes) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_follows(value, other[key], sizes) for key, value in one.items())
    if type(one) is int and type(other) is int:
        return one == other or one * sizes[1] == other * sizes[0]
    return _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True  # what makes them is compared
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one is other or (type(one) is type(other) and (one == other or (one != one and other != other))))
