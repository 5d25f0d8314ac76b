"""What a model computes under ``torch.no_grad``, which a capture without gradients would not tell from the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn

__all__ = ["no_grad_noted", "stop_gradients", "without_stops"]

_KEY, _STOP = "bitwright_no_grad", "gradient_stop"


class _Threads(threading.local):
    """The scopes that a thread is in, beginning with its capture; None where it captures nothing."""

    scopes: list[AbstractContextManager[Any]] | None = None


_threads = _Threads()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_captures = 0


@contextmanager
def no_grad_noted() -> Iterator[None]:
    """Have nodes that ``torch.export`` makes note in their metadata whether a model computes them under ``no_grad``.

    Scopes of threads that capture nothing are left alone.
    """
    global _captures
    before = _threads.scopes
    with _lock:
        if _captures == 0:
            _undo.append(_watched(torch.no_grad, lambda _: True))
            _undo.append(_watched(torch.enable_grad, lambda _: False))
            _undo.append(_watched(torch.set_grad_enabled, lambda scope: not scope.mode))
            _undo.append(_watched(torch.inference_mode, lambda scope: scope.mode))
        _captures += 1
    _threads.scopes = []
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        _threads.scopes = before
        with _lock:
            _captures -= 1
            while _captures == 0 and _undo:
                _undo.pop()()


def _watched(kind: Any, is_off: Callable[[Any], bool]) -> Callable[[], None]:
    """Have nodes made in scopes of a class note whether these are off; returns a function that undoes it."""
    enter, leave = kind.__enter__, kind.__exit__

    def entering(scope: Any) -> Any:
        result = enter(scope)
        if _threads.scopes is not None:
            _threads.scopes.append(fx_traceback.annotate({_KEY: is_off(scope)}))
            _threads.scopes[-1].__enter__()
        return result

    def leaving(scope: Any, *error: Any) -> Any:
        if _threads.scopes:
            _threads.scopes.pop().__exit__(None, None, None)
        return leave(scope, *error)

    def undo() -> None:
        kind.__enter__, kind.__exit__ = enter, leave

    kind.__enter__, kind.__exit__ = entering, leaving
    return undo


def stop_gradients(module: fx.GraphModule) -> None:
    """Let no gradient pass what the model computes under ``torch.no_grad``; changes the graph of ``module``.

    Where the rest of the graph uses such a result, it gets it detached. What writes to a tensor there gets all that it
    reads detached, so that it may write to parameters, and what is written is as much learned as it was. Results that
    depend on no parameter and on no floating-point input, such as rotations by positions, are left as they are.
    """
    learned: set[fx.Node] = set()
    stopped = False
    for node in list(module.graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            if _may_be_learned(node, module):
                learned.add(node)
            continue
        read = [source for source in node.all_input_nodes if source in learned]
        outside = [user for user in node.users if not _is_noted(user)]
        if read and _is_noted(node) and _writes(node):
            written = node.args[0] if node.args else None
            if isinstance(written, fx.Node) and written in read and not _is_noted(written):
                for user in outside:
                    user.replace_input_with(node, written)
            for source in filter(_is_floating_point, read):
                with module.graph.inserting_before(node):
                    node.replace_input_with(source, _stop(module.graph, source))
            stopped = True
        elif read:
            learned.add(node)
            if outside and _is_noted(node) and _is_floating_point(node):
                with module.graph.inserting_after(node):
                    stop = _stop(module.graph, node)
                for user in outside:
                    user.replace_input_with(node, stop)
                stopped = True
    if stopped:
        module.recompile()


def without_stops(module: fx.GraphModule) -> None:
    """Take out what ``stop_gradients`` put into the graph of ``module``, for a model that is trained no more."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        if node.name.startswith(_STOP):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _stop(graph: fx.Graph, source: fx.Node) -> fx.Node:
    stop = graph.create_node("call_function", torch.ops.aten.detach.default, (source,), name=_STOP)
    stop.meta = {"val": source.meta.get("val")}
    return stop


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _is_noted(node: fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(_KEY, False))


def _may_be_learned(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "placeholder":
        return _is_floating_point(node)
    path, _, name = str(node.target).rpartition(".")
    return isinstance(getattr(module.get_submodule(path), name, None), nn.Parameter)


def _is_floating_point(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
