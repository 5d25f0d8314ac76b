"""Running ExecuTorch programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bitwright.export.conversion import ConversionError
from bitwright.export.extras import require

__all__ = ["check", "run_executorch"]


def run_executorch(path: str | Path, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a program once with ExecuTorch's Python runtime.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ConversionError: there is no whole program in the file, or it does not take the inputs.
    """
    require("executorch.kernels.quantized", "executorch", "Running ExecuTorch programs")
    try:
        return [output.clone() for output in _load(path).execute(list(inputs))]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        raise ConversionError(
            f"ExecuTorch's runtime cannot run {str(path)!r} on inputs of shape {shapes or 'none'}: {error}. Write the "
            "file anew if it is damaged; a program takes contiguous tensors of the shapes that it was exported with."
        ) from error


def check(path: Path, program: Any, inputs: tuple[Any, ...], enough_db: float) -> None:
    """Run a file once: XNNPACK's runtime refuses some graphs that its partitioner took, and computes some wrong.

    Raises:
        ValueError: the output is not the exported program's.
    """
    expected = [tensor.double() for tensor in tree_leaves(program.module()(*inputs))]
    found = run_executorch(path, tuple(tree_leaves(inputs)))
    noise = sum(float((a - b.double()).square().sum()) for a, b in zip(expected, found, strict=True))
    signal = sum(float(tensor.square().sum()) for tensor in expected)
    if not noise * 10 ** (enough_db / 10) <= signal:
        raise ValueError("its runtime computes something else than the exported program")


def _load(path: str | Path) -> Any:
    runtime = require("executorch.runtime", "executorch", "Running ExecuTorch programs").Runtime.get()
    return runtime.load_program(str(path)).load_method("forward")
