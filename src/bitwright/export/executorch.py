"""ExecuTorch: a ``.pte`` file whose quantized layers run in XNNPACK."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from bitwright.artifact import CompressedTensor, QuantizedTensor
from bitwright.artifact.sites import activation_simulators
from bitwright.quantization.spec import PerTensorGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .arithmetic import arithmetic_activation
from .conversion import ConversionError, captured, converting
from .coreai_activations import ActivationOperands, activation_operands
from .extras import require
from .lowering import lower

__all__ = ["export_executorch", "run_executorch", "stays_int8"]

_LOW, _HIGH = -128, 127
_QUANTIZE, _DEQUANTIZE = (f"quantized_decomposed::{name}_per_tensor" for name in ("quantize", "dequantize"))
_PRODUCTS = ("aten::linear", "aten::conv", "aten::addmm", "aten::mm")
_FUSED = ("aten::relu", "aten::hardtanh", "aten::batch_norm", "aten::_native_batch_norm")
"""Ops that XNNPACK does in the layer in front of them."""

_Way: TypeAlias = tuple[str, Callable[[str, CompressedTensor[Any]], nn.Module], list[Any]]

_logger = logging.getLogger(__name__)


def export_executorch(model: nn.Module, example_inputs: tuple[Any, ...], path: str | Path) -> Path:
    """Write a prepared model as an ExecuTorch program.

    Symmetric per-tensor and per-channel int8 weights and per-tensor activations become the quantize and dequantize ops
    that XNNPACK fuses into its int8 kernels. Other weights are stored dense with their decoded values. Where one
    activation does not fill int8 (fewer bits, a clipped range, dynamic, per channel), all are written as the arithmetic
    of their simulation, because XNNPACK rejects layers that are int8 on one side only: as exact, but not as fast. The
    file is run once; where XNNPACK refuses it or computes something else, it is given less of the model.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the file to write.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ValueError: an activation has no form there.
        ConversionError: torch.export or ExecuTorch cannot take the model.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
    """
    exir = require("executorch.exir", "executorch", "Export to ExecuTorch")
    xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch", "Export to ExecuTorch")
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the quantized_decomposed ops
    # What XNNPACK leaves over runs on these kernels.
    require("executorch.kernels.quantized", "executorch", "Export to ExecuTorch")
    simulators = activation_simulators(model).values()
    activation = functools.partial(_activation, fused=all(map(_runs_in_int8, simulators)))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partitioner = xnnpack.XnnpackPartitioner
    ways: tuple[_Way, ...] = (
        ("int8 weights, whole sub-graphs for XNNPACK", _weight, [partitioner()]),
        ("int8 weights, single ops for XNNPACK", _weight, [partitioner(per_op_mode=True)]),
        ("dense weights, whole sub-graphs for XNNPACK", _dense, [partitioner()]),
        ("dense weights, nothing for XNNPACK", _dense, []),
    )
    exact = not simulators and all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    for number, (what, weight, partitioners) in enumerate(ways):
        try:
            lowered = lower(model, weight, activation).model.eval()
            program = captured(lowered, example_inputs)
            _dequantize_for_each_reader(program.graph_module)
            _dequantize_in_floats(program.graph_module)
            with converting("ExecuTorch"):
                edge = exir.to_edge_transform_and_lower(program, partitioner=partitioners)
                target.write_bytes(edge.to_executorch().buffer)
                _check(target, program, example_inputs, 60 if exact else 15)
        except ConversionError as error:
            target.unlink(missing_ok=True)
            if number + 1 == len(ways):
                raise
            _logger.warning("%s did not work (%s); next: %s.", what, error, ways[number + 1][0])
        else:
            break
    return target


def _dequantize_for_each_reader(module: fx.GraphModule) -> None:
    """Give every reader of a dequantized tensor a node of its own.

    XNNPACK's partitioner joins ops that share one to a single sub-graph, through whatever other op stands between
    them, and then finds that it has made a cycle.
    """
    for node in list(module.graph.nodes):
        if _op(node) not in (_DEQUANTIZE, "quantized_decomposed::dequantize_per_channel"):
            continue
        for user in list(node.users)[1:]:
            with module.graph.inserting_before(user):
                user.replace_input_with(node, module.graph.node_copy(node))
    module.recompile()


def _dequantize_in_floats(module: fx.GraphModule) -> None:
    """Dequantize by arithmetic what goes into a layer whose output is not quantized at once.

    XNNPACK has no product from int8 to floats. Its partitioner takes the reshapes around one all the same, as int8 on
    one side only, and its runtime then refuses the file. With float activations it takes the layer, int8 weights too.
    """
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        users = list(node.users)
        if _op(node) != _DEQUANTIZE or not users or not _op(users[0]).startswith(_PRODUCTS):
            continue
        if _is_quantized_at_once(users[0]):
            continue
        codes, scale, zero_point = node.args[:3]
        with module.graph.inserting_before(node):
            value = module.graph.call_function(aten._to_copy.default, (codes,), {"dtype": torch.float32})
            value.meta.update(node.meta)
            for op, number in ((aten.sub.Tensor, zero_point), (aten.mul.Tensor, scale)):
                value = module.graph.call_function(op, (value, number))
                value.meta.update(node.meta)
        node.replace_all_uses_with(value)
        module.graph.erase_node(node)
    module.recompile()


def _is_quantized_at_once(node: fx.Node) -> bool:
    """Whether all readers of a layer quantize its output, behind what XNNPACK fuses with it."""
    readers = list(node.users)
    if len(readers) == 1 and _op(readers[0]).startswith(_FUSED):
        return _is_quantized_at_once(readers[0])
    return all(_op(reader) == _QUANTIZE for reader in readers)


def _op(node: fx.Node) -> str:
    """The name of an op, like ``aten::linear``; empty for other nodes."""
    return str(getattr(node.target, "name", str)()) if node.op == "call_function" else ""


def _check(path: Path, program: Any, inputs: tuple[Any, ...], enough_db: float) -> None:
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


def run_executorch(path: str | Path, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a program once with ExecuTorch's Python runtime.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
    """
    require("executorch.kernels.quantized", "executorch", "Running ExecuTorch programs")
    return [output.clone() for output in _load(path).execute(list(inputs))]


class _Weight(nn.Module):
    """An int8 weight under ``dequantize_per_tensor`` or ``dequantize_per_channel``."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, tensor: QuantizedTensor, axis: int | None) -> None:
        super().__init__()
        zero_point = tensor.zero_point()
        assert zero_point is not None
        scale = tensor.scale().reshape(-1)
        if axis is None and len(tensor.shape) == 2:
            # XNNPACK multiplies float activations with weights per channel only.
            axis, scale, zero_point = 0, scale.expand(tensor.shape[0]), zero_point.expand(tensor.shape[0], 1)
        self.axis = axis
        self.register_buffer("codes", tensor.codes())
        self.register_buffer("scale", scale.contiguous())
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
    if not stays_int8(tensor):
        return _Dense(tensor)
    axes = [dim for dim, count in enumerate(tensor.layout.counts) if count > 1]
    return _Weight(tensor, axes[0] if axes else None)


def stays_int8(tensor: CompressedTensor[Any]) -> TypeGuard[QuantizedTensor]:
    """Whether a weight is written as int8 codes: symmetric, with one scale, or one for each channel."""
    if not isinstance(tensor, QuantizedTensor) or tensor.is_sparse or tensor.dtype != torch.float32:
        return False
    layout = tensor.layout
    axes = [dim for dim, count in enumerate(layout.counts) if count > 1]
    by_channel = len(axes) <= 1 and all(layout.block_size[dim] == 1 for dim in axes)
    return layout.format == "int8" and layout.formulation == "zp" and by_channel and layout.zero_point == 0


def _dense(name: str, tensor: CompressedTensor[Any]) -> nn.Module:
    return _Dense(tensor)


def _activation(name: str, simulator: FakeQuantizeImplBase, fused: bool) -> nn.Module | None:
    if fused:
        return _Activation(activation_operands(simulator))
    if simulator.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(
            f"Activation {name!r}: ExecuTorch has no FP8 numbers; use an integer dtype or float4_e2m1fn for it."
        )
    return arithmetic_activation(name, simulator, "ExecuTorch")


def _runs_in_int8(simulator: FakeQuantizeImplBase) -> bool:
    """Whether XNNPACK's int8 saturates where the simulator does."""
    grid = simulator._current_grid()
    plain = isinstance(simulator.granularity, PerTensorGranularity) and grid.is_integer and grid.formulation == "zp"
    if simulator.is_stateless or not plain or simulator.check_health():
        return False
    operands = activation_operands(simulator)
    return operands.compute_dtype == torch.float32 and operands.low is None and operands.high is None
