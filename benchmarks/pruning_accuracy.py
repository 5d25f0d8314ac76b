"""What pruning costs in accuracy: scores, patterns, schedules and removal of channels, on two trained networks.

    python benchmarks/pruning_accuracy.py [--seeds 4] [--steps 300]

The networks and data of qat.py: a CNN on handwritten digits and a character transformer on the source of Python's
standard library. Every row starts from the same float weights; calibrated rows see the same data, trained rows the same
batches. Loss and accuracy are means over seeds, on data held out from training and calibration. Results go to
benchmarks/results/pruning_accuracy.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import write_json
from qat import MODELS, character_data, digits_data, evaluate, train
from torch import nn

from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import CosineDecaySchedule, PolynomialDecaySchedule, SparsityScheduleBase
from bitwright.pruning.spec import ChannelStructured, NMStructured

DATA = {"digits": digits_data, "characters": character_data}
CALIBRATION = 16
RATE = {"digits": 5e-3, "characters": 3e-3}
SHARES = (0.5, 0.6, 0.7)

Row = Callable[[nn.Module, dict[str, Any]], MagnitudePruner]


def config_of(
    task: str, schedule: SparsityScheduleBase | None = None, everything: bool = False, **spec: Any
) -> MagnitudePrunerConfig:
    """One spec for all weights that multiply activations; first and depthwise layers and embeddings stay dense."""
    module = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(**spec)}, sparsity_schedule=schedule)
    config = MagnitudePrunerConfig(global_config=module)
    return config if everything else config.without("embed" if task == "characters" else "(stem|depth)")


def prepared(model: nn.Module, job: dict[str, Any], config: MagnitudePrunerConfig) -> MagnitudePruner:
    """A pruner on the model."""
    pruner = MagnitudePruner(model, config)
    pruner.prepare((job["batches"][0][0],))
    return pruner


def oneshot(**spec: Any) -> Row:
    """Masks on the finished weights; calibrated where the algorithm wants it."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        pruner = prepared(model, job, config_of(job["task"], **spec))
        if spec.get("pruning_algo", "default") != "default":
            with pruner.calibration_mode():
                for x, _ in job["batches"][:CALIBRATION]:
                    model(x)
        return pruner

    return run


def trained(schedule: type[Any] | None = None, everything: bool = False, **spec: Any) -> Row:
    """Masks that follow a schedule while the weights learn."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        steps = job["tuning_steps"]
        made = None if schedule is None else schedule(total_iters=2 * steps // 3, update_frequency=5)
        pruner = prepared(model, job, config_of(job["task"], made, everything, **spec))
        with pruner.training_mode():
            rates = [{"params": model.parameters(), "lr": job["rate"] / 5}]
            train(model, job["batches"][:steps], rates, after=pruner.step)
        return pruner

    return run


def shrunk(**spec: Any) -> Row:
    """Channels pruned while training, and then removed."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        pruner = trained(PolynomialDecaySchedule, True, pruning_scheme=ChannelStructured(), **spec)(model, job)
        model.eval()
        report = pruner.shrink((job["batches"][0][0],))
        job["parameters"] = report.parameters_after / report.parameters_before
        return pruner

    return run


ROWS: dict[str, Row] = {
    **{
        f"{name} {share:.0%}": oneshot(pruning_algo=key, target_sparsity=share)
        for share in SHARES
        for name, key in (("magnitude", "default"), ("wanda", "wanda"), ("sparsegpt", "sparsegpt"))
    },
    **{
        f"wanda {share:.0%}, tensor": oneshot(pruning_algo="wanda", target_sparsity=share, scope="tensor")
        for share in SHARES
    },
    **{f"magnitude {share:.0%}, global": oneshot(target_sparsity=share, scope="global") for share in SHARES},
    **{
        f"{name} 2:4": oneshot(pruning_algo=key, pruning_scheme=NMStructured(n=2, m=4))
        for name, key in (("magnitude", "default"), ("wanda", "wanda"), ("sparsegpt", "sparsegpt"))
    },
    "magnitude 80%, trained at once": trained(target_sparsity=0.8),
    "magnitude 80%, polynomial": trained(PolynomialDecaySchedule, target_sparsity=0.8),
    "magnitude 80%, cosine": trained(CosineDecaySchedule, target_sparsity=0.8),
    "channels 50%, removed": shrunk(target_sparsity=0.5),
}


def float_model(task: str, seed: int, job: dict[str, Any]) -> nn.Module:
    """Train the float network."""
    torch.manual_seed(seed)
    model = MODELS[task]()
    train(model, job["batches"], [{"params": model.parameters(), "lr": RATE[task]}])
    return model.eval()


def run_task(task: str, seeds: int, steps: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Return means over seeds, by row."""
    job = DATA[task](steps)
    job |= {"task": task, "rate": RATE[task], "tuning_steps": steps // 2}
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        dense = float_model(task, seed, job)
        found.setdefault("float32", []).append(evaluate(dense, job["test"]))
        for name in names:
            torch.manual_seed(seed)
            model = copy.deepcopy(dense)
            job.pop("parameters", None)
            ROWS[name](model, job)
            extra = {"parameters": job["parameters"]} if "parameters" in job else {}
            found.setdefault(name, []).append({**evaluate(model, job["test"]), **extra})
    return {name: {key: statistics.mean(r[key] for r in rows) for key in rows[0]} for name, rows in found.items()}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/pruning_accuracy.json")
    args = parser.parse_args()
    warnings.filterwarnings("error")
    warnings.filterwarnings("default", message=r".*\[block-size\].*")  # layers that 2:4 does not divide stay dense
    results: dict[str, Any] = {"seeds": args.seeds, "steps": args.steps}
    for task in DATA:
        results[task] = run_task(task, args.seeds, args.steps, args.rows)
        print(f"\n{task:<34}{'loss':>9}{'accuracy':>10}")
        for name, row in results[task].items():
            size = f"  {row['parameters']:.0%} of the parameters" if "parameters" in row else ""
            print(f"{name:<34}{row['loss']:>9.4f}{row['accuracy']:>10.2%}{size}")
    if args.rows == list(ROWS):
        write_json(args.out, results)


if __name__ == "__main__":
    main()
