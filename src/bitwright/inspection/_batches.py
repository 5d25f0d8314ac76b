"""From what a data loader yields to the arguments of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from ._probe import Inputs

__all__ = ["batches_of", "inputs_of"]


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
        ValueError: it is empty.
    """
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
