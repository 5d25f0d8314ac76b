"""Palettizes one linear layer on request, with bitwright or with coreai-opt: the same code, another import.

    python _clustering_worker.py bitwright|coreai_opt

Reads requests as lines of JSON (see ``clustering.py``) and answers with seconds, bytes and the error that remains.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

_HIGH_WATER = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def high_water() -> int:
    """Most resident bytes since the last reset; 0 where the system does not tell."""
    if not _HIGH_WATER.exists():
        return 0
    line = next(line for line in _HIGH_WATER.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def model_of(shape: list[int], layers: int) -> nn.Module:
    """Linear layers with weights N(0, 0.02)."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False) for _ in range(layers)))
    for layer in model:
        layer.weight.data = 0.02 * torch.randn(shape, generator=generator)
    return model.eval()


def config_of(library: Any, request: dict[str, Any]) -> Any:
    """The configuration that a request asks for."""
    spec: dict[str, Any] = {"n_bits": request["bits"], "cluster_dim": request["dim"]}
    if request["group"]:
        spec["granularity"] = {"type": "per_grouped_channel", "axis": 0, "group_size": request["group"]}
    state = {"weight": library.PalettizationSpec(**spec)}
    fast = request["fast"] and request["dim"] == 1
    module = library.ModuleKMeansPalettizerConfig(op_state_spec=state, enable_fast_kmeans_mode=fast)
    return library.KMeansPalettizerConfig(global_config=module)


def measure(library: Any, request: dict[str, Any]) -> dict[str, float]:
    """Time ``prepare``: wall and CPU seconds, extra bytes at the peak, and the relative squared error."""
    torch.manual_seed(0)
    model = model_of(request["shape"], request["layers"])
    palettizer = library.KMeansPalettizer(model, config_of(library, request))
    inputs = (torch.zeros(1, request["shape"][1]),)
    if _RESET.exists():
        _RESET.write_text("5")
    before, wall, cpu = high_water(), time.perf_counter(), time.process_time()
    palettizer.prepare(inputs, num_workers=request["workers"])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = high_water() - before
    parts = [(layer.parametrizations.weight.original.detach(), layer.weight.detach()) for layer in model]
    error = sum(float((dense - made).double().square().sum()) for dense, made in parts)
    power = sum(float(dense.double().square().sum()) for dense, _ in parts)
    return {"wall": wall, "cpu": cpu, "peak": peak, "error": error / power}


def main() -> None:
    """Answer until the input ends."""
    warnings.simplefilter("ignore")
    answers = sys.stdout
    sys.stdout = sys.stderr
    library = importlib.import_module(f"{sys.argv[1]}.palettization")
    spec = importlib.import_module(f"{sys.argv[1]}.palettization.spec")
    library.PalettizationSpec = spec.PalettizationSpec
    for line in sys.stdin:
        try:
            answer = {"result": measure(library, json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
