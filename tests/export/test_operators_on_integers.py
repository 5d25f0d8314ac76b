"""Operators on integers and what they become beside numbers that are none: values and types in the runtimes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.export.targets import TARGETS

INPUTS = (
    torch.tensor([200, 5, 255, 0], dtype=torch.uint8),
    torch.tensor([5, -128, 127, -1], dtype=torch.int8),
    torch.tensor([5, -(2**31), 2**31 - 1, -7], dtype=torch.int32),
    torch.tensor([7, 8, 9, -3]),
    torch.tensor([1.5, -0.0, -2.0, 0.25], dtype=torch.float16),
)
CASES = {
    "places of the smallest": lambda b, s, i, n, h: [x.argmin() for x in (b, s, i, i.long(), s.short(), h)],
    "places in order": lambda b, s, i, n, h: [
        torch.searchsorted(n.sort()[0], 7.5),
        torch.searchsorted(n.int().sort()[0], 7.5, right=True),
        torch.searchsorted(b.sort()[0], 200, right=True),
        torch.searchsorted(h.float().sort()[0], 1),
    ],
    "signs": lambda b, s, i, n, h: [
        torch.copysign(n, -1.0),
        torch.copysign(n, 2),
        torch.copysign(b, -1),
        torch.copysign(n, h),
        torch.copysign(n, -n),
        torch.copysign(h, n.float()),
        torch.copysign(h, -1.0),
        torch.copysign(s, h.float()),
    ],
    "powers of two": lambda b, s, i, n, h: [torch.ldexp(h, n + 7), torch.ldexp(n, n), torch.ldexp(h, h.float())],
    "remainders": lambda b, s, i, n, h: [
        *(x % 2.5 for x in (b, s, n, n.int(), n > 7, h)), n % 2, n % -2.5
    ],
    "bits of masks": lambda b, s, i, n, h: [(n > 7) & 3, (n > 7) | 2, (n > 7) ^ 3, (n > 7) & True, ~(n > 7)],
    "bits": lambda b, s, i, n, h: [~b, ~s, ~n, b & 15, s | 3, b ^ 255],
    "shifts of bytes": lambda b, s, i, n, h: [
        x for bits in (1, 4, 7, 8, 9) for x in (b << bits, b >> bits, s << bits, s >> bits)
    ],
    "shifts": lambda b, s, i, n, h: [
        *(i >> bits for bits in (1, 30, 31, 32)), *(i << bits for bits in (1, 30, 32)), n >> 64, n << 64
    ],
}  # fmt: skip
MORE = {
    "shifts by tensors": lambda b, s, i, n, h: [
        *(shift(x, n) for x in (b, s, i, n) for shift in (torch.bitwise_left_shift, torch.bitwise_right_shift)),
        b >> torch.tensor(2),
        s << b,
        3 << n,
        -9 >> s,
        n >> -1,
        n << -1,
        i >> 40,
        n >> (n.int() + 62),
    ],
    "places in all": lambda b, s, i, n, h: [
        n.view(2, 2).argmax(keepdim=True),
        s.view(2, 2).argmin(keepdim=True),
        s.short().view(2, 2).argmax(1, True),
    ],
    "narrow": lambda b, s, i, n, h: [
        y
        for x in (b, s, s.short())
        for y in (
            x**2,
            x**3,
            x.square(),
            x.pow(b % 4),
            -x,
            x.relu(),
            x.clamp(3, 6),
            x.clamp(min=x.flip(0)),
            x.max(),
            x.min(),
            x.view(2, 2).amax(0),
            x.view(2, 2).amin(1),
            torch.maximum(x, x.flip(0)),
            torch.where(n > 7, x, x.flip(0)),
            torch.where(n > 7, x, 1),
            x.masked_fill(n > 7, 3),
            x.view(2, 2).triu(),
            x.view(2, 2).tril(-1),
            nn.functional.pad(x, (1, 2), value=7),
            x.view(2, 2) @ x.view(2, 2),
            x % -x.clamp(min=1),
            x.nonzero(),
        )
    ],
    "chosen by masks": lambda b, s, i, n, h: [
        *(x.masked_select(n > 7) for x in (b, s, i, n, h, n > 8)),
        n.masked_select((n > 7).view(4, 1)),
        n.view(4, 1).masked_select(n > 7),
    ],
    "most frequent": lambda b, s, i, n, h: [
        y
        for x in (b, s, s.short(), i, n, h)
        for y in (*(x // 4).mode(), *torch.stack([x, x.flip(0), x]).mode(0), *x.view(2, 2).mode(1, True), *x[0].mode())
    ],
}
"""Only in ONNX."""
ALL = {**CASES, **MORE}


class Integers(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, *inputs):
        return [result for name in self.names for result in ALL[name](*inputs)]


@pytest.mark.parametrize(("target", "names"), [("onnx", ALL), ("executorch", CASES), ("coreai", CASES)])
def test_right_in_the_runtime(target, names, tmp_path):
    """Core AI's integers have 32 bits where PyTorch's have 64."""
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    model = Integers(list(names)).eval()
    path = TARGETS[target].write(model, INPUTS, tmp_path / f"m{TARGETS[target].suffix}", {}, None)
    origins = [f"{number} of {name}" for name in names for number in range(len(ALL[name](*INPUTS)))]
    for origin, expected, found in zip(origins, model(*INPUTS), TARGETS[target].run(path, INPUTS), strict=True):
        narrow = target == "coreai" and expected.dtype == torch.int64
        assert found.dtype == (torch.int32 if narrow else expected.dtype), origin
        assert found.shape == expected.shape, origin
        torch.testing.assert_close(
            found.to(expected.dtype), expected, msg=lambda words, name=origin: f"{name}: {words}"
        )


class OfNothing(nn.Module):
    """Products to which nothing is added of what is no number."""

    def forward(self, x, matrix):
        return torch.addmv(x, matrix, matrix[0], beta=0), torch.addbmm(
            x, *[matrix.expand(2, 3, 3)] * 2, beta=0, alpha=2
        )


@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai"])
def test_nothing_of_what_is_no_number_is_added(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    model, inputs = OfNothing().eval(), (torch.tensor([torch.nan, torch.inf, 1.0]), torch.arange(9.0).view(3, 3))
    path = TARGETS[target].write(model, inputs, tmp_path / f"m{TARGETS[target].suffix}", {}, None)
    for expected, found in zip(model(*inputs), TARGETS[target].run(path, inputs), strict=True):
        torch.testing.assert_close(found, expected)
