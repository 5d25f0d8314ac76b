"""Weights as matrices, and the columns of inputs that these are multiplied with.

Every op here computes, for each of G groups, outputs = inputs · Wᵀ with a matrix W of R outputs by C inputs. For a
convolution a column of inputs is a shifted copy of a channel (im2col). A transposed convolution is taken as the linear
map from the channels of one position to all that they contribute to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bitwright.program.signatures import argument_names

__all__ = ["LayerInputs", "MatrixForm", "layer_inputs"]


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How a weight is read as ``[G, R, C]``.

    Attributes:
        transposed: dimension 0 of the weight runs over inputs, not over outputs.
        groups: number of matrices.
    """

    transposed: bool = False
    groups: int = 1

    def matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` as ``[G, R, C]``."""
        if self.transposed:  # [I, O / G, k...]
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1).transpose(1, 2)
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def weight(self, matrices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Undo :meth:`matrices`."""
        if self.transposed:
            matrices = matrices.transpose(1, 2)
        return matrices.reshape(tuple(shape))

    def spread(self, columns: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a value for each of ``[G, C]`` columns in a shape that broadcasts against the weight."""
        ones = [1] * (len(shape) - 1)
        if self.transposed:
            return columns.reshape(shape[0], *ones)
        if self.groups == 1:
            return columns.reshape(1, *shape[1:])
        return columns.repeat_interleave(shape[0] // self.groups, dim=0).reshape(tuple(shape))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one call multiplies a weight with.

    Attributes:
        form: how the weight is read.
        columns: ``[G, N, C]``, N positions.
        lengths: positions of each group, behind which its columns are zero; empty where all have N.
    """

    form: MatrixForm
    columns: torch.Tensor
    lengths: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Positions of each group."""
        return self.lengths or (self.columns.shape[1],) * self.columns.shape[0]


def layer_inputs(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, Callable[[], LayerInputs]] | None:
    """Return the weight of a call and how to get its inputs; None for a function that is not known."""
    name = getattr(function, "__name__", "").partition(".")[0]
    reader = _READERS.get(name)
    if reader is None:
        return None
    bound = dict(zip(argument_names(function), args, strict=False)) | dict(kwargs)
    return reader(bound)


def _linear(bound: Mapping[str, Any]) -> tuple[torch.Tensor, Callable[[], LayerInputs]]:
    source, weight = bound["input"], bound["weight"]
    return weight, lambda: LayerInputs(MatrixForm(), source.reshape(1, -1, source.shape[-1]))


def _addmm(bound: Mapping[str, Any]) -> tuple[torch.Tensor, Callable[[], LayerInputs]]:
    source, weight = bound["mat1"], bound["mat2"]
    return weight, lambda: LayerInputs(MatrixForm(transposed=True), source.reshape(1, -1, source.shape[-1]))


def _attention(bound: Mapping[str, Any]) -> tuple[torch.Tensor, Callable[[], LayerInputs]] | None:
    weight = bound.get("in_proj_weight")
    if weight is None:
        return None

    def read() -> LayerInputs:
        sources = [bound[name].reshape(-1, bound[name].shape[-1]) for name in ("query", "key", "value")]
        if sources[0] is sources[1] or bound["query"] is bound["key"] is bound["value"]:
            return LayerInputs(MatrixForm(), sources[0].unsqueeze(0))
        columns = nn.utils.rnn.pad_sequence(sources, batch_first=True)
        return LayerInputs(MatrixForm(groups=3), columns, tuple(map(len, sources)))

    return weight, read


def _conv(dims: int) -> Callable[[Mapping[str, Any]], tuple[torch.Tensor, Callable[[], LayerInputs]]]:
    def reader(bound: Mapping[str, Any]) -> tuple[torch.Tensor, Callable[[], LayerInputs]]:
        weight, groups = bound["weight"], int(bound.get("groups", 1))

        def read() -> LayerInputs:
            return LayerInputs(MatrixForm(groups=groups), _windows(bound, dims, groups))

        return weight, read

    return reader


def _windows(bound: Mapping[str, Any], dims: int, groups: int) -> torch.Tensor:
    """Return the windows that a convolution sees: ``[G, batch * positions, C / G * kernel]``."""
    source, weight = bound["input"], bound["weight"]
    source = source if source.ndim == dims + 2 else source.unsqueeze(0)
    kernel = weight.shape[2:]
    stride, dilation = (_per_dim(bound.get(name, 1), dims) for name in ("stride", "dilation"))
    source = F.pad(source, _padding(bound.get("padding", 0), kernel, dilation))
    for dim in range(dims):
        reach = (kernel[dim] - 1) * dilation[dim] + 1
        source = source.unfold(2 + dim, reach, stride[dim])[..., :: dilation[dim]]
    channels = source.shape[1]
    order = (1, 0, *range(2, source.ndim))  # [C, batch, positions..., kernel...]
    flat = source.permute(order).reshape(groups, channels // groups, -1, kernel.numel())
    return flat.transpose(1, 2).reshape(groups, flat.shape[2], -1)


def _per_dim(value: Any, dims: int) -> tuple[int, ...]:
    return (int(value),) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the argument of ``F.pad``: low and high for each dimension, the last first."""
    if padding == "valid":
        padding = 0
    pairs = []
    for dim, size in enumerate(kernel):
        if padding == "same":
            total = (size - 1) * dilation[dim]
            pairs.append((total // 2, total - total // 2))
        else:
            width = _per_dim(padding, len(kernel))[dim]
            pairs.append((width, width))
    return [width for pair in reversed(pairs) for width in pair]


def _conv_transpose(dims: int) -> Callable[[Mapping[str, Any]], tuple[torch.Tensor, Callable[[], LayerInputs]]]:
    def reader(bound: Mapping[str, Any]) -> tuple[torch.Tensor, Callable[[], LayerInputs]]:
        source, weight, groups = bound["input"], bound["weight"], int(bound.get("groups", 1))

        def read() -> LayerInputs:
            batched = source if source.ndim == dims + 2 else source.unsqueeze(0)
            channels = batched.transpose(0, 1).reshape(groups, batched.shape[1] // groups, -1)
            return LayerInputs(MatrixForm(transposed=True, groups=groups), channels.transpose(1, 2))

        return weight, read

    return reader


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[torch.Tensor, Callable[[], LayerInputs]] | None]] = {
    "linear": _linear,
    "addmm": _addmm,
    "multi_head_attention_forward": _attention,
    **{f"conv{dims}d": _conv(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _conv_transpose(dims) for dims in (1, 2, 3)},
}
