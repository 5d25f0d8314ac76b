"""Running ExecuTorch programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bitwright.export.extras import require

__all__ = ["check", "run_executorch"]


def run_executorch(path: str | Path, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a program once with ExecuTorch's Python runtime.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
    """
    require("executorch.kernels.quantized", "executorch", "Running ExecuTorch programs")
    return [output.clone() for output in _load(path).execute(list(inputs))]


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
