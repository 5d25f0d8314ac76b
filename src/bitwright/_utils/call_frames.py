"""Which module's own calls are running in this thread; None while the calls belong to nobody.

Function calls are attributed to the innermost frame. Simulators and modules that are not watched run in an empty frame,
so that their calls are not taken for calls of the module around them.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["thread_frames"]


class _ThreadFrames(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []


thread_frames = _ThreadFrames()
