"""Results of earlier calls that models keep in themselves as long as they are not trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["without_kept_results"]


@contextlib.contextmanager
def without_kept_results(model: nn.Module) -> Iterator[None]:
    """Hide what modules keep of earlier calls and drop in ``train()``; a capture would have it as constants.

    LeViT of timm keeps its attention biases when it is called in eval mode: a program that is captured afterwards does
    not read the parameters, which training would then not change.

    Args:
        model: has on exit what it kept before, and not what the block let it keep in the same places.
    """
    hidden = []
    for module in model.modules():
        if type(module).train is not nn.Module.train:
            for name, dropped in _dropped(module).items():
                hidden.append((module, name, vars(module)[name]))
                vars(module)[name] = dropped
    try:
        yield
    finally:
        for module, name, kept in hidden:
            vars(module)[name] = kept


def _dropped(module: nn.Module) -> dict[str, Any]:
    """Attributes in which a module keeps tensors until it is trained, as they are then."""
    keeping = {name: value for name, value in vars(module).items() if _holds_tensors(name, value)}
    if not keeping:
        return {}
    twin = copy.copy(module)  # train() may write to anything, such as weights that were merged for inference
    state = {"_parameters": _cloned(module._parameters), "_buffers": _cloned(module._buffers), "_modules": {}}
    vars(twin).update({**state, **{name: copy.copy(value) for name, value in keeping.items()}})
    with contextlib.suppress(Exception), torch.no_grad():  # its children are not there
        twin.train()
        return {
            name: vars(twin)[name]
            for name in keeping
            if name in vars(twin) and not _holds_tensors(name, vars(twin)[name])
        }
    return {}


def _cloned(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else copy.deepcopy(tensor.detach()) for name, tensor in tensors.items()}


def _holds_tensors(name: str, value: Any) -> bool:
    if name in ("_parameters", "_buffers", "_modules"):
        return False
    leaves = tree_leaves(value) if type(value) in (dict, list, tuple) else [value]
    return any(type(leaf) is torch.Tensor for leaf in leaves)
