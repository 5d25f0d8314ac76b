"""The lines of ``forward`` methods that an op was called from."""

from __future__ import annotations

import linecache
import re
import sys

from torch import fx

from .types import SourceFrame

__all__ = ["frames_of_node", "running_frames"]

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>\S+)\n(?P<code>[^\n]*)')


def running_frames() -> tuple[SourceFrame, ...]:
    """Return the ``forward`` frames of the running call stack, outermost first."""
    found: list[SourceFrame] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward":
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            found.append(SourceFrame(code.co_filename, frame.f_lineno, "forward", line))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(found))


def frames_of_node(node: fx.Node) -> tuple[SourceFrame, ...]:
    """Return the ``forward`` frames in the stack trace that ``torch.export`` kept on a node, outermost first."""
    trace = node.meta.get("stack_trace") or ""
    return tuple(
        SourceFrame(match["file"], int(match["line"]), "forward", match["code"].strip())
        for match in _FRAME.finditer(trace)
        if match["function"] == "forward"
    )
