"""GGUF files: weights in the block types of ggml that hold them exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright._utils.files import new_file_atomically
from bitwright.artifact import CompressedTensor, QuantizedTensor
from bitwright.export.extras import require
from bitwright.formats import encode

from .gguf_metadata import ALIGNMENT, ARCHITECTURE, encodable, types_of_metadata
from .integers import spread
from .rounding import lost_by_rounding, warn_of_losses
from .source import artifact_of_weights

__all__ = ["export_gguf", "too_many_dimensions", "type_of"]

BLOCK = 32

_MAX_DIMENSIONS, _MAX_NAME_BYTES = 4, 63
"""What ggml.h allows: GGML_MAX_DIMS, and GGML_MAX_NAME less the zero at the end. Readers refuse files with more."""

_FP4 = "float4_e2m1fn_x2"
_SIGNED = (("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 128))
_WITH_MINIMUM = (("Q4_1", 15), ("Q5_1", 31))


_DENSE = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bool: torch.int8,
    torch.int8: torch.int8,
    torch.uint8: torch.int16,
    torch.int16: torch.int16,
    torch.uint16: torch.int32,
    torch.int32: torch.int32,
    torch.uint32: torch.int64,
    torch.int64: torch.int64,
}
"""Dtypes that ggml has a type for, and the smallest of those for others, without loss."""


def export_gguf(
    model: nn.Module,
    path: str | Path,
    *,
    architecture: str = "bitwright",
    metadata: Mapping[str, Any] | None = None,
    rename: Callable[[str], str] | None = None,
    round_scales: bool = False,
    allow_dense: bool = False,
) -> Path:
    """Write the weights of a prepared model as a GGUF file.

    Integers become ``Q4_0``, ``Q5_0`` or ``Q8_0``, whichever is the smallest that holds ``code - zero_point``; the
    ``minval`` formulation becomes ``Q4_1`` or ``Q5_1``, FP4 with power-of-two scales ``MXFP4``. All have blocks of 32
    along the last dimension; larger blocks of ours are written as several with equal scales. What is not compressed
    keeps its numbers: ``F16``, ``F32`` (bfloat16 and FP8 too), ``F64``, and the signed integers that hold its integers.

    Args:
        model: prepared, weights only. Not changed.
        path: the file to write.
        architecture: ``general.architecture``.
        metadata: further text, numbers and booleans by key. Integers are stored in 32 bits, without a sign unless they
            are negative, and floats in single precision, as llama.cpp reads its keys; what needs more has 64 bits.
            Write 10000.0 for a key that llama.cpp reads as a float. ``general.alignment`` is where tensors begin.
        rename: maps a parameter's name to the name in the file, such as llama.cpp's ``blk.0.attn_q.weight``.
        round_scales: ggml keeps scales in half precision. Scales that half precision does not hold are rounded to it,
            unless they lie beyond it; False refuses both, so that the file decodes to what the model computes. A
            warning names weights that lose more than half a step of their codes by that, as with scales below 6e-5.
            Prepare a float16 model to get scales that fit; its weights are rounded to half precision, what ggml decodes
            is not.
        allow_dense: store compressed weights that no type holds as dense tensors with their decoded values.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: the gguf library is not installed.
        ValueError: activations are quantized, or a tensor cannot be held, which no option changes for complex numbers,
            uint64 and more than four dimensions; or a name is longer than 63 bytes, or that of two tensors; or
            metadata cannot be stored. Lists all of them.
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes.
        OSError: the file cannot be written; an old one stays.
    """
    gguf = require("gguf", "gguf", "Export to GGUF")
    described = {ARCHITECTURE: architecture, **(metadata or {})}
    types = types_of_metadata(described)
    artifact = artifact_of_weights(model)
    if artifact.activations:
        raise ValueError(
            f"GGUF holds weights only, but {len(artifact.activations)} activations are quantized, such as "
            f"{next(iter(artifact.activations))!r}. Prepare with op_input_spec=None and op_output_spec=None."
        )
    names = {name: rename(name) if rename else name for name in artifact}
    encoded: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    refused, without_type, losses = [], [], {}
    unreadable = list(_given_twice(names))
    for name, stored in names.items():
        tensor = artifact[name]
        unreadable += _unreadable(name, stored, tensor.layout.shape)
        kind, problem = type_of(tensor, round_scales)
        if problem and not allow_dense:
            refused.append(f"{name}: {problem}")
        if not kind and tensor.dtype not in _DENSE:
            without_type.append(f"{name}: {str(tensor.dtype).removeprefix('torch.')}")
            continue
        encoded[name] = (kind, _ENCODERS[kind](tensor) if kind else _dense(tensor.decode()))
        if kind and isinstance(tensor, QuantizedTensor) and (loss := lost_by_rounding(tensor, torch.float16)):
            losses[name] = loss
    _refuse(unreadable, without_type, refused)
    warn_of_losses(losses, "Leave their layers out of the configuration, which stores them as they are.")
    with new_file_atomically(path) as part:
        writer = _described(gguf, part, described, types)
        for name, (kind, array) in encoded.items():
            type_there = gguf.GGMLQuantizationType[kind] if kind else None  # of a dense array, its dtype says it
            writer.add_tensor(names[name], array, raw_dtype=type_there)
        _write(writer, path)
    return Path(path)


def _described(gguf: Any, path: str | Path, metadata: Mapping[str, Any], types: Mapping[str, str]) -> Any:
    """The library's writer of a file, with the metadata."""
    writer = gguf.GGUFWriter(path, metadata[ARCHITECTURE])
    for key, value in metadata.items():
        if key != ARCHITECTURE:  # which the writer has added
            writer.add_key_value(key, value, gguf.GGUFValueType[types[key]])
    writer.data_alignment = metadata.get(ALIGNMENT, writer.data_alignment)
    return writer


def _refuse(unreadable: Sequence[str], without_type: Sequence[str], refused: Sequence[str]) -> None:
    """Raise for tensors that cannot be stored, with all of them.

    Args:
        unreadable: what readers would not open.
        without_type: what no type holds, dense or not.
        refused: what is stored only as ``allow_dense`` says.
    """
    if unreadable:
        raise ValueError("\n  ".join(["llama.cpp could not open a GGUF file with these tensors:", *unreadable]))
    if without_type:
        raise ValueError(
            f"GGUF has no type for the numbers of {', '.join(without_type)}; store them as real or signed numbers, or "
            "register them with persistent=False."
        )
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise ValueError(f"GGUF cannot hold these weights exactly (allow_dense=True keeps them dense):\n{listed}")


def _write(writer: Any, path: str | Path) -> None:
    """Write the file. The library's own way of writing arrays does not say why it failed."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (file,), (tensors,) = writer.fout, writer.tensors
        writer.write_padding(file, file.tell())
        for info in tensors.values():
            file.write(np.ascontiguousarray(info.tensor))
            writer.write_padding(file, info.nbytes)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # of what the error before was about
            writer.close()


def _given_twice(names: Mapping[str, str]) -> Iterator[str]:
    """Yield the names in the file that belong to several tensors, with the tensors' names in the model."""
    first: dict[str, str] = {}
    for name, stored in names.items():
        if isinstance(stored, str) and first.setdefault(stored, name) != name:
            yield f"{name}: rename= gave it the name {stored!r}, which {first[stored]} has too"


def _unreadable(name: str, stored: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what would keep llama.cpp from opening a file with a tensor, by the tensor's name in the model."""
    if not isinstance(stored, str):
        yield f"{name}: rename= gave it the name {stored!r}, which is no text; return the old name to keep it"
        return
    if not stored or not encodable(stored):
        yield f"{name}: its name {stored!r} is empty, or has no form in UTF-8; give it another one by rename="
        return
    if problem := too_many_dimensions(shape):
        yield f"{name}: {problem}; store it with fewer, or register a buffer with persistent=False"
    if (length := len(stored.encode())) > _MAX_NAME_BYTES:
        yield f"{name}: its name {stored!r} has {length} bytes, and ggml takes {_MAX_NAME_BYTES}; shorten it by rename="


def too_many_dimensions(shape: tuple[int, ...]) -> str | None:
    """Return what is wrong with a tensor of this shape; None if it has no more dimensions than ggml takes."""
    return f"it has {len(shape)} dimensions, and ggml takes {_MAX_DIMENSIONS}" if len(shape) > _MAX_DIMENSIONS else None


def _dense(values: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = values.to(_DENSE[values.dtype]).numpy()
    return array


def type_of(tensor: CompressedTensor[Any], round_scales: bool) -> tuple[str, str | None]:
    """Return the ggml type that holds a tensor, "" for a dense one, and what is wrong if it has to be dense."""
    if not isinstance(tensor, QuantizedTensor):
        compressed = tensor.is_sparse or tensor.layout.kind != "dense"
        return "", f"{tensor.layout.kind} tensors with look-up tables or masks have no type" if compressed else None
    layout = tensor.layout
    fits = layout.shape and layout.shape[-1] % BLOCK == 0 and layout.block_size[-1] % BLOCK == 0
    if not fits:
        return "", f"blocks of {tuple(layout.block_size)} are not multiples of {BLOCK} along the last axis"
    if layout.format == _FP4:
        if layout.scale_dtype != "float8_e8m0fnu":
            return "", "FP4 needs power-of-two scales"
        return "MXFP4", None
    if layout.number_format.kind == "float":
        return "", f"there is no type for {layout.format}"
    factors = [tensor.scale(), tensor.minval()]
    if not round_scales and not all(f is None or torch.equal(f.half().float(), f) for f in factors):
        return "", "its scales are no half-precision numbers (round_scales=True rounds them)"
    if not all(f is None or bool(f.half().isfinite().all()) for f in factors):
        return "", "its scales or minvals lie beyond 65504, the largest number of half precision"
    if layout.formulation == "minval":
        if tensor.is_sparse:
            return "", "the 'minval' formulation has no code for the zeros of a mask; use qformulation 'zp'"
        span = int(layout.quant_max) - int(layout.quant_min)
        found = next((kind for kind, most in _WITH_MINIMUM if span <= most), "")
        return found, None if found else "the 'minval' formulation has types for 4 and 5 bits only"
    values = _centred(tensor)
    low, high = (int(v) for v in torch.aminmax(values)) if values.numel() else (0, 0)
    found = next((kind for kind, half in _SIGNED if -half <= low and high < half), "")
    return found, None if found else f"code minus zero point runs from {low} to {high}, beyond 8 bits"


def _centred(tensor: QuantizedTensor) -> torch.Tensor:
    """``code - zero_point`` of every element; 0 where a mask drops it."""
    zero_point, mask = tensor.zero_point(), tensor.mask()
    assert zero_point is not None
    values = tensor.codes().to(torch.int16) - spread(zero_point, tensor.layout.block_size).to(torch.int16)
    return values if mask is None else values.masked_fill(~mask, 0)


def _for_each(parameter: torch.Tensor, tensor: QuantizedTensor, length: int) -> torch.Tensor:
    """A parameter of every block, for every ``length`` elements along the last dimension."""
    *sizes, last = tensor.layout.block_size
    return spread(parameter, (*sizes, last // length))


def _half(parameter: torch.Tensor, tensor: QuantizedTensor) -> torch.Tensor:
    """A parameter in half precision for every 32 elements, as bytes ``[..., blocks, 2]``."""
    half = _for_each(parameter, tensor, BLOCK).half().contiguous()
    return half.view(torch.uint8).reshape(*half.shape, 2)


def _rows(*parts: torch.Tensor) -> np.ndarray[Any, Any]:
    blocks = torch.cat(parts, -1)
    array: np.ndarray[Any, Any] = blocks.reshape(*blocks.shape[:-2], -1).contiguous().numpy()
    return array


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], -1, BLOCK)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Low four bits of blocks of 32: the first half in the low nibbles, the second half in the high ones."""
    low = (codes & 15).to(torch.uint8)
    return low[..., : BLOCK // 2] | (low[..., BLOCK // 2 :] << 4)


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Bit 4 of blocks of 32 as four bytes, element 0 in the lowest bit."""
    bits = ((codes >> 4) & 1).to(torch.int64) << torch.arange(BLOCK)
    words = bits.sum(-1)
    return torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).to(torch.uint8)


def _q4_0(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    return _rows(_half(tensor.scale(), tensor), _nibbles(_blocks(_centred(tensor)) + 8))


def _q5_0(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    codes = _blocks(_centred(tensor)) + 16
    return _rows(_half(tensor.scale(), tensor), _fifth_bits(codes), _nibbles(codes))


def _q8_0(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    codes = _blocks(_centred(tensor)).to(torch.int8).contiguous().view(torch.uint8)
    return _rows(_half(tensor.scale(), tensor), codes)


def _from_minimum(tensor: QuantizedTensor) -> torch.Tensor:
    return _blocks(tensor.codes().to(torch.int16) - int(tensor.layout.quant_min))


def _minimum(tensor: QuantizedTensor) -> torch.Tensor:
    minval = tensor.minval()
    assert minval is not None
    return minval


def _q4_1(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    scales = _half(tensor.scale(), tensor), _half(_minimum(tensor), tensor)
    return _rows(*scales, _nibbles(_from_minimum(tensor)))


def _q5_1(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    codes = _from_minimum(tensor)
    scales = _half(tensor.scale(), tensor), _half(_minimum(tensor), tensor)
    return _rows(*scales, _fifth_bits(codes), _nibbles(codes))


def _mxfp4(tensor: QuantizedTensor) -> np.ndarray[Any, Any]:
    exponents = _for_each(tensor.parts["scale"], tensor, BLOCK).unsqueeze(-1)
    return _rows(exponents, _nibbles(_blocks(encode(tensor.codes(), _FP4))))


_ENCODERS: dict[str, Callable[[Any], np.ndarray[Any, Any]]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "MXFP4": _mxfp4,
}
