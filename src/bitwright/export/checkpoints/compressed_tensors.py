"""Checkpoints in the format of compressed-tensors, which transformers and vLLM load."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from bitwright._utils.files import new_directory_atomically
from bitwright._utils.tensor_files import write_tensors
from bitwright.artifact import Artifact, CompressedTensor, QuantizedTensor
from bitwright.formats import encode, pack

from .integers import signed_codes
from .rounding import lost_by_rounding, warn_of_losses
from .source import artifact_of_weights, linear_weights

__all__ = ["export_compressed_tensors", "unreadable", "unsupported_weight"]

_logger = logging.getLogger(__name__)

_FP4 = "float4_e2m1fn_x2"

_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
"""What a layer's packed weight is stored as."""

_Scheme: TypeAlias = tuple[dict[str, Any], str, list[str]]
"""The scheme of some layers, the name of their format, and their paths."""


def export_compressed_tensors(
    model: nn.Module,
    directory: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    allow_dense: bool = False,
) -> Path:
    """Write the weights of a prepared model as a compressed-tensors checkpoint.

    Linear weights in integers of 1 to 8 bits become ``pack-quantized``, in FP8 (e4m3) ``float-quantized`` and in FP4
    with power-of-two scales ``mxfp4-pack-quantized``. What those decode to is what the prepared model computes. Scales
    have the type of their weight; if a model was cast after it was prepared they are rounded, and a warning is logged;
    another one names weights that lose more than half a step of their codes by that.

    Args:
        model: prepared, weights only. Not changed.
        directory: folder that is empty or does not exist.
        config: contents of ``config.json``; None for what ``model.config`` says, if it is a transformers model.
        allow_dense: store compressed weights that the format lacks (convolutions, embeddings, palettes, masks, the
            ``minval`` formulation, FP8 e5m2) as dense tensors with their decoded values, instead of refusing them.

    Returns:
        ``directory``.

    Raises:
        ValueError: activations are quantized, a weight cannot be held, or tensors of the model have names that the
            format gives to parts of weights; lists all of them.
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes.
        TypeError: ``config`` holds what JSON does not; names the key.
        NotADirectoryError: ``directory`` is a file.
        FileExistsError: it is not empty.
    """
    artifact = artifact_of_weights(model)
    if artifact.activations:
        raise ValueError(
            f"The compressed-tensors exporter writes weights only, but {len(artifact.activations)} activations are "
            f"quantized, such as {next(iter(artifact.activations))!r}. Prepare with op_input_spec=None and "
            "op_output_spec=None."
        )
    linear = linear_weights(model, artifact.aliases)
    packable = linear - {name for alias, name in artifact.aliases.items() if alias not in linear}
    tensors: dict[str, torch.Tensor] = {}
    schemes: dict[str, _Scheme] = {}
    refused: list[str] = []
    rounded: list[str] = []
    losses: dict[str, str] = {}
    for name in artifact:
        tensor = artifact[name]
        problem = unsupported_weight(tensor, name in packable) or unreadable(tensor)
        if not isinstance(tensor, QuantizedTensor) or problem:
            if problem and not allow_dense:
                refused.append(f"{name}: {problem}")
            tensors[name] = tensor.decode()
            continue
        scheme, form, parts = _entry(tensor)
        if form != "mxfp4-pack-quantized" and not torch.equal(tensor.scale().to(tensor.dtype).float(), tensor.scale()):
            rounded.append(name)
            if loss := lost_by_rounding(tensor, tensor.dtype):
                losses[name] = loss
        path = _layer(name)
        tensors |= {f"{path}.{part}" if path else part: value for part, value in parts.items()}
        schemes.setdefault(_key(scheme, form), (scheme, form, []))[2].append(path)
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise ValueError(f"compressed-tensors cannot hold these weights (allow_dense=True keeps them dense):\n{listed}")
    _refuse_taken_names(schemes, artifact)
    _join_groups(schemes, tensors)
    _warn(rounded, len(schemes))
    warn_of_losses(losses, "Cast the model to bfloat16, or leave their layers out of the configuration.")
    _add_aliases(schemes, tensors, artifact)
    quantized = {path for _, _, paths in schemes.values() for path in paths}
    ignored = sorted({_layer(name) for name in linear} - quantized)
    described = dict(config) if config is not None else _config_of(model)
    described["quantization_config"] = _quantization_config(list(schemes.values()), ignored)
    text = _json(described)
    with new_directory_atomically(directory) as folder:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(contiguous, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(text)
    return Path(directory)


def _refuse_taken_names(schemes: Mapping[str, _Scheme], artifact: Artifact) -> None:
    """Refuse tensors of the model beside a packed weight that are called as loaders call a part of it."""
    packed = {f"{path}.weight" if path else "weight" for _, _, paths in schemes.values() for path in paths}
    tied = [alias for alias, name in artifact.aliases.items() if name in packed]
    stems = [name.removesuffix("weight") for name in (*packed, *tied)]
    names = {f"{stem}{part}" for stem in stems for part in _PARTS if part != "weight"}
    taken = sorted(names.intersection((*artifact, *artifact.aliases)))
    if taken:
        raise ValueError(
            f"The model has tensors called {', '.join(map(repr, taken))}, where compressed-tensors puts parts of the "
            "quantized weights beside them. Rename these, or leave their layers out of the configuration."
        )


def _warn(rounded: list[str], schemes: int) -> None:
    """Log that scales were rounded, and that layers have several schemes."""
    if rounded:
        _logger.warning(
            "The scales of %d weights, such as %r, were rounded to the type of the model, which does not hold them. "
            "Cast the model before it is prepared.",
            len(rounded),
            rounded[0],
        )
    if schemes > 1:
        _logger.warning(
            "The checkpoint has %d schemes. transformers decompresses all layers by one of them when it is told "
            "run_compressed=False; with run_compressed=True, and in vLLM, each layer has its own.",
            schemes,
        )


def _join_groups(schemes: dict[str, _Scheme], tensors: Mapping[str, torch.Tensor]) -> None:
    """Count layers that are as wide as one group to the layers of that group size, whose stored form is the same.

    Transformers decompresses all linear layers by one scheme, so blocks of 64 must not become two.
    """
    for key, (scheme, form, paths) in list(schemes.items()):
        if scheme["strategy"] != "channel" or form != "pack-quantized":
            continue
        for path in list(paths):
            columns = int(tensors[f"{path}.weight_shape" if path else "weight_shape"][1])
            grouped = schemes.get(_key(scheme | {"strategy": "group", "group_size": columns}, form))
            if grouped is not None:
                grouped[2].append(path)
                paths.remove(path)
        if not paths:
            del schemes[key]


def _key(scheme: Mapping[str, Any], form: str) -> str:
    return json.dumps(scheme, sort_keys=True) + form


def unsupported_weight(tensor: CompressedTensor[Any], linear: bool) -> str | None:
    """Return why a compressed weight cannot be held; None if it can, or is not compressed."""
    if not isinstance(tensor, QuantizedTensor):
        compressed = tensor.is_sparse or tensor.layout.kind != "dense"
        return f"{tensor.layout.kind} tensors with look-up tables or masks have no form there" if compressed else None
    layout = tensor.layout
    if not linear or len(tensor.shape) != 2:
        return "only weights of linear layers are packed"
    if layout.formulation == "minval":
        return "the 'minval' formulation has no form there; use qformulation 'zp'"
    if layout.format == "float8_e5m2":
        return "FP8 weights are e4m3 there"
    if layout.format == _FP4 and (layout.block_size != (1, 32) or layout.scale_dtype != "float8_e8m0fnu"):
        return "FP4 weights have blocks of 32 inputs and power-of-two scales there"
    strategy = _strategy(tensor)["strategy"]
    if strategy == "block" and layout.number_format.kind == "int":
        return f"blocks of {layout.block_size} are not packed; they have one row there"
    if strategy == "group" and layout.number_format.kind == "float" and layout.format != _FP4:
        return "FP8 weights have scales per tensor, channel or two-dimensional block there"
    return None


def unreadable(tensor: CompressedTensor[Any]) -> str | None:
    """Return why the library could not read a weight that its format can hold; None if it can.

    ``unpack_from_int32`` transposes zero points to ``[groups, words]`` and views words of 4-bit codes as bytes. Where
    the zero points of a group are one word, ``contiguous()`` keeps the stride of a column, and the view fails.
    """
    if not isinstance(tensor, QuantizedTensor) or not tensor.layout.has_zero_points:
        return None
    (rows, groups), bits = tensor.layout.counts, tensor.layout.number_format.bits
    if bits != 4 or rows * bits > 32 or groups == 1 or signed_codes(tensor).is_symmetric:
        return None
    return (
        f"its library cannot read zero points of 4 bits for several groups in a layer of {rows} outputs, which are one "
        "word; use the symmetric scheme, one zero point for each output, or other bits"
    )


def _entry(tensor: QuantizedTensor) -> tuple[dict[str, Any], str, dict[str, torch.Tensor]]:
    """Scheme, format and stored tensors of a weight."""
    layout = tensor.layout
    scheme: dict[str, Any] = {"num_bits": layout.number_format.bits, "symmetric": True, **_strategy(tensor)}
    if layout.format == _FP4:
        return scheme | {"type": "float"}, "mxfp4-pack-quantized", _mxfp4(tensor)
    scale = tensor.scale().to(tensor.dtype)
    if layout.number_format.kind == "float":
        parts = {"weight": tensor.codes(), "weight_scale": _by_strategy(scale, scheme)}
        return scheme | {"type": "float"}, "float-quantized", parts
    signed = signed_codes(tensor)
    scheme |= {"type": "int", "symmetric": signed.is_symmetric}
    parts = {
        "weight_packed": _packed(signed.codes, signed.bits),
        "weight_scale": _by_strategy(scale, scheme),
        "weight_shape": torch.tensor(tensor.shape),
    }
    if not signed.is_symmetric:
        points = signed.zero_point
        grouped = scheme["strategy"] in ("group", "channel")
        parts["weight_zero_point"] = _packed(points.T, signed.bits).T if grouped else points.reshape(1)
    return scheme, "pack-quantized", parts


def _strategy(tensor: QuantizedTensor) -> dict[str, Any]:
    rows, columns = tensor.layout.block_size
    if tensor.layout.format == _FP4:
        return {"strategy": "group", "group_size": columns}
    if (rows, columns) == tensor.shape and tensor.shape[0] != 1:
        return {"strategy": "tensor"}
    if rows == 1 and columns == tensor.shape[1]:
        return {"strategy": "channel"}
    if rows == 1:
        return {"strategy": "group", "group_size": columns}
    return {"strategy": "block", "block_structure": [rows, columns]}


def _by_strategy(scale: torch.Tensor, scheme: Mapping[str, Any]) -> torch.Tensor:
    return scale.reshape(1) if scheme["strategy"] == "tensor" else scale


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as int32 words without gaps, lowest bits first; codes moved up to be unsigned."""
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    rows, columns = unsigned.shape
    words = -(-columns * bits // 32)
    padded = torch.nn.functional.pad(unsigned, (0, -columns % 32))
    stream = pack(padded, bits).reshape(rows, -1).contiguous().view(torch.int32)
    return stream[:, :words].contiguous()


def _mxfp4(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Two codes in a byte, the first one in the low half, and exponents with a bias of 127."""
    return {
        "weight_packed": pack(encode(tensor.codes(), _FP4), 4).reshape(tensor.shape[0], -1),
        "weight_scale": tensor.parts["scale"],
    }


def _layer(name: str) -> str:
    """Path of the layer whose ``weight`` is called ``name``."""
    return name.rpartition(".")[0]


def _add_aliases(schemes: Mapping[str, _Scheme], tensors: dict[str, torch.Tensor], artifact: Artifact) -> None:
    """Copy tied tensors to their further names, and count layers with a packed one to the layers of its first name:
    loaders look each of them up."""
    packed = {f"{path}.weight" if path else "weight": paths for _, _, paths in schemes.values() for path in paths}
    for alias, name in artifact.aliases.items():
        if name not in packed:
            tensors[alias] = tensors[name].clone()
            continue
        packed[name].append(_layer(alias))
        stem, other = name.removesuffix("weight"), alias.removesuffix("weight")
        parts = [part for part in _PARTS if f"{stem}{part}" in tensors]
        tensors |= {f"{other}{part}": tensors[f"{stem}{part}"].clone() for part in parts}


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    described: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}  # type: ignore[union-attr]
    if described:
        described["architectures"] = [type(model).__name__]
    return described


def _json(described: Mapping[str, Any]) -> str:
    for key, value in described.items():
        try:
            json.dumps({key: value})
        except TypeError as error:
            raise TypeError(
                f"config[{key!r}] is {value!r}, which JSON does not hold ({error}); write it as text, for a dtype "
                "'float32'."
            ) from error
    return json.dumps(described, indent=2)


def _quantization_config(schemes: list[_Scheme], ignored: list[str]) -> dict[str, Any]:
    forms = {form for _, form, _ in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignored,
        "config_groups": {
            f"group_{number}": {"targets": paths, "weights": scheme | {"dynamic": False}, "format": form}
            for number, (scheme, form, paths) in enumerate(schemes)
        },
    }
