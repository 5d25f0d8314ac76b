"""What ExecuTorch does again and again while it lowers a program, done once."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen

from bitwright._utils.replacing import replaced

__all__ = ["less_repetition"]

_TRACEBACK = "torch.fx.traceback"
_SDPA = "executorch.backends.xnnpack.partition.graphs.sdpa"
_VERIFIER = "executorch.exir.verification.verifier"


@contextlib.contextmanager
def less_repetition() -> Iterator[None]:
    """Lower programs in a fraction of the time, to the same files.

    For each part of a program that XNNPACK takes, ExecuTorch captures and lowers two models of its own, the patterns of
    attention that it looks for. And each of its dozens of passes copies for every node the history of what it was made
    from, which the pass before has made longer by one entry. The patterns are kept, and histories, which nobody
    changes, are shared. Every pass writes its graph as Python code, too, which is compiled and hardly ever run; that
    happens now when it is run. And to look at the types of what operators are given, all of them are computed on fake
    tensors; the graph has the results of that already.
    """
    with (
        replaced(_module(_SDPA), "get_graphs", _kept),
        replaced(_module(_TRACEBACK), "copy", _sharing),
        replaced(fx.GraphModule, "recompile", _when_called),
        replaced(_module(_VERIFIER), "EdgeOpArgValidator", _reading),
    ):
        yield


def _module(name: str) -> Any:
    """A module; None if there is none."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


@functools.cache
def _kept(make: Callable[[], Any]) -> Callable[[], Any]:
    return functools.cache(make)


def _sharing(_: Any) -> Any:
    """What ``torch.fx.traceback`` calls of the module ``copy``; it copies histories deeply, and nothing else."""
    return SimpleNamespace(copy=copy.copy, deepcopy=list)


@functools.cache
def _when_called(recompile: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], None]:
    """``GraphModule.recompile`` that waits until the code is run, or read."""

    class Code:
        """Found where a module has no ``_code`` of its own."""

        def __get__(self, module: fx.GraphModule, owner: Any = None) -> str:
            recompile(module)
            return str(vars(module)["_code"])

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(self)  # replaces this function
        return self(*args, **kwargs)

    def later(self: fx.GraphModule) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        vars(self).pop("_code", None)
        own: Any = type(self)  # each graph module has a class of its own
        own._code, own.forward = Code(), forward

    return later


@functools.cache
def _reading(validator: type[fx.Interpreter]) -> type[fx.Interpreter]:
    """ExecuTorch's look at types, with the results that the nodes know.

    Of an operator that returns a list, ExecuTorch counts the rows of the first tensor where it means to count tensors,
    and so fixes a number of rows that is dynamic.
    """

    class Listed(fx.Interpreter):
        node: fx.Node

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            found = self.node.meta.get("val")
            if not isinstance(found, list):
                return super().call_function(target, args, kwargs)
            self.node.meta["val"] = [found]  # the one result of the operator
            try:
                super().call_function(target, args, kwargs)
            finally:
                self.node.meta["val"] = found
            return found

    class Known(fx.Interpreter):
        node: fx.Node

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            found = self.node.meta.get("val")
            return super().call_function(target, args, kwargs) if found is None else found

    return type(validator.__name__, (Listed, validator, Known), {})
