"""Run a function in a second thread step by step, so that two models advance together and neither's activations pile
up: one of the two threads runs at any time.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Stepper"]

_T = TypeVar("_T")

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


class _Stopped(BaseException):
    """Ends the function of a stepper that is closed early."""


class Stepper(Generic[_T]):
    """A generator whose body may emit from any depth of its call stack.

    Args:
        body: called in a thread of its own with a function ``emit``, which hands over an item and waits until the next
            one is asked for.
    """

    def __init__(self, body: Callable[[Callable[[_T], None]], Any]) -> None:
        self._body = body
        self._turn = [threading.Semaphore(0), threading.Semaphore(0)]
        self._items: list[_T] = []
        self._closed = False
        self._error: BaseException | None = None
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="bitwright-reference", daemon=True)
        self._modes = _modes_here()
        self.result: Any = None
        self.finished = False

    def next(self) -> _T | None:
        """Return the next item; None when the function has returned, whose result is then in ``result``.

        Raises:
            BaseException: what the function raised.
        """
        if self.finished:
            return None
        if not self._thread.is_alive() and self._thread.ident is None:
            self._thread.start()
        else:
            self._turn[0].release()
        self._turn[1].acquire()
        if self._error is not None:
            raise self._error
        return None if self.finished else self._items.pop()

    def close(self) -> None:
        """End the function where it waits."""
        if self._thread.ident is not None and not self.finished:
            self._closed = True
            self._turn[0].release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                for mode in self._modes:
                    stack.enter_context(mode)
                self.result = self._body(self._emit)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        self.finished = True
        self._turn[1].release()

    def _emit(self, item: _T) -> None:
        self._items.append(item)
        self._turn[1].release()
        self._turn[0].acquire()
        if self._closed:
            raise _Stopped


def _modes_here() -> list[AbstractContextManager[Any]]:
    """Return what torch keeps per thread: inference mode, devices, autocast, the stream; gradients are off."""
    modes: list[AbstractContextManager[Any]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.no_grad(),
    ]
    default = torch.get_default_device()
    if default.type != "cpu":
        modes.append(default)
    for kind in _AUTOCAST:
        if torch.is_autocast_enabled(kind):
            cache = torch.is_autocast_cache_enabled()
            modes.append(torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=cache))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        modes.append(torch.cuda.stream(torch.cuda.current_stream()))
    return modes
