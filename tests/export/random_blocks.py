"""Networks that are a random series of blocks: what layers meet in them is up to the seed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

__all__ = ["BLOCK_NETWORKS"]

WIDTH = 16
LENGTH = 6


class Series(nn.Module):
    """Blocks that keep the shape of what they are given, one after another, and a head.

    Attributes:
        shape: shape of its input without the batch.
    """

    shape: tuple[int, ...]

    def __init__(self, rng, kinds, head):
        super().__init__()
        self.blocks = nn.ModuleList(rng.choice(kinds)(rng) for _ in range(rng.choice([1, 2, 3])))
        self.head = head

    def inputs(self, dtype, batch=2):
        """Return random inputs."""
        return (torch.randn(batch, *self.shape).to(dtype),)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(type(block).__name__ for block in self.blocks)})"


class Product(nn.Module):
    """A product with a parameter of its own, written in one of many ways."""

    def __init__(self, rng):
        super().__init__()
        self.how = rng.choice(["linear", "matmul", "einsum", "transposed", "addmm", "bmm", "cast"])
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x):
        if self.how == "linear":
            return F.linear(x, self.weight, self.bias)
        if self.how == "einsum":
            return torch.einsum("btc,oc->bto", x, self.weight)
        if self.how == "transposed":
            return x @ self.weight.t() + self.bias
        if self.how == "addmm":
            return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view_as(x)
        if self.how == "bmm":
            return torch.bmm(x, self.weight.expand(x.shape[0], -1, -1))
        return (x.float() @ self.weight.float()).to(x.dtype) if self.how == "cast" else x @ self.weight


class Heads(nn.Module):
    """Attention in which several heads read one, under a mask that may hide everything from the first tokens."""

    def __init__(self, rng):
        super().__init__()
        self.mask = rng.choice(["causal", "flags", "infinities", "none"])
        self.query, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        seen[:, :2] = rng.random() < 0.5
        if self.mask == "infinities":
            seen = torch.zeros(LENGTH, LENGTH).masked_fill(~seen, float("-inf"))
        self.register_buffer("seen", seen, persistent=rng.random() < 0.5)

    def forward(self, x):
        n, t, _ = x.shape
        query = self.query(x).view(n, t, 4, 4).transpose(1, 2)
        key, value = self.rest(x).view(n, t, 2, 8).transpose(1, 2).chunk(2, -1)
        mask = self.seen if self.mask in ("flags", "infinities") else None
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.mask == "causal", enable_gqa=True
        )
        return x + y.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """PyTorch's own transformer layer."""

    def __init__(self, rng):
        super().__init__()
        first, act = rng.random() < 0.5, rng.choice(["relu", "gelu"])
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, act, batch_first=True, norm_first=first)

    def forward(self, x):
        return self.inner(x)


class Cells(nn.Module):
    """A recurrent cell that steps through the tokens, or a whole layer with states that are handed on."""

    def __init__(self, rng):
        super().__init__()
        self.kind = rng.choice(["gru cell", "lstm cell", "rnn", "projected"])
        self.cell = {
            "gru cell": lambda: nn.GRUCell(WIDTH, WIDTH),
            "lstm cell": lambda: nn.LSTMCell(WIDTH, WIDTH, bias=False),
            "rnn": lambda: nn.RNN(WIDTH, WIDTH, nonlinearity=rng.choice(["tanh", "relu"]), batch_first=True),
            "projected": lambda: nn.GRU(WIDTH, WIDTH, bias=False),
        }[self.kind]()

    def forward(self, x):
        if self.kind == "rnn":
            y, state = self.cell(x, x[:, 0][None].contiguous())
            return y + state.transpose(0, 1)
        if self.kind == "projected":
            return self.cell(x.transpose(0, 1))[0].transpose(0, 1)
        state, outputs = None, []
        for token in x.unbind(1):
            state = self.cell(token, state)
            outputs.append(state if isinstance(state, torch.Tensor) else state[0])
        return torch.stack(outputs, 1)


class Rotated(nn.Module):
    """Rotary positions, joined halves, a gate."""

    def __init__(self, rng):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 2, WIDTH // 2)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        gates = [F.silu, F.gelu, torch.sigmoid, F.mish, F.softsign, nn.GELU(approximate="tanh")]
        self.gate = rng.choice(gates)

    def forward(self, x):
        one, other = x.chunk(2, -1)
        x = x * self.cos.to(x.dtype) + torch.cat([-other, one], -1) * self.sin.to(x.dtype)
        value, gate = self.up(x).split(WIDTH, -1)
        return self.down(value * self.gate(gate))


class Experts(nn.Module):
    """Every token is multiplied by the matrices of two experts, and their results are weighed."""

    def __init__(self, rng):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        every = torch.matmul(x[:, None], self.weight).movedim(1, 2)
        picked = every.gather(2, chosen[..., None].expand(-1, -1, -1, WIDTH))
        return (picked * weights[..., None]).sum(2)


class Normed(nn.Module):
    """A norm, and a bilinear or normalized layer."""

    def __init__(self, rng):
        super().__init__()
        self.norm = rng.choice([nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH), nn.LayerNorm((LENGTH, WIDTH))])
        self.kind = rng.choice(["bilinear", "weight norm", "spectral norm", "twice"])
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH) if self.kind == "bilinear" else nn.Linear(WIDTH, WIDTH)
        if self.kind == "weight norm":
            self.layer = parametrizations.weight_norm(self.layer)
        elif self.kind == "spectral norm":
            self.layer = parametrizations.spectral_norm(self.layer)

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "bilinear":
            return self.layer(y, x)
        return self.layer(self.layer(y)) if self.kind == "twice" else self.layer(y) + x


class Tokens(Series):
    """Blocks on tokens; with results in a dictionary inside a tuple, now and then."""

    shape = (LENGTH, WIDTH)

    def __init__(self, rng):
        super().__init__(rng, [Product, Heads, Layer, Cells, Rotated, Experts, Normed], nn.Linear(WIDTH, 5))
        self.nested = rng.random() < 0.3

    def forward(self, x):
        y = super().forward(x)
        return (y, {"last": y[:, -1], "all": (y.exp(),)}) if self.nested else y


class Convolved(nn.Module):
    """One convolution, with options that are seldom used together, and an activation."""

    def __init__(self, rng):
        super().__init__()
        kernel, groups = rng.choice([(1, 3), (3, 1), 3, 5, (1, 5)]), rng.choice([1, 1, 4, WIDTH])
        mode = rng.choice(["zeros", "zeros", "reflect", "replicate"])
        options = {
            "groups": groups,
            "padding_mode": mode,
            "bias": rng.random() < 0.6,
            "dilation": rng.choice([1, 1, 2]),
        }
        self.conv = nn.Conv2d(WIDTH, WIDTH, kernel, padding="same", **options)
        if rng.random() < 0.2:
            self.conv = parametrizations.weight_norm(self.conv)
        self.act = rng.choice(
            [nn.ReLU(inplace=True), nn.Hardtanh(-1, 2), nn.Mish(), nn.PReLU(), nn.Identity(), nn.ELU()]
        )

    def forward(self, x):
        return self.act(self.conv(x))


class DownAndUp(nn.Module):
    """Pooled or strided, and back to the size before by an interpolation, a transposed convolution or a shuffle."""

    def __init__(self, rng):
        super().__init__()
        pools = [
            nn.MaxPool2d(2),
            nn.AvgPool2d(2),
            nn.MaxPool2d(3, 2, 1),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        ]
        strided = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1, groups=rng.choice([1, WIDTH]))
        self.down = rng.choice([*pools, strided, nn.PixelUnshuffle(2)])
        width = 4 * WIDTH if isinstance(self.down, nn.PixelUnshuffle) else WIDTH
        groups = rng.choice([1, 4])
        self.up = rng.choice(
            [
                nn.Sequential(nn.Conv2d(width, 4 * WIDTH, 1), nn.PixelShuffle(2)),
                nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, WIDTH, 1)),
                nn.Sequential(
                    nn.Conv2d(width, WIDTH, 1), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
                ),
                nn.ConvTranspose2d(width, WIDTH, 3, stride=2, padding=1, output_padding=1, groups=groups),
                nn.ConvTranspose2d(width, WIDTH, 4, stride=2, padding=1, bias=False),
            ]
        )

    def forward(self, x):
        return x + self.up(self.down(x))


class Squeezed(nn.Module):
    """Channels weighed by what they hold on average, over norms of several kinds."""

    def __init__(self, rng):
        super().__init__()
        self.norm = rng.choice([nn.GroupNorm(4, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True), nn.BatchNorm2d(WIDTH)])
        self.fewer, self.more = nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(4, WIDTH, 1)
        self.gate = rng.choice([nn.Sigmoid(), nn.Hardsigmoid()])

    def forward(self, x):
        x = self.norm(x)
        return x * self.gate(self.more(F.relu(self.fewer(F.adaptive_avg_pool2d(x, 1)))))


class Windows(nn.Module):
    """Attention inside windows, which are shifted before and behind."""

    def __init__(self, rng):
        super().__init__()
        self.shift = rng.choice([0, 2])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        n = x.shape[0]
        y = torch.roll(x, (-self.shift, -self.shift), (2, 3)) if self.shift else x
        y = y.view(n, WIDTH, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(n * 4, 16, WIDTH)
        q, k, v = self.qkv(y).chunk(3, -1)
        y = self.out((q @ k.mT / 4 + self.positions).softmax(-1) @ v)
        y = y.view(n, 2, 2, 4, 4, WIDTH).permute(0, 5, 1, 3, 2, 4).reshape(n, WIDTH, 8, 8)
        return x + (torch.roll(y, (self.shift, self.shift), (2, 3)) if self.shift else y)


class Scaled(nn.Module):
    """Channels last, as ConvNeXt has them: a norm, two layers, a factor for each channel."""

    def __init__(self, rng):
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.factor = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.factor * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Pooled(nn.Module):
    """Average or largest value of each channel, and a layer."""

    def __init__(self, rng):
        super().__init__()
        self.pool = rng.choice([nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1), nn.AdaptiveAvgPool2d((2, 1))])
        rows = 2 if self.pool.output_size == (2, 1) else 1
        self.layer = nn.Linear(WIDTH * rows, 5)

    def forward(self, x):
        return self.layer(self.pool(x).flatten(1))


class Image(Series):
    """Blocks on images."""

    shape = (WIDTH, 8, 8)

    def __init__(self, rng):
        super().__init__(rng, [Convolved, Convolved, DownAndUp, Squeezed, Windows, Scaled], Pooled(rng))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)


BLOCK_NETWORKS = [Tokens, Tokens, Image, Image]
