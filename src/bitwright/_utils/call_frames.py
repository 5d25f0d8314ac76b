"""Which module's own calls are running in this thread; None while the calls belong to nobody.

Function calls are attributed to the innermost frame. Simulators and modules that are not watched run in an empty frame,
so that their calls are not taken for calls of the module around them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._jit_internal
import torch.functional
import torch.nn.functional
import torch.overrides
from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from . import plain_flags

__all__ = ["calling_code", "captured_again_if_corrected", "is_in_branch", "run_by_itself", "shielded", "thread_frames"]

_Captured = TypeVar("_Captured")
_MOST_CAPTURES = 4
# Operators that torch.compile takes only whole, and only where their functions change nothing outside of them.
_BRANCHING = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})
_size, _at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_push, _pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


class _ThreadFrames(threading.local):
    """What is known of a thread.

    Attributes:
        stack: the frames.
        mode: the function mode that looks at them while it is in force.
        corrections: how often a call was found to have been taken for another one.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.mode: TorchFunctionMode | None = None
        self.corrections = 0


thread_frames = _ThreadFrames()

# Where torch's functions that are written in Python look for modes, and what stands for them.
_TORCH_FILES = frozenset(
    module.__file__
    for module in (
        torch._jit_internal,
        torch._tensor,
        torch.functional,
        torch.nn.functional,
        torch.overrides,
        plain_flags,
    )
)


def calling_code() -> tuple[str, int] | None:
    """Return where the call that a torch function mode handles was written: in which function, and where in it.

    To be called by the mode's ``__torch_function__``. None while ``torch.compile`` traces, and in functions that it
    makes to go on after a graph break, whose code is not the model's. ``torch.export`` runs the model's own code.
    """
    if is_dynamo_compiling():
        return None
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in _TORCH_FILES or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    code = frame.f_code
    return None if code.co_name.startswith("torch_dynamo_resume") else (code.co_qualname, frame.f_lasti)


def is_in_branch() -> bool:
    """Return whether ``torch.compile``, which ``torch.cond`` itself calls, traces a branch of it or a loop's body.

    No frame may be entered there, for a list outside of the branch would change.
    """
    return is_dynamo_compiling() and _traces_branch()


def _traces_branch() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if getattr(tracer.source_target, "__name__", "") in _BRANCHING:
            return True
        tracer = tracer.parent
    return False


# What torch.compiler.assume_constant_result does: run it while tracing. Calling that imports torch._dynamo.
_traces_branch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_by_itself(function: Callable[..., Any], *, with_calls: bool = False) -> None:
    """Have ``torch.compile`` leave calls of a function alone that Python makes: neither compiled nor looked up again.

    Calls of it in compiled code become part of that.

    Args:
        function: the function.
        with_calls: leave what it calls alone as well, which may be compiled otherwise.
    """
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_calls else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def captured_again_if_corrected(capture: Callable[[], _Captured]) -> _Captured:
    """Return what ``capture`` does, which has torch.export run a model.

    Where the model makes a call for torch.export only, that may have been taken for a planned one that came after it.
    The model knows better the next time; the last of ``_MOST_CAPTURES`` is taken as it is.
    """
    for _ in range(_MOST_CAPTURES - 1):
        before = thread_frames.corrections
        result = capture()
        if thread_frames.corrections == before:
            return result
    return capture()


def shielded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in an empty frame.

    The mode is taken off meanwhile if it is the innermost one: while a mode is in force, every function, method and
    attribute of a tensor goes through Python.
    """
    if is_in_branch():
        return run(*args, **kwargs)
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
