"""The benchmarks are listed by name, and what serves them as a worker is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_help_names_the_benchmarks() -> None:
    """A worker would wait for input for ever where all benchmarks are run."""
    run = subprocess.run([sys.executable, str(BENCHMARKS), "--help"], capture_output=True, text=True, check=True)
    names = set(re.findall(r"\w+", run.stdout)) & {path.stem for path in BENCHMARKS.glob("*.py")}
    assert {"kernels", "graph", "training"} <= names
    scripts = {name: (BENCHMARKS / f"{name}.py").read_text() for name in names}
    assert not [name for name, text in scripts.items() if "sys.stdin" in text and "ArgumentParser" not in text]
