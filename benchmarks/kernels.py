"""Fake quantization against coreai-opt and against a copy of the tensor.

Usage: python benchmarks/kernels.py [--threads 1 2] [--repeats 9] [--only TEXT] [--output FILE]

The environment variable BITWRIGHT_PEER_PYTHON names an interpreter with coreai-opt 0.3; without it the peer's column
stays empty. The three sides take turns.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from _kernels_cases import CASES, Case, build, mode
from _measure import Side, Timing, Worker, alternate, ratio, timed, write_json

HERE = Path(__file__).parent


def limit_of(case: Case) -> Side | None:
    """The pass over memory that nothing can undercut."""
    x = torch.randn(case.shape).to(case.dtype)
    if case.limit == "clone":
        return timed(x.clone, calls=case.calls)
    if case.limit == "clone and multiply":
        y = torch.randn(case.shape).to(case.dtype)
        return timed(lambda: (x.clone(), x * y), calls=case.calls)
    return None


def measure(index: int, threads: int, repeats: int, peer: Worker | None) -> dict[str, Timing]:
    """Time the sides of one case."""
    torch.set_num_threads(threads)
    case = CASES[index]
    before, run = build("bitwright", case)
    sides: dict[str, Side] = {"bitwright": timed(run, before, case.calls)}
    limit = limit_of(case)
    if limit is not None:
        sides["limit"] = limit
    if peer is not None:
        sides["peer"] = lambda: peer.ask(case=index, threads=threads)
    with mode(case):
        return alternate(sides, repeats, pause=0.01)


def judge(case: Case, times: dict[str, Timing]) -> dict[str, Any]:
    """The ratios of a case beside those to reach."""
    mine = times["bitwright"]
    over = ratio(mine, times["limit"]) if "limit" in times else 1e6 * mine.median
    found: dict[str, Any] = {"limit": case.limit, "over_limit": over, "over_limit_allowed": case.slower}
    if "peer" in times:
        found |= {"faster": ratio(times["peer"], mine), "faster_wanted": case.faster}
    return found


def line_of(case: Case, times: dict[str, Timing], found: dict[str, Any]) -> str:
    """One row of the table; an exclamation mark stands at a ratio that is missed."""
    unit = "us" if case.limit == "microseconds" else "x"
    mark = "!" if found["over_limit"] > case.slower else " "
    limit = times.get("limit", "")
    text = f"{case.name:46} {times['bitwright']!s:>24} limit {limit!s:>24} "
    text += f"{found['over_limit']:7.2f}{unit:2}{mark}(<= {case.slower:g})"
    if "faster" in found:
        mark = "!" if found["faster"] < case.faster else " "
        text += f" {found['faster']:7.1f}x{mark}(>= {case.faster:g})  peer {times['peer']}"
    return text


def main() -> None:
    """Print the table and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "kernels.json")
    options = parser.parse_args()
    interpreter = os.environ.get("BITWRIGHT_PEER_PYTHON")
    peer = Worker(interpreter, HERE / "_kernels_cases.py", "coreai_opt") if interpreter else None
    results = []
    for threads in options.threads:
        print(f"{threads} thread(s): minimum/median/maximum, over the limit, faster than the peer")
        for index, case in enumerate(CASES):
            if options.only not in case.name:
                continue
            times = measure(index, threads, options.repeats, peer)
            found = judge(case, times)
            print(line_of(case, times, found), flush=True)
            results.append({"case": case.name, "threads": threads, **found, "seconds": times})
    if peer is not None:
        peer.close()
    write_json(options.output, results)


if __name__ == "__main__":
    main()
