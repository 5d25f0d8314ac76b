"""Run an ONNX file with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitwright.export.conversion import ConversionError
from bitwright.export.extras import require

__all__ = ["open_session", "run_onnx"]


def open_session(path: str | Path, *, optimize: bool = True, threads: int | None = None, precise: bool = False) -> Any:
    """Return an ``onnxruntime.InferenceSession`` on the CPU.

    Args:
        path: the file.
        optimize: let ONNX Runtime rewrite the graph; False runs it node by node as written.
        threads: threads of one operator; None for ONNX Runtime's choice.
        precise: use products that cannot overflow on x86 processors without VNNI, where they are slower. ONNX Runtime
            1.31 refuses models with tied weights in this mode.

    Raises:
        MissingExtraError: the onnx extra is not installed.
        ConversionError: ONNX Runtime has no kernel for an operator in the file.
    """
    runtime = require("onnxruntime", "onnx", "Running ONNX files")
    options = runtime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConversionError(
            f"ONNX Runtime cannot run {str(path)!r} on the CPU: {error}. It has few kernels for bfloat16, and none for "
            "float64 convolutions; convert the model to float32 before it is prepared, or run the file elsewhere."
        ) from error


def run_onnx(
    path: str | Path, inputs: tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor], *, optimize: bool = True
) -> list[torch.Tensor]:
    """Run a file once on the CPU.

    Args:
        path: the file.
        inputs: tensors in the order of the graph's inputs, or by name.
        optimize: as for :func:`open_session`.

    Returns:
        The outputs in the graph's order.

    Raises:
        MissingExtraError: the onnx extra is not installed.
    """
    session = open_session(path, optimize=optimize)
    names = [value.name for value in session.get_inputs()]
    given = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
    feed = {name: tensor.detach().cpu().numpy() for name, tensor in given.items()}
    return [torch.from_numpy(output) for output in session.run(None, feed)]
