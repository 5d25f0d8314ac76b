"""Fake quantization and training steps on a GPU, against coreai-opt, a copy of the tensor, and the float step.

Usage: python benchmarks/gpu.py [--repeats 15] [--no-kernels] [--no-training] [--output FILE]

Does nothing where there is no GPU. coreai-opt is measured beside where it can be imported. The sides take turns in one
process. A kernel's time is that of several calls in a row, between two events of the GPU; that of the tiny tensor, that
Python spends, and that of a step are seconds on the clock. Peak memory is what torch has allocated at most from before
a model is built to the end of its third step, for each side alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _kernels_cases import CASES, Case, build, mode
from _measure import Side, alternate, ratio, write_json
from torch import nn
from training import GPT, ResNet, learning

HERE = Path(__file__).parent
CODES = "bitwright, saved as codes"
# Tensors of which a GPU's cache does not hold the better part.
LARGER = {(8, 512, 768): (64, 512, 768), (32, 256, 56, 56): (128, 256, 56, 56), (4096, 4096): (8192, 8192)}
ALLOWED = {"step": 1.2, "peak memory": 1.25}


def cases() -> list[Case]:
    """The cases of ``kernels.py`` with larger tensors, but single calls."""
    found = []
    for case in CASES:
        if "single call" in case.name:
            continue
        shape = LARGER.get(case.shape, case.shape)
        name = case.name.replace("x".join(map(str, case.shape)), "x".join(map(str, shape)))
        found.append(replace(case, name=name, shape=shape, calls=200 if case.limit == "microseconds" else 20))
        if case.dtype is torch.bfloat16:
            limit = {"faster": 6.0, "slower": 1.5, "backward": True, "limit": "clone and multiply"}
            found.append(replace(found[-1], name=f"{name}, forward + backward", **limit))
    return found


def packages() -> list[str]:
    """Bitwright, and the peer if it is installed."""
    return [name for name in ("bitwright", "coreai_opt") if importlib.util.find_spec(name) is not None]


def on_gpu(run: Callable[[], object], before: Callable[[], object], calls: int) -> Side:
    """Seconds that a call takes the GPU, from ``calls`` of them in a row."""

    def once() -> float:
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    return once


def on_the_clock(run: Callable[[], object], calls: int = 1) -> Side:
    """Seconds that a call takes until the GPU is done, from ``calls`` of them in a row."""

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    return once


def kernels(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each case."""
    for case in cases():
        sides: dict[str, Side] = {}
        for package in packages():
            try:
                before, run = build(package, case, "cuda")
                run()
            except Exception as error:
                if package == "bitwright":
                    raise
                print(f"{case.name}: {package} cannot do this: {error}")
                continue
            tiny = case.limit == "microseconds"
            sides[package] = on_the_clock(run, case.calls) if tiny else on_gpu(run, before, case.calls)
        x, y = (torch.randn(case.shape, device="cuda").to(case.dtype) for _ in range(2))
        if case.limit == "clone":
            sides["limit"] = on_gpu(x.clone, lambda: None, case.calls)
        elif case.limit == "clone and multiply":
            sides["limit"] = on_gpu(lambda x=x, y=y: (x.clone(), x * y), lambda: None, case.calls)
        with mode(case):
            times = alternate(sides, repeats)
        mine = times["bitwright"]
        over = ratio(mine, times["limit"]) if "limit" in times else 1e6 * mine.median
        row = {"case": case.name, "limit": case.limit, "over_limit": over, "over_limit_allowed": case.slower}
        text = f"{case.name:50} {mine!s:>26} {over:7.2f} (<= {case.slower:g})"
        if "coreai_opt" in times:
            row |= {"faster": ratio(times["coreai_opt"], mine), "faster_wanted": case.faster}
            text += f" {row['faster']:7.1f}x (>= {case.faster:g})"
        print(text, flush=True)
        yield row | {"seconds": times}


def problem(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, a batch and its targets."""
    torch.manual_seed(0)
    if name == "resnet":
        return ResNet(128).cuda(), torch.randn(128, 3, 64, 64).cuda(), torch.randint(0, 10, (128,)).cuda()
    tokens = torch.randint(0, 8192, (16, 513)).cuda()
    return GPT(8192, 1024, 8).cuda(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step_of(package: str, name: str, execution: str, half: bool) -> Callable[[], None]:
    """A training step, in bfloat16 by autocast or in float32."""
    model, x, y = problem(name)
    if package != "float":
        as_codes = package == CODES
        quantization = importlib.import_module(f"{'bitwright' if as_codes else package}.quantization")
        quantizer = quantization.Quantizer(model, quantization.QuantizerConfig(execution_mode=execution))
        model = quantizer.prepare((x,))
        with quantizer.calibration_mode(), torch.no_grad():
            model(x)
        training = quantizer.training_mode(**({"save_as_codes": True} if as_codes else {}))
        training.__enter__()
        model.mode_held = training  # which ends it when it goes
    scope = (lambda: torch.autocast("cuda", torch.bfloat16)) if half else contextlib.nullcontext
    return learning(model, x, y, scope)


def peak(package: str, name: str, execution: str, half: bool) -> int:
    """Bytes, for this side alone."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = step_of(package, name, execution, half)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    return torch.cuda.max_memory_allocated() - before


def training(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield two rows for each model, mode and precision."""
    for name in ("resnet", "gpt"):
        for execution in ("eager", "graph"):
            for half in (False, True):
                memory, steps = {}, {}
                for side in ("float", *packages(), CODES):
                    try:
                        memory[side] = peak(side, name, execution, half)
                        steps[side] = on_the_clock(step_of(side, name, execution, half))
                    except Exception as error:
                        if side != "coreai_opt":
                            raise
                        print(f"{name} {execution}: {side} cannot do this: {error}")
                times = alternate(steps, repeats)
                over = {side: ratio(times[side], times["float"]) for side in steps if side != "float"}
                more = {side: memory[side] / memory["float"] for side in steps if side != "float"}
                where = {"model": name, "mode": execution, "precision": "bfloat16" if half else "float32"}
                for what, values, seen in (("step", over, times), ("peak memory", more, memory)):
                    row = {"what": what, **where, "over_float": values, "over_float_allowed": ALLOWED[what]}
                    text = ", ".join(f"{side} {value:.2f}" for side, value in values.items())
                    print(f"{what:12} {' '.join(where.values()):24} x float (<= {ALLOWED[what]:g}): {text}", flush=True)
                    yield row | {"seconds" if what == "step" else "bytes": seen}


def main() -> None:
    """Print the tables and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        print("There is no GPU.")
        return
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    print(results["gpu"])
    parts = {
        "fake quantization": None if options.no_kernels else kernels,
        "training steps": None if options.no_training else training,
    }
    for name, rows in parts.items():
        if rows is not None:
            results[name] = []
            for row in rows(options.repeats):
                results[name].append(row)
                write_json(options.output, results)


if __name__ == "__main__":
    main()
