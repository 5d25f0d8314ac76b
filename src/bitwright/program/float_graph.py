"""A graph as it was captured, and whether it computes what its model does where that takes another branch.

Mamba-2 pads sequences ``if pad_size > 0:``. A graph that was captured with padding has a pad of any size, also of 0,
which is what the model computes without that branch.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import tree_leaves, tree_unflatten

from .foreign_results import without_foreign_results
from .graph_record import copy_graph

__all__ = ["FloatGraph", "same_numbers", "varied"]

_ROUNDINGS = {1: 0, 2: 2, 4: 64, 8: 64}
"""How many roundings of the largest number results may differ by, by bytes: sums may be made in another order."""


class FloatGraph:
    """The ops of a model without simulators; the model's own tensors are not held.

    Args:
        root: has the tensors and submodules that the graph reads.
        graph: is copied.
        model: that was captured, in the mode it was captured in.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, model: nn.Module) -> None:
        self._graph = copy_graph(graph)
        for node in self._graph.nodes:
            node.meta = {}
        own = {name for name, _ in _tensors(model)}
        read = {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}
        self._constants = {name: _attribute(root, name) for name in read - own}
        self._training = {path for path, module in model.named_modules() if module.training}

    def computes_as(self, model: nn.Module, leaves: Sequence[Any]) -> bool:
        """Return whether graph and model have the same results, up to rounding.

        They are compared twice: with these inputs, and with random ones between their least and largest numbers. What
        is called are copies of the model that share its parameters: state, and random numbers, go on as if this had not
        been.

        Args:
            model: that was captured.
            leaves: inputs of a call, flattened.

        Returns:
            False also where nobody can tell: one of the two fails, the model has hooks, or there is no input whose
            numbers differ.
        """
        others = varied(leaves)
        if others is None or any(_is_watched(module) for module in model.modules()):
            return False
        try:
            with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return all(self._agrees(model, inputs) for inputs in (leaves, others))
        except Exception:  # whatever the model, or an op with constants for other sizes, raises
            return False

    def _agrees(self, model: nn.Module, leaves: Sequence[Any]) -> bool:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"}

        def result(call: Callable[[nn.Module, Sequence[Any]], Any]) -> Any:
            with torch.random.fork_rng(devices=list(devices)):  # both draw the same random numbers
                return call(self._twin(model), [_cloned(leaf) for leaf in leaves])

        return same_numbers(result(self._results), result(self._results_of_model))

    def _twin(self, model: nn.Module) -> nn.Module:
        """A copy of the model that shares its parameters, in the mode that was captured."""
        twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        for path, module in twin.named_modules():
            module.training = path in self._training
        return twin

    def _results(self, twin: nn.Module, leaves: Sequence[Any]) -> Any:
        return _Runner(twin, self._graph, self._constants).run(*leaves, enable_io_processing=False)

    def _results_of_model(self, twin: nn.Module, leaves: Sequence[Any]) -> Any:
        codegen = self._graph._codegen
        assert isinstance(codegen, _PyTreeCodeGen)
        args, kwargs = tree_unflatten(leaves, codegen.pytree_info.in_spec)
        with without_foreign_results(twin):
            return twin(*args, **kwargs)


def same_numbers(results: Any, references: Any) -> bool:
    """Return whether two results have the same tensors up to rounding, and else the same leaves.

    Args:
        results: nested as pytrees are.
        references: with as many leaves; where they have floating-point numbers, some must be finite.
    """
    pairs = list(zip(tree_leaves(results), tree_leaves(references), strict=True))
    floats = [one for _, one in pairs if isinstance(one, torch.Tensor) and one.is_floating_point()]
    if floats and not any(bool(one.isfinite().any()) for one in floats):
        return False
    return bool(pairs) and all(_is_same(*pair) for pair in pairs)


def _is_same(result: Any, reference: Any) -> bool:
    if not isinstance(result, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return bool(type(result) is type(reference) and result == reference)
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return False
    if not reference.is_floating_point():
        return torch.equal(result, reference)
    result, reference = result.detach(), reference.detach()
    finite = reference[reference.isfinite()]
    largest = float(finite.double().abs().max()) if finite.numel() else 0.0
    allowed = _ROUNDINGS[reference.dtype.itemsize] * torch.finfo(reference.dtype).eps * largest
    return bool(torch.isclose(result, reference, rtol=0.0, atol=allowed, equal_nan=True).all())


class _Runner(fx.Interpreter):
    """Runs a graph with the tensors of a model, and those that the graph has besides."""

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: dict[str, Any]) -> None:
        super().__init__(model, graph=graph)
        self._constants = constants

    def fetch_attr(self, target: str) -> Any:
        """Return a tensor, or the body of a control-flow op."""
        if target not in self._constants:
            return _attribute(self.module, target)
        return _cloned(self._constants[target])


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return [pair for pairs in named for pair in pairs]


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(path), attribute)


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_watched(module: nn.Module) -> bool:
    """Whether calls of a module, or of a copy, may be seen elsewhere."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def varied(leaves: Sequence[Any]) -> list[Any] | None:
    """Return inputs with random numbers between the least and the largest of each; None if none could differ.

    Args:
        leaves: flattened inputs; what is no tensor stays, and so do integers that are all the same.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in tensors):
        return None
    generator, others, found = torch.Generator().manual_seed(0), [], False
    for leaf in leaves:
        other = None
        with contextlib.suppress(Exception):  # a batch of vmap has no numbers
            other = _random_like(leaf, generator) if isinstance(leaf, torch.Tensor) else None
        found |= other is not None
        others.append(leaf if other is None else other)
    return others if found else None


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """A tensor with other numbers; None for complex ones, and for integers that are all the same."""
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    if tensor.is_floating_point():
        finite = tensor.detach()[tensor.isfinite()].double()
        least, largest = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        numbers = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        numbers = least + (largest - least) * numbers if largest > least else least + 2 * numbers - 1
        return numbers.to(tensor.device, tensor.dtype)
    least, largest = int(tensor.min()), int(tensor.max())
    if least == largest:
        return None
    return torch.randint(least, largest + 1, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
