"""What palettization costs in accuracy: granularities, calibration and training strategies, on two trained networks.

    python benchmarks/palettization_accuracy.py [--seeds 3] [--steps 300]

The networks and data of qat.py: a CNN on handwritten digits and a character transformer on the source of Python's
standard library. Every row starts from the same float weights; trained rows see the same batches. Loss and accuracy are
means over seeds, on data held out from training and calibration. Results go to
benchmarks/results/palettization_accuracy.json.
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
from qat import MODELS, character_data, digits_data, evaluate, loss_of, train
from torch import nn

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.quantization.spec import QuantizationSpec

DATA = {"digits": digits_data, "characters": character_data}
CALIBRATION = 32
RATE = {"digits": 5e-3, "characters": 3e-3}

Row = Callable[[nn.Module, dict[str, Any]], KMeansPalettizer]


def config_of(fast: bool = True, **spec: Any) -> KMeansPalettizerConfig:
    """One spec for all weights; where the number of characters or digits does not divide, groups run along axis 1."""

    def module(**changes: Any) -> ModuleKMeansPalettizerConfig:
        chosen = PalettizationSpec(**{**spec, **changes})
        return ModuleKMeansPalettizerConfig(op_state_spec={"weight": chosen}, enable_fast_kmeans_mode=fast)

    config = KMeansPalettizerConfig(global_config=module())
    granularity = spec.get("granularity")
    if granularity is not None and granularity.group_size > 1:
        config.set_module_name("(head|embed)", module(granularity=granularity.model_copy(update={"axis": 1})))
    return config


def prepared(model: nn.Module, job: dict[str, Any], config: KMeansPalettizerConfig) -> KMeansPalettizer:
    """A palettizer on the model, and what the plan says about its size."""
    palettizer = KMeansPalettizer(model, config)
    example = (job["batches"][0][0],)
    plan = palettizer.plan(example)
    weights = sum(row.dense_bytes for row in plan) // 4
    job["bits"] = 8 * plan.compressed_bytes / weights
    palettizer.prepare(example)
    return palettizer


def plain(**spec: Any) -> Row:
    """Palettes of the finished weights."""
    return lambda model, job: prepared(model, job, config_of(**spec))


def calibrated(**spec: Any) -> Row:
    """Palettes weighted by squared gradients."""

    def run(model: nn.Module, job: dict[str, Any]) -> KMeansPalettizer:
        palettizer = prepared(model, job, config_of(**spec))
        with palettizer.calibration_mode(loss_fn=loss_of) as helper:
            for x, y in job["batches"][:CALIBRATION]:
                for part in range(0, len(x), 4):
                    helper.step(model(x[part : part + 4]), y[part : part + 4])
        return palettizer

    return run


def trained(strategy: dict[str, Any], **spec: Any) -> Row:
    """Palettes learned with the weights."""

    def run(model: nn.Module, job: dict[str, Any]) -> KMeansPalettizer:
        palettizer = prepared(model, job, config_of(training_strategy_spec=strategy, **spec))
        batches = job["batches"][: job["tuning_steps"]]
        with palettizer.training_mode():
            job["step_seconds"] = train(model, batches, [{"params": model.parameters(), "lr": job["rate"] / 5}])
        return palettizer

    return run


def grouped(size: int) -> PerGroupedChannelGranularity:
    """Groups of channels along the op's output axis."""
    return PerGroupedChannelGranularity(group_size=size)


ROWS: dict[str, Row] = {
    **{f"{bits} bit": plain(n_bits=bits) for bits in (2, 3, 4, 6)},
    **{f"{bits} bit, groups of 16": plain(n_bits=bits, granularity=grouped(16)) for bits in (2, 3, 4)},
    **{f"{bits} bit, groups of 4": plain(n_bits=bits, granularity=grouped(4)) for bits in (2, 3)},
    "2 bit, per channel": plain(n_bits=2, granularity=grouped(1)),
    "2 bit, channel scale": plain(n_bits=2, enable_per_channel_scale=True),
    "4 bit, int8 entries": plain(n_bits=4, lut_qspec=QuantizationSpec(dtype="int8")),
    "4 bit, int4 entries": plain(n_bits=4, lut_qspec=QuantizationSpec(dtype="int4")),
    "2 bit, sensitivities": calibrated(n_bits=2),
    "4 bit, sensitivities": calibrated(n_bits=4),
    "2 bit, default training": trained({"type": "default"}, n_bits=2),
    "2 bit, straight through": trained({"type": "ste"}, n_bits=2),
    "2 bit, dkm": trained({"type": "dkm"}, n_bits=2),
    "2 bit, dkm, groups of 16": trained({"type": "dkm"}, n_bits=2, granularity=grouped(16)),
    "1 bit, dkm": trained({"type": "dkm"}, n_bits=1),
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
    job |= {"rate": RATE[task], "tuning_steps": steps // 2}
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        dense = float_model(task, seed, job)
        found.setdefault("float32", []).append({"bits": 32.0, **evaluate(dense, job["test"])})
        for name in names:
            torch.manual_seed(seed)
            model = copy.deepcopy(dense)
            job.pop("step_seconds", None)
            ROWS[name](model, job)
            extra = {"step_seconds": job["step_seconds"]} if "step_seconds" in job else {}
            found.setdefault(name, []).append({"bits": job["bits"], **evaluate(model, job["test"]), **extra})
    return {name: {key: statistics.mean(r[key] for r in rows) for key in rows[0]} for name, rows in found.items()}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/palettization_accuracy.json")
    args = parser.parse_args()
    warnings.filterwarnings("error")
    results: dict[str, Any] = {"seeds": args.seeds, "steps": args.steps}
    for task in DATA:
        results[task] = run_task(task, args.seeds, args.steps, args.rows)
        print(f"\n{task:<28}{'bits':>6}{'loss':>9}{'accuracy':>10}")
        for name, row in results[task].items():
            print(f"{name:<28}{row['bits']:>6.2f}{row['loss']:>9.4f}{row['accuracy']:>10.2%}")
    if args.rows == list(ROWS):
        write_json(args.out, results)


if __name__ == "__main__":
    main()
