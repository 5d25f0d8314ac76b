"""``torch.export`` of models as people have them.

They keep results of earlier calls, such as tables of positions, in themselves, or were captured once before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from bitwright._utils.call_frames import captured_again_if_corrected
from bitwright.errors import TraceError

from .export_errors import unknown_class
from .input_shapes import each_input_named
from .protect import preserved_state, without_fake_tensors

__all__ = ["exported"]


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
        TraceError: the model registers buffers in every call.
        InputShapesError: the dynamic shapes do not have one for each input.
        UnknownClassError: an input or output is of a class that ``torch.export`` does not know.
    """
    with each_input_named(model, args, kwargs, options.get("dynamic_shapes")) as options["dynamic_shapes"]:
        program, registered = _captured(model, args, kwargs, options)
        if registered:
            with preserved_state(model):
                model(*args, **kwargs)
            program, registered = _captured(model, args, kwargs, options)
    if registered:
        raise TraceError(
            f"The model registers a buffer, {registered[0]!r}, whenever it is called, which torch.export cannot "
            "capture. Register it in __init__, or keep the tensor in a local variable."
        )
    return program


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """A program, and the names of buffers that the model registered for the first time."""
    capture = partial(torch.export.export, model, tuple(args), dict(kwargs), **options)
    with without_fake_tensors(model), _registrations(model) as registered:
        try:
            program = captured_again_if_corrected(capture)
        except Exception as error:
            unknown = unknown_class(error, args, kwargs)
            if unknown is None:
                raise
            raise unknown from error
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
