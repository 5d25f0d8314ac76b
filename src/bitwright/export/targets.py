"""Every target in one list: what it is called, what it needs, and how to write and run it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.artifact import Artifact

from .torch_program import has_compiler

__all__ = ["TARGETS", "Target", "target_named"]


@dataclass(frozen=True, slots=True)
class Target:
    """A format that a compressed model is written in.

    Attributes:
        name: what the command line calls it.
        title: what tables call it.
        suffix: how its files or folders end; empty for folders without an ending.
        extra: the optional dependency that it needs, None for none.
        modules: what that installs, and the writer and the runtime import.
        write: ``write(model, example_inputs, path, example_kwargs, dynamic_shapes)`` writes a prepared model.
        run: ``run(path, inputs)`` returns the outputs of one call; None for what does not run here.
        keeps_shapes: whether ``dynamic_shapes`` can leave a dimension free; ExecuTorch keeps those with a ``max``.
    """

    name: str
    title: str
    suffix: str
    extra: str | None
    modules: tuple[str, ...]
    write: Callable[[nn.Module, tuple[Any, ...], Path, Mapping[str, Any], Any], Path]
    run: Callable[[Path, Sequence[torch.Tensor]], list[torch.Tensor]] | None
    keeps_shapes: bool = True

    def missing(self) -> str | None:
        """Return what has to be installed before this target can be written, None if nothing."""
        if self.name == "aot-inductor" and not has_compiler():
            return "needs a C++ compiler (g++ or clang++)"
        try:
            absent = [name for name in self.modules if importlib.util.find_spec(name) is None]
        except (ImportError, ValueError):  # a parent package is not there, or is blocked
            absent = list(self.modules)
        return f'pip install "bitwright[{self.extra}]"' if absent else None


def target_named(name: str) -> Target:
    """Return a target.

    Raises:
        KeyError: there is none of that name; lists those that there are.
    """
    if name not in TARGETS:
        raise KeyError(f"There is no target {name!r}; there are {', '.join(TARGETS)}.")
    return TARGETS[name]


def _artifact(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    Artifact.from_model(model).save(path)
    return path


def _torch(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .torch_program import export_torch

    return export_torch(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes)


def _aot_inductor(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .torch_program import export_aot_inductor

    return export_aot_inductor(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes)


def _onnx(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .onnx import export_onnx

    return export_onnx(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes)


def _onnx_nbits(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .onnx import export_onnx

    return export_onnx(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes, int4="matmul_nbits")


def _coreai(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .coreai import export_coreai

    return export_coreai(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes)


def _coreml(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .coreml_package import export_coreml

    return export_coreml(model, inputs, path, example_kwargs=kwargs)


def _executorch(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .executorch import export_executorch

    return export_executorch(model, inputs, path, example_kwargs=kwargs, dynamic_shapes=shapes)


def _compressed_tensors(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .checkpoints import export_compressed_tensors

    return export_compressed_tensors(model, path)


def _gguf(model: nn.Module, inputs: Any, path: Path, kwargs: Any, shapes: Any) -> Path:
    from .checkpoints import export_gguf

    return export_gguf(model, path, round_scales=True)


def _run_torch(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from .torch_program import run_torch

    return run_torch(path, inputs)


def _run_aot_inductor(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from .torch_program import run_aot_inductor

    return run_aot_inductor(path, inputs)


def _run_onnx(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from .onnx import run_onnx

    return run_onnx(path, tuple(inputs))


def _run_coreai(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from .coreai import run_coreai

    return run_coreai(path, inputs)


def _run_executorch(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from .executorch import run_executorch

    return run_executorch(path, tuple(inputs))


_COREAI = ("coreai", "coreai_torch")
_ONNX = ("onnx", "onnxscript", "onnxruntime")

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("artifact", "packed artifact", "", None, (), _artifact, None),
        Target("torch", "torch.export", ".pt2", None, (), _torch, _run_torch),
        Target("aot-inductor", "AOTInductor", ".pt2", None, (), _aot_inductor, _run_aot_inductor),
        Target("onnx", "ONNX", ".onnx", "onnx", _ONNX, _onnx, _run_onnx),
        Target("onnx-nbits", "ONNX MatMulNBits", ".onnx", "onnx", _ONNX, _onnx_nbits, _run_onnx),
        Target("coreai", "Core AI", ".aimodel", "coreai", _COREAI, _coreai, _run_coreai),
        Target(
            "coreml", "Core ML", ".mlpackage", "coreml", ("coremltools",), _coreml, None,
            keeps_shapes=False,
        ),
        Target(
            "executorch", "ExecuTorch", ".pte", "executorch", ("executorch",), _executorch, _run_executorch,
            keeps_shapes=False,
        ),
        Target(
            "compressed-tensors", "compressed-tensors", "", "compressed-tensors", ("compressed_tensors",),
            _compressed_tensors, None,
        ),
        Target("gguf", "GGUF", ".gguf", "gguf", ("gguf",), _gguf, None),
    )
}  # fmt: skip
"""All targets by name."""
