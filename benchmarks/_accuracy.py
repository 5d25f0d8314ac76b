"""Accuracy of compressed networks, row by row and seed by seed, kept in a file between runs."""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import machine
from _pretraining import RECIPES, pretrain
from _qat_tasks import CNN, CharTransformer, character_batches, digits_data, evaluate
from torch import nn
from torch.optim.swa_utils import update_bn

__all__ = ["RATE", "TASKS", "main", "normalized_anew"]


def library_data(steps: int) -> dict[str, Any]:
    """Batches of 32 stretches of all modules of Python's standard library that are one file; the last tenth is held
    out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return character_batches(text, steps, batch=32, test=512, seed=0)


TASKS = {"digits": digits_data, "characters": library_data}
MODELS = {"digits": CNN, "characters": partial(CharTransformer, width=128)}
RATE = {"digits": 5e-3, "characters": 3e-3}
STEPS = {"digits": 800, "characters": 3000}
TUNING = 150

Row = Callable[[nn.Module, dict[str, Any]], object]


def float_model(task: str, seed: int, job: dict[str, Any], folder: Path | None) -> nn.Module:
    """Train the float network, or read it from a folder of those that were trained."""
    torch.manual_seed(seed)
    model = MODELS[task]()
    file = None if folder is None else folder / f"{task}-{RECIPES[task]}-{STEPS[task]}-{seed}.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    pretrain(task, model, job["batches"], RATE[task])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return model.eval()


def measured(
    task: str, seed: int, names: list[str], rows: Mapping[str, Row], folder: Path | None
) -> Iterator[tuple[str, dict[str, float]]]:
    """Loss, accuracy and what else a row notes under ``job["notes"]``, row by row."""
    job = TASKS[task](STEPS[task])
    job |= {"task": task, "rate": RATE[task], "tuning_steps": TUNING}
    dense = float_model(task, seed, job, folder)
    yield "float32", evaluate(dense, job["test"])
    for name in names:
        torch.manual_seed(seed)
        model = copy.deepcopy(dense)
        job["notes"] = {}
        rows[name](model, job)
        yield name, evaluate(model, job["test"]) | job["notes"]


def normalized_anew(row: Row, batches: int = 32) -> Row:
    """The row, and then averages of its batch norms from some of the training batches; without batch norms the row."""

    def run(model: nn.Module, job: dict[str, Any]) -> object:
        done = row(model, job)
        update_bn([x for x, _ in job["batches"][:batches]], model)
        return done

    return run


def means_of(by_row: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over the seeds of each row, and how many there are."""
    means = {}
    for name, by_seed in by_row.items():
        seeds = list(by_seed.values())
        means[name] = {key: statistics.mean(one[key] for one in seeds) for key in seeds[0]} | {"seeds": len(seeds)}
    return means


def claims_of(
    by_row: dict[str, dict[str, dict[str, float]]], claims: Mapping[str, tuple[str, str]]
) -> dict[str, dict[str, float]]:
    """By how much the loss of the first row is below that of the second: mean, its standard error and each seed."""
    gains: dict[str, dict[str, float]] = {}
    for claim, (better, worse) in claims.items():
        low, high = by_row.get(better, {}), by_row.get(worse, {})
        gained = {seed: high[seed]["loss"] - low[seed]["loss"] for seed in low if seed in high}
        if gained:
            spread = statistics.stdev(gained.values()) if len(gained) > 1 else 0.0
            gains[claim] = {
                "mean": statistics.mean(gained.values()),
                "error": spread / math.sqrt(len(gained)),
                **gained,
            }
    return gains


def read(path: Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All results in the file, and those of one task; rows of another training would not compare."""
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    training = {"training": RECIPES[task], "steps": STEPS[task]}
    if not training.items() <= results.get(task, {}).items():
        results[task] = training | {"tuning_steps": TUNING, "by_seed": {}}
    return results, results[task]


def keep(path: Path, task: str, seed: int, name: str, row: dict[str, float], claims: Mapping[str, Any]) -> None:
    """Enter a row of one seed into the file, beside means over all seeds."""
    results, entry = read(path, task)
    entry["date"] = date.today().isoformat()
    entry["by_seed"].setdefault(name, {})[str(seed)] = row
    entry["means"] = means_of(entry["by_seed"])
    entry["loss_gained"] = claims_of(entry["by_seed"], claims)
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


def main(description: str | None, rows: Mapping[str, Row], path: Path, claims: Mapping[str, tuple[str, str]]) -> None:
    """Run, print and keep.

    Args:
        description: of the script.
        rows: what is done to the trained network.
        path: the file of results.
        claims: names, each with the row that should lose less and the row that should lose more.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", nargs="*", default=list(rows), choices=list(rows))
    parser.add_argument("--floats", type=Path, help="folder that keeps the trained float networks for further runs")
    parser.add_argument("--again", action="store_true", help="also run rows that are in the file")
    args = parser.parse_args()
    for task in args.tasks:
        for seed in args.seeds:
            known = {name for name, by_seed in read(path, task)[1]["by_seed"].items() if str(seed) in by_seed}
            names = [name for name in args.rows if args.again or name not in known]
            print(f"{task}, seed {seed}: {len(names)} rows", flush=True)
            for name, row in measured(task, seed, names, rows, args.floats) if names else ():
                print(f"  {name:<34}{row['loss']:>9.4f}{row['accuracy']:>10.2%}", flush=True)
                keep(path, task, seed, name, row, claims)
        for claim, gained in claims_of(read(path, task)[1]["by_seed"], claims).items():
            seeds = len(gained) - 2
            print(f"{task}: {claim:<60}{gained['mean']:>+8.3f} ± {gained['error']:.3f} over {seeds} seeds", flush=True)
