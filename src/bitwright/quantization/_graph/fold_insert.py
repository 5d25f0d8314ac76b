"""Rewrite layer and batch norm into a layer with a folded weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright.planning.chains import Chain
from bitwright.program.aten_names import aten_name, schema_names
from bitwright.program.graph_module import TracedGraphModule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .batch_norm import BiasFold, FoldLayout, OutputFold, WeightFold, WeightUnfold, captured_momentum, channels_of
from .mode_ops import batch_counter

__all__ = ["FOLDS", "OP_NAME", "Fold", "fold_batch_norms", "foldable_biases", "foldable_norms", "unfold_weights"]

FOLDS = "batch_norm_folds"
OP_NAME = "bitwright_op"
"""Key of ``node.meta`` for the name that a renamed layer has in the program and in the float model's graph."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A layer with a folded weight.

    Attributes:
        layer: node of the convolution or linear layer.
        weight: node of the folded weight.
        output: node that took the batch norm's place.
        name: the batch norm's name.
        variant: the same for layers whose folded weights are equal because weight and batch norm are the same.
    """

    layer: fx.Node
    weight: fx.Node
    output: fx.Node
    name: str
    variant: tuple[str, ...]


def fold_batch_norms(module: TracedGraphModule, chains: Sequence[Chain]) -> dict[fx.Node, Fold]:
    """Fold every batch norm that stands right behind a layer; return the folds by the layer's node.

    Left as they are: batch norms without running statistics, over another dimension than the layer's output channels,
    and behind layers whose weight is computed.
    """
    folds: dict[fx.Node, Fold] = {}
    for layer, norm, parts in _foldable(module, chains):
        folds[layer] = _rewrite(module, layer, norm, parts, len(folds))
    _name_as_pt2e_does(module, list(folds.values()))
    return folds


def foldable_norms(module: TracedGraphModule, chains: Sequence[Chain]) -> set[str]:
    """Return the names of the nodes of the batch norms that ``fold_batch_norms`` folds."""
    return {norm.name for _, norm, _ in _foldable(module, chains)}


def foldable_biases(module: TracedGraphModule, chains: Sequence[Chain]) -> set[str]:
    """Return the dotted names of the biases that only layers with a folded batch norm read."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for layer, _, parts in _foldable(module, chains):
        if parts.bias is not None:
            found.setdefault(parts.bias, []).append(layer)
    return {str(bias.target) for bias, layers in found.items() if set(bias.users) <= set(layers)}


def unfold_weights(module: TracedGraphModule, folds: Iterable[Fold]) -> None:
    """Let layers read their folded weights, behind the simulators that stand on them now, without the scale.

    The simulator of a folded weight takes the scale out itself, so that it stands right in front of its layer, as in
    the graphs of PT2E.
    """
    for fold in folds:
        _, gamma, var = fold.weight.args
        folding = module.get_submodule(str(fold.weight.target))
        assert isinstance(folding, WeightFold)
        read = _get_argument(fold.layer, "weight")
        unfolding = WeightUnfold(folding)
        if read is not fold.weight:
            simulator = module.get_submodule(str(read.target))
            assert isinstance(simulator, FakeQuantizeImplBase)
            simulator.behind = unfolding.train(folding.training)
            read.args = (*read.args, gamma, var)
            continue
        number = int(str(fold.weight.target).split(".")[1])
        with module.graph.inserting_before(fold.layer):
            call = _Caller(module, number, folding.training)
            unfolded = call("unfold", unfolding, (read, gamma, var), fold.layer)
        unfolded.meta["val"] = read.meta.get("val")
        _set_argument(fold.layer, "weight", unfolded)


def _name_as_pt2e_does(module: TracedGraphModule, folds: Sequence[Fold]) -> None:
    """Name nodes as torchao's ``prepare_qat_pt2e`` leaves them, for code that looks for them by name.

    It writes convolutions and the batch norms behind them anew, then all folded batch norms, in training mode twice.
    Every writing takes the next free numbers.
    """
    for fold in folds:
        if _is_conv(fold):
            fold.layer.meta[OP_NAME] = fold.layer.name
            _take_next_number(fold.layer, fold.layer.name)
    for turn in range(3):
        for fold in folds:
            training = module.get_submodule(str(fold.output.target)).training
            if (turn > 0 or _is_conv(fold)) and turn < 2 + training:
                _take_next_number(fold.output, fold.name)


def _is_conv(fold: Fold) -> bool:
    return aten_name(fold.layer.target).startswith("conv")


def _take_next_number(node: fx.Node, name: str) -> None:
    node.name = node.graph._graph_namespace.create_name(re.sub(r"_\d+$", "", name), None)


@dataclass(frozen=True, slots=True)
class _Parts:
    weight: fx.Node
    bias: fx.Node | None
    gamma: fx.Node | None
    beta: fx.Node | None
    mean: fx.Node
    var: fx.Node
    momentum: float | None
    training: bool
    layout: FoldLayout


def _foldable(module: TracedGraphModule, chains: Sequence[Chain]) -> Iterator[tuple[fx.Node, fx.Node, _Parts]]:
    for chain in chains:
        if chain.batch_norm is not None:
            layer, norm = chain.primary.handle, chain.batch_norm.handle
            parts = _parts(module, layer, norm)
            if parts is not None:
                yield layer, norm, parts


def _parts(module: TracedGraphModule, layer: fx.Node, norm: fx.Node) -> _Parts | None:
    named: dict[str, Any] = {**dict(zip(schema_names(layer.target), layer.args, strict=False)), **layer.kwargs}
    weight, bias = named.get("weight"), named.get("bias")
    arguments: Any = norm.args
    _, gamma, beta, mean, var, training, momentum, eps = arguments[:8]
    states = [node for node in (weight, bias, gamma, beta, mean, var) if node is not None]
    if weight is None or mean is None or var is None or not all(map(_is_state, states)):
        return None
    transposed = aten_name(layer.target).startswith("conv_transpose")
    groups = int(named.get("groups", 1))
    shape, channels = _tensor(module, weight).shape, _tensor(module, mean).numel()
    rank = len(layer.meta["val"].shape)
    if rank != max(len(shape), 2) or channels_of(shape, transposed, groups) != channels:
        return None
    layout = FoldLayout.of_layer(shape, transposed, groups, float(eps))
    return _Parts(weight, bias, gamma, beta, mean, var, captured_momentum(momentum), bool(training), layout)


def _is_state(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _tensor(module: TracedGraphModule, node: Any) -> torch.Tensor:
    path, _, name = str(node.target).rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), name)
    return tensor


def _rewrite(module: TracedGraphModule, layer: fx.Node, norm: fx.Node, parts: _Parts, number: int) -> Fold:
    graph = module.graph
    batches = batch_counter(module, parts.mean)
    call = _Caller(module, number, parts.training)
    weight_name = str(parts.weight.target)
    bias_name = str(parts.bias.target) if parts.bias is not None else ".".join((*weight_name.split(".")[:-1], "bias"))
    with graph.inserting_before(layer):
        weight_fold = WeightFold(parts.layout, weight_name)
        weight = call("weight", weight_fold, (parts.weight, parts.gamma, parts.var), layer)
        statistics = (parts.gamma, parts.beta, parts.mean, parts.var)
        bias_fold = BiasFold(parts.layout, bias_name, _tensor(module, parts.weight).dtype)
        bias = call("bias", bias_fold, (parts.bias, *statistics), layer)
    weight.meta["val"], bias.meta["val"] = parts.weight.meta.get("val"), parts.mean.meta.get("val")
    with graph.inserting_before(norm):
        fold = OutputFold(parts.layout.eps, parts.momentum)
        output = call("output", fold, (layer, *statistics, batches), norm)
    _set_argument(layer, "weight", weight)
    _set_argument(layer, "bias", bias)
    norm.replace_all_uses_with(output)
    graph.erase_node(norm)
    variant = tuple(str(node.target) if node is not None else "" for node in (parts.weight, parts.gamma, parts.var))
    return Fold(layer, weight, output, norm.name, (*variant, str(parts.layout.eps)))


@dataclass(slots=True)
class _Caller:
    """Adds the modules of one fold and the nodes that call them."""

    module: TracedGraphModule
    number: int
    training: bool

    def __call__(self, role: str, fold: nn.Module, args: tuple[Any, ...], place: fx.Node) -> fx.Node:
        container = self._container(self._container(self.module, FOLDS), str(self.number))
        fold.training = self.training
        container.add_module(role, fold)
        node = self.module.graph.create_node("call_module", f"{FOLDS}.{self.number}.{role}", args)
        node.meta = {key: place.meta[key] for key in ("nn_module_stack", "stack_trace", "val") if key in place.meta}
        return node

    def _container(self, parent: nn.Module, name: str) -> nn.Module:
        if name not in parent._modules:
            child = nn.Module()
            child.training = self.training
            parent.add_module(name, child)
        found = parent._modules[name]
        assert found is not None
        return found


def _get_argument(node: fx.Node, name: str) -> fx.Node:
    position = schema_names(node.target).index(name)
    value = node.args[position] if position < len(node.args) else node.kwargs[name]
    assert isinstance(value, fx.Node)
    return value


def _set_argument(node: fx.Node, name: str, value: fx.Node) -> None:
    position = schema_names(node.target).index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    elif position == len(node.args) and name not in node.kwargs:
        node.args = (*node.args, value)
    else:
        node.update_kwarg(name, value)
