"""Granularities: how many elements of a tensor share one set of quantization parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bitwright._utils.registered_model import RegisteredModel
from bitwright.config.spec import CompressionTargetTensor

from .errors import _BlockSizeMismatchError

__all__ = [
    "PerBlockGranularity",
    "PerChannelGranularity",
    "PerTensorGranularity",
    "PerTokenGranularity",
    "QuantizationGranularity",
    "resolve_block_sizes",
]


def resolve_block_sizes(tensor_shape: Sequence[int], block_sizes: Sequence[int]) -> list[int]:
    """Return block sizes with -1 replaced by the whole dimension.

    Args:
        tensor_shape: shape of the tensor.
        block_sizes: one entry per dimension, positive or -1.

    Raises:
        ValueError: another number of dimensions, an entry that is 0 or below -1, or a block that does not divide its
            dimension.

    Example:
        >>> resolve_block_sizes((4, 6), (-1, 3))
        [4, 3]
    """
    if len(block_sizes) != len(tensor_shape):
        raise ValueError(
            f"block_size {tuple(block_sizes)} has {len(block_sizes)} entries, but the tensor has shape "
            f"{tuple(tensor_shape)}; give one entry per dimension, -1 for a whole dimension."
        )
    resolved = []
    for axis, (size, block) in enumerate(zip(tensor_shape, block_sizes, strict=True)):
        if block < 1 and block != -1:
            raise ValueError(f"block_size[{axis}] must be positive, or -1 for the whole dimension; got {block!r}.")
        resolved.append(size if block == -1 else _divisor(tensor_shape, axis, block))
    return resolved


def _divisor(tensor_shape: Sequence[int], axis: int, block: int) -> int:
    if tensor_shape[axis] % block:
        raise _BlockSizeMismatchError(
            f"dimension {axis} of a tensor of shape {tuple(tensor_shape)} is not divisible by block size {block}"
        )
    return block


def _normalized(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of bounds for a tensor of rank {ndim}; it must lie in [{-ndim}, {ndim}).")
    return axis % ndim


class QuantizationGranularity(RegisteredModel, ABC):
    """Base class of granularities. Frozen and hashable; written as a mapping with a ``type`` key.

    Attributes:
        axis: the dimension that the granularity is about, or None where that has no meaning or is still to be
            resolved from the op that consumes the tensor.
    """

    axis: int | None = None

    def get_block_size(
        self,
        tensor_shape: Sequence[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> tuple[int, ...]:
        """Return the shape of the blocks that share parameters; it divides ``tensor_shape``.

        Args:
            tensor_shape: shape of the tensor.
            quantization_target: weights and activations divide into blocks differently.

        Raises:
            ValueError: the axis is missing or out of range, or blocks do not divide the tensor.
        """
        return tuple(self._get_block_size(list(tensor_shape), quantization_target))

    @abstractmethod
    def _get_block_size(
        self,
        block_sizes_list: list[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> list[int]:
        """Return the block size for a tensor whose shape is ``block_sizes_list``."""

    @staticmethod
    def _resolve_axis(granularity: QuantizationGranularity, tensor_ndim: int) -> int | None:
        """Return the non-negative channel axis of a per-channel granularity, None for any other."""
        if not isinstance(granularity, PerChannelGranularity) or granularity.axis is None:
            return None
        return _normalized(granularity.axis, tensor_ndim) if granularity.axis < 0 else granularity.axis

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if cls is not QuantizationGranularity:
            return handler(core_schema)
        return {"oneOf": [_json_schema(key, kind) for key, kind in cls.REGISTRY.items()]}


def _json_schema(key: str, kind: type[QuantizationGranularity]) -> dict[str, Any]:
    fields = {name: {"title": name} | _FIELD_SCHEMAS.get(name, {}) for name in kind.model_fields}
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    return {
        "type": "object",
        "properties": {"type": {"const": key}, **fields},
        "required": ["type", *required],
        "additionalProperties": False,
    }


_FIELD_SCHEMAS: dict[str, dict[str, Any]] = {
    "axis": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "block_size": {
        "anyOf": [
            {"type": "integer", "exclusiveMinimum": 0},
            {"type": "array", "items": {"type": "integer", "minimum": -1}},
        ]
    },
}


@QuantizationGranularity.register("per_tensor")
class PerTensorGranularity(QuantizationGranularity):
    """One set of parameters for the whole tensor."""

    axis: Literal[None] = None

    def _get_block_size(
        self,
        block_sizes_list: list[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> list[int]:
        return block_sizes_list


@QuantizationGranularity.register("per_channel")
class PerChannelGranularity(QuantizationGranularity):
    """One set of parameters for each index along ``axis``.

    Attributes:
        axis: the channel dimension, negative from the end. None for a weight means the output channels of the op that
            consumes it, filled in by ``prepare``.
    """

    axis: int | None = None

    def _get_block_size(
        self,
        block_sizes_list: list[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> list[int]:
        if self.axis is None:
            raise ValueError(
                "PerChannelGranularity has axis=None, and no default axis is known for this tensor; give the axis, "
                "for example PerChannelGranularity(axis=0)."
            )
        block_sizes_list[_normalized(self.axis, len(block_sizes_list))] = 1
        return block_sizes_list


_BlockLength = Annotated[int, Field(gt=0)]


@QuantizationGranularity.register("per_block")
class PerBlockGranularity(QuantizationGranularity):
    """One set of parameters for each block of elements.

    Attributes:
        axis: the dimension that is cut into blocks when ``block_size`` is an int; None when it is a tuple. None for a
            weight with an int ``block_size`` means the input channels of the op that consumes it, filled in by
            ``prepare``.
        block_size: an int cuts ``axis`` into blocks of that length. Of the other dimensions of a weight, the two
            leading ones have one block per index and the rest (a convolution's kernel) lies inside the block; of an
            activation, all have one block per index. A tuple gives the block's length in every dimension, -1 for the
            whole dimension, for example ``(32, 32)`` for two-dimensional blocks of a matrix.
    """

    axis: int | None = None
    block_size: _BlockLength | tuple[_BlockLength | Literal[-1], ...]

    def _get_block_size(
        self,
        block_sizes_list: list[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> list[int]:
        if isinstance(self.block_size, int):
            return self._along_axis(block_sizes_list, self.block_size, quantization_target)
        if self.axis is not None:
            raise ValueError(
                f"PerBlockGranularity has axis={self.axis!r} and block_size={self.block_size!r}; a tuple gives the "
                "block in every dimension, so leave axis out."
            )
        return resolve_block_sizes(block_sizes_list, self.block_size)

    def _along_axis(self, shape: list[int], block: int, target: CompressionTargetTensor) -> list[int]:
        if self.axis is None:
            raise ValueError(
                f"PerBlockGranularity has axis=None with the int block_size {block!r}, and no default axis is known "
                f"for this tensor; give the axis, for example PerBlockGranularity(axis=1, block_size={block!r})."
            )
        axis = _normalized(self.axis, len(shape))
        whole_from = 2 if target != CompressionTargetTensor.ACTIVATION else len(shape)
        sizes = [1 if dim < whole_from else size for dim, size in enumerate(shape)]
        sizes[axis] = _divisor(shape, axis, block)
        return sizes


@QuantizationGranularity.register("per_token")
class PerTokenGranularity(QuantizationGranularity):
    """One set of parameters for each row, that is for each index of all dimensions but the last.

    Meant for activations of shape (batch, tokens, features), most often with the ``dynamic`` calculator, because the
    number of rows changes from batch to batch.
    """

    axis: Literal[None] = None

    def _get_block_size(
        self,
        block_sizes_list: list[int],
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
    ) -> list[int]:
        return [1] * (len(block_sizes_list) - 1) + block_sizes_list[-1:]
