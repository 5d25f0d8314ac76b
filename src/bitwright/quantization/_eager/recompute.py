"""Frames for what gradient checkpointing computes again.

``checkpoint(self.method, x)`` inside a module's forward runs the method a second time in the backward, when the frame
of that forward is gone. So the first call that a frame sees within such a checkpoint has the checkpoint repeat its
function in a frame that goes on counting from there. Torch has no hook for this: what the checkpoint will repeat is
found where ``torch.utils.checkpoint`` keeps it, and where it keeps nothing of the kind, nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["checkpoint_here", "repeat_with"]

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_backward_task = torch._C._current_graph_task_id
_reentrant_forward: Any = CheckpointFunction.forward.__code__
_MARK = "_bitwright_repeats"
_CALLERS = 96


def checkpoint_here(training: bool) -> Any:
    """Return the state of the innermost checkpoint whose first pass runs here, or None.

    Args:
        training: whether the module is in training mode. A forward without gradients in training mode may be the first
            pass of a reentrant checkpoint, for which the callers are searched.
    """
    if is_compiling() or _backward_task() != -1:
        return None
    if torch.is_grad_enabled():
        return _by_hook()
    return _by_caller() if training else None


def repeat_with(checkpoint: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have a checkpoint repeat ``wrap(function)`` in place of its function; only the first wrapper counts."""
    if getattr(checkpoint, _MARK, False):
        return
    for name in ("recompute_fn", "run_function"):
        function = getattr(checkpoint, name, None)
        if callable(function):
            setattr(checkpoint, name, wrap(function))
            setattr(checkpoint, _MARK, True)


def _by_hook() -> Any:
    """A checkpoint that is not reentrant is in force as a hook on saved tensors."""
    hooks = _hooks(True)
    pack: Any = hooks[0] if hooks else None
    code = getattr(pack, "__code__", None)
    if code is None or code.co_filename != _reentrant_forward.co_filename or "frame" not in code.co_freevars:
        return None
    return pack.__closure__[code.co_freevars.index("frame")].cell_contents


def _by_caller() -> Any:
    caller: Any = sys._getframe(2)
    for _ in range(_CALLERS):
        if caller is None or caller.f_code is _reentrant_forward:
            break
        caller = caller.f_back
    else:
        return None
    return None if caller is None else caller.f_locals.get("ctx")
