"""Dynamic shapes of inputs, as torch.export takes them for a model and for the graph that was captured from it."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.forward_scope import ForwardScope, wrap_forward
from bitwright.errors import BitwrightError

__all__ = ["InputShapesError", "each_input_named", "shapes_by_input"]


class InputShapesError(BitwrightError, ValueError, RuntimeError):
    """``dynamic_shapes`` do not have a shape for each input of a model that takes any number of them."""


def shapes_by_input(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any) -> Any:
    """Return dynamic shapes as torch.export takes them for a model in ``each_input_named``.

    The inputs of ``forward(self, x, *rest, **others)`` are a tuple and a dictionary there, ``(shape, (shape, shape),
    {"mask": shape})`` or ``{"x": shape, "rest": (shape, shape), "others": {"mask": shape}}``; a graph that was captured
    from it has each by itself: ``x``, ``rest_0``, ``rest_1``, ``mask``. Inputs such as ``mask`` may be named by
    themselves for the model too.

    Args:
        model: what is captured; a program has its shapes already.
        args: its positional inputs.
        kwargs: its keyword inputs.
        dynamic_shapes: as for the model, or for the one that it was prepared from.

    Raises:
        InputShapesError: the shapes are not one for each input; for graphs, and models that are given inputs of no
            parameter's name.
    """
    if not isinstance(model, nn.Module) or not dynamic_shapes or not isinstance(dynamic_shapes, (Mapping, tuple, list)):
        return dynamic_shapes  # torch's own collections ask the model for its parameters
    is_graph, kwargs = isinstance(model, fx.GraphModule), kwargs or {}
    if not kwargs and not isinstance(dynamic_shapes, Mapping):
        return _each_by_itself(dynamic_shapes, args) if is_graph else dynamic_shapes
    inputs, others = _inputs(model, args, kwargs)
    if not inputs or (not is_graph and others is None):
        return dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        shapes = _by_name(inputs, dynamic_shapes)
    else:
        shapes = _in_order(inputs, args, kwargs, dynamic_shapes, is_graph)
    if shapes.keys() != inputs.keys():
        raise InputShapesError(_not_one_for_each(inputs, dynamic_shapes))
    return {name: shapes[name] for name in (*(name for name in inputs if name not in kwargs), *kwargs)}


@contextmanager
def each_input_named(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Iterator[Any]:
    """Yield what ``shapes_by_input`` returns; the model has a parameter for each input of ``**others`` meanwhile.

    torch.export 2.13 compares dynamic shapes with the parameters first, and with the inputs later, so that no shapes of
    such a model fit (pytorch/pytorch#150022).

    Args:
        model: what is captured; has its own parameters again on exit.
        args: its positional inputs.
        kwargs: its keyword inputs.
        dynamic_shapes: as for ``shapes_by_input``.

    Raises:
        InputShapesError: as from ``shapes_by_input``; or an input cannot have a parameter of its name.
    """
    shapes = shapes_by_input(model, args, kwargs, dynamic_shapes)
    others = _inputs(model, args, kwargs or {})[1] if isinstance(model, nn.Module) and shapes else None
    undo = wrap_forward(_KeywordsNamed(model, others)) if others else None
    try:
        yield shapes
    finally:
        if undo is not None:
            undo()


class _KeywordsNamed(ForwardScope):
    """A forward with parameters of some names in place of ``**others``."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__(module)
        self.names = names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = super().__signature__
        parameters = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.names]
        return signature.replace(parameters=parameters)


def _inputs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str] | None]:
    """Inputs by name, as forward has them, and the names of those that are in its ``**others``; None without such.

    There are none where forward does not take the inputs, which torch.export says.
    """
    try:
        signature = inspect.signature(model.forward)
        inputs = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}, None
    collecting = next((name for name, one in signature.parameters.items() if one.kind == one.VAR_KEYWORD), None)
    if collecting is None:
        return inputs, None
    others = inputs.pop(collecting, {})
    for name in others:
        if name in inputs or not name.isidentifier() or keyword.iskeyword(name):
            raise InputShapesError(
                f"The keyword input {name!r} of {type(model).__name__} goes into **{collecting}, and "
                f"{'a positional input has that name' if name in inputs else 'no parameter can have that name'}, so "
                "that no dynamic shape can be given for it. Rename it, or leave dynamic_shapes out."
            )
    return {**inputs, **others}, list(others)


def _by_name(inputs: Mapping[str, Any], dynamic_shapes: Mapping[str, Any]) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for name, given in dynamic_shapes.items():
        if _is_for_several(given, inputs, inputs.get(name)) and (given or name not in inputs):
            shapes |= given
        elif name not in inputs and f"{name}_0" in inputs and isinstance(given, (tuple, list)):
            shapes |= {f"{name}_{number}": shape for number, shape in enumerate(given)}
        else:
            shapes[name] = given
    return shapes


def _in_order(
    inputs: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Sequence[Any],
    is_graph: bool,
) -> dict[str, Any]:
    """Shapes by name; of other names than the inputs where it is not clear which shape is whose."""
    *given, last = dynamic_shapes
    collected = last if last and _is_for_several(last, kwargs, inputs[list(inputs)[-1]]) else {}
    if not collected:
        given.append(last)
    names = [name for name in inputs if name not in collected]
    by_keyword = sum(name in kwargs for name in names)
    if is_graph and collected and by_keyword > 1:
        return {}  # a graph has keyword inputs in the order of the call, shapes have that of the parameters
    if is_graph:
        place = len(given) - by_keyword
        given = [*_each_by_itself(given[:place], args), *given[place:]]
    return {**dict(zip(names, given, strict=True)), **collected} if len(names) == len(given) else {}


def _is_for_several(shapes: Any, names: Mapping[str, Any], value: Any) -> bool:
    """Whether shapes are those of inputs by name, not those of the dimensions of one, or of a dictionary of tensors."""
    is_named = isinstance(shapes, Mapping) and all(name in names for name in shapes)
    return is_named and not isinstance(value, Mapping)


def _each_by_itself(dynamic_shapes: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """Shapes in order where the last of them may be those of ``*rest``."""
    if not dynamic_shapes:
        return dynamic_shapes
    *first, last = dynamic_shapes
    if not isinstance(last, (tuple, list)) or len(first) + len(last) != len(args):
        return dynamic_shapes
    # One shape in a tuple may also be that of a tuple of one tensor, or of a tensor with one dimension.
    single = len(last) == 1 and not (isinstance(args[-1], torch.Tensor) and isinstance(last[0], (Mapping, tuple, list)))
    return dynamic_shapes if single else (*first, *last)


def _not_one_for_each(inputs: Mapping[str, Any], dynamic_shapes: Any) -> str:
    given = f"are {len(dynamic_shapes)}"
    if isinstance(dynamic_shapes, Mapping):
        names = (_paths(name, shapes) for name, shapes in dynamic_shapes.items())
        given = f"are for {', '.join(path for paths in names for path in paths)}"
    return (
        f"dynamic_shapes do not have one shape for each input: they {given}, and the inputs are {', '.join(inputs)}. "
        f"Give them by name, None for a fixed shape: {{{', '.join(f'{name!r}: ...' for name in inputs)}}}."
    )


def _paths(name: str, shapes: Any) -> list[str]:
    """The name that shapes were given for; or those inside of it."""
    inside = [key for key in shapes if isinstance(key, str)] if isinstance(shapes, Mapping) else []
    return [f"{name}.{key}" for key in inside] or [name]
