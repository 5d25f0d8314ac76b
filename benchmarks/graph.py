"""Graph mode: what prepare and finalize cost beside ``torch.export``, and how fast the prepared model runs.

Run ``python benchmarks/graph.py [model ...] [package ...]``; models are ``mlp50``, ``gpt6`` and the like (layers,
blocks), packages ``bitwright`` and ``coreai_opt``. With ``BITWRIGHT_PEER_PYTHON`` set the same is measured in
coreai-opt's interpreter and printed beside ours. Without models it goes on where it was interrupted: figures that are
there already are left out. Times are CPU seconds on one thread, so that other processes on the machine matter less;
forwards are the least of ten, in milliseconds. ``benchmarks/results/graph.json`` keeps the figures of all models.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _measure import machine
from _models import Block
from torch import nn

COLUMNS = ("export", "prepare", "added", "forward", "float", "switch", "finalize", "coreai")
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "graph.json"
LIMIT = 600  # seconds for one package and model
DEFAULT = ("mlp50", "mlp200", "mlp800", "gpt6", "gpt24", "gpt48")


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its inputs."""
    kind, count = name[:3], int(name[3:])
    torch.manual_seed(0)
    if kind == "mlp":
        layers = [layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers).eval(), (torch.randn(4, 64),)
    blocks = [Block(64, 4) for _ in range(count)]
    model = nn.Sequential(nn.Embedding(100, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 100))
    return model.eval(), (torch.randint(0, 100, (2, 16)),)


def measure(name: str, package: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return the figures of the first round in this process, and least, median and greatest of those after it."""
    quantization = importlib.import_module(f"{package}.quantization")
    first = _round(name, quantization)
    rounds = [_round(name, quantization) for _ in range(repeats)]
    return {
        key: {
            "first": first[key],
            "minimum": min(r[key] for r in rounds),
            "median": median(r[key] for r in rounds),
            "maximum": max(r[key] for r in rounds),
        }
        for key in COLUMNS
    }


def _round(name: str, quantization: Any) -> dict[str, float]:
    model, inputs = build(name)
    with torch.no_grad():
        export = cpu_seconds(lambda: torch.export.export(model, inputs))
    quantizer = quantization.Quantizer(model, quantization.QuantizerConfig())
    prepare = cpu_seconds(lambda: quantizer.prepare(inputs))
    prepared = quantizer._model
    with quantizer.calibration_mode():
        prepared(*inputs)
    backends = importlib.import_module(f"{quantization.__name__.partition('.')[0]}.common").ExportBackend
    return {
        "export": export,
        "prepare": prepare,
        "added": prepare - export,
        "forward": milliseconds(prepared, inputs),
        "float": milliseconds(model, inputs),
        "switch": cpu_seconds(lambda: (prepared.train(), prepared.eval())) * 1e3,
        "finalize": cpu_seconds(lambda: quantizer.finalize(backend=backends._TORCH)),
        "coreai": cpu_seconds(lambda: quantizer.finalize(backend=backends.CoreAI)),
    }


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of one call."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def milliseconds(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the least CPU time of ten forwards on one thread."""
    times = []
    with torch.no_grad():
        for _ in range(11):
            start = time.process_time()
            model(*inputs)
            times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def main(arguments: list[str]) -> None:
    """Print the rows of each model, and add them to the results as soon as they are there."""
    interpreters = {"bitwright": sys.executable, "coreai_opt": os.environ.get("BITWRIGHT_PEER_PYTHON", "")}
    packages = [package for package in interpreters if package in arguments] or list(interpreters)
    names = [argument for argument in arguments if argument not in interpreters]
    known = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    print(f"{'':20}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name in names or DEFAULT:
        entry: dict[str, Any] = known.setdefault(name, {})
        for package in packages:
            if not interpreters[package] or (not names and package in entry):
                continue
            repeats = 3 if package == "bitwright" else 1
            entry[package] = _elsewhere(interpreters[package], name, package, repeats)
            for row in ("first", "median"):
                figures = "".join(f"{entry[package][column][row]:10.3f}" for column in COLUMNS)
                print(f"{name:8}{package + ' ' + row:20}{figures}", flush=True)
            if len(interpreters.keys() & entry.keys()) == len(interpreters):
                entry["ratios"] = _ratios(entry["bitwright"], entry["coreai_opt"])
            RESULTS.write_text(json.dumps({"machine": machine(), "results": known}, indent=2) + "\n")
        print("".join(f"  {key} {value:.3g}" for key, value in entry.get("ratios", {}).items()), flush=True)


def _elsewhere(interpreter: str, name: str, package: str, repeats: int) -> Any:
    """Measure in a process of its own, so that the first round is the first one in it."""
    call = [interpreter, str(Path(__file__).resolve()), "--one", name, package, str(repeats)]
    done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=LIMIT)
    return json.loads(done.stdout.splitlines()[-1])


def _ratios(ours: Any, theirs: Any) -> dict[str, float]:
    """Return the figures that are promised, by name."""
    prepare, export = ours["prepare"], ours["export"]
    return {
        "prepare/export": prepare["median"] / export["median"],
        "prepare/export of coreai_opt": theirs["prepare"]["median"] / theirs["export"]["median"],
        "added, of coreai_opt's": ours["added"]["median"] / theirs["added"]["median"],
        "added the first time, of coreai_opt's": ours["added"]["first"] / theirs["added"]["first"],
        "finalize, of coreai_opt's": ours["finalize"]["median"] / theirs["finalize"]["median"],
        "finalize for Core AI, of coreai_opt's": ours["coreai"]["median"] / theirs["coreai"]["median"],
        "forward, times faster": theirs["forward"]["minimum"] / ours["forward"]["minimum"],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main(sys.argv[1:])
