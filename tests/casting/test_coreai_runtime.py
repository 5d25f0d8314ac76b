"""Cast programs on the Core AI runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.casting import cast_int32_to_int16, cast_to_16_bit_precision

from .programs import ConvNet, Overflowing
from .programs import run as run_torch

pytest.importorskip("coreai_torch", reason="needs pip install bitwright[coreai]")

from tests.coreai_utils import runtime


@pytest.mark.parametrize(
    ("model", "x", "floor"),
    [
        (ConvNet(), torch.randn(1, 3, 8, 8), 42),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(1, 5, 16), 50),
        (Overflowing(), torch.tensor([[12.0, 3.0]]), 60),
    ],
    ids=["conv", "encoder", "overflow"],
)
def test_half_programs_run_close_to_float(model: nn.Module, x: torch.Tensor, floor: float) -> None:
    program = runtime.coreai_export(model, x)
    reference = run_torch(program, x)[0]
    cast_to_16_bit_precision(program, example_inputs=(x,))
    (result,) = runtime.run(runtime.convert(program), x.half())
    assert result.dtype == "float16"
    assert runtime.sqnr(reference.numpy(), result) > floor


def test_int16_arithmetic_between_reshapes_is_exact() -> None:
    class Integers(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = (x * y).reshape(6)
            w = (z + z).reshape(2, 3)
            return w, (w.transpose(0, 1) - x.transpose(0, 1)).unsqueeze(0), torch.cat([w - x, w], 1)[:, 1:]

    x, y = (torch.randint(-50, 51, (2, 3), dtype=torch.int32) for _ in range(2))
    program = runtime.coreai_export(Integers(), x, y)
    reference = run_torch(program, x, y)
    cast_int32_to_int16(program, value_ranges={"x": (-50, 50), "y": (-50, 50)})
    results = runtime.run(runtime.convert(program), x.short(), y.short())
    assert all((a.numpy() == b).all() for a, b in zip(reference, results, strict=True))
