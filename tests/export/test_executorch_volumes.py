"""Convolutions in three dimensions in ExecuTorch, whose kernels and whose XNNPACK have two: written with those."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir")

from bitwright.export.capabilities import check_plan
from bitwright.export.conversion import ConversionError
from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.export.operators import check_operators
from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import PerChannelGranularity
from tests.measures import ADDS_IN_FLOAT16, sqnr

from .executorch_taps import roundings
from .models import W8, prepared

ASYMMETRIC = QuantizationSpec(qscheme="asymmetric")
UNBATCHED = (4, 6, 8, 10)
LAYERS = {
    "padded": nn.Conv3d(4, 8, 3, padding=1),
    "strides, dilations and groups": nn.Conv3d(
        4, 8, (3, 2, 3), stride=(2, 1, 3), padding=(2, 0, 1), dilation=(2, 1, 2), groups=2, bias=False
    ),
    "by channels": nn.Conv3d(4, 8, (3, 3, 1), padding=(1, 1, 0), groups=4),
    "one slice deep": nn.Conv3d(4, 8, (1, 3, 3), stride=(2, 1, 1)),
    "the same size": nn.Conv3d(4, 4, (2, 4, 3), dilation=(3, 1, 2), padding="same"),
    "no padding": nn.Conv3d(4, 4, 2, padding="valid"),
    "padded in a circle": nn.Conv3d(4, 4, 3, padding=(1, 0, 2), padding_mode="circular"),
    "transposed": nn.ConvTranspose3d(4, 8, 2, stride=2),
    "transposed, of several kinds": nn.ConvTranspose3d(
        4, 8, (3, 2, 3), stride=(3, 1, 2), padding=(1, 0, 2), output_padding=(2, 0, 1), groups=2, dilation=(1, 2, 1)
    ),
    "transposed, of which the ends are cut off": nn.ConvTranspose3d(4, 8, 2, stride=(4, 2, 2), padding=(4, 1, 0)),
    "transposed, and spread out": nn.ConvTranspose3d(4, 8, 1, stride=3, output_padding=2),
}


def _volumes(*shape):
    """Random ones, by default two."""
    return torch.randn(shape or (2, *UNBATCHED), generator=torch.Generator().manual_seed(1))


def _run(ready, x, path):
    (found,) = run_executorch(export_executorch(ready, (x,), path), (x,))
    return found


class Beside(nn.Module):
    """Layers that read the same."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def _check_beside(layers, x, weight, path):
    """Layers of one spec compute what they do in PyTorch, all in one file."""
    model = Beside(copy.deepcopy(list(layers))).eval()
    assert check_operators(model, "executorch", (x,)) == []
    quantizer, ready = prepared(model, x, weight)
    assert check_plan(quantizer.plan((x,)), "executorch") == []
    found = run_executorch(export_executorch(ready, (x,), path), (x,))
    for layer, expected, actual in zip(layers, ready(x), found, strict=True):
        assert actual.shape == expected.shape, layer
        assert sqnr(expected, actual) > 110, layer


@pytest.mark.parametrize("shape", [(2, *UNBATCHED), pytest.param(UNBATCHED, marks=pytest.mark.slow)])
def test_weights_only(shape, tmp_path):
    """Int8 weights with a scale for each channel, on a batch and on one volume, which PyTorch pads with zeros only."""
    layers = [layer for layer in LAYERS.values() if len(shape) == 5 or layer.padding_mode == "zeros"]
    _check_beside(layers, _volumes(*shape), W8, tmp_path / "m.pte")


class Videos(nn.Module):
    """Layers with batch norms and activation functions, a residual sum, and a transposed layer."""

    def __init__(self, width=16, up=True):
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, width, 3, padding=1, bias=False), nn.BatchNorm3d(width)
        self.inner = nn.Conv3d(width, width, (3, 1, 1), padding=(1, 0, 0))
        self.down = nn.Conv3d(width, 8, 3, stride=2)
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2) if up else nn.Identity()
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = torch.nn.functional.relu6(x + self.inner(x))
        return self.up(self.down(x))


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [
        ("asymmetric", "graph"),
        pytest.param("asymmetric", "eager", marks=pytest.mark.slow),
        pytest.param("symmetric", "graph", marks=pytest.mark.slow),
        pytest.param("symmetric", "eager", marks=pytest.mark.slow),
    ],
)
def test_roundings_of_calibrated_networks_are_pytorchs_or_ties(scheme, mode, tmp_path):
    """And zeros around a volume are zeros in whatever code."""
    torch.manual_seed(0)
    model, x = Videos(up=False).eval(), _volumes(2, 3, 8, 9, 10) + 0.5
    _, ready = prepared(model, x, W8, QuantizationSpec(qscheme=scheme), mode)
    rows, behind = roundings(ready, (x,), tmp_path / "m.pte")
    assert sum(row.differing for row in rows) < 1e-3 * sum(row.numbers for row in rows)
    assert max(row.error for row in rows) < 1e-3
    assert behind > 100


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_calibrated_layers_run_in_xnnpack_and_are_small(mode, tmp_path, caplog):
    """The only convolutions are XNNPACK's, on int8: weights take a byte each, once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv3d(64, 64, 3, stride=2)).eval()
    x = _volumes(1, 64, 5, 6, 6)
    _, ready = prepared(model, x, W8, ASYMMETRIC, mode)
    path = tmp_path / "m.pte"
    assert sqnr(ready(x), _run(ready, x, path)) > 50
    assert path.stat().st_size < 1.2 * 2 * 64 * 64 * 27
    assert b"aten::convolution" not in path.read_bytes()
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


def test_calibrated_transposed_layers(tmp_path):
    torch.manual_seed(0)
    model, x = Videos().eval(), _volumes(2, 3, 9, 9, 11)
    _, ready = prepared(model, x, QuantizationSpec(dtype="int8"), ASYMMETRIC, "graph")
    found = _run(ready, x, tmp_path / "m.pte")
    assert found.shape == ready(x).shape
    assert sqnr(ready(x), found) > 40


@pytest.mark.parametrize("axis", [0, 1, 2, 4])
def test_scales_along_any_dimension_of_a_weight(axis, tmp_path):
    torch.manual_seed(0)
    layers = [kind(4, 8, (3, 2, 3), groups=2) for kind in (nn.Conv3d, nn.ConvTranspose3d)]
    for layer in layers:
        layer.weight.data.mul_(torch.logspace(-1, 1, layer.weight.shape[axis]).view([-1] + [1] * (4 - axis)))
    spec = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=axis))
    _check_beside(layers, _volumes(), spec, tmp_path / "m.pte")


@pytest.mark.parametrize("shape", [(2, *UNBATCHED), pytest.param(UNBATCHED, marks=pytest.mark.slow)])
def test_pools_of_volumes(shape, tmp_path):
    """Windows that stand out, that leave places out, and that count zeros or do not."""
    pools = [
        nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1)),
        nn.MaxPool3d((3, 2, 3), stride=(2, 1, 2), padding=1, dilation=(2, 1, 2), ceil_mode=True),
        nn.AvgPool3d((2, 1, 3)),
        nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool3d((3, 2, 3), 2, (1, 0, 1), ceil_mode=True),
        nn.AvgPool3d(3, 2, 1, ceil_mode=True, divisor_override=5),
        nn.AdaptiveAvgPool3d((3, 4, 5)),
        nn.AdaptiveMaxPool3d((3, 2, 2)),
    ]
    pools += [nn.LocalResponseNorm(3, alpha=0.5)] if len(shape) == 5 else []
    model, x = Beside(pools).eval(), _volumes(*shape)
    assert check_operators(model, "executorch", (x,)) == []
    found = run_executorch(export_executorch(model, (x,), tmp_path / "m.pte"), (x,))
    for pool, expected, actual in zip(pools, model(x), found, strict=True):
        assert actual.shape == expected.shape, pool
        assert sqnr(expected, actual) > 110, pool


class Twice(nn.Module):
    """One weight in two layers, whose output is read in two places, and one that is computed from the input."""

    def __init__(self):
        super().__init__()
        self.layer, self.unread = nn.Conv3d(4, 4, 3, padding=1), nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.layer(x)
        y = self.layer(y.relu()) + y.view(2, -1).mean(1).view(2, 1, 1, 1, 1)
        return torch.nn.functional.conv3d(y, y[:1, :, :2, :3, :3].cos())


def test_one_weight_in_two_layers_and_one_that_is_computed(tmp_path):
    torch.manual_seed(0)
    model, x = Twice().eval(), _volumes()
    _, ready = prepared(model, x, W8)
    assert sqnr(ready(x), _run(ready, x, tmp_path / "m.pte")) > 110


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, tmp_path):
    """Rounded once, as PyTorch does."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv3d(16, 8, 3), nn.ReLU()).eval().to(dtype), _volumes(1, 16, 6, 6, 6)
    _, ready = prepared(model, x.to(dtype), W8)
    exact = copy.deepcopy(ready).float()(x.to(dtype).float())
    found = _run(ready, x.to(dtype), tmp_path / "m.pte")
    assert found.dtype == dtype
    adds_itself = ADDS_IN_FLOAT16 and dtype == torch.float16
    assert sqnr(exact, found.float()) > (46 if adds_itself else sqnr(exact, ready(x.to(dtype)).float()) - 3)


def test_height_and_width_may_be_dynamic(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(8, 4, 2)]
    model, x = nn.Sequential(*layers).eval(), _volumes()
    shapes = ({4: 2 * torch.export.Dim("width", max=12)},)
    assert check_operators(model, "executorch", (x,), dynamic_shapes=shapes) == []
    _, ready = prepared(model, x, W8)
    path = export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=shapes)
    for other in (x, _volumes(2, 4, 6, 8, 24)):
        assert sqnr(ready(other), run_executorch(path, (other,))[0]) > 110


def test_a_dynamic_depth_is_refused_in_the_plan(tmp_path):
    """By the places of the layers, before a file is written."""
    model, x = nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU(), nn.ConvTranspose3d(8, 8, 2)).eval(), _volumes()
    shapes = ({2: torch.export.Dim("depth", min=4, max=8)},)
    problems = check_operators(model, "executorch", (x,), dynamic_shapes=shapes)
    assert [problem.where for problem in problems] == ["0", "2"]
    assert all("out of dynamic_shapes" in problem.message for problem in problems)
    _, ready = prepared(model, x, W8)
    with pytest.raises(ConversionError, match=r"three dimensions.*known depth only: conv3d, conv_transpose3d"):
        export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=shapes)
    assert not (tmp_path / "m.pte").exists()
