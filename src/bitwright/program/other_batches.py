"""Whether a graph that was captured for one batch size computes other batches as the model does."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from bitwright.config.spec import CompressionSimulatorBase

__all__ = ["changed_sizes", "holds_for_batches_of"]

_VIEWS = ("view", "reshape", "_unsafe_view", "_reshape_alias", "expand", "flatten", "unflatten")
_SEQUENCES = ("arange", "eye", "linspace", "logspace", "rand", "randint", "randn", "randperm")
_PRODUCTS = ("mul", "mul_", "div", "div_", "true_divide", "floor_divide")

Shape = tuple[int, ...]


def holds_for_batches_of(
    module: fx.GraphModule, before: Sequence[Shape | None], leaves: Sequence[Any], sizes: tuple[int, int]
) -> bool:
    """Return whether a graph may be called with inputs of which some have another size of dimension 0.

    Sizes that the model read from its inputs are constants in the graph. With other batches they make it fail, or pass
    unnoticed as the factor of a mean over the batch. So each node is followed with the sizes alone: whatever depends
    on the changed inputs must be as many times as large along one dimension, must keep that dimension where a view
    would have it, and must not be multiplied with the batch size; nor may there be a sequence as long as the batch,
    or a result of that length that no input enters. Graphs that reduce the batch are not proved.

    Args:
        module: the graph.
        before: shape of each input, as captured; None for what is no tensor or has sizes that vary.
        leaves: the inputs of a call, flattened.
        sizes: the size of the batch that was captured, and the one that came; see ``changed_sizes``.
    """
    try:
        with _unlogged(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            inputs = [mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            captured = _Follower(module)
            captured.run(
                *(leaf if shape is None else leaf.new_empty(shape) for shape, leaf in zip(before, inputs, strict=True))
            )
            follower = _Follower(module, captured.shapes, *sizes)
            follower.run(*inputs)
    except Exception:  # any error of any op: constants do not fit, or an op has no form without numbers
        return False
    return follower.holds


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep PyTorch from logging the errors of operators that are tried."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_off


def changed_sizes(before: Sequence[Shape | None], leaves: Sequence[Any]) -> tuple[int, int] | None:
    """Return the one size of dimension 0 that was captured and the one that came; None if anything else differs.

    Args:
        before: shape of each input, as captured; None for what is no tensor or has sizes that vary.
        leaves: the inputs of a call, flattened.
    """
    found: set[tuple[int, int]] = set()
    for shape, leaf in zip(before, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or shape == tuple(leaf.shape):
            continue
        if not shape or leaf.ndim != len(shape) or tuple(leaf.shape[1:]) != shape[1:]:
            return None
        found.add((shape[0], leaf.shape[0]))
    return found.pop() if len(found) == 1 and all(min(sizes) > 0 for sizes in found) else None


class _Follower(fx.Interpreter):
    """Runs a graph without numbers, and looks where the batch is.

    Args:
        module: the graph.
        before: the shapes of a run with the captured sizes, by node; None for that run.
        captured: the batch size of that run.
        size: the batch size of this one.
    """

    def __init__(
        self, module: fx.GraphModule, before: Mapping[fx.Node, list[Shape]] | None = None,
        captured: int = 1, size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(module, garbage_collect_values=False)
        self.holds = True
        self.shapes: dict[fx.Node, list[Shape]] = {}
        self._before, self._captured, self._size = before, captured, size
        self._batch_of: dict[fx.Node, int | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note its shapes and along which dimension they are larger."""
        result = super().run_node(n)
        self.shapes[n] = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if n.op == "output":
            made = [node for node in n.all_input_nodes if node.op == "call_function" and node not in self._batch_of]
            self.holds &= all(self._captured not in shape for node in made for shape in self.shapes[node])
        elif self._before is not None:
            self._look_at(n, self._before[n], self.shapes[n])
        return result

    def _look_at(self, node: fx.Node, before: list[Shape], shapes: list[Shape]) -> None:
        depends = [source for source in node.all_input_nodes if source in self._batch_of]
        if self._name(node).startswith("new_"):  # of the type of an input, not of its elements
            depends = []
        if not depends and (node.op != "placeholder" or shapes == before):
            self.holds &= self._name(node) not in _SEQUENCES or all(self._captured not in shape for shape in shapes)
            return
        places = [self._place(old, new) for old, new in zip(before, shapes, strict=True)]
        self.holds &= bool(places) and None not in places and not self._multiplies_by_the_size(node)
        self._batch_of[node] = places[0] if len(set(places)) == 1 else None
        if node.op == "call_function" and self._name(node) in _VIEWS:
            self.holds &= self._keeps_place(depends[0], before[0], self._batch_of[node])

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulators keep shapes, and must not see tensors without numbers."""
        called: nn.Module = self.fetch_attr(target)
        if isinstance(called, CompressionSimulatorBase):
            return args[0]
        return super().call_module(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        """Return a module, or a tensor without its numbers."""
        found = super().fetch_attr(target)
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor):
            return mode.from_tensor(found)
        return found

    def _place(self, old: Shape, new: Shape) -> int | None:
        """The one dimension that is as many times as large as the batch is."""
        if len(old) != len(new):
            return None
        larger = [place for place in range(len(old)) if old[place] != new[place]]
        fits = len(larger) == 1 and new[larger[0]] * self._captured == old[larger[0]] * self._size
        return larger[0] if fits else None

    def _keeps_place(self, source: fx.Node, shape: Shape, place: int | None) -> bool:
        """Whether a view has the batch where its elements are, and no constant 1 in its stead."""
        came_from = self._batch_of[source]
        if self._before is None or came_from is None or place is None:
            return False
        in_front = math.prod(self._before[source][0][:came_from])
        first = next((index for index in range(len(shape)) if math.prod(shape[:index]) == in_front), len(shape))
        return place <= first

    def _multiplies_by_the_size(self, node: fx.Node) -> bool:
        numbers = (argument for argument in tree_leaves(node.args) if isinstance(argument, int | float))
        return self._name(node) in _PRODUCTS and any(number == self._captured for number in numbers)

    @staticmethod
    def _name(node: fx.Node) -> str:
        packet = getattr(node.target, "overloadpacket", node.target)
        return str(getattr(packet, "__name__", packet))
