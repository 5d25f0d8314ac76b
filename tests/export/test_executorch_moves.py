"""Operators that XNNPACK has for other operands only, or in another form: moves, PReLU, the GELU with tanh."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_value
from tests.measures import sqnr


class Moving(nn.Module):
    """Quantized values that are moved, and a layer behind."""

    def __init__(self, move):
        super().__init__()
        self.first, self.last, self.move = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1), move

    def forward(self, x):
        return self.move(self.first(x), self.last)


def rotated(x, last):
    """As rotary embeddings move the halves of queries and keys."""
    y = x.transpose(1, 2)
    return torch.cat((-y[..., 4:], y[..., :4]), -1) * 0.5


def cast(x, last):
    """As Gemma casts queries, to the type that they have, before their halves are rotated."""
    y = (x * 0.5).type_as(x)
    return last(torch.cat((-y[:, 4:], y[:, :4]), 1) * 0.5 + y)


MOVES = {
    "cast": cast,
    "rotated": rotated,
    "joined": lambda x, last: torch.cat((x, last(x), x * 3), 1),
    "joined with floats": lambda x, last: torch.cat((x, last(x).exp(), torch.ones(2, 1, 8, 8)), 1),
    "joined for a layer": lambda x, last: last(torch.cat((last(x), x[:, 4:]), 1)),
    "stacked": lambda x, last: last(torch.stack((last(x), x[:, :4]), 2).flatten(1, 2)),
    "padded": lambda x, last: F.pad(x, (1, 1, 1, 1)),
    "padded for a layer": lambda x, last: last(F.pad(x, (1, 1, 1, 1))),
}


@pytest.mark.parametrize(("mode", "move"), each_value(["eager", "graph"], list(MOVES)))
def test_moves_between_scales(mode, move, tmp_path, caplog):
    """At the first try, with int8 weights: XNNPACK's runtime would refuse them in int8."""
    torch.manual_seed(0)
    model, x = Moving(MOVES[move]).eval(), torch.randn(2, 4, 8, 8)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode=mode))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 45, "more than a code beside a tie"
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


@pytest.mark.parametrize(("preset", "parameters"), each_value(["w8a8", "w8"], [1, 8]))
def test_prelu_runs_in_xnnpack(preset, parameters, tmp_path, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.PReLU(parameters), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 4, 8, 8)
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > (45 if preset == "w8a8" else 100)
    assert b"prelu" not in path.read_bytes()
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


def test_the_gelu_with_tanh_is_computed(tmp_path):
    """XNNPACK's partitioner takes it for the one with erf, which is 0.0005 away: 60 dB here."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(approximate="tanh")).eval(), 3 * torch.randn(32, 16)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,))
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    assert sqnr(ready(x), run_executorch(path, (x,))[0]) > 100
    assert b"aten::" not in path.read_bytes()


class Normalized(nn.Module):
    """A batch norm behind codes, as eager mode quantizes the layer in front of it, and one behind a ReLU."""

    def __init__(self, layer, norm, affine):
        super().__init__()
        self.first, self.last = layer(4, 8), layer(8, 4)
        self.norm, self.behind = norm(8, affine=affine), norm(8, affine=affine)

    def forward(self, x):
        return self.last(self.behind(torch.relu(self.norm(self.first(x)))))


NORMS = {
    "1d": (lambda *sizes: nn.Conv1d(*sizes, 3, padding=1, bias=False), nn.BatchNorm1d, (2, 4, 10)),
    "vectors": (lambda *sizes: nn.Linear(*sizes, bias=False), nn.BatchNorm1d, (6, 4)),
    "2d": (lambda *sizes: nn.Conv2d(*sizes, 3, padding=1, bias=False), nn.BatchNorm2d, (2, 4, 6, 6)),
}


@pytest.mark.parametrize(("norm", "affine"), each_value(list(NORMS), [True, False]))
def test_batch_norms_behind_codes(norm, affine, tmp_path, caplog):
    """At the first try: XNNPACK refused what it makes of them where one dimension is behind the channels."""
    torch.manual_seed(0)
    layer, kind, shape = NORMS[norm]
    model, x = Normalized(layer, kind, affine).eval(), torch.randn(shape)
    for module in (model.norm, model.behind):
        module.running_mean.normal_(0, 0.1)
        module.running_var.uniform_(0.5, 1.5)
    model.behind.register_buffer("running_mean", model.behind.running_mean, persistent=False)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    ready.eval()
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "model.pte"), (x,))
    with torch.no_grad():
        assert sqnr(ready(x), found) > 100
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]
