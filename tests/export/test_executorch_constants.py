"""ExecuTorch programs in which several operators read one weight; XNNPACK ends the process on such, as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr


class Shared(nn.Module):
    """A layer, and what else reads its weight or its bias."""

    def __init__(self, layer, other):
        super().__init__()
        self.layer, self.other = layer, other

    def forward(self, x):
        return self.other(self.layer, x, torch.tanh(self.layer(x)))


OTHERS = {
    "decoder": lambda layer, x, y: F.linear(y, layer.weight.t(), y[0].new_ones(32)),
    "transposed product": lambda layer, x, y: torch.tanh(x @ layer.weight.t()) @ layer.weight,
    "elementwise": lambda layer, x, y: y + layer.weight.view(32, 16)[:4],
    "rows": lambda layer, x, y: y + F.linear(x[:, :8], layer.weight[:, :8]),
    "result": lambda layer, x, y: torch.cat([y.t(), layer.weight], 1),
    "computed bias": lambda layer, x, y: y + F.linear(x, layer.weight, layer.bias * y.mean()),
    "bias": lambda layer, x, y: y * layer.bias,
}
KERNELS = {
    "transposed": lambda layer, x, y: F.conv_transpose2d(y, layer.weight, padding=1),
    "swapped": lambda layer, x, y: F.conv2d(y, layer.weight.transpose(0, 1), padding=1),
    "elementwise": lambda layer, x, y: y + layer.weight.flatten()[: y.shape[-1]],
}
CASES = {
    **{name: (lambda: nn.Linear(32, 16), other, (4, 32)) for name, other in OTHERS.items()},
    **{
        f"kernel {name}": (lambda: nn.Conv2d(4, 16, 3, padding=1), other, (2, 4, 6, 6))
        for name, other in KERNELS.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_read_in_two_ways(name, tmp_path, caplog):
    """The runtime computes what the model does, at the first try."""
    torch.manual_seed(0)
    layer, other, shape = CASES[name]
    model, x = Shared(layer(), other).eval(), torch.randn(shape)
    ready = KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4()).prepare((x,))
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class TiedBias(nn.Module):
    """Two layers with one bias, whose inputs have other scales."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.bias = self.first.bias

    def forward(self, x):
        return self.last(self.first(x) * 0.05)


def test_biases_of_two_quantized_layers(tmp_path, caplog):
    """Each layer quantizes the bias with its own scales; XNNPACK's runtime refused those of the first."""
    torch.manual_seed(0)
    model, x = TiedBias().eval(), torch.randn(4, 32)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Counter(nn.Module):
    """A state that is written to, and that several operators read before and after."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("state", torch.ones(16))

    def forward(self, x):
        y = self.layer(x) * self.state - self.state
        self.state.add_(1)
        return y + self.state


def test_states_that_are_written_to_stay_one(tmp_path):
    torch.manual_seed(0)
    model, x = Counter().eval(), torch.randn(2, 16)
    ready = KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4()).prepare((x,))
    ready.state.fill_(1)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    ready.state.fill_(1)
    assert sqnr(ready(x), found) > 100
