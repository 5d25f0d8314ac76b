"""Quantization-aware training against coreai-opt and torchao: float, PTQ, QAT and LSQ, with the same steps.

    python benchmarks/qat.py --peer-python /path/to/python/with/coreai-opt [--tasks digits] [--widths W4A4] [--seeds 0]
    python benchmarks/qat.py --time --peer-python ...

Two tasks: the digits CNN (cross entropy and accuracy on held-out digits) and a character transformer on the source of
Python's standard library (nats per character on held-out text). For each of W8A8, W4A8, W4A4, W2A4: weights per output
channel, activations per tensor. ``ptq`` and ``qat`` have the specs of Bitwright's presets, in which activations of four
bits get the range of least squared error and weights of two bits learn their step. ``qat`` and ``lsq`` freeze the batch
norms after half of the steps (``QATSchedule``), since their averages lag behind weights that jump between codes;
``qat_free_norms`` and ``lsq_free_norms`` are the same without that, as coreai-opt's schedule has no such step.
``ptq_minmax`` and ``qat_minmax`` have coreai-opt's averages of extremes and no schedule, as its own row, which trains
in its own interpreter. torchao, which has no convolutions, runs the transformer with per-token activations, and so does
Bitwright beside it. All rows of a seed start from the same float weights and see the same batches at the same learning
rate; ``float_more`` takes the same further steps in float. ``--time`` measures training steps instead, the libraries
taking turns.

What a row recovers is its share of what PTQ with its own ranges has lost; ``recovered of ptq_minmax`` is the share of
what the averages of extremes have lost. Settings were chosen on the seeds 10 to 13, none of which is in the results.

Results are kept row by row in benchmarks/results/qat.json (``--time``: qat_step_time.json); rows that are there are
not run again without ``--again``, so that a run may be cut into pieces.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from _measure import Timing, Worker, alternate, machine, ratio, write_json
from _qat_tasks import MODELS, Loop, character_data, digits_data, evaluate, loss_of, train

__all__ = ["MODELS", "character_data", "digits_data", "evaluate", "loss_of", "train"]

RESULTS = Path(__file__).parent / "results"
WIDTHS = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4), "W2A4": (2, 4)}
CALIBRATION = 4
FLOAT_STEPS, STEPS = {"digits": 800, "characters": 500}, {"digits": 150, "characters": 100}
RATE = {"digits": 5e-3, "characters": 3e-3}
SHARE = 0.2  # learning rate of the further steps, relative to that of the float model
# coreai-opt leaves these in float, and so must Bitwright when both are to train the same simulators.
ONLY_BITWRIGHT = ("scaled_dot_product_attention", "layer_norm")
ROWS = {
    "digits": ["ptq", "qat", "lsq", "qat_free_norms", "lsq_free_norms", "ptq_minmax", "qat_minmax", "coreai_opt"],
    "characters": ["ptq", "qat", "lsq", "ptq_minmax", "qat_minmax", "coreai_opt", "qat_tokens", "torchao"],
}
PAIRS = (("qat", "coreai_opt"), ("qat_minmax", "coreai_opt"), ("lsq", "coreai_opt"), ("qat_tokens", "torchao"))
FREE_NORMS = "_free_norms"  # end of the names of rows whose batch norms go on to the end, as coreai-opt's do
NO_WORSE = (("qat", "coreai_opt"), ("lsq", "coreai_opt"), ("qat_tokens", "torchao"), ("lsq", "qat"))
PTQ_OF = {"qat_minmax": "ptq_minmax", "coreai_opt": "ptq_minmax"}
ALLOWED_STEP_TIME = 0.85
RECOVERED = {"W4A4": 0.5}  # share of PTQ's loss that QAT is to win back, by width
FEW_BITS = 4  # of activations, from which on the presets search for the range
FEW_WEIGHT_BITS = 2  # of weights, from which on the presets learn the step
_LEARNED_WEIGHT = {"fake_quantize_cls": "lsq", "range_calculator_cls": "mse"}
SCHEDULED = ("qat", "lsq")  # rows that freeze batch norms
GROUPED = (*SCHEDULED, *(row + FREE_NORMS for row in SCHEDULED))  # rows that may have learned steps


def rows_of(task: str, width: str) -> list[str]:
    """Return the rows of a task; with more bits the presets have averages of extremes themselves."""
    few = WIDTHS[width][1] <= FEW_BITS
    return [row for row in ROWS[task] if few or not row.endswith("_minmax")]


def tensor_config(row: str, weight_bits: int, activation_bits: int, freeze: int | None = None) -> Any:
    """Return the configuration of a row, in Bitwright's classes or coreai-opt's; ``freeze`` is a step."""
    library = "coreai_opt" if row == "coreai_opt" else "bitwright"
    row = row.removesuffix(FREE_NORMS)
    quantization = importlib.import_module(f"{library}.quantization")
    spec = importlib.import_module(f"{library}.quantization.spec")
    weight: dict[str, Any] = {"dtype": f"int{weight_bits}", "granularity": spec.PerChannelGranularity(axis=0)}
    activation: dict[str, Any] = {"dtype": f"int{activation_bits}", "qscheme": "asymmetric"}
    if row == "lsq":
        weight |= _LEARNED_WEIGHT
        activation |= {"fake_quantize_cls": "lsq_plus", "range_calculator_cls": "mse"}
    elif row in ("ptq", "qat"):
        activation |= {"range_calculator_cls": "mse"} if activation_bits <= FEW_BITS else {}
        weight |= _LEARNED_WEIGHT if weight_bits <= FEW_WEIGHT_BITS else {}
    made = spec.QuantizationSpec(**activation)
    schedule = {} if freeze is None else {"qat_schedule": quantization.config.QATSchedule(freeze_batch_norm=freeze)}
    config = quantization.ModuleQuantizerConfig(
        op_input_spec={"*": made},
        op_output_spec=None,
        op_state_spec={"weight": spec.QuantizationSpec(**weight)},
        op_type_config=dict.fromkeys(ONLY_BITWRIGHT),
        **schedule,
    )
    return quantization.QuantizerConfig(global_config=config, execution_mode="eager")


def token_config(weight: torch.dtype, activation: torch.dtype) -> Any:
    """Per-token activations and per-channel weights of linear layers, as torchao's QAT has them."""
    from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, QuantizerConfig
    from bitwright.quantization.spec import PerChannelGranularity, PerTokenGranularity

    rows = QuantizationSpec(
        dtype=activation, qscheme="asymmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"
    )
    states = {"weight": QuantizationSpec(dtype=weight, granularity=PerChannelGranularity(axis=0))}
    linear = ModuleQuantizerConfig(op_input_spec={0: rows}, op_output_spec=None, op_state_spec=states)
    return QuantizerConfig(
        global_config=None, module_type_configs={"torch.nn.modules.linear.Linear": linear}, execution_mode="eager"
    )


class Trainer:
    """One row: the float model with one library's simulators, calibrated, and its training loop."""

    def __init__(self, row: str, task: str, job: dict[str, Any], bits: tuple[int, int]) -> None:
        self.row, self.job, self.quantizer = row, job, None
        model = MODELS[task]()
        model.load_state_dict(job["float"])
        dtypes = [getattr(torch, f"int{n}") for n in bits]
        if row == "torchao":
            from torchao.quantization import quantize_
            from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

            activation = IntxFakeQuantizeConfig(dtypes[1], "per_token", is_symmetric=False)
            weight = IntxFakeQuantizeConfig(dtypes[0], "per_channel")
            quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step="prepare"))
        elif row not in ("float", "float_more"):
            library = "coreai_opt" if row == "coreai_opt" else "bitwright"
            freeze = len(job["batches"]) // 2 if row in SCHEDULED else None
            config = token_config(*dtypes) if row == "qat_tokens" else tensor_config(row, *bits, freeze)
            quantizer = importlib.import_module(f"{library}.quantization").Quantizer(model, config)
            model = quantizer.prepare((job["batches"][0][0],))
            with quantizer.calibration_mode(), torch.no_grad():
                for x, _ in job["batches"][:CALIBRATION]:
                    model(x)
            self.quantizer = quantizer
        self.model = model
        self.loop: Loop | None = None

    def begin(self) -> Loop:
        """Enter training mode."""
        groups = [{"params": list(self.model.parameters()), "lr": self.job["rate"]}]
        if self.row in GROUPED:
            groups = importlib.import_module("bitwright.quantization.qat").parameter_groups(
                self.model, self.job["rate"]
            )
        if self.quantizer is not None:
            self.mode = self.quantizer.training_mode()
            self.mode.__enter__()
        self.model.train()
        self.loop = Loop(self.model, self.job["batches"], groups)
        return self.loop

    def quality(self) -> dict[str, float]:
        """Train, unless the row is about no training, and evaluate."""
        if self.row != "float" and not self.row.startswith("ptq"):
            loop = self.begin()
            if self.row in SCHEDULED:
                self.quantizer.step_with(loop.optimizer)
            for _ in self.job["batches"]:
                loop.step()
            if self.quantizer is not None:
                self.mode.__exit__(None, None, None)
        return evaluate(self.model, self.job["test"])

    def measure(self, steps: int) -> float:
        """Return the mean seconds of some steps."""
        loop = self.loop or self.begin()
        return sum(loop.step() for _ in range(steps)) / steps


def make_job(folder: Path, task: str, seed: int) -> Path:
    """Train the float model, unless ``folder`` has it, and return the file with it and the further batches."""
    before, after = FLOAT_STEPS[task], STEPS[task]
    path = folder / f"{task}-{seed}-{before}-{after}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        data = {"digits": digits_data, "characters": character_data}[task](before + after, seed)
        model = MODELS[task]()
        train(model.train(), data["batches"][:before], [{"params": list(model.parameters()), "lr": RATE[task]}])
        later = data["batches"][before:]
        job = {"float": model.state_dict(), "batches": later, "test": data["test"], "rate": RATE[task] * SHARE}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(job, path)
    return path


def serve() -> None:
    """Answer requests of the other interpreter: the quality of a row, or the seconds of some steps."""
    trainers: dict[str, Trainer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            key = json.dumps(request["row"])
            if key not in trainers or request["op"] == "quality":
                row, task, path, bits = request["row"]
                trainers = {**trainers, key: Trainer(row, task, torch.load(path, weights_only=True), bits)}
            trainer = trainers[key]
            result = trainer.quality() if request["op"] == "quality" else trainer.measure(request["steps"])
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def measure_quality(options: argparse.Namespace, folder: Path, peer: Worker | None) -> None:
    """Run the rows that are missing, writing after each."""
    report = json.loads(options.output.read_text()) if options.output.exists() else {"rows": {}}
    report |= {"machine": machine(), "float_steps": FLOAT_STEPS, "steps": STEPS, "calibration_batches": CALIBRATION}
    wanted = [("-", row) for row in ("float", "float_more")]
    for task in options.tasks:
        rows = [(width, row) for width in options.widths for row in rows_of(task, width)]
        rows = [pair for pair in rows if options.rows is None or pair[1] in options.rows]
        for seed in options.seeds:
            for width, row in [*wanted, *rows]:
                key = f"{task}/{width}/{row}/{seed}"
                foreign = row == "coreai_opt"
                if (key in report["rows"] and not options.again) or (foreign and peer is None):
                    continue
                path, bits = make_job(folder, task, seed), WIDTHS.get(width, (8, 8))
                if foreign:
                    assert peer is not None
                    result = peer.ask(op="quality", row=[row, task, str(path), bits])
                else:
                    result = Trainer(row, task, torch.load(path, weights_only=True), bits).quality()
                report["rows"][key] = result
                print(f"{key}: {result['loss']:.4f} {result['accuracy']:.4f}", flush=True)
                report["summary"] = summarize(report["rows"])
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, found in report.get("summary", {}).items():
        print(name, *(f"\n    {k}: {v}" for k, v in found.items()))


def spread(values: list[float]) -> dict[str, float]:
    """Return minimum, median and maximum over seeds."""
    found = {"minimum": min(values), "median": median(values), "maximum": max(values)}
    return {key: round(value, 5) for key, value in found.items()} | {"seeds": len(values)}


def with_error(values: list[float]) -> dict[str, float]:
    """Return the spread with the mean and its standard error: single seeds of few bits differ by more than rows do."""
    found = spread(values) | {"mean": round(mean(values), 5)}
    return found | ({"standard error": round(stdev(values) / len(values) ** 0.5, 5)} if len(values) > 1 else {})


def summarize(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return, by task and width, losses of the rows and their comparisons over the seeds."""
    summary: dict[str, Any] = {}
    for task in MODELS:
        for width in WIDTHS:
            losses: dict[str, dict[str, float]] = {}
            accuracies: dict[str, list[float]] = {}
            for key, result in rows.items():
                in_task, at, row, seed = key.split("/")
                if in_task == task and at in ("-", width):
                    losses.setdefault(row, {})[seed] = result["loss"]
                    accuracies.setdefault(row, []).append(result["accuracy"])
            if "ptq" in losses:
                found = {f"loss of {row}": spread(list(by_seed.values())) for row, by_seed in losses.items()}
                found |= {f"accuracy of {row}": spread(values) for row, values in accuracies.items()}
                compared = compare(losses)
                for row, other in NO_WORSE:
                    compared.get(f"loss of {row} minus {other}", {})["median_allowed"] = 0.0
                if width in RECOVERED and "qat: recovered" in compared:
                    compared["qat: recovered"]["median_wanted"] = RECOVERED[width]
                summary[f"{task} {width}"] = found | compared
    return summary


def compare(losses: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return seed by seed what training wins back of PTQ's loss, and differences of losses of rows."""
    found: dict[str, Any] = {}
    for row in ("qat", "qat_minmax", *GROUPED[1:], "coreai_opt", "qat_tokens", "torchao"):
        own = PTQ_OF.get(row, "ptq")
        own = own if own in losses else "ptq"
        bases = [(own, "float", "recovered"), (own, "float_more", "recovered of float with the same further steps")]
        if "ptq_minmax" in losses:
            bases.append(("ptq_minmax", "float", "recovered of ptq_minmax"))
        for worst, best, name in bases:
            shares = recovered(losses, row, worst, best)
            if shares:
                found[f"{row}: {name}"] = spread(shares)
    free = [(row + FREE_NORMS, "coreai_opt") for row in SCHEDULED]
    for row, other in (*PAIRS, *free, ("lsq", "qat")):
        seeds = [s for s in losses.get(row, {}) if s in losses.get(other, {})]
        if seeds:
            found[f"loss of {row} minus {other}"] = with_error([losses[row][s] - losses[other][s] for s in seeds])
    return found


def recovered(losses: dict[str, dict[str, float]], row: str, worst: str, best: str) -> list[float]:
    """Return seed by seed which share of the way from one row to another a third has come."""
    seeds = [s for s in losses.get(row, {}) if s in losses.get(worst, {}) and s in losses.get(best, {})]
    lost = {s: losses[worst][s] - losses[best][s] for s in seeds}
    return [(losses[worst][s] - losses[row][s]) / lost[s] for s in seeds if lost[s] > 0]


def measure_time(options: argparse.Namespace, folder: Path, peer: Worker | None) -> None:
    """Measure training steps, all libraries in turn, task by task and width by width."""
    report = json.loads(options.output.read_text())["results"] if options.output.exists() else {}
    for task in options.tasks:
        path = make_job(folder, task, options.seeds[0])
        job = torch.load(path, weights_only=True)
        for width in options.widths:
            if f"{task} {width}" in report and not options.again:
                continue
            sides = {}
            rows = [row for row in rows_of(task, width) if not (row.startswith("ptq") or row.endswith(FREE_NORMS))]
            for row in ["float", *rows]:
                if row == "coreai_opt" and peer is not None:
                    request = {"op": "time", "row": [row, task, str(path), WIDTHS[width]], "steps": options.steps}
                    sides[row] = lambda request=request: peer.ask(**request)
                elif row != "coreai_opt":
                    trainer = Trainer(row, task, job, WIDTHS[width])
                    sides[row] = lambda trainer=trainer: trainer.measure(options.steps)
            timings = alternate(sides, options.repeats, pause=0.02)
            print(f"{task} {width}: " + ", ".join(f"{row} {timing}" for row, timing in timings.items()))
            report[f"{task} {width}"] = {"seconds": timings, "ratios": step_ratios(timings)}
            print(f"    {report[f'{task} {width}']['ratios']}", flush=True)
            write_json(options.output, report)


def step_ratios(timings: dict[str, Timing]) -> dict[str, float]:
    """Return quotients of the median seconds of a step."""
    pairs = [pair for pair in (*PAIRS, ("qat", "float"), ("lsq", "float")) if all(row in timings for row in pair)]
    ratios = {f"{row} / {other}": round(ratio(timings[row], timings[other]), 3) for row, other in pairs}
    return ratios | {f"{row} / {other}_allowed": ALLOWED_STEP_TIME for row, other in pairs if other != "float"}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with coreai-opt; left out, the peer is skipped")
    parser.add_argument("--tasks", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", help="rows to run; all when left out")
    parser.add_argument("--time", action="store_true", help="measure the time of steps")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each library with --time")
    parser.add_argument("--steps", type=int, default=3, help="steps of each measurement with --time")
    parser.add_argument("--again", action="store_true", help="run rows that the results have already")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bitwright-qat")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch; the results hardly depend on it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    if options.worker:
        serve()
        return
    options.output = options.output or RESULTS / ("qat_step_time.json" if options.time else "qat.json")
    peer = (
        Worker(options.peer_python, Path(__file__), "--worker", "--threads", str(options.threads))
        if options.peer_python
        else None
    )
    try:
        (measure_time if options.time else measure_quality)(options, options.folder, peer)
    finally:
        if peer is not None:
            peer.close()


if __name__ == "__main__":
    main()
