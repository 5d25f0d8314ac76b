"""What to tell a user whose model ``torch.export`` cannot capture."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from bitwright.errors import BitwrightError, TraceError

__all__ = [
    "UnknownClassError",
    "blaming_inputs",
    "export_failure",
    "flag_refused",
    "forward_problem",
    "inputs_by_name",
    "not_a_tuple",
    "sizes_refused",
    "unknown_class",
]

_TORCH_FOLDER = os.path.dirname(torch.__file__)
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))

# What torch says about debugging torch itself.
_ADVICE = (
    "For more ",
    "For extended logs",
    "For C++ stack trace",
    "If you suspect the guard",
    "consider using data-",
    "The error above occurred when calling torch.export",
)

_HINTS = """Debugging hints:
  1. Eager mode needs no export: set execution_mode="eager" in the QuantizerConfig. It allows branches on data.
  2. Run torch.export.export(model, example_inputs) by itself; torch.export.draft_export lists all problems at once.
  3. Replace branches on tensor values by torch.where or torch.cond, .item() by tensor arithmetic, numpy by torch.
  4. To let a batch size or a length vary, pass dynamic_shapes. If a dimension was declared dynamic but the model fixes
     it, remove it from dynamic_shapes.
  5. Inputs and outputs of a class of their own, such as caches, need torch.utils._pytree.register_pytree_node; models
     of transformers return no cache with use_cache=False."""


_UNKNOWN = re.compile(
    r"Unsupported input type <class '([^']+)'>|Found <class '([^']+)'> in output, which is not a known"
)


class UnknownClassError(BitwrightError, RuntimeError):
    """The model takes or returns an object of a class that ``torch.export`` does not know."""


def unknown_class(
    error: BaseException, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> UnknownClassError | None:
    """Return the error to raise where an input or output is of a class that ``torch.export`` cannot look into.

    Args:
        error: what ``torch.export`` raised.
        args: positional inputs.
        kwargs: keyword inputs.
    """
    found = _UNKNOWN.search(str(error))
    if found is None:
        return None
    path, where = found[1] or found[2], "an input" if found[1] else "the output"
    leaves, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    keys = [key for key, leaf in leaves if repr(type(leaf)) == f"<class {path!r}>"]
    if found[1] and keys:
        where = f"input {keystr(keys[0][1:])}"
    name = path.rpartition(".")[2]
    return UnknownClassError(
        f"torch.export does not know the class of {where} of the model, {path}. If it is a dataclass, call "
        f"torch.export.register_dataclass({name}, serialized_type_name={name!r}) first, once per process, for others "
        "torch.utils._pytree.register_pytree_node; or use a tuple or a dictionary there."
    )


def export_failure(error: BaseException) -> TraceError:
    """Return the error to raise in place of ``error``: its cause, the line of the user's model, and what to do."""
    cause = _first_lines(str(error)) or "no message"
    where = _user_line(error.__traceback__)
    place = f"\nIn your model:\n{where}" if where else ""
    return TraceError(f"torch.export could not capture the model: {type(error).__name__}: {cause}{place}\n{_HINTS}")


def sizes_refused(error: BaseException) -> bool:
    """Whether ``torch.export`` says that a program does not hold for all sizes of ``dynamic_shapes``."""
    return "Constraints violated" in str(error)


def flag_refused(error: BaseException) -> bool:
    """Whether an operator did not take a comparison of sizes for a truth value."""
    return isinstance(error, TypeError) and "must be bool, not SymBool" in str(error)


def not_a_tuple(inputs: Any) -> TypeError:
    """Return the error to raise for example inputs that are no tuple; says how to pass what was given."""
    remedy = "wrap it as (x,)"
    if isinstance(inputs, Mapping):
        remedy = "pass inputs by name as example_kwargs, with () as example_inputs"
    elif isinstance(inputs, list):
        remedy = "write tuple(...) around it"
    return TypeError(f"example_inputs must be a tuple of the model's inputs, got {type(inputs).__name__}: {remedy}.")


def forward_problem(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TraceError | None:
    """Return the error to raise where the model does not run on its inputs at all, whether exported or not.

    The forward works on copies of the buffers, so that the model stays as it was.
    """
    state = {**dict(model.named_parameters()), **{name: buffer.clone() for name, buffer in model.named_buffers()}}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.func.functional_call(model, state, tuple(args), dict(kwargs))
    except Exception as error:
        where = _user_line(error.__traceback__)
        place = f"\nIn your model:\n{where}" if where else ""
        return TraceError(
            f"The model does not run on its inputs ({_described(args, kwargs)}): {type(error).__name__}: "
            f"{_first_lines(str(error)) or 'no message'}{place}\nCheck that the float model runs on them: shapes, "
            f"dtypes, the device, and how many there are.{inputs_by_name(model, args)}"
        )
    return None


@contextmanager
def blaming_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Where the block fails, and the float model alone fails on these inputs too, say that instead.

    Raises:
        TraceError: the model does not run on the inputs; describes them.
    """
    try:
        yield
    except Exception as error:
        problem = forward_problem(model, args, kwargs)
        if problem is None or str(problem) == str(error):
            raise
        raise problem from error


def inputs_by_name(model: nn.Module, args: Sequence[Any]) -> str:
    """Say where a mapping among the inputs belongs whose keys are arguments of forward; empty if there is none."""
    try:
        known = inspect.signature(type(model).forward).parameters
    except (TypeError, ValueError):
        return ""
    for value in args:
        if isinstance(value, Mapping) and value and all(key in known for key in value):
            return f" Inputs by name ({', '.join(map(str, value))}) go into example_kwargs, with () as example_inputs."
    return ""


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say what the inputs are, in a few words each."""
    named = [("", value) for value in args] + [(f"{name}=", value) for name, value in kwargs.items()]
    return ", ".join(name + _kind(value) for name, value in named[:8]) or "none"


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def _first_lines(message: str, limit: int = 6) -> str:
    lines = [line for line in message.strip().splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return "\n".join(lines[:limit])


def _user_line(trace: TracebackType | None) -> str:
    """Return the innermost line outside torch and this package, as a traceback prints it."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    if not frames:
        return ""
    frame = frames[-1]
    return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line or ""}'


def _is_users(filename: str) -> bool:
    generated = filename.startswith("<") and "eval_with_key" not in filename
    return not (generated or filename.startswith((_TORCH_FOLDER, _OWN_FOLDER)) or "contextlib" in filename)
