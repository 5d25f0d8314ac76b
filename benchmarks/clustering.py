"""Palettizing a layer: time, memory and error beside coreai-opt's, for scalar and vector palettes.

    python benchmarks/clustering.py --peer-python /path/to/python/with/coreai-opt [--cases NAME ...]

Both libraries run ``KMeansPalettizer.prepare`` on the same linear layer N(0, 0.02), each in an interpreter of its own,
taking turns; a first small layer loads and compiles what they need. Ratios are of medians of CPU seconds, coreai-opt's
over ours. Peak memory is what the process held on top of before, in multiples of the weight. Results are kept case by
case in benchmarks/results/clustering.json with the date they were measured on; ``--once`` measures coreai-opt a single
time where it takes long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from _measure import Timing, Worker, machine, ratio

RESULTS = Path(__file__).parent / "results/clustering.json"
SCRIPT = Path(__file__).parent / "_clustering_worker.py"


@dataclass(frozen=True)
class Case:
    """What is palettized, and what is aimed at.

    Attributes:
        shape: of the weight.
        bits: of an index.
        group: output channels that share a palette; 0 for one palette.
        dim: entries of a vector.
        fast: the fast mode, for scalars.
        faster: by how much faster than coreai-opt it should be; 0 for not compared.
        layers: such layers in one model.
        workers: ``num_workers`` of prepare.
        slow: coreai-opt takes more than ten seconds.
    """

    shape: tuple[int, int]
    bits: int
    group: int = 0
    dim: int = 1
    fast: bool = True
    faster: float = 0
    layers: int = 1
    workers: int = 1
    slow: bool = field(default=False, compare=False)


CASES = {
    "4096x4096, 4 bit": Case((4096, 4096), 4, faster=50),
    "4096x4096, 8 bit": Case((4096, 4096), 8, faster=20),
    "4096x4096, 4 bit, groups of 16": Case((4096, 4096), 4, group=16, faster=10),
    "4096x4096, 8 bit, groups of 16": Case((4096, 4096), 8, group=16, faster=3, slow=True),
    "1024x1024, 4 bit, groups of 16": Case((1024, 1024), 4, group=16, faster=10),
    "1024x1024, 8 bit, groups of 16": Case((1024, 1024), 8, group=16, faster=3),
    "1024x1024, 4 bit, exact": Case((1024, 1024), 4, fast=False, faster=5),
    "512x512, 4 bit, pairs": Case((512, 512), 4, dim=2, fast=False, faster=30, slow=True),
    "512x512, 4 bit, quadruples": Case((512, 512), 4, dim=4, fast=False, faster=30, slow=True),
    "256x256, 8 bit, quadruples": Case((256, 256), 8, dim=4, fast=False, faster=30, slow=True),
}
WORKERS = {f"ten 1024x1024, 4 bit, {n} workers": Case((1024, 1024), 4, layers=10, workers=n) for n in (1, 2)}


def ask(worker: Worker, case: Case) -> dict[str, float]:
    """One measurement."""
    request = {key: value for key, value in asdict(case).items() if key not in ("faster", "slow")}
    found: dict[str, float] = worker.ask(**request)
    return found


def summary(case: Case, found: list[dict[str, float]]) -> dict[str, Any]:
    """Minimum, median and maximum of the times, largest peak in multiples of the weight, and the error."""
    size = 4 * case.shape[0] * case.shape[1] * case.layers
    return {
        "wall": asdict(Timing.of([one["wall"] for one in found])),
        "cpu": asdict(Timing.of([one["cpu"] for one in found])),
        "peak_over_weight": max(one["peak"] for one in found) / size,
        "relative_error": found[-1]["error"],
    }


def compared(name: str, case: Case, ours: Worker, peer: Worker | None, repeats: int, once: bool) -> dict[str, Any]:
    """Measure one case on both sides in turn, print a line and return the figures."""
    sides: dict[str, list[dict[str, float]]] = {"bitwright": [], "coreai_opt": []}
    for turn in range(repeats):
        sides["bitwright"].append(ask(ours, case))
        if peer is not None and not (turn > 0 and once and case.slow):
            sides["coreai_opt"].append(ask(peer, case))
    entry: dict[str, Any] = {"date": date.today().isoformat(), "load": os.getloadavg()[0]}
    entry |= {side: summary(case, found) for side, found in sides.items() if found}
    line = f"{name:<34}{entry['bitwright']['cpu']['median']:>9.3f} s{entry['bitwright']['peak_over_weight']:>7.2f} x"
    if peer is not None:
        for clock in ("cpu", "wall"):
            times = [Timing(**entry[side][clock]) for side in ("coreai_opt", "bitwright")]
            entry[f"{clock}_ratio"] = ratio(*times)
        entry["aim"] = case.faster
        entry["error_ratio"] = entry["bitwright"]["relative_error"] / entry["coreai_opt"]["relative_error"]
        line += f"{entry['cpu_ratio']:>8.1f} x{entry['wall_ratio']:>8.1f} x{case.faster:>6.0f} x"
        line += f"{entry['error_ratio']:>10.5f}"
    print(line, flush=True)
    return entry


def workers_compared(ours: Worker, repeats: int) -> dict[str, Any]:
    """Ten layers with one and with two workers, in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WORKERS}
    for _ in range(repeats):
        for name, case in WORKERS.items():
            found[name].append(ask(ours, case))
    entries = {name: summary(case, found[name]) for name, case in WORKERS.items()}
    for name, entry in entries.items():
        print(f"{name:<34}{entry['wall']['median']:>9.3f} s", flush=True)
    return {"date": date.today().isoformat(), "load": os.getloadavg()[0], **entries}


def keep(name: str, entry: dict[str, Any]) -> None:
    """Write one case into the file of results."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    results = kept["results"] | {name: entry}
    RESULTS.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[*CASES, "workers"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="measure coreai-opt once where it takes long")
    parser.add_argument("--peer-python", default=os.environ.get("BITWRIGHT_PEER_PYTHON"))
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    args = parser.parse_args()
    ours = Worker(sys.executable, SCRIPT, "bitwright")
    peer = Worker(args.peer_python, SCRIPT, "coreai_opt") if args.peer_python else None
    print(f"{'':<34}{'CPU':>11}{'memory':>9}{'by CPU':>10}{'by wall':>10}{'aim':>8}{'error':>10}")
    for name in args.cases:
        if name == "workers":
            entry = workers_compared(ours, args.repeats)
        else:
            case = CASES[name]
            small = Case((64, 64), 4, case.group, case.dim, case.fast)
            for worker in (ours, peer):
                if worker is not None:
                    ask(worker, small)
            ask(ours, case)
            entry = compared(name, case, ours, peer, args.repeats, args.once)
        if not args.dry:
            keep(name, entry)
    for worker in (ours, peer):
        if worker is not None:
            worker.close()


if __name__ == "__main__":
    main()
