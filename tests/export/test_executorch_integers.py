"""Operators on integers that ExecuTorch does not know, and sums that leave out what they do not read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.export.executorch.exporter import _spelled_out

BYTES, SMALL = torch.tensor([200, 5, 255, 0], dtype=torch.uint8), torch.tensor([5, -128, 127, -1], dtype=torch.int8)
WORDS, LONG = torch.tensor([5, -(2**31), 2**31 - 1, -7], dtype=torch.int32), torch.tensor([7, 8, 31, -3])
HALVES = torch.tensor([1.5, 3.0, -2.0, 0.25], dtype=torch.float16)
ODD = torch.tensor([torch.nan, torch.inf, 1.0])
MATRIX = torch.arange(9.0).view(3, 3)


class Called(nn.Module):
    """A function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


CASES = {
    "shifts to the left": (
        lambda b, s, i, n: [
            s << (s & 7), i << n, n << (n + 33), torch.bitwise_left_shift(s, 3), b << torch.tensor(2),
        ],
        (BYTES, SMALL, WORDS, LONG),
    ),
    "shifts to the right": (
        lambda b, s, i, n: [
            b >> (b & 7), s >> s, i >> n.int(), torch.bitwise_right_shift(-200, n), torch.bitwise_right_shift(s, 3),
            n.clone().__irshift__(n),
        ],
        (BYTES, SMALL, WORDS, LONG),
    ),
    "numbers in front": (
        lambda b, s, n, h: [
            torch.remainder(-7, n), torch.remainder(-7.5, n), torch.remainder(7, s), torch.remainder(-1.0, h),
            torch.bitwise_or(5, b), torch.bitwise_xor(5, s), torch.bitwise_and(3, n > 7),
        ],
        (BYTES, SMALL, LONG, HALVES),
    ),
    "sums with nothing": (
        lambda x, matrix, half: [
            torch.addmm(x, matrix, matrix, beta=0), torch.addmm(x, matrix, matrix, beta=0, alpha=2),
            torch.addmm(x.half(), half, half, beta=0), torch.addmm(x, matrix, matrix, beta=2, alpha=3),
        ],
        (ODD, MATRIX, MATRIX.half()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_in_the_runtime(name, tmp_path):
    """Numbers of bits beyond a type's, negative ones, and addends of NaN with a factor of zero too."""
    function, inputs = CASES[name]
    found = run_executorch(export_executorch(Called(function).eval(), inputs, tmp_path / "m.pte"), inputs)
    for number, (expected, one) in enumerate(zip(function(*inputs), found, strict=True)):
        assert one.dtype == expected.dtype, number
        torch.testing.assert_close(one, expected, equal_nan=True, msg=lambda words, n=number: f"{n}: {words}")


def _written(x, y, n):
    """Operators that ExecuTorch lacks, in their forms that write to what they are given."""
    x.mul_(2.0)
    n >>= n & 7
    x.copysign_(y)
    return [x.hypot_(y), n]


def test_forms_that_write_in_place():
    """They are written with others as well, and what is written to an input is no output of the program."""
    inputs = torch.tensor([1.5, -3.0]), torch.tensor([2.0, -0.0]), LONG[:2]
    program = _spelled_out(torch.export.export(Called(_written), inputs))
    called = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in called if any(lacking in name for lacking in ("shift", "copysign", "hypot"))]
    assert [spec.kind.name for spec in program.graph_signature.output_specs] == ["USER_OUTPUT"] * 2
    found = program.module()(*inputs)
    torch.testing.assert_close(found, _written(*(one.clone() for one in inputs)))
