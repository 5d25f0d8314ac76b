"""Finalize for Core ML: dense weights that are already rounded, metadata beside them, torch's own quantize calls."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.sites import WeightSite, activation_simulators, weight_sites
from bitwright.common import CoreMLExportError
from bitwright.quantization.spec import PerChannelGranularity, PerTensorGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .coreai_activations import ClampToRange, activation_operands
from .coreml_weights import check_weight, mark_root, mark_weight, stays_dense

__all__ = ["Dequantize", "check_activation", "check_activation_form", "coreml_activation", "finalize_eager_coreml"]

_QUANTIZED_DTYPES = {torch.int8: torch.qint8, torch.uint8: torch.quint8}


def check_activation(simulator: FakeQuantizeImplBase, name: str) -> None:
    """Check that Core ML can hold an activation, and that it was calibrated.

    Raises:
        CoreMLExportError: it cannot; the message names the activation and the reason.
        ArtifactError: it was not calibrated.
    """
    check_activation_form(simulator, name)
    QuantizedActivation.from_simulator(simulator, name)


def check_activation_form(simulator: FakeQuantizeImplBase, name: str = "") -> None:
    """Check that Core ML can hold an activation, whatever its parameters are.

    Raises:
        CoreMLExportError: it cannot; the message names the activation and the reason.
    """
    where = f"activation {name!r}" if name else "this activation"
    if simulator.dtype not in _QUANTIZED_DTYPES:
        raise CoreMLExportError(
            f"CoreML export does not support {str(simulator.dtype).removeprefix('torch.')} for {where}; "
            "it has int8 and uint8."
        )
    if not isinstance(simulator.granularity, PerTensorGranularity):
        if isinstance(simulator.granularity, PerChannelGranularity):
            raise CoreMLExportError.from_config(simulator.granularity, where)
        raise CoreMLExportError.from_config(
            simulator.granularity, where, "Use PerTensorGranularity; Core AI takes PerChannelGranularity too."
        )
    if simulator._current_grid().formulation != "zp":
        raise CoreMLExportError(
            f"CoreML export does not support the 'minval' formulation for {where}; use qformulation 'zp'."
        )


class _Quantize(nn.Module):
    def __init__(self, scale: torch.Tensor, zero_point: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x.float(), self.scale, self.zero_point, self.dtype)  # type: ignore[arg-type]


class Dequantize(nn.Module):
    """Floating-point values of quantized ones.

    Args:
        dtype: what they are returned in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` dequantized."""
        return x.dequantize() if self.dtype == torch.float32 else x.dequantize().to(self.dtype)


def coreml_activation(simulator: FakeQuantizeImplBase) -> nn.Sequential:
    """Return the module that takes an activation simulator's place; children ``quantize`` and ``dequantize``."""
    operands = activation_operands(simulator)
    assert operands.zero_point is not None
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    if operands.low is not None or operands.high is not None:
        modules["clamp"] = ClampToRange(operands)
    quantized = _QUANTIZED_DTYPES[operands.dtype]
    modules["quantize"] = _Quantize(operands.scale, operands.zero_point.to(torch.int32), quantized)
    modules["dequantize"] = Dequantize(operands.compute_dtype)
    return nn.Sequential(modules)


def finalize_eager_coreml(model: nn.Module) -> None:
    """Turn a prepared eager model into what coremltools converts; in place, after everything was checked.

    Raises:
        CoreMLExportError: Core ML cannot hold a weight or an activation.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
    """
    from .eager import place_weight, replace_modules

    activations = activation_simulators(model)
    for path, simulator in activations.items():
        if not simulator.is_disabled():
            check_activation(simulator, path)
    weights: list[tuple[WeightSite, CompressedTensor[Any]]] = []
    for site in weight_sites(model):
        tensor = compress_tensor(site.tensor, site.simulators, site.name)
        check_weight(tensor, site.name)
        weights.append((site, tensor))
    replacements: dict[Any, nn.Module] = {
        simulator: nn.Identity() if simulator.is_disabled() else coreml_activation(simulator)
        for simulator in dict.fromkeys(activations.values())
    }
    for site, tensor in weights:
        for path, attribute in site.owners:
            owner = model.get_submodule(path)
            place_weight(owner, attribute, tensor, None)
            if isinstance(owner, nn.RNNBase):
                stays_dense(f"{path}.{attribute}")
            else:
                mark_weight(owner, attribute, tensor)
    replace_modules(model, replacements)
    mark_root(model)
