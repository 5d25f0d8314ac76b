"""PyTorch itself: models whose weights stay packed, as modules, exported programs and ahead-of-time packages."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import tree_leaves, tree_unflatten

from bitwright._utils.files import new_file_atomically
from bitwright.artifact import CompressedTensor, PackedTensor
from bitwright.artifact.sites import simulators_in
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .arithmetic import ArithmeticActivation, fits_arithmetic
from .averages import average_in_order
from .conversion import ConversionError, captured, converting
from .lowering import lower

__all__ = [
    "export_aot_inductor", "export_torch", "has_compiler", "packed_copy", "run_aot_inductor", "run_torch",
    "save_program",
]  # fmt: skip

# Where an op came from in the Python code: most of the bytes of a small program.
_TRACES = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")


def packed_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a prepared model whose weights stay packed in memory and are decoded on use.

    Activation simulators become plain arithmetic, so the copy needs nothing of Bitwright once it is exported. It
    computes what the prepared model computes, bit for bit; batch norms that graph mode folds are folded. On the CPU,
    large linear layers that are given up to four vectors multiply with the codes: that saves reading the decoded
    weight, and adds in another order, about 120 dB from the prepared model. With up to 256 vectors they decode a part
    of the weight at a time; but with 2 or 4 bits, on processors with AVX-512, they multiply with the codes then too,
    unless activations are quantized, whose codes another order of sums may move.

    Args:
        model: prepared in eager or graph mode; not changed. Tensors that compression does not touch are shared.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
            not calibrated.
    """
    lowered = lower(model, _weight, _activation)
    exact = bool(lowered.activations or simulators_in(lowered.model))
    for module in lowered.model.modules():
        if isinstance(module, PackedTensor):
            module.exact = exact
    return lowered.model.eval()


def export_torch(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """Write a prepared model with packed weights by ``torch.export.save``; it runs with torch alone.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the ``.pt2`` file to write.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.

    Returns:
        ``path``.

    Raises:
        ConversionError: torch.export cannot capture or write the model.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the file cannot be written; an old one stays.
    """
    program, target = captured(packed_copy(model), example_inputs, example_kwargs, dynamic_shapes), Path(path)
    _refuse_keywords(program)
    program._example_inputs = None  # they are written too, and may be larger than the model
    for node in program.graph.nodes:
        for key in _TRACES:
            node.meta.pop(key, None)
    with converting("torch.export.save"):
        save_program(program, target)
    return target


def save_program(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Write an exported program by ``torch.export.save``; an error leaves the old file, or none.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()  # to a file that cannot grow, torch's writer ends the process
    torch.export.save(program, buffer)
    _write(buffer, path)


def _write(buffer: io.BytesIO, path: str | Path) -> None:
    with new_file_atomically(path) as part:
        Path(part).write_bytes(buffer.getbuffer())


def _refuse_keywords(program: torch.export.ExportedProgram) -> None:
    """Refuse states whose names torch cannot read in a program that it has loaded."""
    for state in (*program.state_dict, *program.constants):
        for step in filter(iskeyword, state.split(".")):
            raise ConversionError(
                f"torch.export.load could not run the program: it reads {state!r} as an attribute, and {step!r} is a "
                "keyword of Python. Rename that module or tensor of the model and prepare it again."
            )


def run_torch(path: str | Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a saved program once.

    Args:
        path: the ``.pt2`` file.
        inputs: the tensors among the program's inputs, in their order. What else it was captured with stays.

    Returns:
        The tensors among its outputs.

    Raises:
        ValueError: the program has more or fewer tensors among its inputs.
    """
    program = torch.export.load(path)
    given = iter(inputs)
    user_inputs = [spec.arg for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    wanted = [arg.name for arg in user_inputs if not isinstance(arg, ConstantArgument)]
    if len(inputs) != len(wanted):
        raise ValueError(f"{path} takes {len(wanted)} tensors ({', '.join(wanted)}), got {len(inputs)}.")
    leaves = [arg.value if isinstance(arg, ConstantArgument) else next(given) for arg in user_inputs]
    args, kwargs = tree_unflatten(leaves, program.call_spec.in_spec)
    with torch.no_grad():
        return _flat(program.module()(*args, **kwargs))


def has_compiler() -> bool:
    """Whether the C++ compiler that AOTInductor needs is there."""
    return any(shutil.which(name) for name in ("g++", "clang++"))


def export_aot_inductor(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """Compile a prepared model with packed weights ahead of time; the package loads into Python and C++.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the ``.pt2`` package to write.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.

    Returns:
        ``path``.

    Raises:
        ConversionError: there is no C++ compiler, or torch cannot capture or compile the model.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the file cannot be written; an old one stays.
    """
    if not has_compiler():
        raise ConversionError("AOTInductor needs a C++ compiler, and neither g++ nor clang++ is there; install one.")
    program, target = captured(packed_copy(model), example_inputs, example_kwargs, dynamic_shapes), Path(path)
    average_in_order(program)
    buffer = io.BytesIO()
    with converting("AOTInductor"):
        torch._inductor.aoti_compile_and_package(program, package_path=buffer)
    _write(buffer, target)
    return target


def run_aot_inductor(path: str | Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Load a package and run it once; return its outputs, flattened."""
    with torch.no_grad():
        return _flat(torch._inductor.aoti_load_package(str(path))(*inputs))


def _weight(name: str, tensor: CompressedTensor[Any]) -> nn.Module:
    return PackedTensor(tensor)


def _activation(name: str, simulator: FakeQuantizeImplBase) -> nn.Module | None:
    return ArithmeticActivation(simulator) if fits_arithmetic(simulator) else None


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
