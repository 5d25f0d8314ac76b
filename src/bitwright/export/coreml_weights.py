"""Core ML's metadata for compressed weights: what coremltools reads beside the dense weight."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, DenseTensor, PalettizedTensor, QuantizedTensor
from bitwright.common import CompressionType, CoreMLExportError

__all__ = [
    "METADATA_PREFIX",
    "METADATA_VERSION",
    "NO_BFLOAT16",
    "check_weight",
    "mark_root",
    "mark_weight",
    "stays_dense",
]

METADATA_PREFIX = "_COREML_"
METADATA_VERSION = 1

_logger = logging.getLogger(__name__)

_INTEGERS = ("int4", "uint4", "int8", "uint8")
_LUT_INTEGERS = ("int8", "uint8")
_PALETTE_ENTRIES = tuple(1 << bits for bits in (1, 2, 3, 4, 6, 8))


NO_BFLOAT16 = "Core ML has no bfloat16: convert the model to float16 or float32 before it is prepared"


def check_weight(tensor: CompressedTensor[Any], name: str = "") -> None:
    """Check that Core ML can hold a weight.

    Raises:
        CoreMLExportError: it cannot; the message names the weight and the reason.
    """
    where = f"weight {name!r}" if name else "this weight"
    if tensor.dtype == torch.bfloat16:
        raise CoreMLExportError(f"CoreML export does not support {where}. {NO_BFLOAT16}.")
    if isinstance(tensor, QuantizedTensor):
        layout = tensor.layout
        if layout.format not in _INTEGERS:
            raise CoreMLExportError(
                f"CoreML export does not support {layout.format} for {where}; it has {', '.join(_INTEGERS)}."
            )
        if layout.formulation != "zp":
            raise CoreMLExportError(
                f"CoreML export does not support the 'minval' formulation for {where}; use qformulation 'zp'."
            )
    elif isinstance(tensor, PalettizedTensor):
        _check_palette(tensor, where)


def _check_palette(tensor: PalettizedTensor, where: str) -> None:
    lut = tensor.lut
    quantized = isinstance(lut, QuantizedTensor)
    if isinstance(lut, QuantizedTensor) and lut.layout.format not in _LUT_INTEGERS:
        raise CoreMLExportError(
            f"CoreML export does not support {lut.layout.format} for the look-up table of {where}; "
            f"it has {', '.join(_LUT_INTEGERS)}."
        )
    features = {
        "vectors (cluster_dim > 1)": tensor.layout.vector_size > 1,
        "a quantized look-up table (lut_qspec)": quantized,
        "a scale per channel (enable_per_channel_scale)": tensor.layout.channel_axis is not None,
    }
    used = [feature for feature, present in features.items() if present]
    if len(used) > 1:
        raise CoreMLExportError(f"CoreML export does not support {' with '.join(used)} for {where}; use one of them.")


def stays_dense(name: str) -> None:
    """Say that a weight of an RNN keeps its rounded values without metadata: Core ML's RNNs take no packed weights."""
    _logger.warning("Core ML cannot pack weights of RNNs: %s is written with its rounded values, uncompressed.", name)


def mark_root(model: nn.Module) -> None:
    """Register the version of the metadata on the root module."""
    _register(model, f"{METADATA_PREFIX}/metadata_version", torch.tensor(METADATA_VERSION))


def mark_weight(owner: nn.Module, attribute: str, tensor: CompressedTensor[Any]) -> None:
    """Register a weight's metadata on the module that owns it; the dense weight is expected in its place."""
    if isinstance(tensor, DenseTensor) and not tensor.is_sparse:
        return
    for key, value in _metadata(tensor).items():
        _register(owner, f"{METADATA_PREFIX}/{attribute}/{key}", value)


def _register(module: nn.Module, name: str, value: torch.Tensor) -> None:
    module.register_buffer(name, value)


def _metadata(tensor: CompressedTensor[Any]) -> dict[str, torch.Tensor]:
    kinds = [CompressionType.PRUNING] if tensor.is_sparse else []
    values: dict[str, torch.Tensor] = {}
    if isinstance(tensor, QuantizedTensor):
        kinds.append(CompressionType.QUANTIZATION)
        values |= _quantization(tensor)
    elif isinstance(tensor, PalettizedTensor):
        kinds.append(CompressionType.PALETTIZATION)
        lut = tensor.lut
        values["lut"] = _with_allowed_size(lut.decode())
        if isinstance(lut, QuantizedTensor) and not tensor.is_sparse:  # below a mask, coremltools takes plain tables
            kinds.append(CompressionType.QUANTIZATION)
            values |= _quantization(lut)
        factors = tensor.channel_scale()
        if factors is not None:
            values["palettization_scale"] = factors
        if tensor.layout.vector_size > 1:
            values["vector_axis"] = torch.tensor(tensor.layout.vector_axis)
    return {"compression_type": torch.tensor([kind.to_coreml_code() for kind in kinds]), **values}


def _with_allowed_size(lut: torch.Tensor) -> torch.Tensor:
    """Tables of 5 and 7 bits, which Core ML lacks, with their last entry repeated up to the next size that it has."""
    entries = lut.shape[-2]
    missing = next(size for size in _PALETTE_ENTRIES if size >= entries) - entries
    return torch.cat([lut, lut[..., -1:, :].expand(*lut.shape[:-2], missing, lut.shape[-1])], -2) if missing else lut


def _quantization(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    fmt, zero_point = tensor.layout.number_format, tensor.zero_point()
    assert zero_point is not None
    return {
        "quantization_n_bits": torch.tensor(fmt.bits),
        # Of the weight's type, or the decoded constant would not fit the layer's other operands.
        "quantization_scale": tensor.scale().to(torch.float16 if tensor.dtype == torch.float16 else torch.float32),
        "zero_point": zero_point.to(fmt.storage),
    }
