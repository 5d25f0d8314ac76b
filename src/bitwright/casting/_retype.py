"""Dtypes of the values of a graph, changed one node at a time.

Every value has one native dtype: that of the node which computes it. Who needs it in another dtype asks for a
cast, which is made once, in front of the first node that reads it, and shared; unless the value is written to in
place, when each reader casts what it is by then. Because a reader always asks by the *original* node, no cast of a
cast arises, and neighbours that work in the same dtype are connected directly.

A cast belongs to the module of its reader, so that what a submodule returns does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from ._arguments import written_in_place
from ._cleanup import dtype_of
from ._numbers import largest

_KEPT_META = ("stack_trace", "nn_module_stack")
_STALE_META = ("tensor_meta", "example_value", "original_dtype")


class Retyper:
    """Hand out the values of one graph in the dtypes that their consumers work in.

    Args:
        graph: graph whose nodes carry ``meta["val"]``; changed in place.
        inserted: set that collects the casts made here.
        saturated: nodes whose casts get the largest finite number of their dtype in place of larger ones.
    """

    def __init__(self, graph: Graph, inserted: set[Node], saturated: Container[Node] = ()) -> None:
        self._graph = graph
        self._saturated = saturated
        self._inserted = inserted
        self._original = {node: dtype_of(node) for node in graph.nodes}
        self._written = written_in_place(graph)
        self._casts: dict[tuple[Node, torch.dtype], Node] = {}

    def original(self, node: Node) -> torch.dtype | None:
        """Return the dtype that ``node`` had before any change; None when its value is no tensor."""
        return self._original.get(node)

    def is_written(self, node: Node) -> bool:
        """Tell whether the memory of ``node`` was written to in place before any change."""
        return node in self._written

    def value(self, node: Node, dtype: torch.dtype, reader: Node) -> Node:
        """Return a node that holds the value of ``node`` in ``dtype``: itself, or a cast.

        Readers have to ask in the order of the graph.
        """
        if dtype_of(node) == dtype:
            return node
        if node in self._written:
            return self._insert_cast(node, dtype, reader)
        key = (node, dtype)
        if key not in self._casts:
            self._casts[key] = self._insert_cast(node, dtype, reader)
        return self._casts[key]

    def feed(self, node: Node, wanted: Callable[[Node], torch.dtype | None]) -> None:
        """Let every tensor argument of ``node`` arrive in the dtype that ``wanted`` returns for it (None: as it is)."""

        def replace(argument: Node) -> Node:
            dtype = wanted(argument)
            return argument if dtype is None else self.value(argument, dtype, node)

        node.args = torch.fx.map_arg(node.args, replace)
        node.kwargs = torch.fx.map_arg(node.kwargs, replace)

    def feed_original(self, node: Node) -> None:
        """Let every argument of ``node`` arrive in the dtype that it had before any change."""
        self.feed(node, self.original)

    def _insert_cast(self, node: Node, dtype: torch.dtype, reader: Node) -> Node:
        limit = largest(dtype) if node in self._saturated else None
        with self._graph.inserting_before(reader):
            source = node
            if limit is not None:
                source = self._graph.call_function(torch.ops.aten.clamp.default, (node, -limit, limit))
                source.meta = dict(node.meta)
            cast = self._graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
        cast.meta = {key: reader.meta[key] for key in _KEPT_META if key in reader.meta}
        if reader.op == "output" and "nn_module_stack" in node.meta:
            cast.meta["nn_module_stack"] = dict(list(node.meta["nn_module_stack"].items())[:1])
        cast.meta["val"] = retyped(node.meta["val"], dtype)
        self._inserted.add(cast)
        return cast


def insert_cast_after(
    graph: Graph, node: Node, dtype: torch.dtype, pass_inserted: set[Node] | None = None
) -> Node | None:
    """Put a cast behind ``node`` and let all its users read from it; None, and no change, when it has no users."""
    users = sorted(node.users)
    if not users:
        return None
    cast = Retyper(graph, pass_inserted if pass_inserted is not None else set()).value(node, dtype, users[0])
    for user in users:
        user.replace_input_with(node, cast)
    return cast


def retyped(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` (a tensor, fake or real) in ``dtype``, with the same device, sizes and strides."""
    with torch.no_grad(), _guards_of(value):
        cast = value.detach().to(dtype)
        return cast.requires_grad_(value.requires_grad) if dtype.is_floating_point else cast


def set_dtypes(node: Node, dtypes: list[torch.dtype | None]) -> None:
    """Set the dtypes of the tensors in ``meta["val"]`` of ``node``, in pytree order (None: no tensor, as it is)."""
    leaves, spec = pytree.tree_flatten(node.meta["val"])
    changed = [
        leaf if dtype is None or leaf.dtype == dtype else retyped(leaf, dtype)
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    node.meta["val"] = pytree.tree_unflatten(changed, spec)
    for key in _STALE_META:
        node.meta.pop(key, None)


def dtypes_of(value: Any) -> list[torch.dtype | None]:
    """Return the dtypes of the leaves of ``value`` in pytree order; None for what is no tensor."""
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(value)]


class DtypeInference:
    """Ask operators for the dtypes of their results, by running them on fake tensors; answers are remembered.

    The operator itself answers, so type promotion, ``dtype`` arguments and operators that always compute in
    float32 are right without a table of them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[torch.dtype | None] | None] = {}

    def __call__(
        self, node: Node, args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> list[torch.dtype | None] | None:
        """Return the dtypes of the results of ``node.target(*args, **kwargs)``; None when it refuses its arguments."""
        values = torch.fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        key = (node.target, tuple(_promotion_key(leaf) for leaf in pytree.tree_leaves(values)))
        if key not in self._known:
            self._known[key] = self._run(node, *values)
        return self._known[key]

    def _run(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.dtype | None] | None:
        if not callable(node.target):
            raise TypeError(f"{node.name}: {node.target!r} cannot be called")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mode = detect_fake_mode(tensors)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(_guards_of(*tensors))
                if mode is not None:
                    stack.enter_context(mode)
                return dtypes_of(node.target(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None


def _promotion_key(leaf: Any) -> Any:
    """Return what type promotion sees of an argument: dtype and whether it is zero-dimensional, or the Python type."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim() == 0
    return leaf if isinstance(leaf, torch.dtype | bool | str) else type(leaf)


@contextmanager
def _guards_of(*values: Any) -> Iterator[None]:
    """Keep the shape environment of fake ``values`` as it is: no new guards, no pending unbacked symbols."""
    mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    environment = getattr(mode, "shape_env", None)
    with ExitStack() as stack:
        if environment is not None:
            stack.enter_context(environment.suppress_guards())
            stack.enter_context(environment.ignore_fresh_unbacked_symbols())
        yield
