"""Run an ONNX file with ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bitwright.export.conversion import ConversionError
from bitwright.export.extras import require

__all__ = ["open_session", "run_onnx", "run_with_codes"]

_BFLOAT16 = 16
_MULTIPLE = re.compile(r"(\d+)\*[A-Za-z_]\w*")
"""What torch.onnx writes for ``4 * torch.export.Dim("length")``."""


def open_session(
    path: str | Path,
    *,
    optimize: bool = True,
    threads: int | None = None,
    precise: bool = False,
    also: Sequence[str] = (),
) -> Any:
    """Return an ``onnxruntime.InferenceSession`` on the CPU.

    Args:
        path: the file.
        optimize: let ONNX Runtime rewrite the graph; False runs it node by node as written.
        threads: threads of one operator; None for ONNX Runtime's choice.
        precise: let products of signed weights not overflow on x86 processors without VNNI. Files of ``export_onnx``
            need it with ``unsigned_activations=False`` only. ONNX Runtime 1.31 refuses models with tied weights in
            this mode.
        also: names of inner values to return behind the outputs.

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
    file: str | bytes = str(path)
    if also:
        file = _with_outputs(path, also)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(Path(path).parent))
    try:
        return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConversionError(
            f"ONNX Runtime cannot run {str(path)!r} on the CPU: {error}. It has few kernels for bfloat16, and none for "
            "float64 convolutions: write bfloat16 models with bfloat16_kernels=False, convert others to float32 before "
            "they are prepared, or run the file elsewhere."
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
        ConversionError: ONNX Runtime cannot run the file on the CPU, or the file does not take the inputs.
    """
    session = open_session(path, optimize=optimize)
    names = [value.name for value in session.get_inputs()]
    given = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=False))
    if len(given) != len(inputs) or given.keys() != set(names):
        extra = [name for name in given if name not in names]
        raise ConversionError(
            f"{str(path)!r} takes {_described(session)}, got "
            + (f"inputs that it does not have: {', '.join(extra)}." if extra else f"{len(inputs)} inputs.")
        )
    try:
        _check_multiples(session, given)
        return _run(session, given)
    except Exception as error:
        tensors = ", ".join(f"{name}: {_shown(t.dtype, t.shape)}" for name, t in given.items())
        other = any(
            isinstance(size, int) and size != found
            for value in session.get_inputs()
            for size, found in zip(value.shape, given[value.name].shape, strict=False)
        )
        raise ConversionError(
            f"{str(path)!r} does not take these inputs: {error}. It takes {_described(session)}, got {tensors}."
            + (" For inputs of other sizes export with dynamic_shapes." if other else "")
        ) from error


def _check_multiples(session: Any, given: Mapping[str, torch.Tensor]) -> None:
    """Refuse sizes that are no multiples where a file has ``4*length``; ONNX Runtime goes on until a shape conflicts.

    Raises:
        ValueError: with the input and the size.
    """
    for value in session.get_inputs():
        for dim, (asked, size) in enumerate(zip(value.shape, given[value.name].shape, strict=False)):
            multiple = _MULTIPLE.fullmatch(str(asked))
            if multiple and size % int(multiple[1]):
                raise ValueError(f"size {size} of dimension {dim} of {value.name} is no multiple of {multiple[1]}")


def _described(session: Any) -> str:
    """The inputs of a file with dtype and shape."""
    found = [f"{value.name}: {_shown(value.type, value.shape)}" for value in session.get_inputs()]
    return ", ".join(found) or "no inputs"


def _shown(dtype: object, shape: Sequence[object]) -> str:
    name = str(dtype).removeprefix("torch.").removeprefix("tensor(").removesuffix(")")
    return f"{name}[{', '.join(map(str, shape))}]"


def run_with_codes(
    path: str | Path, inputs: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
) -> dict[str, list[tuple[torch.Tensor, float, int]]]:
    """Run a file once on the CPU, and return the integer codes of its activations.

    Args:
        path: the file.
        inputs: tensors in the order of the graph's inputs that are not named.
        named: further inputs by name.

    Returns:
        Codes, scale and zero point of every use of an activation's quantizer, in the order of the graph, by the
        activation's name.
    """
    onnx = require("onnx", "onnx", "Running ONNX files")
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {constant.name: constant for constant in graph.initializer}
    rectified = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "Max" and len(n.input) > 1}
    nodes = [n for n in graph.node if n.op_type == "QuantizeLinear"]
    places = [rectified.get(node.output[0], node.output[0]) for node in nodes]
    session = open_session(path, also=places)
    names = [value.name for value in session.get_inputs() if value.name not in named]
    given = {**dict(zip(names, inputs, strict=True)), **named}
    outputs = [output.name for output in session.get_outputs()]
    values = dict(zip(outputs, _run(session, given), strict=True))
    found: dict[str, list[tuple[torch.Tensor, float, int]]] = {}
    for node, place in zip(nodes, places, strict=True):
        scale, zero_point = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        use = values[place], float(scale), int(zero_point)
        found.setdefault(node.name.rpartition("_QuantizeLinear_")[0], []).append(use)
    return found


def _run(session: Any, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a session once. NumPy has no bfloat16, which goes in as its bits and comes out through DLPack."""
    runtime = require("onnxruntime", "onnx", "Running ONNX files")
    given = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            bits = tensor.view(torch.uint16).numpy()
            given[name] = runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)
        else:
            given[name] = runtime.OrtValue.ortvalue_from_numpy(tensor.numpy())
    return [_tensor(value) for value in session.run_with_ort_values(None, given)]


def _tensor(value: Any) -> torch.Tensor:
    if value.element_type() != _BFLOAT16:
        return torch.from_numpy(value.numpy())
    return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()


def _with_outputs(path: str | Path, names: Sequence[str]) -> bytes:
    """A file's graph with further outputs; large weights stay in the file beside it."""
    onnx = require("onnx", "onnx", "Running ONNX files")
    model = onnx.load(str(path), load_external_data=False)
    given = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    serialized: bytes = model.SerializeToString()
    return serialized
