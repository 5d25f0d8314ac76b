"""Accuracy of compressed networks, row by row and seed by seed, kept in a file between runs."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _measure import machine
from qat import MODELS, character_data, digits_data, evaluate, train
from torch import nn

__all__ = ["RATE", "TASKS", "main"]

TASKS = {"digits": digits_data, "characters": character_data}
RATE = {"digits": 5e-3, "characters": 3e-3}
STEPS = {"digits": 300, "characters": 1200}
TUNING = 150

Row = Callable[[nn.Module, dict[str, Any]], object]


def float_model(task: str, seed: int, job: dict[str, Any]) -> nn.Module:
    """Train the float network."""
    torch.manual_seed(seed)
    model = MODELS[task]()
    train(model, job["batches"], [{"params": model.parameters(), "lr": RATE[task]}])
    return model.eval()


def measure(task: str, seed: int, names: list[str], rows: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Loss, accuracy and what else a row notes under ``job["notes"]``, by row."""
    job = TASKS[task](STEPS[task])
    job |= {"task": task, "rate": RATE[task], "tuning_steps": TUNING}
    dense = float_model(task, seed, job)
    found = {"float32": evaluate(dense, job["test"])}
    for name in names:
        torch.manual_seed(seed)
        model = copy.deepcopy(dense)
        job["notes"] = {}
        rows[name](model, job)
        found[name] = evaluate(model, job["test"]) | job["notes"]
        print(f"  {name:<34}{found[name]['loss']:>9.4f}{found[name]['accuracy']:>10.2%}", flush=True)
    return found


def means_of(by_row: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over the seeds of each row, and how many there are."""
    means = {}
    for name, by_seed in by_row.items():
        seeds = list(by_seed.values())
        means[name] = {key: statistics.mean(one[key] for one in seeds) for key in seeds[0]} | {"seeds": len(seeds)}
    return means


def claims_of(means: dict[str, dict[str, float]], claims: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """By how much the loss of the first row is below that of the second, for each claim that was measured."""
    return {
        claim: means[worse]["loss"] - means[better]["loss"]
        for claim, (better, worse) in claims.items()
        if better in means and worse in means
    }


def keep(path: Path, task: str, seed: int, found: dict[str, dict[str, float]], claims: Mapping[str, Any]) -> None:
    """Enter the rows of one seed into the file, beside means over all seeds."""
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    entry = results.get(task, {})
    if entry.get("steps") != STEPS[task]:  # rows of another training would not compare
        entry = results[task] = {"steps": STEPS[task], "tuning_steps": TUNING, "by_seed": {}}
    entry["date"] = date.today().isoformat()
    for name, row in found.items():
        entry["by_seed"].setdefault(name, {})[str(seed)] = row
    entry["means"] = means_of(entry["by_seed"])
    entry["loss_gained"] = claims_of(entry["means"], claims)
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
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--rows", nargs="*", default=list(rows), choices=list(rows))
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    args = parser.parse_args()
    for task in args.tasks:
        for seed in args.seeds:
            print(f"{task}, seed {seed}", flush=True)
            found = measure(task, seed, args.rows, rows)
            if not args.dry:
                keep(path, task, seed, found, claims)
