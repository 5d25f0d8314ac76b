"""ExecuTorch programs run in its Python runtime and give what the prepared model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.quantization import QuantizationSpec
from tests.measures import sqnr

from .models import CHANNEL, W8, ConvNet, Mlp, blocks, built, prepared

ACTIVATIONS = {
    "none": None,
    "int8 asymmetric": QuantizationSpec(qscheme="asymmetric"),
    "uint8": QuantizationSpec(dtype="uint8", qscheme="asymmetric"),
    "clipped": QuantizationSpec(qscheme="symmetric_with_clipping"),
    "dynamic": QuantizationSpec(qscheme="asymmetric", qparam_calculator_cls="dynamic"),
}


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        ("none", "eager", ConvNet),
        ("int8 asymmetric", "graph", ConvNet),
        ("uint8", "eager", ConvNet),
        ("clipped", "graph", ConvNet),
        pytest.param("dynamic", "eager", Mlp, marks=pytest.mark.slow),
        pytest.param("int8 asymmetric", "eager", ConvNet, marks=pytest.mark.slow),
    ],
)
def test_int8_models(name, mode, kind, tmp_path):
    """The runtime's output is the prepared model's; a sum in another order may move a code by one."""
    model, x = built(kind)
    _, ready = prepared(model, x, W8, ACTIVATIONS[name], mode)
    path = export_executorch(ready, (x,), tmp_path / "model.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 35


@pytest.mark.parametrize(
    "spec",
    [
        QuantizationSpec(dtype="int4", granularity=blocks(32)),
        QuantizationSpec(dtype="float8_e4m3fn", granularity=CHANNEL),
    ],
)
def test_other_weights_are_dense_and_exact(spec, tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "model.pte"), (x,))
    assert sqnr(ready(x), found) > 110


def test_int8_layers_are_delegated_and_small(tmp_path):
    """Weights take one byte each in the file."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec(qscheme="asymmetric"), "graph")
    path = export_executorch(ready, (x,), tmp_path / "model.pte")
    dense = sum(p.nbytes for p in model.parameters())
    assert path.stat().st_size < 0.6 * dense


class AroundErf(nn.Module):
    """A sum reads what its other summand is made of, through an operator that XNNPACK lacks."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return self.last(x + torch.erf(self.inner(x)))


def test_int8_layers_around_other_operators_run_in_xnnpack(tmp_path, caplog):
    """Its partitioner joins readers of one dequantized tensor, and would find a cycle here and give up."""
    torch.manual_seed(0)
    model, x = AroundErf().eval(), torch.randn(2, 5, 16)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="uint8", qscheme="asymmetric"), "graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Gated(nn.Module):
    """A layer whose output goes through an activation function before it is quantized."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_layers_with_float_outputs_keep_the_others_in_xnnpack(tmp_path, caplog):
    """Int8 goes in and floats come out of the gate, which XNNPACK's runtime would refuse the file for."""
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(2, 5, 16)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="uint8", qscheme="asymmetric"), "graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


@pytest.mark.parametrize("spec", [QuantizationSpec(), QuantizationSpec(qscheme="asymmetric", granularity=CHANNEL)])
def test_int8_weights_beside_float_activations(spec, tmp_path):
    """Per tensor, and with zero points: forms that XNNPACK computes wrong or refuses are written otherwise."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec, mode="graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


def test_fp8_activations_are_refused_by_name(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="float8_e4m3fn"))
    with pytest.raises(ValueError, match=r"up\.linear_quantize_input.*no FP8"):
        export_executorch(ready, (x,), tmp_path / "m.pte")
