"""``torch.export`` of models as people have them.

They keep results of earlier calls, such as tables of positions, in themselves, or were captured once before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export.dynamic_shapes import _DerivedDim
from torch.fx.experimental import _config
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from bitwright._utils.call_frames import captured_again_if_corrected
from bitwright.errors import TraceError

from .assigned_buffers import assignments_written
from .export_errors import flag_refused, sizes_refused, unknown_class
from .failed_calls import failed_calls_forgotten
from .input_shapes import each_input_named
from .protect import preserved_state, without_fake_tensors
from .python_sizes import python_on_sizes
from .states import attribute_tensors_preserved

__all__ = ["exported", "one_at_a_time"]

one_at_a_time = threading.RLock()
"""``torch.export`` has modes and patches that are the process's, and fails in two threads at once."""


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
    with (
        one_at_a_time,
        each_input_named(model, args, kwargs, options.get("dynamic_shapes")) as options["dynamic_shapes"],
    ):
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
    capture = partial(_capture, model, tuple(args), dict(kwargs), options)
    with (
        attribute_tensors_preserved(model),  # torch.export traces these as what they are
        without_fake_tensors(model),
        assignments_written(model),
        failed_calls_forgotten(),
        _checkpoints_called(),
        _registrations(model) as registered,
    ):
        try:
            program = captured_again_if_corrected(capture)
        except Exception as error:
            unknown = unknown_class(error, args, kwargs)
            if unknown is None:
                raise
            raise unknown from error
    return program, registered


def _capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    """A program from ``torch.export``, asked twice where it refuses sizes for what it assumed of them.

    It takes every size for another one than 1, and refuses those for which that is wrong: ``x[:, 1:]`` may not have one
    row. The second time it leaves that open, as for sizes that depend on values, and refuses only what the model itself
    asks. The least size is 2, as it is the first time. And Python's ``int`` and flags are right for sizes then.
    """
    try:
        return torch.export.export(model, args, kwargs, **options)
    except Exception as error:
        if not (sizes_refused(error) or flag_refused(error)):
            raise
        shapes = tree_map_only(torch.export.Dim, _from_two, options["dynamic_shapes"])
        patched = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        suppressed = () if flag_refused(error) else (Exception,)
        with patched, python_on_sizes(model), contextlib.suppress(*suppressed):
            return torch.export.export(model, args, kwargs, **{**options, "dynamic_shapes": shapes})
        raise


def _from_two(size: Any) -> Any:
    """A dynamic size that begins with 2, or later; of several that depend on one, that one does."""
    if isinstance(size, _DerivedDim):
        return _DerivedDim(size.__name__, _from_two(size.root), size.fn)
    if type(size) is not torch.export.Dim or size.min >= 2 or size.max <= 2:
        return size
    return torch.export.Dim(size.__name__, min=2, max=size.max)


@contextmanager
def _checkpoints_called() -> Iterator[None]:
    """Have ``checkpoint(..., use_reentrant=True)`` call its function and do nothing else.

    Its first pass is one without gradients, and would be captured as such: nothing in it, or before it, would train.
    """
    own = vars(CheckpointFunction).get("apply")
    setattr(CheckpointFunction, "apply", staticmethod(lambda function, _, *args: function(*args)))  # noqa: B010
    try:
        yield
    finally:
        if own is None:
            del CheckpointFunction.apply  # it is inherited
        else:
            setattr(CheckpointFunction, "apply", own)  # noqa: B010


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
