"""Activation quantizers as modules of Core AI's torch ops."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from bitwright.formats import format_of
from bitwright.kernels import Grid
from bitwright.quantization._export_utils import canonicalize_qparam_shape
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .coreai_weights import CallsCoreAI, coreai_layers

__all__ = ["ActivationOperands", "ClampToRange", "activation_operands", "along", "coreai_activation", "narrowed"]


@dataclass(frozen=True, slots=True)
class ActivationOperands:
    """What Core AI's ``quantize`` and ``dequantize`` are called with.

    Attributes:
        dtype: the quantized type.
        scale: 0-D or 1-D.
        zero_point: like ``scale``, or None.
        minval: like ``scale``, or None.
        axis: the dimension that 1-D parameters lie along.
        compute_dtype: the dtype of the activation.
        low: like ``scale``: what is below it saturates. None where the quantized type itself ends there.
        high: the same above.
    """

    dtype: torch.dtype
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    minval: torch.Tensor | None
    axis: int
    compute_dtype: torch.dtype
    low: torch.Tensor | None
    high: torch.Tensor | None

    @property
    def is_integer(self) -> bool:
        """Whether the quantized type is an integer."""
        return not self.dtype.is_floating_point


class ClampToRange(nn.Module):
    """Limits an activation to what its quantizer represents, where the quantized type could hold more.

    Args:
        operands: gives the limits.
    """

    def __init__(self, operands: ActivationOperands) -> None:
        super().__init__()
        self.register_buffer("low", operands.low)
        self.register_buffer("high", operands.high)
        self.axis = operands.axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` clamped to the limits."""
        if self.low is not None:
            x = torch.maximum(x, along(self.low, self.axis, x.ndim))  # type: ignore[arg-type]
        if self.high is not None:
            x = torch.minimum(x, along(self.high, self.axis, x.ndim))  # type: ignore[arg-type]
        return x


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)

    def extra_repr(self) -> str:
        return str(self.dtype)


class _Widened(CallsCoreAI):
    """One of Core AI's layers whose parameters are kept in the model's dtype and read in float32.

    Args:
        layer: the layer.
        dtype: the model's dtype; a parameter that ``narrowed`` refuses stays in float32.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        for name, parameter in layer.named_buffers():
            self.register_buffer(name, narrowed(parameter, dtype))
        self._quantizes = "input_dtype" not in vars(layer)
        self._options = {name: value for name, value in vars(layer).items() if name in ("axis", "input_dtype")}
        self._dtype = layer.output_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer returns."""
        read = {
            name: parameter.float() if parameter.is_floating_point() else parameter
            for name, parameter in self.named_buffers()
        }
        scale = read.pop("scale")
        if self._quantizes:
            quantized: torch.Tensor = torch.ops.coreai.quantize(x, scale, self._dtype, **read, **self._options)
            return quantized
        values: torch.Tensor = torch.ops.coreai.dequantize(x, scale, output_dtype=self._dtype, **read, **self._options)
        return values


def narrowed(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a float32 parameter in a model's dtype if that holds it exactly, and anything else as it is.

    Numbers below the dtype's smallest normal one stay in float32: Core AI's runtime takes them for zero.
    """
    if parameter.dtype != torch.float32:
        return parameter
    narrow = parameter.to(dtype)
    normal = (narrow.abs() >= torch.finfo(dtype).tiny) | (parameter == 0)
    return narrow if bool(((narrow == parameter) & normal).all()) else parameter


def along(parameter: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """Return a 0-D or 1-D parameter in the shape in which it broadcasts against a tensor of ``rank`` dimensions."""
    if parameter.ndim == 0:
        return parameter
    axis = axis % rank
    return parameter.reshape([-1 if dim == axis else 1 for dim in range(rank)])


def activation_operands(simulator: FakeQuantizeImplBase) -> ActivationOperands:
    """Return the operands that make Core AI's ops compute what a simulator computes.

    The ops saturate at the ends of their integer type, which has 8 bits here; where the simulator's range is narrower
    (a clipped range, or fewer bits) the activation is clamped before. In the ``minval`` formulation they count from the
    type's lowest code, which leaves the decoded values the same.
    """
    scale, zero_point, minval = (
        None if parameter is None else parameter.detach() for parameter in simulator.calculate_qparams()
    )
    assert scale is not None
    granularity, grid = simulator.granularity, simulator._current_grid()
    dtype, low, high = simulator.dtype, None, None
    if grid.is_integer:
        dtype = format_of(grid.dtype).storage
        low, high = _limits(grid, scale.float(), zero_point, minval)
        if grid.formulation == "minval":
            zero_point = None
        else:
            minval = None
            zero_point = (torch.zeros_like(scale) if zero_point is None else zero_point).to(dtype)

    def shaped(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else canonicalize_qparam_shape(parameter, granularity).clone()

    flat = shaped(scale.float())
    assert flat is not None
    return ActivationOperands(
        dtype=dtype,
        scale=flat,
        zero_point=shaped(zero_point),
        minval=None if minval is None else shaped(minval.float()),
        axis=0 if granularity.axis is None else granularity.axis % max(1, scale.ndim),
        compute_dtype=simulator.qparams_calculator._compute_dtype_for_export,
        low=shaped(low),
        high=shaped(high),
    )


def _limits(
    grid: Grid, scale: torch.Tensor, zero_point: torch.Tensor | None, minval: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The values at which a simulator saturates before an 8-bit type does."""
    storage = format_of(format_of(grid.dtype).storage)
    if grid.formulation == "minval":
        assert minval is not None
        narrower = grid.quant_max - grid.quant_min < storage.maximum - storage.minimum
        return None, minval.float() + (grid.quant_max - grid.quant_min) * scale if narrower else None
    offset = torch.zeros_like(scale) if zero_point is None else zero_point.float()
    low = (grid.quant_min - offset) * scale if grid.quant_min > storage.minimum else None
    return low, (grid.quant_max - offset) * scale if grid.quant_max < storage.maximum else None


def coreai_activation(simulator: FakeQuantizeImplBase) -> nn.Sequential:
    """Return the module that takes an activation simulator's place.

    Its children ``quantize`` and ``dequantize`` are Core AI's; they work in float32, as the simulator does, so
    activations of another dtype are cast before and after, and parameters that such a dtype holds are kept in it.

    Raises:
        MissingExtraError: coreai-torch is not installed.
    """
    layers, operands = coreai_layers(), activation_operands(simulator)
    cast = operands.compute_dtype != torch.float32
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    if cast:
        modules["widen"] = _Cast(torch.float32)
    if operands.low is not None or operands.high is not None:
        modules["clamp"] = ClampToRange(operands)

    def parameters() -> dict[str, torch.Tensor | int | None]:  # of each module its own: safetensors refuses shared ones
        tensors = {"scale": operands.scale, "zero_point": operands.zero_point, "minval": operands.minval}
        return {
            **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()},
            "axis": operands.axis,
        }

    modules["quantize"] = layers.ActivationQuantizeModule(output_dtype=operands.dtype, **parameters())
    modules["dequantize"] = layers.ActivationDequantizeModule(
        input_dtype=operands.dtype if operands.is_integer else None, output_dtype=torch.float32, **parameters()
    )
    if cast:
        for name in ("quantize", "dequantize"):
            modules[name] = _Widened(modules[name], operands.compute_dtype)
        modules["narrow"] = _Cast(operands.compute_dtype)
    return nn.Sequential(modules)
