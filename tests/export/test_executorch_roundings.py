"""Roundings of ExecuTorch programs: each is PyTorch's, given the same codes, or the value is a tie.

Norms, softmax and other sums add in another order, and a scale is divided by in PyTorch and multiplied with in
ExecuTorch; both move a value in its last bits, which moves a code where the value lies half-way between two. The whole
output may then be at 40 dB, though nothing is computed wrongly. What XNNPACK does round is a bias between calibrated
activations, by some thousandths of a step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerTokenGranularity

from .executorch_taps import roundings
from .models import CHANNEL, W8

TOKEN = PerTokenGranularity()
STATIC = {scheme: QuantizationSpec(qscheme=scheme) for scheme in ("symmetric", "asymmetric")}
DYNAMIC = {
    "int8 per token": QuantizationSpec(granularity=TOKEN, qparam_calculator_cls="dynamic"),
    "int8 per token, asymmetric": QuantizationSpec(
        qscheme="asymmetric", granularity=TOKEN, qparam_calculator_cls="dynamic"
    ),
    "uint8 per tensor": QuantizationSpec(dtype="uint8", qparam_calculator_cls="dynamic"),
}


class Block(nn.Module):
    """Lookups that are summed and normed, self-attention and layers around an activation function."""

    def __init__(self, width=64, normed_first=False):
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(24, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.normed_first = normed_first

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        if self.normed_first:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x)
        x = self.norm2(x + self.attention(x))
        return self.norm3(x + self.mlp(x))

    def attention(self, x):
        n, t, c = x.shape
        q, k, v = (part.view(n, t, 4, c // 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


def _prepared(model, inputs, others, linear=None, mode="graph"):
    """A calibrated model; all operators quantize by one spec, linear layers perhaps by another one."""
    weight = {"weight": QuantizationSpec(granularity=CHANNEL)}
    sides = {"op_input_spec": {"*": others}, "op_output_spec": {"*": others}}
    types = {}
    if linear is not None:
        types = {
            nn.Linear: ModuleQuantizerConfig(op_state_spec=weight, op_input_spec={"*": linear}, op_output_spec=None)
        }
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_state_spec={"weight": W8}, **sides),
        module_type_configs=types,
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        ready(*inputs)
    return ready


@pytest.mark.parametrize(
    ("name", "scheme", "normed_first", "mode"),
    [
        pytest.param("int8 per token", "symmetric", False, "graph", marks=pytest.mark.slow),
        pytest.param("int8 per token, asymmetric", "asymmetric", True, "graph", marks=pytest.mark.slow),
        pytest.param("uint8 per tensor", "symmetric", True, "graph", marks=pytest.mark.slow),
        pytest.param("int8 per token", "asymmetric", True, "eager", marks=pytest.mark.slow),
        (None, "symmetric", True, "graph"),
        pytest.param(None, "asymmetric", False, "eager", marks=pytest.mark.slow),
    ],
)
def test_roundings_of_transformers_are_pytorchs_or_ties(name, scheme, normed_first, mode, tmp_path):
    """Whatever one moved code becomes further on, nothing rounds wrongly by itself."""
    torch.manual_seed(0)
    model, tokens = Block(normed_first=normed_first).eval(), torch.randint(0, 50, (8, 24))
    ready = _prepared(model, (tokens,), STATIC[scheme], None if name is None else DYNAMIC[name], mode)
    rows, behind = roundings(ready, (tokens,), tmp_path / "m.pte")
    total = sum(row.numbers for row in rows)
    assert total > 150_000
    assert sum(row.differing for row in rows) < 1e-3 * total
    assert max(row.error for row in rows) < 1e-4
    assert max(row.bias for row in rows) < 2e-3
    assert any(row.bias for row in rows) == (name is None)
    assert behind > 100


class Words(nn.Module):
    """A transformer of random parameters, from token ids to one tensor."""

    def __init__(self, name):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {
            "vocab_size": 100,
            "num_layers": 2,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
        }
        sizes |= {"intermediate_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
        kind = getattr(transformers, name)
        self.model = kind(kind.config_class(**sizes))
        for vector in [parameter for parameter in self.parameters() if parameter.ndim == 1]:
            nn.init.normal_(vector, vector.mean().item(), 0.1)

    def forward(self, tokens):
        return self.model(tokens).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertModel", "T5EncoderModel"])
def test_roundings_of_published_models_are_pytorchs_or_ties(name, tmp_path):
    """With every operator quantized by calibrated int8."""
    torch.manual_seed(0)
    model, tokens = Words(name).eval(), torch.randint(0, 100, (4, 24))
    ready = _prepared(model, (tokens,), STATIC["symmetric"])
    rows, behind = roundings(ready, (tokens,), tmp_path / "m.pte")
    total = sum(row.numbers for row in rows)
    assert total > 100_000
    assert sum(row.differing for row in rows) < 1e-3 * total
    assert max(row.error for row in rows) < 1e-4
    assert max(row.bias for row in rows) < 3e-3
    assert behind > 100
