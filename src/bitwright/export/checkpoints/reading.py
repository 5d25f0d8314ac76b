"""Checkpoints read back by the libraries that own their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bitwright.export.extras import require

__all__ = ["read_compressed_tensors", "read_gguf"]

_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight")


def read_gguf(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file by name, dequantized to float32 by the gguf library; integers and float64 as
    they are.

    Raises:
        MissingExtraError: the gguf library is not installed.
    """
    gguf = require("gguf", "gguf", "Reading GGUF files")
    return {
        tensor.name: torch.from_numpy(_numbers(gguf, tensor).copy()) for tensor in gguf.GGUFReader(str(path)).tensors
    }


def _numbers(gguf: Any, tensor: Any) -> Any:
    plain = tensor.tensor_type.name in ("I8", "I16", "I32", "I64", "F64")
    return tensor.data if plain else gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def read_compressed_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, decompressed by the compressed-tensors library.

    Args:
        directory: what :func:`export_compressed_tensors` wrote.

    Raises:
        MissingExtraError: the compressed-tensors library is not installed.
    """
    library = require("compressed_tensors.compressors", "compressed-tensors", "Reading compressed-tensors checkpoints")
    schemes = require("compressed_tensors.quantization", "compressed-tensors", "Reading compressed-tensors checkpoints")
    folder = Path(directory)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    for group in described["config_groups"].values():
        arguments = schemes.QuantizationArgs(**group["weights"])
        scheme = schemes.QuantizationScheme(targets=group["targets"], weights=arguments, format=group["format"])
        compressor = library.BaseCompressor.get_value_from_registry(group["format"])
        for target in group["targets"]:
            prefix = f"{target}." if target else ""
            parts = {name: tensors.pop(prefix + name) for name in _PARTS if prefix + name in tensors}
            tensors |= {prefix + "weight": _weight(compressor, parts, scheme)}
    return tensors


def _weight(compressor: Any, parts: Mapping[str, torch.Tensor], scheme: Any) -> torch.Tensor:
    weight: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
    return weight
