"""Graph mode: what prepare and finalize cost beside ``torch.export``, and how fast the prepared model runs.

Run ``python -m benchmarks.graph [model ...]``; models are ``mlp50``, ``gpt6`` and the like (layers, blocks). With
``BITWRIGHT_PEER_PYTHON`` set the same is measured in coreai-opt's interpreter and printed beside it. Times are CPU
seconds, so that other processes on the machine matter less; forwards are the least of five, in milliseconds.
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
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

DEFAULT = ("mlp50", "mlp200", "mlp800", "gpt6", "gpt24", "gpt48")


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its inputs."""
    kind, count = name[:3], int(name[3:])
    torch.manual_seed(0)
    if kind == "mlp":
        layers = [layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers).eval(), (torch.randn(4, 64),)
    blocks = [Block() for _ in range(count)]
    model = nn.Sequential(nn.Embedding(100, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 100))
    return model.eval(), (torch.randint(0, 100, (2, 16)),)


def measure(name: str, package: str) -> dict[str, float]:
    """Return the second of two rounds, when everything is loaded."""
    quantization = importlib.import_module(f"{package}.quantization")
    _round(name, quantization)
    return _round(name, quantization)


def _round(name: str, quantization: Any) -> dict[str, float]:
    model, inputs = build(name)
    with torch.no_grad():
        export = cpu_seconds(lambda: torch.export.export(model, inputs))
    quantizer = quantization.Quantizer(model, quantization.QuantizerConfig())
    prepare = cpu_seconds(lambda: quantizer.prepare(inputs))
    prepared = quantizer._model
    with quantizer.calibration_mode():
        prepared(*inputs)
    return {
        "export": export,
        "prepare": prepare,
        "added": prepare - export,
        "forward": milliseconds(prepared, inputs),
        "float": milliseconds(model, inputs),
        "switch": cpu_seconds(lambda: (prepared.train(), prepared.eval())) * 1e3,
        "finalize": cpu_seconds(lambda: quantizer.finalize(backend="_torch")),
    }


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of one call."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def milliseconds(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the least wall-clock time of five forwards."""
    times = []
    with torch.no_grad():
        for _ in range(6):
            start = time.perf_counter()
            model(*inputs)
            times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def main(names: list[str]) -> None:
    """Print one row for each model."""
    peer = os.environ.get("BITWRIGHT_PEER_PYTHON", "")
    columns = ("export", "prepare", "added", "forward", "float", "switch", "finalize")
    print(f"{'':8}{'':12}" + "".join(f"{column:>10}" for column in columns))
    for name in names:
        rows = {"bitwright": measure(name, "bitwright")}
        if peer:
            call = [peer, str(Path(__file__)), "--peer", name]
            answer = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            rows["coreai_opt"] = json.loads(answer)
        for package, row in rows.items():
            print(f"{name:8}{package:12}" + "".join(f"{row[column]:10.3f}" for column in columns), flush=True)
        if peer:
            ours, theirs = rows["bitwright"], rows["coreai_opt"]
            print(
                f"{'':20}prepare/export {ours['prepare'] / ours['export']:.2f} (peer "
                f"{theirs['prepare'] / theirs['export']:.2f}), added {ours['added'] / theirs['added']:.3f} of the "
                f"peer's, finalize {ours['finalize'] / theirs['finalize']:.2f}, forward "
                f"{theirs['forward'] / ours['forward']:.1f} x faster",
                flush=True,
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peer"]:
        print(json.dumps(measure(sys.argv[2], "coreai_opt")))
    else:
        main(sys.argv[1:] or list(DEFAULT))
