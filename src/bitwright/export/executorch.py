"""ExecuTorch: a ``.pte`` file whose quantized layers run in XNNPACK."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, QuantizedActivation, QuantizedTensor
from bitwright.artifact.sites import activation_simulators
from bitwright.quantization.spec import PerTensorGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .arithmetic import ArithmeticActivation, fits_arithmetic
from .coreai_activations import ActivationOperands, activation_operands
from .extras import require
from .lowering import lower

__all__ = ["export_executorch", "run_executorch"]

_LOW, _HIGH = -128, 127


def export_executorch(model: nn.Module, example_inputs: tuple[Any, ...], path: str | Path) -> Path:
    """Write a prepared model as an ExecuTorch program.

    Per-tensor and per-channel int8 weights and per-tensor activations become the quantize and dequantize ops that
    XNNPACK fuses into its int8 kernels. Other weights are stored dense with their decoded values. Where one activation
    does not fill int8 (fewer bits, a clipped range, dynamic, per channel), all are written as the arithmetic of their
    simulation, because XNNPACK rejects layers that are int8 on one side only: as exact, but not as fast.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the file to write.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ValueError: an activation has no form there.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
    """
    exir = require("executorch.exir", "executorch", "Export to ExecuTorch")
    xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch", "Export to ExecuTorch")
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the quantized_decomposed ops
    # What XNNPACK leaves over runs on these kernels.
    require("executorch.kernels.quantized", "executorch", "Export to ExecuTorch")
    fused = all(map(_runs_in_int8, activation_simulators(model).values()))
    lowered = lower(model, _weight, functools.partial(_activation, fused=fused))
    with torch.no_grad(), _quiet():
        program = torch.export.export(lowered.model.eval(), example_inputs)
        edge = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        buffer = edge.to_executorch().buffer
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(buffer)
    return target


def run_executorch(path: str | Path, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a program once with ExecuTorch's Python runtime.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
    """
    require("executorch.kernels.quantized", "executorch", "Running ExecuTorch programs")
    runtime = require("executorch.runtime", "executorch", "Running ExecuTorch programs").Runtime.get()
    method = runtime.load_program(str(path)).load_method("forward")
    return [output.clone() for output in method.execute(list(inputs))]


class _Weight(nn.Module):
    """An int8 weight under ``dequantize_per_tensor`` or ``dequantize_per_channel``."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, tensor: QuantizedTensor, axis: int | None) -> None:
        super().__init__()
        zero_point = tensor.zero_point()
        assert zero_point is not None
        self.axis = axis
        self.register_buffer("codes", tensor.codes())
        self.register_buffer("scale", tensor.scale().reshape(-1))
        self.register_buffer("zero_point", zero_point.reshape(-1).long())
        self.single = (float(self.scale[0]), int(self.zero_point[0]))

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        if self.axis is None:
            weight: torch.Tensor = ops.dequantize_per_tensor(self.codes, *self.single, _LOW, _HIGH, torch.int8)
        else:
            weight = ops.dequantize_per_channel(
                self.codes, self.scale, self.zero_point, self.axis, _LOW, _HIGH, torch.int8
            )
        return weight


class _Dense(nn.Module):
    """A weight with its decoded values."""

    weight: torch.Tensor

    def __init__(self, tensor: CompressedTensor[Any]) -> None:
        super().__init__()
        self.register_buffer("weight", tensor.decode())

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight


class _Activation(nn.Module):
    """An activation through ``quantize_per_tensor`` and back, as int8; unsigned codes are moved down by 128."""

    def __init__(self, operands: ActivationOperands) -> None:
        super().__init__()
        assert operands.zero_point is not None
        shift = 128 if operands.dtype == torch.uint8 else 0
        self.parameters_of_op = (float(operands.scale), int(operands.zero_point) - shift, _LOW, _HIGH, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        codes = ops.quantize_per_tensor(x, *self.parameters_of_op)
        decoded: torch.Tensor = ops.dequantize_per_tensor(codes, *self.parameters_of_op)
        return decoded


def _weight(name: str, tensor: CompressedTensor[Any]) -> nn.Module:
    if not isinstance(tensor, QuantizedTensor) or tensor.is_sparse or tensor.dtype != torch.float32:
        return _Dense(tensor)
    layout = tensor.layout
    axes = [dim for dim, count in enumerate(layout.counts) if count > 1]
    by_channel = len(axes) <= 1 and all(layout.block_size[dim] == 1 for dim in axes)
    if layout.format != "int8" or layout.formulation != "zp" or not by_channel:
        return _Dense(tensor)
    return _Weight(tensor, axes[0] if axes else None)


def _activation(name: str, simulator: FakeQuantizeImplBase, fused: bool) -> nn.Module | None:
    if not simulator.is_stateless:
        QuantizedActivation.from_simulator(simulator, name)
    if fused:
        return _Activation(activation_operands(simulator))
    if fits_arithmetic(simulator):
        return ArithmeticActivation(simulator)
    if simulator._is_fused():
        raise ValueError(
            f"Activation {name!r}: power-of-two scales that are computed at run time have no ExecuTorch form. Use a "
            "static qparam_calculator_cls, or leave scale_dtype out."
        )
    return None  # a custom class: its own arithmetic is traced


def _runs_in_int8(simulator: FakeQuantizeImplBase) -> bool:
    """Whether XNNPACK's int8 saturates where the simulator does."""
    grid = simulator._current_grid()
    plain = isinstance(simulator.granularity, PerTensorGranularity) and grid.is_integer and grid.formulation == "zp"
    if simulator.is_stateless or not plain or simulator.check_health():
        return False
    operands = activation_operands(simulator)
    return operands.compute_dtype == torch.float32 and operands.low is None and operands.high is None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
