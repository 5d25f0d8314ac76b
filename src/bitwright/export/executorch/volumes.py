"""Convolutions in three dimensions, which ExecuTorch has no kernels for, as convolutions in two.

The depth of a volume goes beside its batch. The slices that one place of the output sees through the kernel's depth are
laid together along the channels, and so are the kernel's own: one convolution adds up what the three-dimensional one
does. Codes are moved as codes, so that int8 layers stay int8 layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

from bitwright.export.constants import compute_beforehand, remove_constant
from bitwright.export.conversion import ConversionError, module_path
from bitwright.export.dimensions import for_each_dimension
from bitwright.export.graph_edits import argument, call, replace
from bitwright.planning import Problem, Severity

from .graph import DEQUANTIZE, DEQUANTIZE_CHANNELS, FUSED, QUANTIZE, op_name

__all__ = ["flatten_convolutions"]

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv3d.default, _aten.conv3d.padding, _aten.conv_transpose3d.input, _aten.convolution.default)
_BESIDE_THE_BATCH = [0, 2, 1, 3, 4]
"""Depth and channels change places."""


def flatten_convolutions(program: ExportedProgram) -> None:
    """Write convolutions in three dimensions as convolutions in two, in place.

    Args:
        program: may hold quantize and dequantize ops around them; what XNNPACK does in a layer is done before its
            output becomes a volume again.

    Raises:
        ConversionError: the depth of a volume is dynamic; with a problem for each convolution.
    """
    graph = program.graph
    nodes = [node for node in graph.nodes if node.target in _CONVOLUTIONS and _value(node.args[1]).ndim == 5]
    _refuse_dynamic_depth(nodes)
    weights: set[fx.Node] = set()
    read: set[fx.Node] = set()
    for node in nodes:
        layer = _Convolution.of(node)
        read.update(layer.weight.all_input_nodes, [layer.weight])
        with graph.inserting_before(node), _sizes_kept(node):
            moved = layer.weight_and_its_parts()
            weights.update(moved[1:])
            images = layer.convolved(layer.slices(), moved[0])
            last, images = _with_what_is_fused(node, images)
            volumes = layer.volumes(images)
        replace(last, volumes)
    if not nodes:
        return
    graph.eliminate_dead_code()
    compute_beforehand(program, weights.__contains__)
    _drop_unread_states(program, read)
    program.graph_module.recompile()


@dataclass(frozen=True)
class _Convolution:
    """A convolution in three dimensions.

    Attributes:
        graph: what it is in.
        x: its input, volumes of shape (N, C, D, H, W) or (C, D, H, W).
        weight: shape (O, C / groups, K, ...), or if it is transposed (C, O / groups, K, ...).
        bias: None for none.
        stride: of each dimension.
        around: zeros before and behind each dimension.
        dilation: of each dimension.
        groups: of channels.
        transposed: whether it is the transpose of one.
        output_padding: of a transposed one.
    """

    graph: fx.Graph
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: list[int]
    around: list[tuple[int, int]]
    dilation: list[int]
    groups: int
    transposed: bool
    output_padding: list[int]

    @classmethod
    def of(cls, node: fx.Node) -> _Convolution:
        """Read the arguments of a call."""
        named = node.target in (_aten.conv3d.default, _aten.conv3d.padding)
        whole = node.target is _aten.convolution.default
        weight, dilation = argument(node, "weight"), for_each_dimension(argument(node, "dilation"), 3)
        return cls(
            graph=node.graph,
            x=argument(node, "input"),
            weight=weight,
            bias=argument(node, "bias"),
            stride=for_each_dimension(argument(node, "stride"), 3),
            around=_around(argument(node, "padding"), _value(weight).shape[2:], dilation),
            dilation=dilation,
            groups=argument(node, "groups"),
            transposed=argument(node, "transposed") if whole else not named,
            output_padding=[0] * 3 if named else for_each_dimension(argument(node, "output_padding"), 3),
        )

    @property
    def depth(self) -> int:
        """How many slices one place of the output sees."""
        depth: int = _value(self.weight).shape[2]
        return depth

    @property
    def output_depth(self) -> int:
        """How many slices an output volume has."""
        size, reach = _value(self.x).shape[-3], self.dilation[0] * (self.depth - 1)
        if self.transposed:
            return int((size - 1) * self.stride[0] - sum(self.around[0]) + reach + self.output_padding[0] + 1)
        return int((size + sum(self.around[0]) - reach - 1) // self.stride[0] + 1)

    def slices(self) -> fx.Node:
        """Return the input as images of shape (N * output depth, C * kernel depth, H, W), dequantized."""
        x: Any = self.x
        fill: Any = 0
        dequantize = x if op_name(x) == DEQUANTIZE and _holds_zero(x) else None
        if dequantize is not None:
            x, _, fill = dequantize.args[:3]
        if _value(x).ndim == 4:
            x = call(self.graph, _aten.unsqueeze.default, x, 0)
        x = call(self.graph, _aten.permute.default, x, _BESIDE_THE_BATCH)
        x = self._padded(self._spread(x, fill), fill)
        step = 1 if self.transposed else self.stride[0]
        reach = step * (self.output_depth - 1) + 1
        starts = [tap * self.dilation[0] for tap in range(self.depth)]
        taps = [call(self.graph, _aten.slice.Tensor, x, 1, start, start + reach, step) for start in starts]
        x = call(self.graph, _aten.cat.default, taps, 3) if len(taps) > 1 else taps[0]
        x = call(self.graph, _aten.unflatten.int, x, 3, [self.depth, -1])
        x = call(self.graph, _aten.flatten.using_ints, x, 2, 3)
        x = call(self.graph, _aten.flatten.using_ints, x, 0, 1)
        return x if dequantize is None else self._repeated(dequantize, x)

    def _spread(self, x: fx.Node, fill: int) -> fx.Node:
        """Put the zeros of a transposed convolution's stride between slices, one set behind the last one too."""
        between = self.stride[0] - 1
        if not self.transposed or not between:
            return x
        x = call(self.graph, _aten.unsqueeze.default, x, 2)
        x = call(self.graph, _aten.constant_pad_nd.default, x, [0] * 7 + [between], fill)
        return call(self.graph, _aten.flatten.using_ints, x, 1, 2)

    def _padded(self, x: fx.Node, fill: int) -> fx.Node:
        """Put zeros around slices, and around images where the convolution has more of them on one side."""
        before, behind = self.around[0]
        if self.transposed:
            reach = self.dilation[0] * (self.depth - 1)
            before, behind = reach - before, reach - behind + self.output_padding[0] + 1 - self.stride[0]
        start, length = max(0, -before), _value(x).shape[1] + min(0, before) + min(0, behind)
        if start or length != _value(x).shape[1]:
            x = call(self.graph, _aten.slice.Tensor, x, 1, start, start + length)
        more = [after - first for first, after in self.around[1:]]
        sides = [0, more[1], 0, more[0], 0, 0, max(0, before), max(0, behind)]
        return call(self.graph, _aten.constant_pad_nd.default, x, sides, fill) if any(sides) else x

    def weight_and_its_parts(self) -> list[fx.Node]:
        """Return the weight with the kernel's depth along its channels, and the calls that read states only for it."""
        weight = self.weight
        arguments: Any = weight.args
        if op_name(weight) not in (DEQUANTIZE, DEQUANTIZE_CHANNELS):
            flat = self._flat_weight(weight)
            return [flat, flat]
        codes = self._flat_weight(arguments[0])
        if op_name(weight) == DEQUANTIZE:
            return [self._repeated(weight, codes), codes]
        scale, zero_point, axis = arguments[1:4]
        numbers = [self._flat_numbers(one, axis) for one in (scale, zero_point)]
        places = {2: 0 if self.transposed else 1, 3: 2, 4: 3}
        decoded = call(
            self.graph, weight.target, codes, *numbers, places.get(axis, axis), *arguments[4:], **weight.kwargs
        )
        return [decoded, codes, *(one for one in numbers if one not in (scale, zero_point))]

    def _flat_weight(self, weight: fx.Node) -> fx.Node:
        if not self.transposed:
            return call(self.graph, _aten.flatten.using_ints, weight, 1, 2)
        turned = call(self.graph, _aten.flip.default, weight, [2])
        turned = call(self.graph, _aten.permute.default, turned, _BESIDE_THE_BATCH)
        return call(self.graph, _aten.flatten.using_ints, turned, 0, 1)

    def _flat_numbers(self, numbers: fx.Node, axis: int) -> fx.Node:
        """Scales or zero points along a dimension of the weight, along the one that the dimension becomes a part of."""
        channels = 0 if self.transposed else 1
        if axis == channels:
            return call(self.graph, _aten.repeat_interleave.self_int, numbers, self.depth)
        if axis != 2:
            return numbers
        if self.transposed:
            numbers = call(self.graph, _aten.flip.default, numbers, [0])
        return call(self.graph, _aten.repeat.default, numbers, [_value(self.weight).shape[channels]])

    def _repeated(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """The call of a node, of something else."""
        return call(self.graph, node.target, x, *node.args[1:], **node.kwargs)

    def convolved(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        """Return the convolution of images, of shape (N * output depth, O, H, W)."""
        stride, dilation = self.stride[1:], self.dilation[1:]
        padding = [before for before, _ in self.around[1:]]
        if self.transposed:
            options = (stride, padding, self.output_padding[1:], self.groups, dilation)
            return call(self.graph, _aten.conv_transpose2d.input, x, weight, self.bias, *options)
        return call(self.graph, _aten.conv2d.default, x, weight, self.bias, stride, padding, dilation, self.groups)

    def volumes(self, images: fx.Node) -> fx.Node:
        """Return images as the volumes that they are of, laid out in the order of their dimensions."""
        y = call(self.graph, _aten.unflatten.int, images, 0, [-1, self.output_depth])
        y = call(self.graph, _aten.permute.default, y, _BESIDE_THE_BATCH)
        if _value(self.x).ndim == 4:
            y = call(self.graph, _aten.squeeze.dim, y, 0)
        return call(self.graph, _aten.clone.default, y, memory_format=torch.contiguous_format)


def _with_what_is_fused(node: fx.Node, images: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Do to images what XNNPACK does in the layer that made them; returns the last node that it takes the place of."""
    while len(node.users) == 1:
        (reader,) = node.users
        ends = op_name(reader) == QUANTIZE
        if not ends and (not op_name(reader).startswith(FUSED) or not isinstance(reader.meta["val"], torch.Tensor)):
            break
        if reader.args[0] is not node or _value(node).ndim != 5:
            break
        images, node = call(node.graph, reader.target, images, *reader.args[1:], **reader.kwargs), reader
        if ends:
            break
    return node, images


@contextlib.contextmanager
def _sizes_kept(node: fx.Node) -> Iterator[None]:
    """Let no operator narrow the sizes of a program that is dynamic.

    Padding in C++ reads them as numbers, and convolutions ask whether they are given fewer than 16 images.
    """
    mode = detect_fake_mode(_value(node))
    env = None if mode is None else mode.shape_env
    with enable_python_dispatcher(), contextlib.nullcontext() if env is None else env.suppress_guards():
        yield


def _refuse_dynamic_depth(nodes: Sequence[fx.Node]) -> None:
    dynamic = [node for node in nodes if not isinstance(_value(argument(node, "input")).shape[-3], int)]
    if dynamic:
        message = (
            "ExecuTorch has no kernels for convolutions in three dimensions, and they can be written in two for a "
            f"known depth only: {', '.join(map(str, dynamic))}. Leave the dimension that becomes the depth of their "
            "input, the third from the end, out of dynamic_shapes."
        )
        places = [module_path(node) or "the model itself" for node in dynamic]
        raise ConversionError(message, tuple(Problem("target", place, message, Severity.ERROR) for place in places))


def _drop_unread_states(program: ExportedProgram, candidates: set[fx.Node]) -> None:
    """Remove weights in the form that nothing reads any more; they would be written too."""
    signature = program.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in program.graph.find_nodes(op="placeholder"):
        is_written = states.get(node.name) in signature.buffers_to_mutate.values()
        if node in candidates and not node.users and node.name in states and not is_written:
            remove_constant(program, node)


def _around(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Zeros before and behind each dimension, of padding in numbers or in words."""
    if not isinstance(padding, str):
        return [(length, length) for length in for_each_dimension(padding, 3)]
    reaches = [step * (size - 1) if padding == "same" else 0 for size, step in zip(kernel, dilation, strict=True)]
    return [(reach // 2, reach - reach // 2) for reach in reaches]


def _holds_zero(dequantize: fx.Node) -> bool:
    """Whether a code of a tensor is zero, and no other number."""
    arguments: Any = dequantize.args
    _, _, zero_point, low, high = arguments[:5]
    return isinstance(zero_point, int) and low <= zero_point <= high


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
