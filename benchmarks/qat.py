"""Quantization-aware training against coreai-opt and torchao: float, PTQ, QAT and LSQ, with the same steps.

    python benchmarks/qat.py --peer-python /path/to/python/with/coreai-opt

Two tasks: the digits CNN (cross entropy and accuracy on held-out digits) and a character transformer on the source of
Python's standard library (nats per character on held-out text). For each of W8A8, W4A8, W4A4, W2A4: weights per output
channel, activations per tensor. coreai-opt runs the same specs in its own interpreter; torchao, which has no
convolutions, runs the transformer with per-token activations, and so does Bitwright beside it. All start from the same
float weights and see the same batches. Results go to benchmarks/results/qat.json.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4), "W2A4": (2, 4)}
CONTEXT = 48
CALIBRATION = 4


class CNN(nn.Module):
    """Depthwise-separable convolutions with batch norm on 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.depth, self.norm1 = nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False), nn.BatchNorm2d(32)
        self.point, self.norm2 = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm0(self.stem(x)))
        x = F.relu(self.norm2(self.point(F.relu(self.norm1(self.depth(x))))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    """Two blocks over characters."""

    def __init__(self, vocabulary: int = 97, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"digits": CNN, "characters": CharTransformer}


def digits_data(steps: int) -> dict[str, Any]:
    from bitwright.demo import load_digits

    digits = load_digits()
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randint(0, len(digits.train_images), (64,), generator=generator) for _ in range(steps)]
    return {
        "batches": [(digits.train_images[i], digits.train_labels[i]) for i in picks],
        "test": (digits.test_images, digits.test_labels),
    }


def character_data(steps: int) -> dict[str, Any]:
    names = ("argparse", "ast", "dataclasses", "datetime", "inspect", "tarfile", "typing", "unittest.mock", "zipfile")
    sources = [Path(str(importlib.import_module(name).__file__)).read_text() for name in names]
    codes = torch.tensor([min(max(ord(c) - 31, 0), 96) for c in "\n".join(sources)])
    held_out = len(codes) // 10
    generator = torch.Generator().manual_seed(0)

    def draw(text: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=generator)
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return {"batches": [draw(codes[:-held_out], 16) for _ in range(steps)], "test": draw(codes[-held_out:], 128)}


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train(model: nn.Module, batches: list[Any], groups: Any, after: Any = None) -> float:
    """Train with Adam and a linear decay; return the median seconds of a step."""
    optimizer = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / len(batches))
    seconds = []
    for x, y in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        decay.step()
        if after is not None:
            after()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


@torch.no_grad()
def evaluate(model: nn.Module, test: Any) -> dict[str, float]:
    model.eval()
    logits = model(test[0])
    return {"loss": float(loss_of(logits, test[1])), "accuracy": float((logits.argmax(-1) == test[1]).float().mean())}


def tensor_config(library: str, weight_bits: int, activation_bits: int, learned: bool = False) -> Any:
    """Return the same configuration in Bitwright or coreai-opt."""
    quantization = importlib.import_module(f"{library}.quantization")
    spec = importlib.import_module(f"{library}.quantization.spec")
    weight: dict[str, Any] = {"dtype": f"int{weight_bits}", "granularity": spec.PerChannelGranularity(axis=0)}
    activation: dict[str, Any] = {"dtype": f"int{activation_bits}", "qscheme": "asymmetric"}
    if learned:
        weight |= {"fake_quantize_cls": "lsq", "range_calculator_cls": "mse"}
        activation |= {"fake_quantize_cls": "lsq_plus", "range_calculator_cls": "mse"}
    made = spec.QuantizationSpec(**activation)
    config = quantization.ModuleQuantizerConfig(
        op_input_spec={"*": made}, op_output_spec=None, op_state_spec={"weight": spec.QuantizationSpec(**weight)}
    )
    return quantization.QuantizerConfig(global_config=config, execution_mode="eager")


def run_quantizer(library: str, task: str, job: dict[str, Any], bits: tuple[int, int], method: str) -> dict[str, Any]:
    """PTQ, QAT or LSQ with a quantizer; the two libraries have the same interface."""
    quantization = importlib.import_module(f"{library}.quantization")
    model = MODELS[task]()
    model.load_state_dict(job["float"])
    quantizer = quantization.Quantizer(model, tensor_config(library, *bits, learned=method == "lsq"))
    prepared = quantizer.prepare((job["batches"][0][0],))
    with quantizer.calibration_mode(), torch.no_grad():
        for x, _ in job["batches"][:CALIBRATION]:
            prepared(x)
    step_seconds = None
    if method != "ptq":
        ranges = []
        if method == "lsq":
            ranges = importlib.import_module("bitwright.quantization.qat").range_parameters(prepared)
        known = {id(p) for p in ranges}
        groups = [{"params": [p for p in prepared.parameters() if id(p) not in known], "lr": job["rate"]}]
        groups += [{"params": ranges, "lr": job["rate"] * 0.1}] if ranges else []
        with quantizer.training_mode():
            step_seconds = train(prepared, job["batches"], groups)
    return {"step_seconds": step_seconds, **evaluate(prepared, job["test"])}


def run_tokens(who: str, job: dict[str, Any], bits: tuple[int, int]) -> dict[str, Any]:
    """QAT of the transformer's linear layers with per-token activations, by torchao or by Bitwright."""
    model = CharTransformer()
    model.load_state_dict(job["float"])
    weight, activation = getattr(torch, f"int{bits[0]}"), getattr(torch, f"int{bits[1]}")
    if who == "torchao":
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        quantize_(
            model,
            QATConfig(
                activation_config=IntxFakeQuantizeConfig(activation, "per_token", is_symmetric=False),
                weight_config=IntxFakeQuantizeConfig(weight, "per_channel"),
                step="prepare",
            ),
        )
        seconds = train(model.train(), job["batches"], [{"params": list(model.parameters()), "lr": job["rate"]}])
        return {"step_seconds": seconds, **evaluate(model, job["test"])}
    from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
    from bitwright.quantization.spec import PerChannelGranularity, PerTokenGranularity

    rows = QuantizationSpec(
        dtype=activation, qscheme="asymmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"
    )
    states = {"weight": QuantizationSpec(dtype=weight, granularity=PerChannelGranularity(axis=0))}
    linear = ModuleQuantizerConfig(op_input_spec={0: rows}, op_output_spec=None, op_state_spec=states)
    config = QuantizerConfig(
        global_config=None, module_type_configs={"torch.nn.modules.linear.Linear": linear}, execution_mode="eager"
    )
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare((job["batches"][0][0],))
    with quantizer.training_mode():
        seconds = train(prepared, job["batches"], [{"params": list(prepared.parameters()), "lr": job["rate"]}])
    return {"step_seconds": seconds, **evaluate(prepared, job["test"])}


def run_peer(python: str, folder: Path, task: str, name: str) -> dict[str, Any] | None:
    command = [python, __file__, "--worker", str(folder / f"{task}.pt"), task, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def make_job(task: str, float_steps: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    data = (digits_data if task == "digits" else character_data)(float_steps + steps)
    model = MODELS[task]()
    rate = 5e-3 if task == "digits" else 3e-3
    train(model.train(), data["batches"][:float_steps], [{"params": list(model.parameters()), "lr": rate}])
    state = copy.deepcopy(model.state_dict())
    later = data["batches"][float_steps:]
    return {
        "float": state,
        "batches": later,
        "test": data["test"],
        "rate": rate * 0.2,
        "reached": evaluate(model, data["test"]),
    }


def summarize(task: str, name: str, rows: dict[str, Any], reached: float) -> dict[str, Any]:
    lost = rows["ptq"]["loss"] - reached
    summary: dict[str, Any] = {
        "ptq_lost": lost,
        "qat_recovered": (rows["ptq"]["loss"] - rows["qat"]["loss"]) / lost if lost > 0 else None,
        "lsq_recovered": (rows["ptq"]["loss"] - rows["lsq"]["loss"]) / lost if lost > 0 else None,
    }
    for other, own in (("coreai_opt", "qat"), ("torchao", "qat_tokens")):
        if other in rows and "loss" in rows[other]:
            summary[f"step_time_to_{other}"] = rows[own]["step_seconds"] / rows[other]["step_seconds"]
            summary[f"loss_minus_{other}"] = rows[own]["loss"] - rows[other]["loss"]
    print(f"{task} {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in summary.items() if v is not None), flush=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with coreai-opt; left out, the peer is skipped")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--float-steps", type=int, default=300)
    parser.add_argument("--tasks", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "qat.json")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    random.seed(0)
    if options.worker:
        path, task, name = options.worker
        print(json.dumps(run_quantizer("coreai_opt", task, torch.load(path, weights_only=True), WIDTHS[name], "qat")))
        return
    report: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            job = make_job(task, options.float_steps, options.steps)
            torch.save(job, Path(folder) / f"{task}.pt")
            report[task] = {"float": job["reached"]}
            for name in options.widths:
                bits = WIDTHS[name]
                rows = {m: run_quantizer("bitwright", task, job, bits, m) for m in ("ptq", "qat", "lsq")}
                if task == "characters":
                    rows |= {
                        "qat_tokens": run_tokens("bitwright", job, bits),
                        "torchao": run_tokens("torchao", job, bits),
                    }
                if options.peer_python:
                    rows["coreai_opt"] = run_peer(options.peer_python, Path(folder), task, name)
                report[task][name] = {**rows, "summary": summarize(task, name, rows, job["reached"]["loss"])}
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
