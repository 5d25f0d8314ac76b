"""Tensors that a model keeps in attributes when it is called, such as tables that it computes once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .model import Argument, Op, Value

__all__ = ["calls_of_constant", "kept_tensors", "only_gives_a_pattern", "without_kept_results"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def kept_tensors(model: nn.Module) -> dict[tuple[int, str, Any], torch.Tensor]:
    """Return the attributes of modules that are tensors, or lists or dictionaries of them; no parameters or buffers.

    Args:
        model: the model.

    Returns:
        Tensors by the identity of their module, the name of the attribute, and the key in it, None for the attribute
        itself.
    """
    return {
        (id(module), name, key): tensor
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
        for key, tensor in _tensors_in(value).items()
    }


def _tensors_in(value: Any) -> dict[Any, torch.Tensor]:
    """The tensors that an attribute holds, by key."""
    entries = value if type(value) is dict else dict(enumerate(value)) if type(value) is list else {None: value}
    return {key: entry for key, entry in entries.items() if isinstance(entry, torch.Tensor)}


def calls_of_constant(value: Value, attributes: Sequence[Value] = ()) -> list[Op]:
    """Return the calls that compute a value of the numbers of buffers and constants alone; none for any other value.

    What has only the type or the shape of an input, such as anchors of a feature map of that size, is a constant.

    Args:
        value: of an eager program.
        attributes: further values that are constants.
    """
    constants = set(map(id, attributes))
    found, known = [value], {id(value)}
    for one in found:
        if one.producer is None:
            if one is value or not (id(one) in constants or (one.state is not None and not one.state.is_parameter)):
                return []
            continue
        read = [argument for argument in one.producer.arguments if not only_gives_a_pattern(argument)]
        before = [argument.value for argument in read if id(argument.value) not in known]
        known.update(map(id, before))
        found += before
    return [one.producer for one in found if one.producer is not None]


def only_gives_a_pattern(argument: Argument) -> bool:
    """Return whether an argument gives a call a type, a device or a shape, and no numbers."""
    name = argument.op.type
    if name.startswith(("new_", "empty_", "full_", "ones_", "zeros_")):
        return argument.index == 0
    return argument.index > 0 and (name == "to" or name.endswith("_as"))


@contextlib.contextmanager
def without_kept_results(model: nn.Module) -> Iterator[None]:
    """Hide what modules keep of earlier calls until they are trained; a capture would have it as constants.

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
    """Attributes in which a module keeps tensors until it is trained, as they are when it is back in its mode then.

    What it makes anew for that mode, such as merged weights, which its forward may rely on, is not among them.
    """
    attributes = vars(module).items()
    keeping = {name: value for name, value in attributes if name not in _OF_EVERY_MODULE and _tensors_in(value)}
    if not keeping:
        return {}
    twin = copy.copy(module)  # train() may write to anything, such as weights that were merged for inference
    state = {"_parameters": _cloned(module._parameters), "_buffers": _cloned(module._buffers), "_modules": {}}
    vars(twin).update({**state, **{name: copy.copy(value) for name, value in keeping.items()}})
    with contextlib.suppress(Exception), torch.no_grad():  # its children are not there
        twin.train()
        twin.train(module.training)
        return {name: vars(twin)[name] for name in keeping if name in vars(twin) and not _tensors_in(vars(twin)[name])}
    return {}


def _cloned(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else copy.deepcopy(tensor.detach()) for name, tensor in tensors.items()}
