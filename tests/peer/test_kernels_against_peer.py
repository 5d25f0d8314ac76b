"""Scale, zero point, minval, output, codes and gradient mask equal coreai-opt's bit for bit, over random cases."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwright import kernels
from bitwright.formats import quant_range, storage_dtype
from bitwright.kernels import Grid, reference

pytestmark = pytest.mark.peer

PEER = os.environ.get("BITWRIGHT_PEER_PYTHON", "")
CASES = int(os.environ.get("BITWRIGHT_PEER_CASES", "1500"))
INTEGERS = ("int8", "int4", "int2", "uint8", "uint4", "uint2")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
SHAPES = ((24,), (6, 16), (16, 48), (4, 6, 8), (4, 2, 3, 3), (8, 4, 3, 3), (2, 3, 4, 2, 2))


def random_block(rng: random.Random, shape: tuple[int, ...]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A granularity for the peer and the block size it means for a weight of this shape."""
    kind = rng.choice(("per_tensor", "per_channel", "per_block"))
    if kind == "per_tensor":
        return {"type": kind}, shape
    if kind == "per_channel":
        axis = rng.randrange(len(shape))
        return {"type": kind, "axis": axis}, tuple(1 if d == axis else s for d, s in enumerate(shape))
    block = tuple(rng.choice([b for b in range(1, s + 1) if s % b == 0]) for s in shape)
    return {"type": kind, "block_size": list(block)}, block


def random_values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values with ties, zeros, wide exponents, and in a few cases NaN or infinities."""
    kind = rng.randrange(8)
    x = torch.randn(shape)
    if kind == 1:
        x = x.mul(8).round().div(2)
    elif kind == 2:
        x = x.abs()
    elif kind == 3:
        x = -x.abs()
    elif kind == 4:
        x = x * torch.pow(10.0, torch.randint(-40, 38, shape).float())
    elif kind == 5:
        x = x * (torch.rand(shape) > 0.5)
    elif kind == 6:
        x = x * 1e-6
    elif kind == 7 and rng.random() < 0.5:
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((float("inf"), -float("inf"), float("nan")))
    return x.to(dtype)


def random_case(rng: random.Random) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A spec, an input and a gradient, and the block size."""
    shape = rng.choice(SHAPES)
    granularity, block = random_block(rng, shape)
    dtype = rng.choice(INTEGERS + FLOATS)
    spec: dict[str, Any] = {"dtype": dtype, "granularity": granularity}
    if dtype in INTEGERS:
        spec["qscheme"] = rng.choice(("symmetric", "asymmetric", "symmetric_with_clipping"))
        spec["qformulation"] = rng.choice(("zp", "minval"))
    elif dtype == FLOATS[2] or rng.random() < 0.5:
        spec["scale_dtype"] = "float8_e8m0fnu"
    compute = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    x = random_values(rng, shape, compute)
    case = {"target": "WEIGHT", "spec": spec, "x": x, "grad": torch.randn(shape).to(compute)}
    return case, block


def ours(case: dict[str, Any], block: tuple[int, ...], form: Any) -> dict[str, torch.Tensor]:
    """What Bitwright computes for a case."""
    spec = case["spec"]
    dtype = getattr(torch, spec["dtype"])
    scheme = spec.get("qscheme", "symmetric")
    low, high = quant_range(dtype, clip_symmetric=scheme == "symmetric_with_clipping")
    grid = Grid(dtype, low, high, spec.get("qformulation", "zp"))
    scale_dtype = torch.float8_e8m0fnu if "scale_dtype" in spec else None
    x = case["x"].clone().requires_grad_()
    y, *qparams = form.observe_and_fake_quantize(x, block_size=block, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
    y.backward(case["grad"])
    codes = form.quantize(case["x"], *qparams, block_size=block, grid=grid).to(storage_dtype(dtype))
    values = form.dequantize(codes, *qparams, block_size=block, grid=grid)
    names = ("y", "grad", "scale", "zero_point", "minval", "codes", "values")
    found = (y.detach(), x.grad, *qparams, codes.float(), values)
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def same_bits(a: torch.Tensor, b: torch.Tensor, name: str) -> bool:
    """Equal shape, dtype and bits; every NaN counts as the same, and the sign of a zero minval does not count.

    torch.maximum(-0.0, 0.0) depends on the position of the element, so the peer's minval of a block of zeros is
    -0.0 or 0.0 by chance; nothing computed from it depends on that.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = torch.isnan(a)
    if not torch.equal(nan, torch.isnan(b)):
        return False
    zero = torch.zeros((), dtype=a.dtype)
    if name == "minval":
        return torch.equal(torch.where(nan, zero, a), torch.where(nan, zero, b))
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(torch.where(nan, zero, a).view(bits), torch.where(nan, zero, b).view(bits))


@pytest.mark.skipif(not PEER, reason="BITWRIGHT_PEER_PYTHON does not name the peer's interpreter")
@pytest.mark.parametrize("form", [reference, kernels], ids=["reference", "dispatched"])
def test_equal_to_peer_bit_for_bit(form: Any, tmp_path: Path) -> None:
    """Every number of every random case is the peer's."""
    seed = int(os.environ.get("BITWRIGHT_PEER_SEED", "20240229"))
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cases = [random_case(rng) for _ in range(CASES)]
    torch.save([case for case, _ in cases], tmp_path / "cases.pt")
    worker = Path(__file__).with_name("fake_quantize_worker.py")
    subprocess.run(
        [PEER, str(worker), str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")],
        check=True,
        capture_output=True,
        timeout=600,
    )
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    problems = []
    compared = 0
    for (case, block), theirs in zip(cases, results, strict=True):
        if "error" in theirs:
            problems.append(("peer failed", case["spec"], theirs["error"]))
            continue
        mine = ours(case, block, form)
        compared += 1
        for name, value in theirs.items():
            if name not in mine or not same_bits(value, mine[name], name):
                problems.append((name, case["spec"], case["x"].dtype, tuple(case["x"].shape), value, mine.get(name)))
    assert not problems, f"{len(problems)} differences, the first: {problems[:3]}"
    assert compared == CASES
