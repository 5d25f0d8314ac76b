"""Which channels of a model are constant whatever the input, and which tensors they run through.

A *space* is a set of channels that several tensors have in common: what a convolution puts out, a batch norm scales, a
residual add joins, and the next convolution reads. A channel of a space can go when everybody who reads it sees a
constant there. Ops that are not known keep their channels as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.program import Op, Program, Value

__all__ = ["CONVS", "TRANSPOSED", "ChannelAnalysis", "Reader", "Space", "Tensor"]

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_UNARY = frozenset(
    {
        "relu",
        "relu_",
        "relu6",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "mish",
        "softplus",
    }
    | {"hardswish", "hardsigmoid", "hardtanh", "dropout", "dropout2d", "contiguous", "clone", "detach", "abs", "square"}
)
_POOLS = frozenset(
    f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)
)
_JOINS = frozenset({"add", "add_", "sub", "sub_", "mul", "mul_"})
_FLATTEN = frozenset({"flatten", "view", "reshape"})


@dataclass(eq=False, slots=True)
class Tensor:
    """A parameter or buffer with an axis that belongs to a space.

    Attributes:
        path: path of its owner.
        attribute: its name there; a bias may be missing.
        axis: the axis.
        repeats: entries along the axis for each channel.
    """

    path: str
    attribute: str
    axis: int
    repeats: int = 1


@dataclass(eq=False, slots=True)
class Reader:
    """A layer that sums over the channels of a space.

    Attributes:
        path: path of the layer.
        module: the layer.
        dim: channel dimension of its input.
        repeats: entries along that dimension for each channel.
        constant: channels that are constant in its input.
    """

    path: str
    module: nn.Module
    dim: int
    repeats: int
    constant: torch.Tensor


@dataclass(eq=False, slots=True)
class Space:
    """Channels that go together.

    Attributes:
        size: number of channels.
        tensors: what has an axis along them.
        readers: who sums over them.
        writers: paths of the layers that put them out.
        fixed: why they must stay, or None.
        merged: the space that this one became part of.
    """

    size: int
    tensors: list[Tensor] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    fixed: str | None = None
    merged: Space | None = None

    def root(self) -> Space:
        """Return the space that this one is part of by now."""
        space = self
        while space.merged is not None:
            space = space.merged
        return space

    def join(self, other: Space) -> Space:
        """Make one space of two."""
        first, second = self.root(), other.root()
        if first is second:
            return first
        first.tensors += second.tensors
        first.readers += second.readers
        first.writers += second.writers
        first.fixed = first.fixed or second.fixed
        second.merged = first
        return first


@dataclass(frozen=True, slots=True, eq=False)
class _Channels:
    """Channels of one value: their space, where they are, and which are constant."""

    space: Space
    dim: int
    repeats: int
    constant: torch.Tensor


class ChannelAnalysis:
    """Walks a program and finds its spaces.

    Args:
        program: of the model, in eager mode.
        model: the model.
        weight_of: returns the effective weight of a layer; None if it cannot be cut (shared, or compressed otherwise).
        calls: how often each module ran.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        weight_of: Callable[[str, nn.Module], torch.Tensor | None],
        calls: dict[str, int],
    ) -> None:
        self._modules = dict(model.named_modules())
        self._weight_of = weight_of
        self._calls = calls
        self._channels: dict[int, _Channels] = {}
        self._spaces: list[Space] = []
        for op in program.ops:
            self._visit(op)
        for value in program.outputs:
            self._fix(value, "they are an output of the model")

    @property
    def spaces(self) -> list[Space]:
        """All spaces, each once."""
        return list(dict.fromkeys(space.root() for space in self._spaces))

    def _visit(self, op: Op) -> None:
        module = self._modules.get(op.module_path)
        inputs = [argument.value for argument in op.arguments if argument.value.state is None]
        if isinstance(module, (nn.Linear, *CONVS, *TRANSPOSED)) and op.type in _LAYER_OPS:
            self._visit_layer(op, module, inputs[0])
        elif isinstance(module, NORMS) and op.type == "batch_norm":
            self._visit_norm(op, module, inputs[0])
        elif len(inputs) == 1 and (op.type in _UNARY or _is_plain_pool(op, inputs[0])):
            self._pass(inputs[0], op.outputs[0])
        elif op.type in _FLATTEN and len(inputs) == 1:
            self._flatten(inputs[0], op.outputs[0])
        elif op.type in _JOINS and len(op.arguments) == len(inputs):
            self._join(op, inputs)
        else:
            for value in inputs:
                self._fix(value, f"{op.type} ({op.name}) reads them")

    def _visit_layer(self, op: Op, layer: nn.Module, source: Value) -> None:
        path = op.module_path
        weight = self._weight_of(path, layer) if self._calls.get(path, 0) == 1 else None
        known = self._channels.get(id(source))
        if weight is None or (known is not None and known.dim != _input_dim(layer, source)):
            self._fix(source, f"{path} reads them, and its weight cannot be cut")
            return
        groups = getattr(layer, "groups", 1)
        if groups > 1:
            self._visit_depthwise(op, layer, source, weight)
            return
        axis_in, axis_out = (0, 1) if isinstance(layer, TRANSPOSED) else (1, 0)
        if known is not None:
            space = known.space.root()
            space.tensors.append(Tensor(path, "weight", axis_in, known.repeats))
            space.readers.append(Reader(path, layer, known.dim, known.repeats, known.constant))
        out = Space(weight.shape[axis_out])
        self._write(op, layer, out, axis_out, _zero_channels(weight, axis_out))

    def _visit_depthwise(self, op: Op, layer: Any, source: Value, weight: torch.Tensor) -> None:
        path = op.module_path
        known = self._channels.get(id(source))
        plain = isinstance(layer, CONVS) and layer.groups == layer.in_channels == layer.out_channels
        if not plain or known is None or known.repeats != 1:
            self._fix(source, f"{path} has {layer.groups} groups")
            return
        constant = _zero_channels(weight, 0)
        if not any(_widths(layer.padding)):
            constant = constant | known.constant
        self._write(op, layer, known.space.root(), 0, constant)

    def _write(self, op: Op, layer: nn.Module, space: Space, axis: int, constant: torch.Tensor) -> None:
        """Record that a layer puts out the channels of ``space``."""
        space.writers.append(op.module_path)
        space.tensors.append(Tensor(op.module_path, "weight", axis))
        space.tensors.append(Tensor(op.module_path, "bias", 0))
        self._spaces.append(space)
        output = op.outputs[0]
        dim = _input_dim(layer, output)
        self._channels[id(output)] = _Channels(space, dim, 1, constant)

    def _visit_norm(self, op: Op, norm: Any, source: Value) -> None:
        known = self._channels.get(id(source))
        if known is None:
            return
        if known.repeats != 1 or norm.running_mean is None or self._calls.get(op.module_path, 0) != 1:
            self._fix(source, f"{op.module_path} normalises them otherwise than channel by channel")
            return
        space = known.space.root()
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(norm, name) is not None:
                space.tensors.append(Tensor(op.module_path, name, 0))
        self._channels[id(op.outputs[0])] = known

    def _pass(self, source: Value, output: Value) -> None:
        known = self._channels.get(id(source))
        if known is not None:
            self._channels[id(output)] = known

    def _flatten(self, source: Value, output: Value) -> None:
        known = self._channels.get(id(source))
        if known is None:
            return
        sizes = source.shape
        rest = 1
        for size in sizes[2:]:
            rest *= int(size)
        if known.dim != 1 or tuple(output.shape) != (sizes[0], int(sizes[1]) * rest):
            if tuple(output.shape) == tuple(sizes):
                self._channels[id(output)] = known
                return
            self._fix(source, "a reshape mixes them with other dimensions")
            return
        self._channels[id(output)] = _Channels(known.space, 1, known.repeats * rest, known.constant)

    def _join(self, op: Op, inputs: list[Value]) -> None:
        found = [self._channels.get(id(value)) for value in inputs]
        known = [channels for channels in found if channels is not None]
        if len(inputs) == 1 and known:  # with a plain number
            self._channels[id(op.outputs[0])] = known[0]
            return
        ranks = {len(value.shape) for value in inputs}
        fits = len(known) == len(inputs) and len(ranks) == 1
        fits = fits and len({(c.dim, c.repeats, c.space.root().size) for c in known}) == 1
        if not fits:
            for value in inputs:
                self._fix(value, f"{op.type} ({op.name}) joins them with something else")
            return
        space, constant = known[0].space, known[0].constant
        for other in known[1:]:
            space = space.join(other.space)
            constant = constant & other.constant
        self._channels[id(op.outputs[0])] = _Channels(space, known[0].dim, known[0].repeats, constant)

    def _fix(self, value: Value, reason: str) -> None:
        known = self._channels.get(id(value))
        if known is not None:
            space = known.space.root()
            space.fixed = space.fixed or reason


_LAYER_OPS = frozenset({"linear"} | {f"{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)})


def _is_plain_pool(op: Op, source: Value) -> bool:
    """True for pooling that puts out one tensor of as many dimensions."""
    return op.type in _POOLS and len(source.shape) == len(op.outputs[0].shape)


def _input_dim(layer: nn.Module, value: Value) -> int:
    """Return the channel dimension of a layer's input or output."""
    return len(value.shape) - 1 if isinstance(layer, nn.Linear) else 1


def _zero_channels(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return which channels of a weight have zeros only, bool ``[C]``."""
    others = [dim for dim in range(weight.ndim) if dim != axis]
    return weight.abs().amax(others) == 0


def _widths(padding: Any) -> tuple[int, ...]:
    if isinstance(padding, str):
        return (0,) if padding == "valid" else (1,)
    return (padding,) if isinstance(padding, int) else tuple(padding)
