"""``torch.export`` of models as people have them.

They keep results of earlier calls, such as tables of positions, in themselves, or were captured once before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from bitwright._utils.call_frames import captured_again_if_corrected

from .protect import preserved_state, without_fake_tensors

__all__ = ["exported", "shapes_by_input"]


def exported(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any
) -> torch.export.ExportedProgram:
    """Return what ``torch.export.export`` makes of a model, in the mode that it is in.

    Of a buffer that the model registers when it is called, torch 2.13 makes a write to one of the inputs. Such a model
    is called once, as it would be by itself, and captured with the buffers that it then has.

    Args:
        model: left without what the capture put into it.
        args: positional inputs.
        kwargs: keyword inputs.
        options: of ``torch.export.export``.

    Raises:
        RuntimeError: the model registers buffers in every call.
    """
    options["dynamic_shapes"] = shapes_by_input(model, args, options.get("dynamic_shapes"))
    program, registered = _captured(model, args, kwargs, options)
    if registered:
        with preserved_state(model):
            model(*args, **kwargs)
        program, registered = _captured(model, args, kwargs, options)
    if registered:
        raise RuntimeError(
            f"The model registers a buffer, {registered[0]!r}, whenever it is called, which torch.export cannot "
            "capture. Register it in __init__, or keep the tensor in a local variable."
        )
    return program


def shapes_by_input(model: Any, args: Sequence[Any], dynamic_shapes: Any) -> Any:
    """Return dynamic shapes as torch.export takes them for a model.

    The inputs of ``forward(self, x, *rest)`` are one tuple there, ``(shape, (shape, shape))`` or ``{"x": shape, "rest":
    (shape, shape)}``; a graph that was captured from it has each by itself: ``x``, ``rest_0``, ``rest_1``.

    Args:
        model: what is captured; a program has its shapes already.
        args: its positional inputs.
        dynamic_shapes: as for the model, or for the one that it was prepared from.
    """
    if not isinstance(model, fx.GraphModule) or not dynamic_shapes:
        return dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        names = inspect.signature(model.forward).parameters
        split: dict[str, Any] = {}
        for name, shapes in dynamic_shapes.items():
            several = name not in names and f"{name}_0" in names and isinstance(shapes, (tuple, list))
            split |= {f"{name}_{number}": shape for number, shape in enumerate(shapes)} if several else {name: shapes}
        return split
    *first, last = dynamic_shapes
    if not isinstance(last, (tuple, list)) or len(first) + len(last) != len(args):
        return dynamic_shapes
    # One shape in a tuple may also be that of a tuple of one tensor, or of a tensor with one dimension.
    single = len(last) == 1 and not (isinstance(args[-1], torch.Tensor) and isinstance(last[0], (Mapping, tuple, list)))
    return dynamic_shapes if single else (*first, *last)


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """A program, and the names of buffers that the model registered for the first time."""
    capture = partial(torch.export.export, model, tuple(args), dict(kwargs), **options)
    with without_fake_tensors(model), _registrations(model) as registered:
        program = captured_again_if_corrected(capture)
    return program, registered


@contextmanager
def _registrations(model: nn.Module) -> Iterator[list[str]]:
    names, parts = list[str](), {id(part) for part in model.modules()}

    def note(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if id(module) in parts and buffer is not None and module._buffers.get(name) is None:
            names.append(name)

    handle = register_module_buffer_registration_hook(note)
    try:
        yield names
    finally:
        handle.remove()
