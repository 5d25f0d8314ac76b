"""Results of classes that ``torch.export`` does not know, such as the caches of language models."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["without_foreign_results"]


@contextmanager
def without_foreign_results(model: nn.Module) -> Iterator[None]:
    """Let ``model`` return None in place of each result of a class that pytrees do not know, and warn of it.

    Only beside tensors: where nothing else is returned, the export refuses the result, as it would without this.
    """
    handle = model.register_forward_hook(_without_foreign)
    try:
        yield
    finally:
        handle.remove()


def _without_foreign(model: nn.Module, args: Any, result: Any) -> Any:
    leaves, spec = tree_flatten(result)
    foreign = [_is_foreign(leaf) for leaf in leaves]
    if not any(foreign) or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return result
    classes = {type(leaf).__qualname__ for leaf, dropped in zip(leaves, foreign, strict=True) if dropped}
    warnings.warn(
        f"{type(model).__name__} returns {', '.join(sorted(classes))}, which torch.export does not know: the captured "
        "graph returns None there. To keep it, register the class with torch.utils._pytree.register_pytree_node; "
        "models of transformers return no cache with use_cache=False.",
        UserWarning,
        stacklevel=2,
    )
    return tree_unflatten([None if dropped else leaf for leaf, dropped in zip(leaves, foreign, strict=True)], spec)


def _is_foreign(leaf: Any) -> bool:
    if isinstance(leaf, (torch.Tensor, enum.Enum)):
        return False
    return type(leaf).__module__.partition(".")[0] not in ("builtins", "torch")
