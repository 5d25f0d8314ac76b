"""Check that a captured graph is called with the shapes and the constants that it was captured for."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import tree_leaves, tree_unflatten

from .batch_dependence import computes_with_sizes
from .float_graph import FloatGraph
from .free_batch import FREE_BATCH, FreeBatch
from .other_batches import changed_sizes, holds_for_batches_of
from .size_conditions import ASSUMED, SizeCondition, single_refused

__all__ = ["Dimension", "InputCheck", "InputShape", "Origin"]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of an input.

    Attributes:
        size: the only size that fits, None for a dynamic dimension.
        symbol: dynamic dimensions with the same symbol must have the same size; empty where sizes are free.
        minimum: smallest size of a dynamic dimension.
        maximum: largest size, None for no limit.
    """

    size: int | None
    symbol: str = ""
    minimum: int = 0
    maximum: int | None = None

    def fits(self, size: int, seen: dict[str, int]) -> bool:
        """Whether ``size`` is allowed, given the sizes that symbols had before."""
        if self.size is not None:
            return size == self.size
        if size < self.minimum or (self.maximum is not None and size > self.maximum):
            return False
        return not self.symbol or seen.setdefault(self.symbol, size) == size

    def __str__(self) -> str:
        if self.size is not None:
            return str(self.size)
        limits = f"{self.minimum}..{'' if self.maximum is None else self.maximum}"
        return f"{self.symbol or 'any'} ({limits})"


@dataclass(frozen=True, slots=True)
class InputShape:
    """What is known about one input.

    Attributes:
        name: of the input.
        dimensions: None where the input is no tensor.
        constant: the number, flag, string or None that the graph computes with whatever comes, in a tuple of one; None
            where the input is a tensor, or a number that the graph takes as it comes.
    """

    name: str
    dimensions: tuple[Dimension, ...] | None
    constant: tuple[Any] | None = None

    def check_kind(self, leaf: Any) -> None:
        """Check that what came is of the kind, or the constant, that the graph was captured for.

        Raises:
            ValueError: it is not; names the input, and says what was captured and what came.
        """
        if self.constant is None:
            if leaf is None and self.dimensions is not None:
                raise self._other_kind("a tensor", "None")
        elif not _is_same(leaf, self.constant[0]):
            raise self._other_kind(_described(self.constant[0]), _described(leaf))

    def _other_kind(self, captured: str, came: str) -> ValueError:
        return ValueError(
            f"Input {self.name!r} was {captured} when the graph was captured, and is {came} now. Whatever is no tensor "
            "is fixed in the graph: prepare a model for each such value, pass a number as a tensor of one element, or "
            'set execution_mode="eager" in the QuantizerConfig.'
        )


class Origin:
    """The model that a graph was captured from, as long as somebody has it; copies refer to it, pickles do not.

    Args:
        model: the model.
        graph: as it was captured.
    """

    def __init__(self, model: nn.Module | None = None, graph: FloatGraph | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self.graph = graph

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it is gone."""
        return None if self._model is None else self._model()

    def compared(self, leaves: Sequence[Any], free: FreeBatch | None = None) -> bool | None:
        """Whether the graph is seen to compute what the model does, with these inputs; None if nobody can tell."""
        model = self.model
        return None if model is None or self.graph is None else self.graph.compared_with(model, leaves, free)

    def free_batch(self, leaves: Sequence[Any], place: int, sizes: tuple[int, int]) -> FreeBatch | None:
        """What follows the batch in the graph, as a capture of the model with these inputs shows; None if none does."""
        model = self.model
        return None if model is None or self.graph is None else self.graph.free_batch(model, leaves, place, sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Origin, ()


@dataclass(frozen=True, slots=True)
class InputCheck:
    """A forward pre-hook that refuses inputs of other shapes, which constants in the graph would not fit.

    Other batch sizes pass where the graph is seen to hold for them.

    Attributes:
        parameters: names of forward's arguments, in order.
        shapes: one entry for each flattened input.
        origin: the model, which is asked whether it computes with the size of the batch, and what it computes where
            it takes another branch.
        conditions: what must be true of sizes that vary.
    """

    parameters: tuple[str, ...]
    shapes: tuple[InputShape, ...]
    origin: Origin
    conditions: tuple[SizeCondition, ...] = ()

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of a call of ``module``.

        Raises:
            ValueError: an input has another shape than the graph was captured for, or one for which the model takes
                another branch with other results, or is another number, flag or string; names the input, and says what
                was captured and what came.
        """
        if torch.compiler.is_compiling():
            return
        if kwargs:
            named = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
            args = [named[name] for name in self.parameters if name in named]
        self.check_leaves(module, tree_leaves(tuple(args)))

    def check_leaves(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        """Check the flattened inputs of ``module``.

        Raises:
            ValueError: as for a call.
        """
        if len(leaves) != len(self.shapes):
            return  # the generated code reports another structure of the arguments
        seen: dict[str, int] = {}
        for leaf, expected in zip(leaves, self.shapes, strict=True):
            expected.check_kind(leaf)
            if expected.dimensions is None or not isinstance(leaf, torch.Tensor):
                continue
            if not _fits(expected.dimensions, tuple(leaf.shape), seen):
                if self._holds_all_the_same(module, leaves):
                    break
                raise _misfit(expected, expected.dimensions, tuple(leaf.shape), self.origin.model is None)
        broken = next((condition for condition in self.conditions if not condition.holds(seen)), None)
        if broken is not None and not self._has_the_same_numbers(module, leaves, seen):
            raise broken.refusal(seen, self._names_of_symbols(), self.origin.model is None)
        single = tuple(sorted((symbol, size) for symbol, size in seen.items() if type(size) is int and size < ASSUMED))
        if single and not self._holds_for_single(module, leaves, single):
            raise single_refused(dict(single), self._names_of_symbols())

    def _holds_for_single(self, module: nn.Module, leaves: Sequence[Any], single: tuple[tuple[str, int], ...]) -> bool:
        """Whether the graph is not seen to be wrong where these sizes are 0 or 1, which it was not captured for.

        The model is asked once for each set of such sizes, whatever the others are.
        """
        known: dict[Any, bool] = module.__dict__.setdefault("_single_sizes", {})
        if single not in known:
            known[single] = self.origin.compared(leaves) is not False
        return known[single]

    def _has_the_same_numbers(self, module: nn.Module, leaves: Sequence[Any], seen: Mapping[str, int]) -> bool:
        """Whether the other branch that the model takes computes what the graph's does; kept, also in copies."""
        known: set[Any] = module.__dict__.setdefault("_other_branches", set())
        sizes = tuple(sorted(seen.items()))
        if sizes not in known and self.origin.compared(leaves) is True:
            known.add(sizes)
        return sizes in known

    def _names_of_symbols(self) -> dict[str, str]:
        """What to call the sizes that vary: the first dimension of an input that is one."""
        found: dict[str, str] = {}
        for shape in self.shapes:
            for place, dimension in enumerate(shape.dimensions or ()):
                found.setdefault(dimension.symbol, f"{shape.name}.shape[{place}]")
        return found

    def _holds_all_the_same(self, module: nn.Module, leaves: Sequence[Any]) -> bool:
        """Whether the inputs differ in the size of the batch alone, and the graph is one for any; found once."""
        came = tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        known: dict[Any, bool] = module.__dict__.setdefault("_other_batches", {})
        if came not in known:
            known[came] = isinstance(module, fx.GraphModule) and self._holds_for(module, leaves)
        return known[came]

    def _holds_for(self, module: fx.GraphModule, leaves: Sequence[Any]) -> bool:
        """Whether the graph is one for a batch of another size, as it is or with the sizes in it that follow it."""
        before = [_static(shape.dimensions) for shape in self.shapes]
        sizes = changed_sizes(before, leaves)
        if sizes is None:
            return False
        free: FreeBatch | None = module.__dict__.get(FREE_BATCH)
        unsafe = free is None and self.origin.graph is not None and self.origin.graph.is_recurrent
        same = None if unsafe else self.origin.compared(leaves, free)
        if same is True:
            return True
        alike = free is None and same is None and holds_for_batches_of(module, before, leaves, sizes)
        if alike and not self._model_computes_with(module.graph, before, leaves, sizes):
            return True
        pairs = enumerate(zip(before, leaves, strict=True))
        own = [n for n, (shape, leaf) in pairs if isinstance(leaf, torch.Tensor) and shape != tuple(leaf.shape)]
        if free is not None:
            found = self.origin.free_batch(leaves, own[0], sizes)
            return found is not None and free.agrees(found, sizes[1])
        # Ops that do nothing are left out for a batch of 1: a capture with one shows less than one with several.
        larger = sizes[1] if sizes[1] > 1 else sizes[0] + 1
        found = self.origin.free_batch(_resized(leaves, own, larger), own[0], (sizes[0], larger))
        if found is None or (larger != sizes[1] and self.origin.compared(leaves, found) is not True):
            return False
        if found.added and self.origin.compared(_resized(leaves, own, sizes[0]), found) is not True:
            return False
        return found.follow(module)

    def _model_computes_with(
        self,
        graph: fx.Graph,
        before: Sequence[tuple[int, ...] | None],
        leaves: Sequence[Any],
        sizes: tuple[int, int],
    ) -> bool:
        """Whether the model is seen to compute with the size of the batch, which would be a constant in the graph."""
        model, codegen = self.origin.model, graph._codegen
        if model is None or not isinstance(codegen, _PyTreeCodeGen):
            return False
        captured = {id(leaf): shape for shape, leaf in zip(before, leaves, strict=True) if shape is not None}
        args, kwargs = tree_unflatten(leaves, codegen.pytree_info.in_spec)
        return computes_with_sizes(model, args, kwargs, captured, sizes) is True


# Values of one kind are the same if they are equal.
_KINDS = ((bool, np.bool_), (numbers.Real,))


def _is_same(leaf: Any, constant: Any) -> bool:
    """Whether a graph that was captured with ``constant`` computes what the model does with ``leaf``."""
    kind = next((kind for kind in _KINDS if isinstance(constant, kind)), (type(constant),))
    other = next((kind for kind in _KINDS if isinstance(leaf, kind)), (type(leaf),))
    if kind is not other and not isinstance(leaf, kind):
        return False
    return bool(leaf == constant) or (leaf != leaf and constant != constant)


def _described(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _static(dimensions: tuple[Dimension, ...] | None) -> tuple[int, ...] | None:
    """The sizes of an input; None if one of them varies, or if it is no tensor."""
    sizes = [dimension.size for dimension in dimensions or ()]
    return None if dimensions is None or None in sizes else tuple(size for size in sizes if size is not None)


def _resized(leaves: Sequence[Any], places: Sequence[int], batch: int) -> list[Any]:
    """Inputs of which some have another batch: as many of their rows, or the same ones again."""
    found = list(leaves)
    for place in places:
        leaf = leaves[place].detach()
        found[place] = leaf[torch.arange(batch, device=leaf.device) % leaf.shape[0]]
    return found


def _fits(dimensions: tuple[Dimension, ...], shape: tuple[int, ...], seen: dict[str, int]) -> bool:
    return len(shape) == len(dimensions) and all(
        dimension.fits(size, seen) for dimension, size in zip(dimensions, shape, strict=True)
    )


def _misfit(
    expected: InputShape, dimensions: tuple[Dimension, ...], shape: tuple[int, ...], unasked: bool
) -> ValueError:
    """The error of another shape; ``unasked`` where the model is gone, which could have told about another batch."""
    captured = ", ".join(map(str, dimensions))
    pairs = enumerate(zip(dimensions, shape, strict=False))
    fixed = [place for place, (dimension, size) in pairs if dimension.size not in (None, size)] or [0]
    shapes = ", ".join(f"{place}: torch.export.Dim.AUTO" for place in fixed)
    ask = "Or call the prepared model once with such a batch, before it is saved, while the float model is there. "
    return ValueError(
        f"Input {expected.name!r} has shape {shape}, but the graph was captured for ({captured}). Sizes of the "
        "example inputs are fixed in the graph; to let a dimension vary, pass dynamic_shapes to prepare(), for "
        f"example dynamic_shapes={{{expected.name!r}: {{{shapes}}}}}. {ask if unasked and fixed == [0] else ''}"
        "Where forward itself fixes a size (a Python loop over it), give inputs of one size, or set "
        'execution_mode="eager" in the QuantizerConfig.'
    )
