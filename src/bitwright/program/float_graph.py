"""A graph as it was captured, and whether it computes what its model does where that takes another branch.

Mamba-2 pads sequences ``if pad_size > 0:``. A graph that was captured with padding has a pad of any size, also of 0,
which is what the model computes without that branch.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import tree_leaves, tree_unflatten

from .foreign_results import without_foreign_results
from .free_batch import FreeBatch, free_batch
from .graph_record import copy_graph

__all__ = ["FloatGraph", "Recapture", "same_numbers", "varied"]

_ROUNDINGS = {1: 0, 2: 2, 4: 64, 8: 64}
"""How many roundings of the largest number results may differ by, by bytes: sums may be made in another order."""

_FAR = 16
"""Times as much as rounding is another result for sure."""


class Recapture(Protocol):
    """How a model was captured, so that it can be once more."""

    def within(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """What a model is in while it is captured."""

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FloatGraph | None:
        """Capture a model with other inputs, in the mode it is in; it keeps nothing of that."""


class FloatGraph:
    """The ops of a model without simulators; the model's own tensors are not held.

    Args:
        root: has the tensors and submodules that the graph reads.
        graph: is copied.
        model: that was captured, in the mode it was captured in.
        recapture: how that was done; None if it cannot be done again.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, model: nn.Module, recapture: Recapture | None = None) -> None:
        self._recapture = recapture
        self._graph = copy_graph(graph)
        for node in self._graph.nodes:
            node.meta = {}
        own = {name for name, _ in _tensors(model)}
        read = {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}
        self._constants = {name: _attribute(root, name) for name in read - own}
        self._training = {path for path, module in model.named_modules() if module.training}

    def compared_with(self, model: nn.Module, leaves: Sequence[Any], free: FreeBatch | None = None) -> bool | None:
        """Return whether graph and model have the same results: True up to rounding, False by far more than that.

        They are compared twice: with these inputs, and with random ones between their least and largest numbers. What
        is called are copies of the model that share its parameters: state, and random numbers, go on as if this had not
        been.

        Args:
            model: that was captured.
            leaves: inputs of a call, flattened.
            free: sizes in the graph that follow the batch; None for none.

        Returns:
            None where nobody can tell: one of the two fails, the model has other results each time, or hooks and
            wrappers that may be what makes the difference, or there is no input whose numbers differ.
        """
        others = varied(leaves)
        graph = self._graph if free is None else free.applied(self._graph)
        if others is None or graph is None:
            return None
        try:
            with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [self._agrees(model, graph, inputs) for inputs in (leaves, others)]
        except Exception:  # whatever the model, or an op with constants for other sizes, raises
            return None
        return False if False in found else None if None in found else True

    @property
    def is_recurrent(self) -> bool:
        """Whether it has ops that do not look whether their inputs fit, and read beyond them."""
        called = [str(node.target) for node in self._graph.nodes if node.op == "call_function"]
        return any(target.startswith(("aten.gru.", "aten.lstm.", "aten.rnn_")) for target in called)

    def free_batch(
        self, model: nn.Module, leaves: Sequence[Any], place: int, sizes: tuple[int, int]
    ) -> FreeBatch | None:
        """Return which sizes in the graph follow the batch, as another capture of the model shows.

        Args:
            model: that was captured; a copy is captured, which shares its parameters.
            leaves: inputs with another batch, flattened.
            place: of one that has the batch, among these.
            sizes: the batch that was captured, and the one that came.

        Returns:
            None where the model computes something else with the other batch, and where nobody can tell: it cannot be
            captured, or the inputs have no numbers.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._recapture is None or any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in tensors):
            return None
        try:
            with (
                torch.inference_mode(False),
                torch.random.fork_rng(devices=_devices(leaves)),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                args, kwargs = self._arguments([_cloned(leaf) for leaf in leaves])
                other = self._recapture(self._twin(model), args, kwargs)
        except Exception:  # whatever the model, or torch.export, raises
            return None
        if other is None or not _same_constants(self._constants, other._constants):
            return None
        return free_batch(self._graph, other._graph, place, sizes)

    def _agrees(self, model: nn.Module, graph: fx.Graph, leaves: Sequence[Any]) -> bool | None:
        def result(call: Callable[[nn.Module, Sequence[Any]], Any]) -> Any:
            with torch.random.fork_rng(devices=_devices(leaves)):  # both draw the same random numbers
                twin = self._twin(model)
                with contextlib.nullcontext() if self._recapture is None else self._recapture.within(twin):
                    return call(twin, [_cloned(leaf) for leaf in leaves])

        found, expected = result(partial(self._results, graph)), result(self._results_of_model)
        if same_numbers(found, expected):
            return True
        if any(map(_is_watched, model.modules())):
            return None
        is_steady = same_numbers(result(self._results_of_model), expected)
        return False if is_steady and not same_numbers(found, expected, slack=_FAR) else None

    def _twin(self, model: nn.Module) -> nn.Module:
        """A copy of the model that shares its parameters, in the mode that was captured, without others' hooks."""
        twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        for path, module in twin.named_modules():
            module.training = path in self._training
            module._forward_hooks = _own_hooks(module, module._forward_hooks)
            module._forward_pre_hooks = _own_hooks(module, module._forward_pre_hooks)
            vars(module).pop("forward", None)
        return twin

    def _results(self, graph: fx.Graph, twin: nn.Module, leaves: Sequence[Any]) -> Any:
        return _Runner(twin, graph, self._constants).run(*leaves, enable_io_processing=False)

    def _results_of_model(self, twin: nn.Module, leaves: Sequence[Any]) -> Any:
        args, kwargs = self._arguments(leaves)
        with without_foreign_results(twin):
            return twin(*args, **kwargs)

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        codegen = self._graph._codegen
        assert isinstance(codegen, _PyTreeCodeGen)
        args, kwargs = tree_unflatten(leaves, codegen.pytree_info.in_spec)
        return args, kwargs


def same_numbers(results: Any, references: Any, slack: int = 1) -> bool:
    """Return whether two results have the same tensors up to rounding, and else the same leaves.

    Args:
        results: nested as pytrees are.
        references: with as many leaves; where they have floating-point numbers, some must be finite.
        slack: how many times as much as usual rounding may be.
    """
    pairs = list(zip(tree_leaves(results), tree_leaves(references), strict=True))
    floats = [one for _, one in pairs if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()]
    if floats and not any(bool(one.isfinite().any()) for one in floats):
        return False
    return bool(pairs) and all(_is_same(*pair, slack) for pair in pairs)


def _is_same(result: Any, reference: Any, slack: int) -> bool:
    if not isinstance(result, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return bool(type(result) is type(reference) and result == reference)
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return False
    if not reference.is_floating_point():
        return torch.equal(result, reference)
    result, reference = result.detach(), reference.detach()
    finite = reference[reference.isfinite()]
    largest = float(finite.double().abs().max()) if finite.numel() else 0.0
    allowed = slack * _ROUNDINGS[reference.dtype.itemsize] * torch.finfo(reference.dtype).eps * largest
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


def _devices(leaves: Sequence[Any]) -> list[torch.device]:
    """CUDA devices of inputs, whose random numbers a run may draw."""
    return list({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"})


def _same_constants(ones: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two captures have equal tensors besides those of the model, and no bodies of control flow."""
    return ones.keys() == others.keys() and all(
        isinstance(one, torch.Tensor)
        and isinstance(others[name], torch.Tensor)
        and (one.shape, one.dtype) == (others[name].shape, others[name].dtype)
        and bool(torch.isclose(one, others[name], rtol=0.0, atol=0.0, equal_nan=True).all())
        for name, one in ones.items()
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has what its copies are made without."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in vars(module) or any(len(_own_hooks(module, kind)) < len(kind) for kind in hooks)


def _own_hooks(module: nn.Module, hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Hooks of the package that a module's class is from, which are part of it, as transformers' that keep outputs."""
    package, inside, _ = type(module).__module__.partition(".")
    own = f"{package}." if inside else ""
    return OrderedDict((n, hook) for n, hook in hooks.items() if own and str(hook.__module__).startswith(own))


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
