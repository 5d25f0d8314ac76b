"""Which module's own calls are running in this thread; None while the calls belong to nobody.

Function calls are attributed to the innermost frame. Simulators and modules that are not watched run in an empty frame,
so that their calls are not taken for calls of the module around them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

__all__ = ["shielded", "thread_frames"]

_size, _at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_push, _pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


class _ThreadFrames(threading.local):
    """Attributes: ``stack`` holds the frames, ``mode`` the function mode that looks at them while it is in force."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.mode: TorchFunctionMode | None = None


thread_frames = _ThreadFrames()


def shielded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in an empty frame.

    The mode is taken off meanwhile if it is the innermost one: while a mode is in force, every function, method and
    attribute of a tensor goes through Python.
    """
    stack, size = thread_frames.stack, _size()
    mode = thread_frames.mode
    if mode is not None and (size == 0 or _at(size - 1) is not mode or is_compiling()):
        mode = None
    stack.append(None)
    if mode is not None:
        _pop()
        thread_frames.mode = None
    try:
        return run(*args, **kwargs)
    finally:
        if mode is not None:
            _push(mode)
            thread_frames.mode = mode
        stack.pop()
