"""Random small models and configurations; a seed stands for one case."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


@dataclass
class Case:
    """One model with its configuration.

    Attributes:
        name: what was drawn, for messages.
        model: float model in eval mode.
        x: an input of it.
        compress: prepares a copy of the model.
        has_activations: whether activations are quantized.
    """

    name: str
    model: nn.Module
    x: torch.Tensor
    compress: Any
    has_activations: bool


class ConvStack(nn.Module):
    """Convolutions of one dimensionality with norms, activations, a residual add and a linear head."""

    def __init__(self, rng):
        super().__init__()
        self.rank = rank = rng.choice([1, 2, 2, 2, 3])
        self.shape = (rng.choice([1, 2]), 4, *[rng.choice([6, 8])] * rank)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
        width = rng.choice([8, 16])
        bias = rng.random() < 0.5
        self.stem = conv(4, width, 3, stride=rng.choice([1, 2]), padding=1, bias=bias)
        self.norm = norm(width) if rng.random() < 0.6 else nn.Identity()
        groups = rng.choice([1, 2, width])
        self.block = conv(width, width, 3, padding=2, dilation=2, groups=groups, bias=rng.random() < 0.5)
        self.norm2 = rng.choice([norm(width), nn.Identity(), nn.GroupNorm(2, width)])
        self.act = rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.ReLU6(), nn.Hardswish(), nn.LeakyReLU(0.1)])
        up = {"stride": 2} if rng.random() < 0.5 else {"groups": 2}
        self.up = transposed(width, 8, 2, **up) if rng.random() < 0.4 else None
        self.pool = rng.choice([None, "max", "avg"]) if rank < 3 else None
        self.residual = rng.random() < 0.7
        self.head = nn.Linear(8 if self.up is not None else width, rng.choice([3, 8]))
        for module in self.modules():
            if isinstance(module, norm):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        y = self.norm2(self.block(x))
        x = torch.relu(x + y) if self.residual else self.act(y)
        if self.pool is not None:
            kinds = {"max": (F.max_pool1d, F.max_pool2d), "avg": (F.avg_pool1d, F.avg_pool2d)}
            x = kinds[self.pool][self.rank - 1](x, 2)
        if self.up is not None:
            x = self.up(x)
        return self.head(x.flatten(2).mean(-1))


class Attention(nn.Module):
    """Self-attention written out, through ``scaled_dot_product_attention``, or as torch's own module."""

    def __init__(self, rng, width):
        super().__init__()
        self.kind = rng.choice(["matmul", "sdpa", "module"])
        self.heads = 2
        if self.kind == "module":
            self.inner = nn.MultiheadAttention(width, self.heads, batch_first=True)
        else:
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

    def forward(self, x):
        if self.kind == "module":
            return self.inner(x, x, x, need_weights=False)[0]
        n, t, c = x.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, -1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Encoder(nn.Module):
    """A transformer block; tokens or vectors in; the head may be tied to the embedding."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([32, 64])
        self.tokens = rng.random() < 0.5
        self.shape = (2, 5) if self.tokens else (2, 5, width)
        self.embed = nn.Embedding(32, width) if self.tokens else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(rng, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 32, bias=rng.random() < 0.5)
        if self.tokens and rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM or GRU and a linear head."""

    def __init__(self, rng):
        super().__init__()
        kind = rng.choice([nn.LSTM, nn.GRU])
        both = rng.random() < 0.3
        self.shape = (2, 5, 32)
        self.rnn = kind(32, 32, num_layers=rng.choice([1, 2]), batch_first=True, bidirectional=both)
        self.head = nn.Linear(64 if both else 32, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Perceptron(nn.Module):
    """Linear layers, one of them called twice."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([32, 64, 24])
        self.shape = rng.choice([(3, width), (2, 3, width)])
        self.first = nn.Linear(width, 64)
        self.again = nn.Linear(64, 64, bias=rng.random() < 0.5)
        self.last = nn.Linear(64, rng.choice([10, 32]))

    def forward(self, x):
        x = torch.tanh(self.again(F.relu(self.again(F.silu(self.first(x))))))
        return F.log_softmax(self.last(x), -1)


MODELS = [ConvStack, ConvStack, Encoder, Encoder, Recurrent, Perceptron]


def _granularity(rng, kind):
    roll = rng.random()
    if kind is ConvStack:
        return PerChannelGranularity(axis=0) if roll < 0.6 else None
    if roll < 0.4:
        return PerChannelGranularity(axis=rng.choice([0, 0, 1]))
    if roll < 0.75:
        return PerBlockGranularity(axis=rng.choice([1, 1, 0]), block_size=rng.choice([32, 8, 16]))
    return PerBlockGranularity(block_size=rng.choice([(8, 8), (4, 32)])) if roll < 0.85 else None


def _weight_spec(rng, kind):
    dtype = rng.choice(["int8", "int4", *INTEGERS, *FLOATS])
    options: dict[str, Any] = {}
    granularity = _granularity(rng, kind)
    if granularity is not None:
        options["granularity"] = granularity
    if dtype in FLOATS:
        if dtype.startswith("float4") or rng.random() < 0.4:
            options["scale_dtype"] = "float8_e8m0fnu"
    else:
        options["qscheme"] = rng.choice(["symmetric", "asymmetric"])
        if dtype[-1] != "1" and rng.random() < 0.2:
            options["qscheme"] = "symmetric_with_clipping"
        options["qformulation"] = rng.choice(["zp", "zp", "minval"])
    return QuantizationSpec(dtype=dtype, **options)


def _activation_spec(rng):
    roll = rng.random()
    if roll < 0.35:
        return None
    if roll < 0.6:
        return QuantizationSpec(dtype=rng.choice(["int8", "uint8"]), qscheme=rng.choice(["symmetric", "asymmetric"]))
    options: dict[str, Any] = {}
    dtype = rng.choice(["int8", "uint8", "int4", "uint4", "int6", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
    if dtype.startswith("float"):
        if dtype.startswith("float4"):
            options["scale_dtype"] = rng.choice(["float8_e8m0fnu", None])
            options["granularity"] = PerBlockGranularity(axis=-1, block_size=8)
    else:
        options["qscheme"] = rng.choice(["symmetric", "asymmetric", "symmetric_with_clipping"])
        options["qformulation"] = rng.choice(["zp", "minval"])
    if "granularity" not in options and rng.random() < 0.3:
        options["granularity"] = rng.choice([PerChannelGranularity(axis=-1), PerTokenGranularity()])
    if rng.random() < 0.25 or isinstance(options.get("granularity"), PerTokenGranularity):
        options["qparam_calculator_cls"] = "dynamic"
        if options.get("qscheme") == "symmetric_with_clipping":
            options["qscheme"] = "symmetric"
    return QuantizationSpec(dtype=dtype, **options)


def _palette_spec(rng):
    options: dict[str, Any] = {"n_bits": rng.randint(1, 8)}
    if rng.random() < 0.3:
        options["granularity"] = PerGroupedChannelGranularity(axis=rng.choice([0, 0, 1]), group_size=rng.choice([2, 4]))
    if rng.random() < 0.25:
        options["n_bits"], options["cluster_dim"] = rng.choice([(2, 2), (4, 2), (3, 4)])
    if rng.random() < 0.3:
        dtype, scheme = rng.choice([("int8", "symmetric"), ("uint8", "asymmetric"), ("float8_e4m3fn", "symmetric")])
        options["lut_qspec"] = QuantizationSpec(dtype=dtype, qscheme=scheme)
    if rng.random() < 0.3 and "cluster_dim" not in options:
        options["enable_per_channel_scale"] = True
    return PalettizationSpec(**options)


def _quantized(model, x, weight, activation, mode):
    specs = None if activation is None else {"*": activation}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec=None if weight is None else {"weight": weight}, op_input_spec=specs, op_output_spec=specs
        ),
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((x,))
    if activation is not None:
        with quantizer.calibration_mode(), torch.no_grad():
            ready(x)
    return quantizer, ready


def _palettized(model, x, spec):
    module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}, enable_fast_kmeans_mode=False)
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=module))
    return palettizer, palettizer.prepare((x,))


def _pruned(model, x, sparsity):
    module = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(target_sparsity=sparsity)})
    pruner = MagnitudePruner(model, MagnitudePrunerConfig(global_config=module))
    return pruner, pruner.prepare((x,))


def random_case(seed):
    """The case of a seed; its configuration may be one that the model does not allow."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choice(MODELS)
    dtype = rng.choice([torch.float32] * 6 + [torch.float16, torch.bfloat16])
    model = kind(rng).eval().to(dtype)
    tokens = getattr(model, "tokens", False)
    x = torch.randint(0, 32, model.shape) if tokens else torch.randn(model.shape).to(dtype)
    technique = rng.choice(["quantize"] * 5 + ["palettize"] * 2 + ["prune", "prune, quantize", "palettize, quantize"])
    weight, activation = _weight_spec(rng, kind), _activation_spec(rng)
    palette, sparsity = _palette_spec(rng), rng.choice([0.02, 0.5, 0.8])
    mode = rng.choice(["eager", "graph"])

    def compress():
        twin, compressor = copy.deepcopy(model), None
        if "prune" in technique:
            compressor, twin = _pruned(twin, x, sparsity)
            if technique != "prune":
                twin = compressor.finalize(backend="_torch")
        if "palettize" in technique:
            compressor, twin = _palettized(twin, x, palette)
            if technique != "palettize":
                twin = compressor.finalize(backend="_torch")
        if "quantize" in technique:
            chosen = None if "palettize" in technique else weight
            return _quantized(twin, x, chosen, activation, mode if technique == "quantize" else "eager")
        return compressor, twin

    parts = [f"seed {seed}", kind.__name__, str(dtype).removeprefix("torch."), technique]
    if "quantize" in technique:
        parts += [mode, f"weight {_short(weight)}", f"activation {_short(activation)}"]
    if "palettize" in technique:
        parts.append(f"palette {_short(palette)}")
    return Case(", ".join(parts), model, x, compress, "quantize" in technique and activation is not None)


def _short(spec):
    if spec is None:
        return None
    names = sorted(spec.model_fields_set - {"fake_quantize_cls", "qparam_calculator_cls", "range_calculator_cls"})
    fields = {name: getattr(spec, name) for name in names}
    return " ".join(
        f"{name}={_short(value) if name == 'lut_qspec' and value else value}" for name, value in fields.items()
    )
