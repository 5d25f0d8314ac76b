"""Reading and rewriting the operations of a Core AI program.

The authoring facades of coreai-core build programs but do not walk or change them, so this module works on the MLIR
bindings below; everything else in this package goes through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from bitwright.export.extras import require
from bitwright.formats import encode, format_of, pack

from .common import DType

_PURPOSE: Final = "Compressing a Core AI program"

#: Element types of weights, and the torch dtype of the same bytes.
FLOAT_TYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}

#: Number formats of few bits, by element type.
FORMATS: Final = {
    **{f"si{bits}": f"int{bits}" for bits in (2, 4, 8)},
    **{f"ui{bits}": f"uint{bits}" for bits in (1, 2, 4, 6, 8)},
    "f4E2M1FN": "float4_e2m1fn_x2",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "f8E8M0FNU": "float8_e8m0fnu",
}

ELEMENT_TYPES: Final = {
    DType.INT2: "si2",
    DType.UINT2: "ui2",
    DType.INT4: "si4",
    DType.UINT4: "ui4",
    DType.INT8: "si8",
    DType.UINT8: "ui8",
    DType.FP4_E2M1FN: "f4E2M1FN",
    DType.FP8_E4M3FN: "f8E4M3FN",
    DType.FP8_E5M2: "f8E5M2",
    DType.FP8_E8M0FNU: "f8E8M0FNU",
}


@cache
def _bindings() -> SimpleNamespace:
    """Import coreai-core.

    Raises:
        MissingExtraError: it is not installed; the message names the extra.
    """
    authoring = require("coreai.authoring", "coreai", _PURPOSE)
    dialect = require("coreai._compiler.dialects.coreai", "coreai", _PURPOSE)
    libraries = require("coreai._compiler._mlir_libs._coreaiIR", "coreai", _PURPOSE)._bindings
    return SimpleNamespace(
        AIProgram=authoring.AIProgram,
        ir=require("coreai._compiler.ir", "coreai", _PURPOSE),
        ops=dialect,
        elements=libraries.mlir.dialects.coreai.create_elements_attr,
        copy_constant=libraries.compiler.copy_constant_value_to_array,
    )


def working_copy(program: Any, in_place: bool) -> Any:
    """Return the program to change: itself, or a copy.

    Raises:
        MissingExtraError: coreai-core is not installed.
        TypeError: ``program`` is no ``coreai.authoring.AIProgram``.
    """
    expected = _bindings().AIProgram
    if not isinstance(program, expected):
        raise TypeError(
            f"Expected a coreai.authoring.AIProgram, got {type(program).__name__}. Convert the model first: "
            "TorchConverter().add_exported_program(...).to_coreai() of coreai-torch, or AIModelAsset.load(...).program."
        )
    return program if in_place else copy.deepcopy(program)


@dataclass(frozen=True)
class Use:
    """One operation that reads a value.

    Attributes:
        name: name of the operation, ``"coreai.conv2d"`` for example.
        position: index of the operand.
        operation: the operation itself.
    """

    name: str
    position: int
    operation: Any


@dataclass(frozen=True)
class Constant:
    """A ``coreai.constant`` of floats with a static shape."""

    operation: Any
    shape: tuple[int, ...]
    element_type: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def uses(self) -> list[Use]:
        """Who reads the constant."""
        return uses_of(self.operation)

    def read(self) -> torch.Tensor:
        """Return the values in their own dtype."""
        dtype = FLOAT_TYPES[self.element_type]
        buffer = np.empty(self.size * dtype.itemsize, dtype=np.uint8)
        _bindings().copy_constant(constant_op=self.operation, destination=buffer)
        return torch.from_numpy(buffer).view(dtype).reshape(self.shape)

    def __str__(self) -> str:
        readers = sorted({use.name for use in self.uses})
        return f"weight of shape {self.shape} read by {', '.join(readers)}"


def float_constants(program: Any) -> list[Constant]:
    """Return the float constants of a program, those in nested regions included, in program order."""
    ir = _bindings().ir
    found: list[Constant] = []
    for operation in _operations(program._module._mlir_module.operation):
        if operation.name != "coreai.constant":
            continue
        kind = operation.results[0].type
        if not ir.RankedTensorType.isinstance(kind):
            continue
        ranked = ir.RankedTensorType(kind)
        element = str(ranked.element_type)
        if ranked.has_static_shape and element in FLOAT_TYPES:
            found.append(Constant(operation, tuple(ranked.shape), element))
    return found


def _operations(parent: Any) -> Iterator[Any]:
    for region in parent.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _operations(view.operation)


def uses_of(operation: Any) -> list[Use]:
    """Return who reads the first result of ``operation``."""
    return [Use(use.owner.name, use.operand_number, use.owner) for use in operation.results[0].uses]


def shape_of(operation: Any) -> tuple[int, ...] | None:
    """Return the shape of the first result of ``operation``; None when it is not static."""
    kind = operation.results[0].type
    if not _bindings().ir.RankedTensorType.isinstance(kind):
        return None
    ranked = _bindings().ir.RankedTensorType(kind)
    return tuple(ranked.shape) if ranked.has_static_shape else None


def integers_of(value: Any) -> list[int] | None:
    """Return the integers that an operand holds when it is a constant; None otherwise."""
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") != "coreai.constant":
        return None
    attribute = owner.attributes["value"]
    if not _bindings().ir.DenseElementsAttr.isinstance(attribute):
        return None
    return [int(entry) for entry in np.array(_bindings().ir.DenseElementsAttr(attribute)).reshape(-1)]


class Builder:
    """Operations that decode a compressed weight, written in front of the constant that they replace."""

    def __init__(self) -> None:
        self._ops = _bindings().ops

    def constant(self, values: torch.Tensor, element_type: str) -> Any:
        """Write ``values``, all of which ``element_type`` holds, as a constant; codes of few bits are packed."""
        return self._constant(tuple(values.shape), element_type, _stored_bytes(values, element_type))

    def zeros(self, shape: tuple[int, ...], element_type: str) -> Any:
        """Write zeros, stored once."""
        ir = _bindings().ir
        element = ir.Type.parse(element_type)
        kind = ir.RankedTensorType.get(list(shape), element)
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(element, 0.0))
        return self._ops.ConstantOp(value=zero).result

    def axis(self, axis: int) -> Any:
        """Write an axis, as ``lut_to_dense`` takes it."""
        return self._constant((), "si16", torch.tensor([axis], dtype=torch.int16).view(torch.uint8))

    def _constant(self, shape: tuple[int, ...], element_type: str, stored: torch.Tensor) -> Any:
        ir = _bindings().ir
        kind = ir.RankedTensorType.get(list(shape), ir.Type.parse(element_type))
        location = ir.Location.current
        return self._ops.ConstantOp(value=_bindings().elements(location, kind, stored.numpy())).result

    def shift_scale(self, data: Any, scale: Any, offset: Any, bias: Any) -> Any:
        """``scale * (data - offset) + bias``, by blocks."""
        return self._ops.blockwise_shift_scale(data, scale, offset, bias)

    def lut_to_dense(self, indices: Any, lut: Any, axis: Any) -> Any:
        """Replace indices by entries of look-up tables."""
        return self._ops.lut_to_dense(indices, lut, axis)

    def sparse_to_dense(self, values: Any, mask: Any) -> Any:
        """Place values where the mask is one, and zeros elsewhere."""
        return self._ops.sparse_with_bitmask_to_dense(self._ops.build_sparse_with_bitmask(values, mask))


def _stored_bytes(values: torch.Tensor, element_type: str) -> torch.Tensor:
    """Return the bytes of a constant: elements in row-major order, codes of few bits as one little-endian stream."""
    values = values.detach().contiguous()
    if element_type in FLOAT_TYPES:
        return values.to(FLOAT_TYPES[element_type]).reshape(-1).view(torch.uint8)
    fmt = format_of(FORMATS[element_type])
    return pack(encode(values, fmt), fmt.bits)


Emit = Callable[[Builder], Any]


@contextmanager
def _writing_before(operation: Any) -> Iterator[None]:
    ir = _bindings().ir
    with operation.context, operation.location, ir.InsertionPoint(operation):
        yield


def replace_constant(constant: Constant, emit: Emit) -> None:
    """Replace a constant by what ``emit`` writes for it."""
    operation = constant.operation
    with _writing_before(operation):
        result = emit(Builder())
    if result.type != operation.results[0].type:
        raise AssertionError(f"{constant}: decoded as {result.type}, not {operation.results[0].type}")
    operation.results[0].replace_all_uses_with(result)
    operation.erase()


def verify(program: Any) -> None:
    """Check a rewritten program by the rules of its operations."""
    program._module.verify()
