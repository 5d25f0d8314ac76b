"""Specs and simulators beside the peer's: the same numbers bit for bit, and the same specs refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from _peer import both, requires_peer

INTEGERS = ("int8", "int4", "int2", "uint8", "uint4", "uint2")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
CALCULATORS = ("default", "static", "dynamic", "moving_average", "global_minmax")
SHAPES = ((1,), (7,), (32,), (3, 8), (16, 16), (4, 6, 8), (2, 8, 3, 3), (5, 1), (1, 8, 4, 2))


def run_simulators(package: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each case's simulator puts out while observing and after, its gradients, and its state."""
    import importlib

    spec_module = importlib.import_module(f"{package}.quantization.spec")
    target_enum = importlib.import_module(f"{package}.config.spec").CompressionTargetTensor
    results = []
    for case in cases:
        try:
            spec = spec_module.QuantizationSpec(**case["spec"])
            simulator = spec_module.QuantizationComponentFactory.create_fake_quantizer(
                spec, target_enum(case["target"])
            )
            outputs = []
            for step, batch in enumerate(case["batches"]):
                x = batch.clone()
                if case["parameter"]:
                    x = torch.nn.Parameter(x)
                x.requires_grad_()
                simulator.enable_fake_quant(not case["only_observe_first"] or step > 0)
                if step == len(case["batches"]) - 1:
                    simulator.disable_observer()
                y = simulator(x)
                y.backward(case["grad"])
                outputs += [y.detach(), x.grad]
            results.append({"outputs": outputs, "state": dict(simulator.state_dict())})
        except Exception as error:
            results.append({"error": type(error).__name__, "message": str(error)})
    return results


def random_spec(rng: random.Random, shape: tuple[int, ...], target: str) -> dict[str, Any]:
    dtype = rng.choice((*INTEGERS, *INTEGERS, *FLOATS))
    spec: dict[str, Any] = {"dtype": dtype, "granularity": random_granularity(rng, shape)}
    spec["qparam_calculator_cls"] = rng.choice(
        [name for name in CALCULATORS if name != "dynamic" or target != "weight"]
    )
    if dtype in FLOATS:
        spec["scale_dtype"] = rng.choice((None, "float8_e8m0fnu"))
    else:
        spec["qscheme"] = rng.choice(("symmetric", "asymmetric", "symmetric_with_clipping"))
        spec["qformulation"] = rng.choice(("zp", "minval"))
    if spec["qparam_calculator_cls"] == "dynamic":
        if spec.get("qscheme") == "symmetric_with_clipping":
            spec["qscheme"] = "symmetric"
    elif rng.random() < 0.3:
        spec["float_range"] = [rng.choice((None, 0.0, -1.5)), rng.choice((None, 0.7, 3))]
    return spec


def random_granularity(rng: random.Random, shape: tuple[int, ...]) -> dict[str, Any]:
    axis = rng.randrange(len(shape))
    divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    signed_axis = axis if rng.random() < 0.7 else axis - len(shape)
    return rng.choice(
        (
            {"type": "per_tensor"},
            {"type": "per_channel", "axis": signed_axis},
            {"type": "per_block", "axis": signed_axis, "block_size": rng.choice(divisors)},
            {"type": "per_block", "block_size": [rng.choice((-1, 1, size)) for size in shape]},
            {"type": "per_block", "axis": signed_axis, "block_size": shape[axis] + 1},
        )
    )


def random_case(rng: random.Random, generator: torch.Generator) -> dict[str, Any]:
    shape = rng.choice(SHAPES)
    target = rng.choice(("weight", "activation"))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    batches = [random_tensor(rng, generator, shape, dtype) for _ in range(rng.choice((2, 3, 4)))]
    return {
        "spec": random_spec(rng, shape, target),
        "target": target,
        "only_observe_first": rng.random() < 0.3,
        "parameter": target == "weight" and rng.random() < 0.7,
        "batches": batches,
        "grad": torch.randn(shape, generator=generator).to(dtype),
    }


def random_tensor(
    rng: random.Random, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    x = torch.randn(shape, generator=generator) * 10 ** rng.uniform(-4, 3)
    kind = rng.random()
    if kind < 0.1:
        x = x.abs()
    elif kind < 0.15:
        x = -x.abs()
    elif kind < 0.2:
        x = torch.zeros(shape)
    elif kind < 0.25:
        x = (x * 2).round() / 2
    elif kind < 0.32:
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((float("nan"), float("inf"), float("-inf")))
    return x.to(dtype)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal in shape, dtype and bits, where any NaN equals any other."""
    return (
        ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and torch.equal(torch.nan_to_num(ours.float(), nan=1e30), torch.nan_to_num(theirs.float(), nan=1e30))
    )


@requires_peer
@pytest.mark.parametrize("seed", range(4))
def test_simulators_agree_bit_for_bit(seed: int) -> None:
    """Output, gradient, scale, zero point, minval, running range and switches equal the peer's over random specs."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cases = [random_case(rng, generator) for _ in range(800)]
    ours, theirs = both(run_simulators, cases)
    failures = [
        (case["spec"], difference)
        for case, mine, other in zip(cases, ours, theirs, strict=True)
        if (difference := describe_difference(mine, other))
    ]
    assert not failures, f"{len(failures)} of {len(cases)}; the first: {failures[:3]}"
    assert sum("error" not in other for other in theirs) > 600


def describe_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if "error" in ours or "error" in theirs:
        kinds = (ours.get("error"), theirs.get("error"))
        return "" if kinds[0] == kinds[1] else f"errors {kinds}: {ours.get('message')} / {theirs.get('message')}"
    if ours["state"].keys() != theirs["state"].keys():
        return f"state keys {list(ours['state'])} / {list(theirs['state'])}"
    pairs = {key: (value, theirs["state"][key]) for key, value in ours["state"].items()}
    pairs |= {f"output {i}": pair for i, pair in enumerate(zip(ours["outputs"], theirs["outputs"], strict=True))}
    wrong = [name for name, (mine, other) in pairs.items() if not same(mine, other)]
    return f"{wrong}: {pairs[wrong[0]]}" if wrong else ""


def build_specs(package: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Return each spec as plain values, or the class of the error that refuses it."""
    import importlib

    spec_module = importlib.import_module(f"{package}.quantization.spec")
    results: list[Any] = []
    for case in cases:
        try:
            dumped = spec_module.QuantizationSpec(**case).model_dump()
        except Exception as error:
            results.append(type(error).__name__)
            continue
        dumped.pop("averaging_constant", None)
        results.append(
            {
                key: value.__name__ if isinstance(value, type) else str(value)
                for key, value in dumped.items()
                if key != "granularity"
            }
            | {"granularity": {key: str(value) for key, value in dumped["granularity"].items()}}
        )
    return results


@requires_peer
def test_specs_agree_on_what_is_valid_and_what_it_means() -> None:
    """Random specs, a third of them invalid, dump to the same values or raise the same class of error."""
    rng = random.Random(7)
    ours, theirs = both(build_specs, cases := [random_spec_text(rng) for _ in range(3000)])
    failures = [(case, a, b) for case, a, b in zip(cases, ours, theirs, strict=True) if a != b]
    assert not failures, f"{len(failures)} of {len(cases)}; the first: {failures[0]}"
    assert 500 < sum(isinstance(result, str) for result in theirs) < 2500


def random_spec_text(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, tuple[Any, ...]] = {
        "dtype": (*INTEGERS, *INTEGERS, *FLOATS, "float8_e4m3", "float4_e2m1fn", "float32", "int9", "bfloat16"),
        "qscheme": ("symmetric", "symmetric", "asymmetric", "symmetric_with_clipping", "Symmetric"),
        "qformulation": ("zp", "zp", "minval", "min_val"),
        "granularity": (
            {"type": "per_tensor"},
            {"type": "per_tensor", "axis": 1},
            {"type": "per_channel"},
            {"type": "per_channel", "axis": -1},
            {"type": "per_channel", "axis": 1, "block_size": 2},
            {"type": "per_block", "axis": 0, "block_size": 32},
            {"type": "per_block", "block_size": [1, -1]},
            {"type": "per_block", "axis": 0, "block_size": 0},
            {"type": "per_block"},
            {"axis": 1},
            "per_tensor",
        ),
        "qparam_calculator_cls": (*CALCULATORS, "nothing"),
        "range_calculator_cls": ("minmax", "minmax", "maxmin"),
        "fake_quantize_cls": ("default", "default", "other"),
        "float_range": ([None, None], (0, 6), [-1, 1.5], [None, 2], [1, 2], [-2, -1], [0, 0], [0, True], [1], 3, None),
        "scale_dtype": (None, None, "float8_e8m0fnu", "float8_e8m0", "float32", "float7"),
    }
    fields = rng.sample(list(choices), rng.randint(0, 4))
    return {name: rng.choice(choices[name]) for name in fields}
