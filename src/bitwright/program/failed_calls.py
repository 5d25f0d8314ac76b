"""Calls of modules that raise, where the model catches it, as one that tries arguments that not every layer takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

__all__ = ["failed_calls_forgotten"]


@contextmanager
def failed_calls_forgotten() -> Iterator[None]:
    """Have ``torch.export`` leave a module again whose call raises.

    Its tracer (torch 2.13) stays in such a module and ends in an ``AssertionError: Unexpected key ...``. Failed calls
    are not counted either: the next one is the module's first. Only one thread may capture at a time.
    """
    call = fx.Tracer.call_module

    def forgetting(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth, counts = len(self.module_stack), dict(self.num_calls)
        try:
            return call(self, *args, **kwargs)
        except Exception:
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            self.num_calls.clear()
            self.num_calls.update(counts)
            raise

    fx.Tracer.call_module = forgetting  # type: ignore[method-assign]
    try:
        yield
    finally:
        fx.Tracer.call_module = call  # type: ignore[method-assign]
