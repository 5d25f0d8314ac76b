"""From what a data loader yields to the arguments of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from ._probe import Inputs

__all__ = ["batches_of", "dynamic_shapes", "example_of", "inputs_of"]


def inputs_of(batch: Any, model: nn.Module) -> Inputs:
    """Return the arguments that a batch stands for.

    A mapping gives keyword arguments; a tuple or list as many positional ones as forward takes, so that the labels of
    ``(images, labels)`` are left out; anything else is the only argument.
    """
    if isinstance(batch, Mapping):
        return Inputs((), _fitting_keys(batch, model))
    if isinstance(batch, (tuple, list)):
        most = _positional(model)
        return Inputs(tuple(batch[:most]), {})
    return Inputs((batch,), {})


def batches_of(data: Any, limit: int | None = None) -> Iterator[Any]:
    """Yield the batches of ``data``; a single tensor or mapping is one batch.

    Raises:
        TypeError: ``data`` cannot be iterated over.
        ValueError: it is empty, or ``limit`` is less than 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"At least one batch is needed, got batches={limit!r}; leave it out to use them all.")
    if isinstance(data, (torch.Tensor, Mapping)):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise TypeError(
            f"data must be an iterable of batches (a DataLoader, a list of tensors), got {type(data).__name__}."
        )
    count = 0
    for batch in islice(data, limit):
        count += 1
        yield batch
    if not count:
        raise ValueError("data is empty: pass at least one batch of inputs. An iterator that was used up is empty too.")


def example_of(batches: Sequence[Any], model: nn.Module) -> Inputs:
    """Return the inputs of the first of the batches with the fewest dimensions of size 1, which no graph can vary."""
    return min((inputs_of(batch, model) for batch in batches), key=_fixed_dimensions)


def _fixed_dimensions(inputs: Inputs) -> int:
    leaves = tree_leaves((inputs.args, dict(inputs.kwargs)))
    return sum(size < 2 for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape)


def dynamic_shapes(
    inputs: Inputs,
    model: nn.Module,
    others: Iterable[Inputs] | None = None,
    is_free: Callable[[torch.Tensor, int], bool] = lambda tensor, dim: True,
) -> Any:
    """Return what lets sizes of inputs vary, as ``torch.export`` takes it: by parameter of forward.

    Args:
        inputs: what the model is captured with; dimensions of size 1 cannot vary.
        model: the model.
        others: what else it will be called with. Only the batch, dimension 0, varies then, and dimensions that have
            another size there. None to let every dimension vary.
        is_free: says of a tensor of the inputs and a dimension whether that may vary.
    """
    named = _by_parameter(inputs, model)
    more = None if others is None else [_by_parameter(entry, model) for entry in others]
    return _varying(named, more, is_free)


def _by_parameter(inputs: Inputs, model: nn.Module) -> dict[str, Any] | tuple[Any, ...]:
    """The inputs by forward's parameters; where it does not say which they are, those given by position or by name."""
    try:
        return dict(inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments)
    except (TypeError, ValueError):
        return dict(inputs.kwargs) or inputs.args


def _varying(value: Any, others: Sequence[Any] | None, is_free: Callable[[torch.Tensor, int], bool]) -> Any:
    """Return the dynamic shapes of a value; ``others`` are those in its place among further inputs."""
    if isinstance(value, torch.Tensor):
        shapes = None if others is None else [entry.shape for entry in others if isinstance(entry, torch.Tensor)]
        vary = [dim for dim, size in enumerate(value.shape) if size > 1 and _varies(dim, size, shapes)]
        return {dim: Dim.AUTO for dim in vary if is_free(value, dim)}
    if isinstance(value, Mapping):
        return {key: _varying(entry, _in_place(others, Mapping, key), is_free) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_varying(entry, _in_place(others, (list, tuple), i), is_free) for i, entry in enumerate(value)]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return None


def _in_place(others: Sequence[Any] | None, kind: Any, key: Any) -> list[Any] | None:
    """What has a place in containers of a kind, in those that have the place."""
    if others is None:
        return None
    return [
        entry[key]
        for entry in others
        if isinstance(entry, kind) and (key in entry if kind is Mapping else key < len(entry))
    ]


def _varies(dim: int, size: int, shapes: Sequence[torch.Size] | None) -> bool:
    return shapes is None or dim == 0 or any(dim < len(shape) and shape[dim] != size for shape in shapes)


def _positional(model: nn.Module) -> int | None:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return None if not _exported_arguments(model) else _exported_arguments(model)
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _exported_arguments(model: nn.Module) -> int | None:
    graph = getattr(model, "graph", None)
    return None if graph is None else len(graph.find_nodes(op="placeholder"))


def _fitting_keys(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Leave out keys that forward does not take, such as labels, unless it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return dict(batch)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return dict(batch)
    return {key: value for key, value in batch.items() if key in parameters} or dict(batch)
