"""Runs functions in the peer library's interpreter, named by ``BITWRIGHT_PEER_PYTHON``, beside ours.

A function under comparison is written once, takes ``(package, payload)``, imports what it needs from ``package``
(``"bitwright"`` here, ``"coreai_opt"`` there) and returns plain data and tensors::

    @requires_peer
    def test_something():
        ours, theirs = both(scales, {"x": torch.randn(4)})
"""

from __future__ import annotations

import atexit
import inspect
import io
import os
import shutil
import struct
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PEER_PYTHON = os.environ.get("BITWRIGHT_PEER_PYTHON", "")
PEER_PACKAGE = "coreai_opt"

_ABSENT = not PEER_PYTHON or shutil.which(PEER_PYTHON) is None
_MARKS = (
    pytest.mark.peer,
    pytest.mark.skipif(_ABSENT, reason="BITWRIGHT_PEER_PYTHON names no interpreter that has coreai-opt"),
)
_WORKER = Path(__file__).with_name("_peer_worker.py")


def requires_peer(test: Any) -> Any:
    """Mark a test or a class of tests that needs the peer; skipped where it is not installed."""
    for mark in _MARKS:
        test = mark(test)
    return test


class PeerError(Exception):
    """A function raised in the peer's interpreter; ``kind`` is the name of the exception's class."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


def call_peer(function: Callable[[str, Any], Any], payload: Any) -> Any:
    """Return ``function("coreai_opt", payload)`` as the peer's interpreter computes it.

    ``function`` must be at the top level of its module and use no other name of it. Payload and result consist of
    tensors, dtypes, numbers, strings, None, lists, tuples and dicts.

    Raises:
        PeerError: the function raised.
    """
    return _worker().call(function, payload)


def both(function: Callable[[str, Any], Any], payload: Any) -> tuple[Any, Any]:
    """Return what ``function`` gives with our package, and with the peer's."""
    return function("bitwright", payload), call_peer(function, payload)


class _Worker:
    """A process of the peer's interpreter that waits for functions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PEER_PYTHON, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )
        atexit.register(self.close)

    def call(self, function: Callable[[str, Any], Any], payload: Any) -> Any:
        request = {
            "source": textwrap.dedent(inspect.getsource(function)),
            "name": function.__name__,
            "package": PEER_PACKAGE,
            "payload": payload,
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        buffer = io.BytesIO()
        torch.save(request, buffer)
        stdin.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
        stdin.flush()
        header = stdout.read(8)
        if len(header) < 8:
            raise PeerError("EOFError", f"the peer's interpreter ended with {self._process.wait()}", "")
        (size,) = struct.unpack("<Q", header)
        answer = torch.load(io.BytesIO(stdout.read(size)), weights_only=True)
        if "error" in answer:
            raise PeerError(answer["error"], answer["message"], answer["trace"])
        return answer["result"]

    def close(self) -> None:
        """End the process by closing its input."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=30)


_RUNNING: list[_Worker] = []


def _worker() -> _Worker:
    if not _RUNNING:
        _RUNNING.append(_Worker())
    return _RUNNING[0]
