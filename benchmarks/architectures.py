"""Real architectures to the end: how prepare, calibration or training, and finalization go, in coreai-opt and here.

Run ``python -m benchmarks.architectures [name ...]``; the names are those of ``tests/e2e/architectures.py``. Without
names it goes on where it was interrupted: rows that are there already are left out. With ``BITWRIGHT_PEER_PYTHON`` set
(an interpreter that has coreai-opt and transformers) the same is tried there and printed beside ours. A run ends ``ok``
when its output is finite and the finalized model computes what the prepared one does; else it says in which stage it
ended and how. ``benchmarks/results/architectures.json`` keeps the rows of all runs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

KINDS = ("w8", "w8a8", "qat")
MODES = ("graph", "eager")
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "architectures.json"
# Seconds of processor time for the three runs of a row, which other work on the machine does not use up; coreai-opt
# prepares some of these in minutes.
LIMIT = 300


class Positional(nn.Module):
    """A model whose inputs are all positional, and whose outputs are a tuple of tensors of real numbers."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model; the last arguments are its keyword inputs."""
        split = len(args) - len(self.names)
        result = self.model(*args[:split], **dict(zip(self.names, args[split:], strict=True)))
        leaves = tree_leaves(list(result.values()) if isinstance(result, dict) else result)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def attempt(package: str, name: str, mode: str, kind: str) -> str:
    """Return how one run ends: ``ok``, or the stage and the error."""
    quantization = importlib.import_module(f"{package}.quantization")
    architectures = importlib.import_module("tests.e2e.architectures")
    built = architectures.build(name)
    model = Positional(built.model, tuple(built.kwargs)).eval()
    inputs = (*built.args, *built.kwargs.values())
    config = quantization.QuantizerConfig
    chosen = config.presets.w8(execution_mode=mode) if kind == "w8" else config(execution_mode=mode)
    stage = "prepare"
    try:
        quantizer = quantization.Quantizer(model, chosen)
        prepared = quantizer.prepare(inputs)
        stage = "train" if kind == "qat" else "calibrate"
        _settle(quantizer, prepared, inputs, kind)
        stage = "run"
        with torch.no_grad():
            before = prepared(*inputs)
        stage = "finalize"
        finalized = quantizer.finalize(backend=_simulated(package))
        with torch.no_grad():
            after = finalized(*inputs)
    except Exception as error:
        return f"{stage}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if not all(leaf.isfinite().all() for leaf in after):
        return "not finite"
    same = all(_agree(mine, final) for mine, final in zip(before, after, strict=True))
    return "ok" if same else "finalized differs from prepared"


def _agree(prepared: torch.Tensor, finalized: torch.Tensor) -> bool:
    """Equal but for rounding: 100 dB."""
    noise = (prepared.double() - finalized.double()).square().sum()
    return bool(noise <= 1e-10 * prepared.double().square().sum())


def _settle(quantizer: Any, prepared: Any, inputs: tuple[torch.Tensor, ...], kind: str) -> None:
    if kind == "w8a8":
        with quantizer.calibration_mode(), torch.no_grad():
            prepared(*inputs)
    if kind == "qat":
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
        with quantizer.training_mode():
            for _ in range(3):
                optimizer.zero_grad()
                prepared(*inputs)[0].float().square().mean().backward()
                optimizer.step()
    if not isinstance(prepared, torch.fx.GraphModule):  # graphs of coreai-opt refuse to be switched
        prepared.eval()


def _simulated(package: str) -> Any:
    return importlib.import_module(f"{package}.common").ExportBackend._TORCH


def run(interpreter: str, package: str, name: str, mode: str) -> dict[str, str]:
    """Return how the runs of one architecture end in another process; one that hangs is stopped."""
    call = [interpreter, str(Path(__file__).resolve()), "--one", package, name, mode]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    found = {row[0]: row[1] for line in done.stdout.splitlines() if line.startswith("[") for row in [json.loads(line)]}
    missing = f"more than {LIMIT} s" if done.returncode == -signal.SIGXCPU else "the process ended"
    return {kind: found.get(kind, missing) for kind in KINDS}


def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    return found


def _is_complete(entry: dict[str, Any], peer: str) -> bool:
    return "bitwright" in entry and (not peer or "coreai_opt" in entry)


def main(names: list[str]) -> None:
    """Print one line for each architecture and mode, and add the rows to the results."""
    sys.path.insert(0, str(HERE.parent))
    from benchmarks._measure import machine

    known = importlib.import_module("tests.e2e.architectures").NAMES
    peer = os.environ.get("BITWRIGHT_PEER_PYTHON", "")
    rows = _recorded()
    for name in names or known:
        for mode in MODES:
            if not names and _is_complete(rows.get(f"{name} {mode}", {}), peer):
                continue
            entry = {"bitwright": run(sys.executable, "bitwright", name, mode)}
            if peer:
                entry["coreai_opt"] = run(peer, "coreai_opt", name, mode)
            rows = {**_recorded(), f"{name} {mode}": entry}  # others may have measured meanwhile
            for package, ends in entry.items():
                print(
                    f"{name:14}{mode:7}{package:12}" + "  ".join(f"{k}: {end}" for k, end in ends.items()), flush=True
                )
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(
                json.dumps({"machine": machine(), "results": dict(sorted(rows.items()))}, indent=2) + "\n"
            )
    for package in ("bitwright", "coreai_opt"):
        ends = [end for row in rows.values() for end in row.get(package, {}).values()]
        print(f"{package}: {ends.count('ok')} of {len(ends)} runs end well")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 10))
        for one in KINDS:
            print(json.dumps([one, attempt(sys.argv[2], sys.argv[3], sys.argv[4], one)]), flush=True)
    else:
        main(sys.argv[1:])
