"""The Core AI runtime."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

from bitwright.errors import BitwrightError

from .conversion import ConversionError, converting
from .extras import require

__all__ = ["WrongStateError", "run_coreai"]

_UNABLE = "It lacks a kernel for these shapes or types: write the float model with other operators or in float32."


class WrongStateError(BitwrightError, ValueError):
    """A state was given that the model does not have, or not in that shape."""


def run_coreai(
    path: str | Path, inputs: Sequence[torch.Tensor], states: dict[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Run a Core AI model once in the Core AI runtime.

    Args:
        path: the ``.aimodel`` folder.
        inputs: tensors in the order of the model's inputs.
        states: what the model keeps from call to call, such as a cache, by the file's names; holds the new values
            afterwards, for the next call. What is not in it begins with zeros.

    Returns:
        The outputs in the model's order.

    Raises:
        MissingExtraError: the coreai extra is not installed.
        WrongStateError: the model has no state of a name, or one of another shape (a ``ValueError``).
        ConversionError: the runtime refuses the model, as it does with some operators on bfloat16; or an integer that
            was given does not fit in 32 bits.
    """
    require("coreai.runtime", "coreai", "Running Core AI models")
    # In a thread of its own, so that it works inside a running event loop too, as in a notebook.
    with converting("The Core AI runtime", _UNABLE), concurrent.futures.ThreadPoolExecutor(1) as pool:
        outputs, kept = pool.submit(asyncio.run, _run(Path(path), inputs, states or {})).result()
    if states is not None:
        states.update(kept)
    return outputs


async def _run(
    path: Path, inputs: Sequence[torch.Tensor], states: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and the states by name."""
    authoring = require("coreai.authoring", "coreai", "Running Core AI models")
    array = require("coreai.runtime", "coreai", "Running Core AI models").NDArray
    async with authoring.AIModelAsset.load(path).executable() as loaded:
        function = loaded.load_function("main")
        described = function.desc
        begun = _begun({name: described.state_descriptor(name) for name in described.state_names}, states)
        kept = {name: array(value) for name, value in begun.items()}
        given = zip(described.input_names, inputs, strict=True)
        outputs = await function(
            inputs={name: array(_narrow(name, value)) for name, value in given},
            state=kept,
        )
        # What the runtime returns is in no order.
        found = [_tensor_of(outputs[name]) for name in described.output_names]
        return found, {name: _tensor_of(value) for name, value in kept.items()}


def _begun(described: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states before a call; zeros where none are given."""
    shapes = {name: tuple(one.shape) for name, one in described.items()}
    wrong = {name: tuple(value.shape) for name, value in given.items() if shapes.get(name) != tuple(value.shape)}
    if wrong:
        raise WrongStateError(f"The model has states of the names and shapes {shapes}; it was given {wrong}.")
    zeros = {name: torch.zeros(shapes[name], dtype=getattr(torch, one.dtype)) for name, one in described.items()}
    return {name: _narrow(name, given.get(name, value)) for name, value in zeros.items()}


def _tensor_of(array: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(array._tensor.to_dlpack()).clone()


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of a type that Core AI has: its numbers go up to 32 bits."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.int64 and not torch.equal(tensor.int().long(), tensor):
        raise ConversionError(
            f"Core AI's integers have 32 bits, and {name!r} holds numbers from {int(tensor.min())} to "
            f"{int(tensor.max())}. Give it such that fit, or let the model compute with smaller ones."
        )
    return tensor.to({torch.int64: torch.int32, torch.float64: torch.float32}.get(tensor.dtype, tensor.dtype))
