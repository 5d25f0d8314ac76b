"""Timing of alternatives side by side: they take turns, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

__all__ = [
    "Side",
    "Spread",
    "Timing",
    "Worker",
    "alternate",
    "machine",
    "peak_growth",
    "ratio",
    "resident",
    "timed",
    "write_json",
]

# Returns the seconds that one repetition took.
Side = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """What repeated measurements of one side found."""

    minimum: float
    median: float
    maximum: float
    repeats: int

    @classmethod
    def of(cls, found: Sequence[float]) -> Self:
        """Summarise single measurements."""
        return cls(min(found), median(found), max(found), len(found))


class Timing(Spread):
    """Seconds of the repetitions of one side."""

    def __str__(self) -> str:
        values = (self.minimum, self.median, self.maximum)
        if self.median < 1e-3:
            return "/".join(f"{1e6 * v:.1f}" for v in values) + " us"
        return "/".join(f"{1e3 * v:.2f}" for v in values) + " ms"


def timed(run: Callable[[], object], before: Callable[[], object] | None = None, calls: int = 1) -> Side:
    """Make a side of a function.

    Args:
        run: what is measured.
        before: called before each repetition, outside the measurement.
        calls: how often ``run`` is called in one repetition; the time is divided by it.
    """

    def once() -> float:
        if before is not None:
            before()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls

    return once


def alternate(sides: Mapping[str, Side], repeats: int, warmup: int = 2, pause: float = 0.0) -> dict[str, Timing]:
    """Measure the sides in turn, ``repeats`` times each.

    Args:
        sides: what to measure, by name.
        repeats: measurements of each side.
        warmup: rounds that are not counted: compilation, first allocation.
        pause: seconds to sleep before each measurement, so that threads of the side before come to rest.
    """
    for _ in range(warmup):
        for side in sides.values():
            side()
    found: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, side in sides.items():
                time.sleep(pause)
                found[name].append(side())
    finally:
        gc.enable()
    return {name: Timing.of(seconds) for name, seconds in found.items()}


def ratio(over: Spread, under: Spread) -> float:
    """Quotient of the medians."""
    return over.median / under.median


def resident() -> int:
    """Bytes of this process that lie in main memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_growth(run: Callable[[], object], before: int, calls: int = 3) -> int:
    """Largest growth of the resident set during some calls, looked at every millisecond."""
    peak, done = resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(calls):
        run()
    done.set()
    watcher.join()
    return peak - before


class Worker:
    """Another interpreter that measures on request, over lines of JSON."""

    def __init__(self, interpreter: str, script: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [interpreter, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer.

        Raises:
            RuntimeError: the worker has ended, or answered with an error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The worker {self._process.args!r} has ended.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"The worker failed: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the worker."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def write_json(path: Path, results: Any) -> None:
    """Write results beside a description of the machine. Spreads become minimum, median and maximum."""

    def plain(value: Any) -> Any:
        if isinstance(value, Spread):
            return asdict(value)
        raise TypeError(f"cannot write {type(value).__name__}")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2, default=plain) + "\n")
