"""The cases of ``kernels.py``, built from the public classes of either package. Also the worker in the peer's process.

Usage as a worker: python _kernels_cases.py coreai_opt
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A fake quantizer and what it is given.

    Attributes:
        name: what the table calls it.
        shape: shape of the tensor.
        spec: arguments of ``QuantizationSpec``.
        target: ``WEIGHT`` or ``ACTIVATION``.
        observe: whether the observer stays on.
        backward: whether the gradient is computed too.
        dtype: dtype of the tensor.
        calls: calls in one repetition. What takes less than a millisecond is measured by several in a row; a single
            call, after the other sides have had their turns, tells of cold caches and sleeping threads instead.
        faster: how many times faster than the peer it must be.
        slower: how many times the limit's time it may take, or microseconds if the limit is a time.
        limit: ``clone``, ``clone and multiply`` or ``microseconds``.
    """

    name: str
    shape: tuple[int, ...]
    spec: dict[str, Any]
    target: str
    observe: bool
    faster: float
    slower: float
    backward: bool = False
    dtype: torch.dtype = torch.float32
    calls: int = 1
    limit: str = field(default="clone")


_ACTIVATION, _IMAGES, _WEIGHT = (8, 512, 768), (32, 256, 56, 56), (4096, 4096)
_INT8 = {"dtype": "int8"}
_CHANNEL = {"dtype": "int8", "granularity": {"type": "per_channel", "axis": 0}}
_BLOCK = {"dtype": "int4", "granularity": {"type": "per_block", "axis": 1, "block_size": 32}}
_FP8 = {"dtype": "float8_e4m3fn", "granularity": {"type": "per_channel", "axis": 0}}
_FP4 = {"dtype": "float4_e2m1fn_x2", "granularity": {"type": "per_block", "axis": 1, "block_size": 32}}


def _both(name: str, *where: Any, slower: float, calls: int = 1) -> list[Case]:
    both = {"faster": 6.0, "slower": 1.5, "backward": True, "limit": "clone and multiply", "calls": calls}
    return [
        Case(f"{name}, forward", *where, faster=10.0, slower=slower, calls=calls),
        Case(f"{name}, forward + backward", *where, **both),  # type: ignore[arg-type]
    ]


def _alone(cases: list[Case]) -> list[Case]:
    """The same cases, and each also by single calls."""
    return [*cases, *(replace(case, name=f"{case.name}, a single call", calls=1) for case in cases)]


CASES = [
    *_alone(_both("int8 per tensor 8x512x768", _ACTIVATION, _INT8, "ACTIVATION", False, slower=1.3, calls=10)),
    *_both("int8 per tensor 32x256x56x56", _IMAGES, _INT8, "ACTIVATION", False, slower=1.3),
    *_both("int8 per channel 4096x4096, observed", _WEIGHT, _CHANNEL, "WEIGHT", True, slower=1.6),
    *_both("int4 block 32 4096x4096, observed", _WEIGHT, _BLOCK, "WEIGHT", True, slower=1.6),
    Case("FP8 per channel 4096x4096", _WEIGHT, _FP8, "WEIGHT", False, 12.0, 1.6),
    Case("FP8 per channel 4096x4096, observed", _WEIGHT, _FP8, "WEIGHT", True, 12.0, 1.6),
    Case("MXFP4 4096x4096", _WEIGHT, _FP4, "WEIGHT", False, 35.0, 2.0),
    Case("MXFP4 4096x4096, observed", _WEIGHT, _FP4, "WEIGHT", True, 35.0, 2.0),
    *_alone(
        [Case("bfloat16 8x512x768", _ACTIVATION, _INT8, "ACTIVATION", False, 15.0, 3.0, dtype=torch.bfloat16, calls=10)]
    ),
    Case("int8 16x16, observed", (16, 16), _INT8, "ACTIVATION", True, 25.0, 25.0, calls=200, limit="microseconds"),
]


def build(package: str, case: Case, device: str = "cpu") -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what runs before a repetition, and the call that is measured; both belong in ``mode(case)``."""
    spec_module = importlib.import_module(f"{package}.quantization.spec")
    target = importlib.import_module(f"{package}.config.spec").CompressionTargetTensor[case.target]
    spec = spec_module.QuantizationSpec(**case.spec)
    simulator = spec_module.QuantizationComponentFactory.create_fake_quantizer(spec, target)
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device).to(case.dtype)
    simulator.to(device)(x)
    if not case.observe:
        simulator.disable_observer()
    if not case.backward:
        return _touch(x), lambda: simulator(x)
    x.requires_grad_()
    gradient = torch.randn(case.shape, device=device).to(case.dtype)
    return _touch(x), lambda: torch.autograd.grad(simulator(x), x, gradient)


def mode(case: Case) -> AbstractContextManager[Any]:
    """Gradients are off but for a case with a backward pass; entering costs as much as a call on a tiny tensor."""
    return contextlib.nullcontext() if case.backward else torch.no_grad()


def _touch(x: torch.Tensor) -> Callable[[], object]:
    """Write to the tensor, so that nothing that was computed from it before may be used again."""

    def touch() -> None:
        with torch.no_grad():
            x.view(-1)[:1].add_(0)

    return touch


def _measure(package: str, built: dict[int, Any], request: dict[str, Any]) -> float:
    torch.set_num_threads(request["threads"])
    index = request["case"]
    if index not in built:
        built.clear()
        built[index] = build(package, CASES[index])
    before, run = built[index]
    with mode(CASES[index]):
        before()
        calls = CASES[index].calls
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


def main() -> None:
    """Answer requests ``{"case": index, "threads": n}`` with seconds."""
    warnings.simplefilter("ignore")
    built: dict[int, Any] = {}
    for line in sys.stdin:
        try:
            answer = {"result": _measure(sys.argv[1], built, json.loads(line))}
        except Exception as error:  # told to the process that asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
