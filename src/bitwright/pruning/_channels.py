"""Which channels of a model are constant whatever the input, and which tensors they run through.

A channel of a space can go when everybody who reads it sees a constant there. Ops that are not known keep their
channels as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitwright.program import Op, Program, Value

from ._channel_moves import keeps_zeros, moved_channels, widths
from ._channel_spaces import Channels, Part, Reader, Space, Tensor

__all__ = ["CONVS", "TRANSPOSED", "ChannelAnalysis"]

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_LAYER_OPS = frozenset({"linear"} | {f"{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)})
_PRODUCTS = frozenset({"mul", "mul_"})
_JOINS = frozenset({"add", "add_", "sub", "sub_"}) | _PRODUCTS
_WITH_NUMBERS = _JOINS | {"div", "div_", "truediv"}
_CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})


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
        self._read_again = {
            path for state in program.states.values() if len(state.uses) > 1 for path, _ in state.owners
        }
        self._channels: dict[int, Channels] = {}
        self._spaces: list[Space] = []
        self._uncut: list[str] = []
        for op in program.ops:
            self._visit(op)
        for value in program.outputs:
            self._fix(value, "they are an output of the model")

    @property
    def spaces(self) -> list[Space]:
        """All spaces, each once."""
        return list(dict.fromkeys(space.root() for space in self._spaces))

    @property
    def uncut(self) -> list[str]:
        """Layers with output channels of zeros whose weights cannot be cut."""
        found = []
        for path in self._uncut:
            layer: Any = self._modules[path]
            axis = 1 if isinstance(layer, TRANSPOSED) else 0
            if bool(_zero_channels(layer.weight.detach(), axis).any()):
                found.append(path)
        return found

    def _visit(self, op: Op) -> None:
        module = self._modules.get(op.module_path)
        inputs = [argument.value for argument in op.arguments if argument.value.state is None]
        alone = len(op.arguments) == len(inputs)
        if isinstance(module, (nn.Linear, *CONVS, *TRANSPOSED)) and op.type in _LAYER_OPS and _is_own(op):
            self._visit_layer(op, module, inputs[0])
        elif isinstance(module, NORMS) and op.type == "batch_norm":
            self._visit_norm(op, module, inputs[0])
        elif isinstance(module, nn.PReLU) and op.type == "prelu":
            self._visit_prelu(op, module, inputs[0])
        elif op.type in _CONCATENATIONS and alone:
            self._concatenate(op, inputs)
        elif op.type in _JOINS and alone and len(inputs) == 2:
            self._join(op, inputs)
        elif len(inputs) == 1 and alone:
            self._pass(op, inputs[0])
        else:
            for value in inputs:
                self._fix(value, f"{op.type} ({op.name}) reads them")

    def _visit_layer(self, op: Op, layer: nn.Module, source: Value) -> None:
        path = op.module_path
        weight = self._weight_of(path, layer) if self._runs_once(path) else None
        known = self._known(source)
        if weight is None or (known is not None and known.dim != _channel_dim(layer, source)):
            self._fix(source, f"{path} reads them, and its weight cannot be cut")
            self._uncut.append(path)
            return
        if getattr(layer, "groups", 1) > 1:
            self._visit_depthwise(op, layer, source, weight)
            return
        axis_in, axis_out = (0, 1) if isinstance(layer, TRANSPOSED) else (1, 0)
        for offset, part in [] if known is None else known.with_offsets():
            space = part.space.root()
            space.tensors.append(Tensor(path, "weight", axis_in, part.repeats, offset))
            space.readers.append(Reader(path, layer, _channel_dim(layer, source), part.repeats, offset, part.constant))
        space = Space(weight.shape[axis_out])
        self._spaces.append(space)
        self._write(op, layer, axis_out, (self._written_part(layer, space, _zero_channels(weight, axis_out)),))

    def _visit_depthwise(self, op: Op, layer: Any, source: Value, weight: torch.Tensor) -> None:
        path = op.module_path
        known = self._known(source)
        plain = isinstance(layer, CONVS) and layer.groups == layer.in_channels == layer.out_channels
        if not plain or known is None or any(part.repeats != 1 for part in known.parts):
            self._fix(source, f"{path} has {layer.groups} groups")
            return
        padded = any(widths(layer.padding))
        parts = []
        for offset, part in known.with_offsets():
            stretch = slice(offset, offset + part.entries)
            dead = _zero_channels(weight[stretch], 0)
            constant = dead | part.zero | (torch.zeros_like(dead) if padded else part.constant)
            bias = _zero_bias(layer, len(weight))[stretch]
            parts.append(Part(part.space.root(), constant, (dead | part.zero) & bias))
        self._write(op, layer, 0, tuple(parts))

    def _written_part(self, layer: Any, space: Space, constant: torch.Tensor) -> Part:
        return Part(space, constant, constant & _zero_bias(layer, space.size))

    def _write(self, op: Op, layer: nn.Module, axis: int, parts: tuple[Part, ...]) -> None:
        """Record that a layer puts out these channels."""
        channels = Channels(_channel_dim(layer, op.outputs[0]), parts)
        for offset, part in channels.with_offsets():
            part.space.writers.append(op.module_path)
            part.space.tensors.append(Tensor(op.module_path, "weight", axis, 1, offset))
            part.space.tensors.append(Tensor(op.module_path, "bias", 0, 1, offset))
        self._channels[id(op.outputs[0])] = channels

    def _visit_norm(self, op: Op, norm: Any, source: Value) -> None:
        known = self._known(source)
        if known is None:
            return
        plain = self._runs_once(op.module_path) and known.dim == 1 and all(part.repeats == 1 for part in known.parts)
        if norm.running_mean is None or not plain:
            known.fix(f"{op.module_path} normalises them otherwise than channel by channel")
            return
        self._along(known, op.module_path, ("weight", "bias", "running_mean", "running_var"))
        shift = -norm.running_mean if norm.weight is None else -norm.running_mean * norm.weight
        if norm.bias is not None:
            shift = shift + norm.bias * (norm.running_var + norm.eps).sqrt()
        still = shift.detach().cpu() == 0
        parts = [
            Part(part.space, part.constant, part.zero & still[offset : offset + part.entries])
            for offset, part in known.with_offsets()
        ]
        self._channels[id(op.outputs[0])] = Channels(known.dim, tuple(parts))

    def _visit_prelu(self, op: Op, activation: nn.PReLU, source: Value) -> None:
        known = self._known(source)
        if known is None:
            return
        if activation.num_parameters > 1:
            if not self._runs_once(op.module_path) or known.dim != 1 or any(part.repeats != 1 for part in known.parts):
                known.fix(f"{op.module_path} has a slope for each of them")
                return
            self._along(known, op.module_path, ("weight",))
        self._channels[id(op.outputs[0])] = known

    def _runs_once(self, path: str) -> bool:
        """Whether a module is called once, and nobody else reads its tensors."""
        return self._calls.get(path, 0) == 1 and path not in self._read_again

    def _along(self, channels: Channels, path: str, names: tuple[str, ...]) -> None:
        """Record one-dimensional tensors that have an entry for each channel."""
        for offset, part in channels.with_offsets():
            part.space.root().tensors.extend(Tensor(path, name, 0, 1, offset) for name in names)

    def _pass(self, op: Op, source: Value) -> None:
        """Follow the channels through an op on one tensor, with plain numbers or without."""
        known = self._known(source)
        if known is None:
            return
        if op.type in _WITH_NUMBERS:
            moved: Channels | None = known if op.type in _PRODUCTS else known.without_zeros()
        else:
            moved = moved_channels(op, known, [int(size) for size in source.shape])
        if moved is None:
            known.fix(f"{op.type} ({op.name}) reads them")
            return
        self._channels[id(op.outputs[0])] = moved if keeps_zeros(op) else moved.without_zeros()

    def _concatenate(self, op: Op, inputs: list[Value]) -> None:
        """Put the channels one after the other; what is not known among them stays."""
        known = [self._known(value) for value in inputs]
        rank = len(op.outputs[0].shape)
        dim = int(op.literals.get("dim", op.literals.get("axis", 0))) % rank
        if not any(known):
            return
        if any(channels is not None and channels.dim != dim for channels in known):
            for channels in known:
                if channels is not None:
                    channels.fix(f"{op.type} ({op.name}) joins them along another dimension")
            return
        parts: list[Part] = []
        for value, channels in zip(inputs, known, strict=True):
            parts += self._unknown(int(value.shape[dim])) if channels is None else channels.parts
        self._channels[id(op.outputs[0])] = Channels(dim, tuple(parts))

    def _unknown(self, size: int) -> tuple[Part, ...]:
        """Return channels that nothing is known about."""
        space = Space(size, fixed="some of what they are joined with is not put out by a layer")
        self._spaces.append(space)
        nothing = torch.zeros(size, dtype=torch.bool)
        return (Part(space, nothing, nothing),)

    def _join(self, op: Op, inputs: list[Value]) -> None:
        first, second = (self._known(value) for value in inputs)
        same_rank = len(inputs[0].shape) == len(inputs[1].shape)
        if first is None or second is None or not same_rank or not _aligned(first, second):
            self._fix(inputs[0], f"{op.type} ({op.name}) joins them with something else")
            self._fix(inputs[1], f"{op.type} ({op.name}) joins them with something else")
            return
        parts = []
        for one, other in zip(first.parts, second.parts, strict=True):
            zero, constant = one.zero & other.zero, one.constant & other.constant
            if op.type in _PRODUCTS:
                zero = one.zero | other.zero
            parts.append(Part(one.space.join(other.space), constant | zero, zero, one.repeats))
        self._channels[id(op.outputs[0])] = Channels(first.dim, tuple(parts))

    def _known(self, value: Value) -> Channels | None:
        return self._channels.get(id(value))

    def _fix(self, value: Value, reason: str) -> None:
        known = self._known(value)
        if known is not None:
            known.fix(reason)


def _aligned(first: Channels, second: Channels) -> bool:
    """Whether two values have the same channels one by one."""
    shapes = [[(part.space.root().size, part.repeats) for part in channels.parts] for channels in (first, second)]
    return first.dim == second.dim and shapes[0] == shapes[1]


def _is_own(op: Op) -> bool:
    """Whether a layer's op reads the weight and the bias of the layer itself."""
    states = {argument.name: argument.value.state for argument in op.arguments}
    own = all(
        state is not None and (op.module_path, name) in state.owners
        for name, state in states.items()
        if name != "input"
    )
    return own and "weight" in states and states["input"] is None


def _channel_dim(layer: nn.Module, value: Value) -> int:
    """Return the channel dimension of a layer's input or output."""
    places = () if isinstance(layer, nn.Linear) else getattr(layer, "kernel_size", ())
    return len(value.shape) - 1 - len(places)


def _zero_channels(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return which channels of a weight have zeros only, bool ``[C]``."""
    others = [dim for dim in range(weight.ndim) if dim != axis]
    return (weight == 0).all(others).cpu()


def _zero_bias(layer: Any, size: int) -> torch.Tensor:
    """Return which channels of a layer get no bias, bool ``[C]``."""
    return torch.ones(size, dtype=torch.bool) if layer.bias is None else layer.bias.detach().cpu() == 0
