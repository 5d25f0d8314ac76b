"""From a prepared graph to one in which nothing is left to be learnt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.module_copy import replicate_module
from bitwright.program.graph_module import TracedGraphModule, uncompiled_copy
from bitwright.program.graph_record import copy_graph
from bitwright.program.no_grad_scopes import without_stops
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .batch_norm import BiasFold, OutputFold, WeightFold, WeightUnfold
from .fold_insert import FOLDS

__all__ = ["folded_copy", "folded_norms"]

# Where a folded graph says which batch norms are part of its weights.
_NORMS = "_folded_norms"


def folded_copy(prepared: fx.GraphModule) -> TracedGraphModule:
    """Return a copy in eval mode with batch norms folded into weights and biases; simulators stay.

    The copy has simulators of its own and refers to the parameters that folding does not change. Its views may copy,
    since what a target puts in the places of simulators may lie in another order. Its code is not generated yet.
    ``prepared`` is left as it is.
    """
    if not isinstance(prepared, TracedGraphModule):  # what passes of others made of one
        prepared = TracedGraphModule(prepared, copy_graph(prepared.graph))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _states(prepared)}
    for child in prepared.modules():
        if isinstance(child, FakeQuantizeImplBase):
            replicate_module(child, memo)
    twin = uncompiled_copy(prepared, memo)
    twin.eval()
    without_stops(twin)
    for view in twin.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        view.target = torch.ops.aten.reshape.default
    twin.__dict__[_NORMS] = folded_norms(prepared)
    with torch.no_grad():
        _Folder(twin).run()
    return twin


def folded_norms(graph: fx.GraphModule) -> list[str]:
    """Return paths of the batch norms that stand as folds in a prepared graph, or did so before it was finalized.

    Each path of one that has several.
    """
    nodes = graph.graph.find_nodes(op="call_module")
    folds = [node for node in nodes if isinstance(graph.get_submodule(str(node.target)), OutputFold)]
    means: list[Any] = [node.args[3] for node in folds]
    ids = {id(_state(graph, str(mean.target))) for mean in means}
    buffers = [(*name.rpartition("."), id(buffer)) for name, buffer in graph.named_buffers(remove_duplicate=False)]
    found = [path for path, _, attribute, of in buffers if attribute == "running_mean" and of in ids]
    return [*graph.__dict__.get(_NORMS, ()), *found]


def _state(module: nn.Module, target: str) -> torch.Tensor:
    path, _, name = target.rpartition(".")
    state: torch.Tensor = getattr(module.get_submodule(path), name)
    return state


def _states(module: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for child in _outside_simulators(module):
        found += [tensor for tensor in (*child._parameters.values(), *child._buffers.values()) if tensor is not None]
    return found


def _outside_simulators(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, FakeQuantizeImplBase):
        return []
    return [module, *(found for child in module.children() for found in _outside_simulators(child))]


class _Folder:
    """Replaces the nodes of folds by the tensors that they compute."""

    def __init__(self, module: TracedGraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.names: dict[tuple[Any, ...], str] = {}
        self.targets: set[str] = set()
        self.paths: dict[str, list[str]] = {}

    def run(self) -> None:
        if FOLDS not in self.module._modules:
            return
        nodes = [node for node in self.graph.nodes if node.op == "call_module" and str(node.target).startswith(FOLDS)]
        folds = {node: self.module.get_submodule(str(node.target)) for node in nodes}
        sources = (source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")
        read = {id(_state(self.module, str(source.target))) for source in sources}
        constants = {
            node: fold(*(self._value(argument) for argument in node.args))
            for node, fold in folds.items()
            if isinstance(fold, WeightFold | BiasFold)
        }
        for node, fold in folds.items():
            if isinstance(fold, OutputFold | WeightUnfold):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        self._take_out_of_simulators()
        self.targets = {fold.target for fold in folds.values() if isinstance(fold, WeightFold | BiasFold)}
        # Weights first: their names tell of layers with several, and biases may be new.
        for node, constant in sorted(constants.items(), key=lambda entry: isinstance(folds[entry[0]], BiasFold)):
            self._replace(node, folds[node], constant)
        del self.module._modules[FOLDS]
        self._drop_unread(read)

    def _take_out_of_simulators(self) -> None:
        """Have simulators of folded weights take nothing but the weight: what is behind them counts in training."""
        for node in self.graph.nodes:
            if _calls_simulator(self.module, node) and len(node.args) > 1:
                node.args = node.args[:1]
                simulator = self.module.get_submodule(str(node.target))
                assert isinstance(simulator, FakeQuantizeImplBase)
                simulator.behind = None

    def _replace(self, node: fx.Node, fold: nn.Module, constant: torch.Tensor) -> None:
        assert isinstance(fold, WeightFold | BiasFold)
        sources = tuple(self._source(argument) for argument in node.args)
        key = (fold.target, fold.layout, *sources)
        if key not in self.names:
            self.names[key] = self._store(fold.target, constant, sources[0])
        with self.graph.inserting_before(node):
            replacement = self.graph.get_attr(self.names[key])
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        self.graph.erase_node(node)

    def _store(self, target: str, constant: torch.Tensor, raw: str) -> str:
        """Keep a folded tensor under the layer's own name, or beside it if something else stands or is read there.

        A layer with several names has it under each of them.

        Args:
            target: the layer's own name.
            constant: the folded tensor.
            raw: name of the tensor that was folded, empty if there was none.
        """
        name, number = target, 0
        while name in self.names.values() or not (self._is_free(name) or (name == raw and not self._is_shared(raw))):
            number += 1
            name = f"{target}_folded_{number}"
        folded = nn.Parameter(constant.detach(), requires_grad=False)
        for one in [name, *self._further_names(name, raw)]:
            path, _, attribute = one.rpartition(".")
            self.module.get_submodule(path)._parameters[attribute] = folded
        return name

    def _further_names(self, name: str, raw: str) -> list[str]:
        """Return what else a folded tensor is called, but for names of other layers that share it and are folded too.

        A bias that the layer did not have gets the names that go with those of its weight.
        """
        path, _, attribute = name.rpartition(".")
        found: list[str] = []
        if name == raw:
            tensor = _state(self.module, raw)
            named = self.module.named_parameters(remove_duplicate=False)
            found = [further for further, other in named if other is tensor and further != raw]
            self.paths[path] = [further.rpartition(".")[0] for further in found]
        elif not raw:
            further = (f"{other}.{attribute}".lstrip(".") for other in self.paths.get(path, ()))
            found = [name for name in further if self._is_free(name)]
        return [name for name in found if name not in self.targets]

    def _is_free(self, name: str) -> bool:
        path, _, attribute = name.rpartition(".")
        return getattr(self.module.get_submodule(path), attribute, None) is None

    def _is_shared(self, raw: str) -> bool:
        """Whether others than folds read a tensor, directly or behind simulators."""
        readers = [user for node in self.graph.find_nodes(op="get_attr", target=raw) for user in node.users]
        for reader in readers:
            if _calls_simulator(self.module, reader):
                readers += reader.users
            elif not str(reader.target).startswith(FOLDS):
                return True
        return False

    def _source(self, argument: Any) -> str:
        while argument is not None and argument.op == "call_module":  # a simulator on a bias
            argument = argument.args[0]
        return "" if argument is None else str(argument.target)

    def _value(self, argument: Any) -> torch.Tensor | None:
        if argument is None:
            return None
        if argument.op == "call_module":
            simulated: torch.Tensor = self.module.get_submodule(str(argument.target))(self._value(argument.args[0]))
            return simulated
        return _state(self.module, str(argument.target))

    def _drop_unread(self, read: Collection[int]) -> None:
        """Remove nodes that nobody reads any more, and, under all of its names, what only the folds read.

        Args:
            read: by ``id`` the tensors that the folds read.
        """
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or _calls_simulator(self.module, node)):
                self.graph.erase_node(node)
        still = {id(_state(self.module, str(node.target))) for node in self.graph.find_nodes(op="get_attr")}
        gone = set(read) - still
        for container in _outside_simulators(self.module):
            for tensors in (container._parameters, container._buffers):
                for name in [name for name, tensor in tensors.items() if id(tensor) in gone]:
                    del tensors[name]


def _calls_simulator(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), FakeQuantizeImplBase)
