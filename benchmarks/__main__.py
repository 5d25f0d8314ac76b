"""Run every benchmark, one after the other: ``python -m benchmarks [name ...]``.

Each script prints its table and writes JSON under ``benchmarks/results/``. Set ``BITWRIGHT_PEER_PYTHON`` to an
interpreter that has coreai-opt 0.3 to have it measured beside.

``kernels.json`` and ``training.json``, and those of a processor without AVX-512 (``kernels_avx2.json``,
``training_avx2.json``, written with ``--output``), are ``{"machine": {...}, "results": [row, ...]}``. Every time is
``{"minimum", "median", "maximum", "repeats"}`` in seconds, every peak of memory the same in bytes, every ratio one of
medians.

* A row of ``kernels.json``: ``case``, ``threads``; ``limit`` (``"clone"``, ``"clone and multiply"`` or
  ``"microseconds"``), ``over_limit`` (a ratio, or microseconds a call) and ``over_limit_allowed``; with the peer also
  ``faster`` and ``faster_wanted``; ``seconds`` by side (``bitwright``, ``limit``, ``peer``).
* A row of ``training.json``: ``what`` (``"step"``, ``"step, trained before"``, ``"peak memory"``,
  ``"peak memory, no thread cache"``, ``"peak memory in use"`` or ``"frozen evaluation"``), ``model``, ``mode``;
  ``over_float`` by side (``bitwright``, ``bitwright, tensors in full``, ``peer``) and ``over_float_allowed``; and
  ``seconds`` by side, or ``bytes`` by side: ``peak`` growth of the resident set, and what would be ``saved`` for the
  backward pass if nothing were kept as codes. Files from before codes became the rule call the sides ``bitwright``
  (tensors in full) and ``bitwright, saved as codes``.

``gpu.json`` holds the rows of a GPU under ``fake quantization`` and ``training steps``: of the former kind without
``threads``, and of the latter with ``precision``; ``bytes`` are what torch had allocated at most.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_") and "__name__" in p.read_text())


def main(arguments: list[str]) -> None:
    """Run the scripts called so, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks one after the other.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(SCRIPTS)}; all if none is given")
    names = parser.parse_args(arguments).names
    unknown = sorted(set(names) - set(SCRIPTS))
    if unknown:
        raise SystemExit(f"No such benchmark: {', '.join(unknown)}. There are {', '.join(SCRIPTS)}.")
    sys.path.insert(0, str(HERE))
    for name in names or SCRIPTS:
        print(f"\n== {name}", flush=True)
        sys.argv = [name]
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
