"""Attention under masks that hide all keys from some queries, as padding in front of a short text does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

MASKS = ("flags", "infinities", "lowest numbers")


class Attention(nn.Module):
    """Attention of two heads, four of which read them, and a layer."""

    def __init__(self):
        super().__init__()
        self.query, self.rest, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, mask):
        n, t, _ = x.shape
        query = self.query(x).view(n, t, 4, 8).transpose(1, 2)
        key, value = self.rest(x).view(n, t, 2, 16).transpose(1, 2).chunk(2, -1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(n, t, 32))


def _case(kind, dtype=torch.float32):
    """A prepared model, and inputs of which the second has three tokens of padding in front."""
    torch.manual_seed(0)
    model, x = Attention().eval().to(dtype), torch.randn(2, 5, 16).to(dtype)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, :, :, :3] = False
    rest = {"infinities": float("-inf"), "lowest numbers": torch.finfo(dtype).min}
    mask = seen if kind == "flags" else torch.zeros(2, 1, 5, 5, dtype=dtype).masked_fill(~seen, rest[kind])
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x, mask))
    return ready, (x, mask)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai", "torch"])
def test_queries_that_see_nothing(target, kind, tmp_path):
    """They have zeros from flags and from infinities, and an average of all values from lowest numbers."""
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    ready, inputs = _case(kind)
    path = tmp_path / f"m{TARGETS[target].suffix}"
    TARGETS[target].write(ready, inputs, path, {}, None)
    with torch.no_grad():
        assert sqnr(ready(*inputs), TARGETS[target].run(path, inputs)[0]) > 90


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_onnx(dtype, kind, tmp_path):
    """The same for halves."""
    pytest.importorskip("onnxruntime")
    from bitwright.export.onnx import export_onnx, run_onnx

    ready, inputs = _case(kind, dtype)
    path = export_onnx(ready, inputs, tmp_path / "m.onnx")
    with torch.no_grad():
        assert sqnr(ready(*inputs), run_onnx(path, inputs)[0]) > 30


class Gated(nn.Module):
    """Normalised queries under a mask, whose result is laid together by a view, as in AFMoE."""

    def __init__(self):
        super().__init__()
        self.query, self.rest, self.out = nn.Linear(16, 32), nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        n, t, _ = x.shape
        query = F.rms_norm(self.query(x).view(n, t, 4, 8), (8,)).transpose(1, 2)
        key, value = self.rest(x).view(n, t, 4, 16).transpose(1, 2).chunk(2, -1)
        mask = torch.ones(t, t, dtype=torch.bool).tril()[None, None].expand(n, 1, t, t)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(y.transpose(1, 2).view(n, t, -1))


@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai", "torch"])
def test_views_behind_attention_of_quantized_queries(target, tmp_path):
    """Of quantized queries, PyTorch's attention lays its result in another order, in which it has no such view."""
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    torch.manual_seed(0)
    model, x = Gated().eval(), (torch.randn(2, 5, 16),)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="graph"))
    ready = quantizer.prepare(x)
    with quantizer.calibration_mode():
        ready(*x)
    ready.eval()
    path = TARGETS[target].write(ready, x, tmp_path / f"m{TARGETS[target].suffix}", {}, None)
    with torch.no_grad():
        assert sqnr(ready(*x), TARGETS[target].run(path, x)[0]) > 35


class WithoutHeads(nn.Module):
    """Attention of vectors in as many dimensions as they come in, causal or under a mask."""

    def __init__(self, masked):
        super().__init__()
        self.layer, self.masked = nn.Linear(8, 24), masked

    def forward(self, x):
        query, key, value = self.layer(x).chunk(3, -1)
        if not self.masked:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(-1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8)])
def test_attention_without_heads_in_onnx(shape, masked, tmp_path):
    """torch's translation takes four dimensions only."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip(TARGETS["onnx"].missing())
    torch.manual_seed(0)
    model, x = WithoutHeads(masked).eval(), torch.randn(*shape)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,))
    sizes = ({0: torch.export.Dim.DYNAMIC},) if len(shape) == 3 else None
    TARGETS["onnx"].write(ready, (x,), tmp_path / "m.onnx", {}, sizes)
    with torch.no_grad():
        for inputs in (x, x[:2]) if sizes else (x,):
            assert sqnr(ready(inputs), TARGETS["onnx"].run(tmp_path / "m.onnx", (inputs,))[0]) > 110
