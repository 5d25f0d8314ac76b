"""Runs inside the peer's interpreter: fake-quantizes every case of a file with coreai-opt and writes what came out.

Usage: python fake_quantize_worker.py CASES RESULTS, both files of ``torch.save``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

warnings.simplefilter("ignore")

from coreai_opt.config.spec import CompressionTargetTensor  # noqa: E402
from coreai_opt.quantization.spec import (  # noqa: E402
    QuantizationComponentFactory,
    QuantizationSpec,
)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of one case, or the error it raised."""
    target = CompressionTargetTensor[case["target"]]
    try:
        spec = QuantizationSpec(**case["spec"])
        simulator = QuantizationComponentFactory.create_fake_quantizer(spec, target)
        x = case["x"].clone().requires_grad_()
        y = simulator(x)
        y.backward(case["grad"])
        calculator = simulator.qparams_calculator
        qparams = (calculator.scale, calculator.zero_point, calculator.minval)
        codes = simulator.quantize(case["x"], *qparams)
        values = simulator.dequantize(codes, *qparams)
    except Exception as error:  # what the peer cannot do is part of the comparison
        return {"error": f"{type(error).__name__}: {error}"}
    names = ("y", "grad", "scale", "zero_point", "minval", "codes", "values")
    found = (y.detach(), x.grad, *qparams, codes.float(), values)
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def main() -> None:
    """Run all cases."""
    cases = torch.load(sys.argv[1], weights_only=True)
    torch.save([run_case(case) for case in cases], sys.argv[2])


if __name__ == "__main__":
    main()
