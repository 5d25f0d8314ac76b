"""Stack traces of captured ops, without the frames that no trace keeps."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.fx import proxy

__all__ = ["short_stack_traces"]

_CAPTURE = "CapturedTraceback"


@contextlib.contextmanager
def short_stack_traces() -> Iterator[None]:
    """Let ``torch.export`` find the lines of the model that an op comes from in a few microseconds.

    It describes the whole call stack for each op and each input, and throws away all but the ``forward`` frames, which
    takes a seventh of its time. Here only what it keeps is described, once for each line.
    """
    before = vars(proxy).get(_CAPTURE)
    if before is None:  # another version of torch
        yield
        return
    setattr(proxy, _CAPTURE, _Capture())
    try:
        yield
    finally:
        setattr(proxy, _CAPTURE, before)


class _Capture:
    """Stands for torch's ``CapturedTraceback``."""

    def __init__(self) -> None:
        self._known: dict[tuple[CodeType, int], traceback.FrameSummary] = {}
        self._anchors: set[tuple[str, str]] = vars(proxy).get("_STACK_TRACE_ANCHORS", set())

    def extract(self, **_: Any) -> _Trace:
        """Return the frames of the running call that a trace keeps, innermost last."""
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if (
                code.co_name == "forward"
                or code.co_filename.endswith("torch/__init__.py")
                or (code.co_filename, code.co_name) in self._anchors
            ):
                frames.append(self._describe(code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return _Trace(frames[::-1])

    def _describe(self, code: CodeType, line: int) -> traceback.FrameSummary:
        known = self._known.get((code, line))
        if known is None:
            known = self._known[code, line] = traceback.FrameSummary(code.co_filename, line, code.co_name)
        return known


class _Trace:
    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self._frames = frames

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self._frames)
