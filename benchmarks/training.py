"""Quantization-aware training beside float training: time of a step, peak memory, and evaluation of frozen weights.

Usage: python benchmarks/training.py [--threads 2] [--repeats 15] [--models resnet gpt] [--no-memory] [--output FILE]

The environment variable BITWRIGHT_PEER_PYTHON names an interpreter with coreai-opt 0.3; without it the peer is left
out. Float, Bitwright and peer take turns, step by step, each on the same model and batch and in a process of its own,
since memory that one leaves behind would be another's. Memory is measured in
processes of their own: the growth of the resident set from a model that is built and has its simulators to its peak
during three steps; libraries, compiled code and the converters' leftovers lie before. It holds, besides what is in use,
what the allocator has not given back, which varies from run to run. A second measurement is without glibc's cache for
each thread, which keeps the splinters of aligned tensors from growing together with them again; a third maps every
larger tensor by itself, so that nothing of the kind is left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Side, Spread, Worker, alternate, peak_growth, ratio, resident, write_json
from _models import Block
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
MODES = ("eager", "graph")
STEP, STEP_OF_TRAINED, FROZEN = "step", "step, trained before", "frozen evaluation"
IN_FULL = "bitwright, tensors in full"
# What is measured of memory: how glibc is set up for it.
MEMORY = {
    "peak memory": {},
    "peak memory, no thread cache": {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
    "peak memory in use": {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)},
}


class Residual(nn.Module):
    """Two convolutions with batch norm around which the input is carried."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Residual blocks at three resolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(3):
            here = width << stage
            layers += [Residual(here), Residual(here)]
            if stage < 2:
                layers += [nn.Conv2d(here, 2 * here, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * here), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, vocabulary: int = 512, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def problem(name: str, small: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, a batch and its targets; the same in every process."""
    torch.manual_seed(0)
    if small:  # in all but its tensors, which are just large enough for the code of large ones
        tokens = torch.randint(0, 64, (64, 65))
        images = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        return (ResNet(8), *images) if name == "resnet" else (GPT(64, 32, 2), tokens[:, :-1], tokens[:, 1:])
    if name == "resnet":
        return ResNet(), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    tokens = torch.randint(0, 512, (8, 129))
    return GPT(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def learning(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, scope: Callable[[], Any] = contextlib.nullcontext
) -> Callable[[], None]:
    """Return a step of gradient descent, whose forward pass runs within ``scope``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def learn() -> None:
        optimizer.zero_grad()
        with scope():
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()

    return learn


def build(
    package: str, name: str, mode: str, in_full: bool = False, small: bool = False, trained: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step and an evaluation.

    Args:
        package: ``float``, ``bitwright`` or ``coreai_opt``.
        name: ``resnet`` or ``gpt``.
        mode: ``eager`` or ``graph``.
        in_full: keep what is saved for the backward pass as it is, not as codes (Bitwright).
        small: build a small model, to load what is loaded once.
        trained: train the float model for a while first, so that its batch norms know their inputs. Otherwise
            calibration, which is evaluation, sees other ranges than training, and half the vectors clip something.
    """
    model, x, y = problem(name, small)
    if trained:
        learn = learning(model, x, y)
        for _ in range(30):
            learn()
    training = contextlib.ExitStack()
    if package != "float":
        quantization = importlib.import_module(f"{package}.quantization")
        quantizer = quantization.Quantizer(model, quantization.QuantizerConfig(execution_mode=mode))
        model = quantizer.prepare((x,))
        with quantizer.calibration_mode(), torch.no_grad():
            model(x)
        options = {"save_as_codes": False} if in_full else {}  # which coreai-opt does not have
        training.enter_context(quantizer.training_mode(**options))
    learn = learning(model, x, y)

    def step(_: contextlib.ExitStack = training) -> None:  # which ends when nobody holds it
        learn()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    return step, evaluate


def frozen(package: str, name: str) -> Callable[[], None]:
    """Return the evaluation of a model whose weights are int4 and which is not trained any more."""
    model, x, _ = problem(name)
    if package != "float":
        quantization = importlib.import_module(f"{package}.quantization")
        quantizer = quantization.Quantizer(model, quantization.QuantizerConfig.presets.w4(execution_mode="eager"))
        model = quantizer.prepare((x,))
    model.eval()
    return torch.no_grad()(lambda: model(x))


def seconds(run: Callable[[], object]) -> Side:
    """Time one call."""

    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return once


def saved_bytes(run: Callable[[], object]) -> int:
    """Bytes that one step would keep in full for its backward pass, each piece of memory counted once."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(found.values())


def memory_of(package: str, name: str, mode: str, in_full: bool) -> dict[str, int]:
    """Measure in this process; libraries and compiled code are loaded and the model is built before."""
    for _ in range(2):
        step, _ = build(package, name, mode, in_full, small=True)
        for _ in range(3):
            step()
    step, _ = build(package, name, mode, in_full)
    if package == "bitwright":
        importlib.import_module("bitwright.kernels").release_idle_memory()
    ctypes.CDLL(None).malloc_trim(0)
    return {"peak": peak_growth(step, resident()), "saved": saved_bytes(step)}


def ask_memory(interpreter: str, what: str, *arguments: str) -> dict[str, int]:
    """``memory_of`` in another process, for a row of ``MEMORY``."""
    command = [interpreter, str(HERE / "training.py"), "--memory-of", *arguments]
    environment = os.environ | MEMORY[what]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    found: dict[str, int] = json.loads(text.splitlines()[-1])
    return found


def measure_times(
    what: str, name: str, mode: str, repeats: int, threads: int, workers: dict[str, Worker]
) -> dict[str, Any]:
    """Time steps, or the evaluation of frozen int4 weights, in processes of their own; ratios of medians."""
    sides: dict[str, Side] = {
        side: partial(worker.ask, what=what, name=name, mode=mode, threads=threads) for side, worker in workers.items()
    }
    times = alternate(sides, repeats, pause=0.01)
    over = {side: ratio(times[side], times["float"]) for side in times if side != "float"}
    return {"what": what, "model": name, "mode": mode, "threads": threads, "over_float": over,
            "over_float_allowed": 1.05 if what == FROZEN else 1.2, "seconds": times}  # fmt: skip


def measure_memory(what: str, name: str, mode: str, repeats: int, interpreter: str | None) -> dict[str, Any]:
    """Peak memory of a step in a new process each time, as multiples of the float step's; a row of ``MEMORY``."""
    sides = {
        "float": (sys.executable, "float", ""),
        "bitwright": (sys.executable, "bitwright", ""),
        IN_FULL: (sys.executable, "bitwright", "in full"),
    }
    if interpreter:
        sides["peer"] = interpreter, "coreai_opt", ""
    peaks: dict[str, list[float]] = {side: [] for side in sides}
    saved: dict[str, int] = {}
    for _ in range(repeats):
        for side, (python, package, in_full) in sides.items():
            answer = ask_memory(python, what, package, name, mode, in_full)
            peaks[side].append(answer["peak"])
            saved[side] = answer["saved"]
    spreads = {side: Spread.of(values) for side, values in peaks.items()}
    over = {side: ratio(spreads[side], spreads["float"]) for side in sides if side != "float"}
    found = {side: {"peak": spreads[side], "saved": saved[side]} for side in sides}
    return {"what": what, "model": name, "mode": mode, "over_float": over, "over_float_allowed": 1.25,
            "bytes": found}  # fmt: skip


def serve(package: str) -> None:
    """Answer requests with seconds; ``package`` is one of ``build``, or ``IN_FULL``."""
    in_full, package = package == IN_FULL, "bitwright" if package == IN_FULL else package
    built: dict[tuple[str, str, str], Side] = {}
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request["threads"])
        key = request["what"], request["name"], request["mode"]
        try:
            if key not in built:
                built.clear()
                what, name, mode = key
                trained = what == STEP_OF_TRAINED
                if what == FROZEN:
                    built[key] = seconds(frozen(package, name))
                else:
                    built[key] = seconds(build(package, name, mode, in_full, trained=trained)[0])
            answer = {"result": built[key]()}
        except Exception as error:  # told to the process that asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def report(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row; an exclamation mark stands at a ratio that is missed."""
    text = ", ".join(
        f"{side} {over:.2f}{'!' if side != 'peer' and over > row['over_float_allowed'] else ''}"
        for side, over in row["over_float"].items()
    )
    print(f"{row['what']:28} {row['model']:7} {row['mode']:6} x float (<= {row['over_float_allowed']:g}): {text}")
    sys.stdout.flush()
    return row


def main() -> None:
    """Print the table and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--models", nargs="+", default=["resnet", "gpt"], choices=["resnet", "gpt"])
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "training.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.worker:
        serve(options.worker)
        return
    if options.memory_of:
        package, name, mode, in_full = options.memory_of
        print(json.dumps(memory_of(package, name, mode, bool(in_full))))
        return
    interpreter = os.environ.get("BITWRIGHT_PEER_PYTHON")
    script = HERE / "training.py"
    workers = {side: Worker(sys.executable, script, "--worker", side) for side in ("float", "bitwright", IN_FULL)}
    if interpreter:
        workers["peer"] = Worker(interpreter, script, "--worker", "coreai_opt")
    evaluating = {side: worker for side, worker in workers.items() if side != IN_FULL}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(report(row))
        write_json(options.output, rows)

    for name in options.models:
        keep(measure_times(FROZEN, name, "eager", 2 * options.repeats, options.threads, evaluating))
        for mode in MODES:
            for what in (STEP, STEP_OF_TRAINED):
                keep(measure_times(what, name, mode, options.repeats, options.threads, workers))
            if not options.no_memory:
                for what in MEMORY:
                    repeats = 1 if what == "peak memory in use" else options.memory_repeats
                    keep(measure_memory(what, name, mode, repeats, interpreter))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
