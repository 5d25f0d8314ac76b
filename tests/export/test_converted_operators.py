"""Operators that ONNX's and ExecuTorch's converters get wrong for some arguments: right in the runtimes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.export.conversion import ConversionError
from bitwright.export.operators import check_operators
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

CASES = {
    "an average with a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=7),
    "an average with a negative divisor": lambda x: F.avg_pool2d(x, (2, 3), divisor_override=-2),
    "a padded average": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "cut off": lambda x: F.pad(x, (-1, 2, 1, -1)),
    "cut off in three dimensions": lambda x: F.pad(x, (-1, -1, 2, -2, 0, -1), value=2.5),
    "cut off and reflected": lambda x: F.pad(x, (-1, 2, 1, 1), mode="reflect"),
    "folded and cut off": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 10), 3, padding=1),
    "windows": lambda x: x.unfold(3, 4, 2),
    "remainders of integers": lambda x: torch.remainder((x * 9).int(), 4) * x,
    "remainders of integers by others": lambda x: torch.remainder((x * 9).long(), (x.flip(0) * 9).long() * 2 + 1) * x,
    "sums and products of masks": lambda x: ((x > 0) + (x < -1)) * (x < 0.5) * x,
    "one mask or another": lambda x: torch.where(x > 0, x < 1, x > -1) * x,
    "one of two bools": lambda x: torch.where(x > 0, True, False) * x,
    "roundings of integers": lambda x: torch.floor((x * 9).int()) + (x * 9).long().ceil() + (x * 9).int().trunc() * x,
    "finite integers": lambda x: torch.isfinite((x * 9).int()) * x + torch.isnan((x * 9).long()),
    "extremes of masks": lambda x: (x > 0).amax(-1, keepdim=True) * x + (x > -1).amin((1, 2), keepdim=True),
    "asserted": lambda x: x.float() + torch.arange(10, device=x.device).to(x.dtype),
}
ONNX_ONLY = {
    "an average of three dimensions with a divisor": lambda x: F.avg_pool3d(x, 2, divisor_override=5),
    "products of integers and sums": lambda x: torch.addmm(
        (x * 9).int()[0, 0, :, :8], (x * 9).int()[0, 0], (x * 9).int()[0, 1].T, beta=2, alpha=3
    ).float(),
    "statistics of the batch": lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4), training=True, eps=0.5),
    "statistics of each input": lambda x: F.batch_norm(
        x.reshape(1, 8, 8, 10), torch.zeros(8), torch.ones(8), torch.arange(8.0), -torch.ones(8), training=True
    ),
}
"""ExecuTorch has no kernels for three dimensions or products of integers, and no norms with running statistics."""


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(4, 4, 1), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize("name", CASES | ONNX_ONLY)
@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_right_in_the_runtime(target, name, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    if target == "executorch" and name in ONNX_ONLY:
        pytest.skip("ExecuTorch has no kernels for it")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 10)
    model = Model((CASES | ONNX_ONLY)[name]).eval()
    assert not check_operators(model, target, (x,))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval()
    with torch.no_grad():
        expected = ready(x)
    path = TARGETS[target].write(ready, (x,), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    (actual,) = TARGETS[target].run(path, (x,))
    assert actual.shape == expected.shape
    assert sqnr(expected, actual) > 110


def test_onnx_refuses_a_divisor_of_windows_that_stand_out():
    pytest.importorskip("onnxscript")
    model = Model(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=7)).eval()
    (problem,) = check_operators(model, "onnx", (torch.randn(2, 4, 8, 10),))
    assert "ceil_mode and divisor_override" in problem.message


NO_KERNEL = {
    "largest values of integers": lambda x: F.max_pool2d((x * 9).int(), 2).float(),
    "convolutions in float64": lambda x: F.conv2d(x.double(), torch.ones(2, 4, 3, 3, dtype=torch.float64)).float(),
    "an einsum of dots that vanish": lambda x: torch.einsum("...ik,...j->ij", x[:, 0], x[0, 0, 0]),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_onnx_runtime_has_no_kernel_for_is_refused_in_the_plan(name, tmp_path):
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model, x = nn.Sequential(nn.Identity(), Model(NO_KERNEL[name])).eval(), torch.randn(2, 4, 8, 10)
    (problem,) = check_operators(model, "onnx", (x,))
    assert problem.where == "1"
    assert "ONNX Runtime" in problem.message
    path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
    with pytest.raises(ConversionError, match="ONNX Runtime"):
        TARGETS["onnx"].run(path, (x,))


class Limits(nn.Module):
    """Clamps of one tensor by limits of its own, as Gemma 4's layers have them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in (("low", "-inf"), ("high", "inf"), ("lowest", "-inf"), ("highest", "inf")):
            self.register_buffer(name, torch.tensor(float(value)))

    def forward(self, x):
        y = self.layer(x).relu() * 2
        return torch.clamp(y, self.low, self.high) + torch.clamp(y, self.lowest, self.highest) * 3


def test_onnx_has_the_constants_of_joined_clamps(tmp_path):
    """The optimizer of torch.onnx forgets some, and ONNX Runtime refuses the file."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model, x = Limits().eval(), torch.randn(2, 8)
    path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
    assert sqnr(model(x), TARGETS["onnx"].run(path, (x,))[0]) > 110
