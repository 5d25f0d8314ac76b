"""Peak memory of the fidelity report: it should not depend on how many layers the model has.

``python benchmarks/inspection.py`` compares chains of convolutions in 8 bits with their float form, each in a process
of its own, and takes the largest growth of the resident set while ``compare`` runs. The weights are small; the result
of each layer has 16 MiB, those of the deepest chain together 512 MiB.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _measure import peak_growth, resident, write_json
from torch import nn

from bitwright.inspection import compare
from bitwright.quantization import Quantizer, QuantizerConfig

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "inspection.json"
DEPTHS = (8, 32)
ALLOWED = 1.25


def growth(mode: str, depth: int) -> int:
    """Bytes by which this process grows at most."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(depth)]).eval()
    image = torch.randn(4, 16, 256, 256)
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode=mode))
    prepared = quantizer.prepare((image,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(image)
    before = resident()
    return peak_growth(lambda: compare(model, prepared, [image], output_batches=0), before, calls=1)


def ask_growth(mode: str, depth: int) -> int:
    """``growth`` in another process."""
    command = [sys.executable, str(HERE / "inspection.py"), "--growth", mode, str(depth)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    """Measure both modes at both depths."""
    rows: list[dict[str, Any]] = []
    for mode in ("eager", "graph"):
        found = {depth: ask_growth(mode, depth) for depth in DEPTHS}
        rows.append(
            {
                "what": "peak memory of compare",
                "mode": mode,
                "MiB": {f"{depth} layers": round(size / 2**20) for depth, size in found.items()},
                "deep_over_shallow": found[DEPTHS[1]] / found[DEPTHS[0]],
                "deep_over_shallow_allowed": ALLOWED,
            }
        )
        print(json.dumps(rows[-1]))
    write_json(RESULTS, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", nargs=2, metavar=("MODE", "LAYERS"))
    asked = parser.parse_args().growth
    if asked is None:
        main()
    else:
        print(growth(asked[0], int(asked[1])))
