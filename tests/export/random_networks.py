"""Small networks with random structure, which the random cases are made of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["NETWORKS", "ConvStack"]


class Network(nn.Module):
    """A model that knows what goes into it.

    Attributes:
        shape: shape of its input without the batch.
    """

    shape: tuple[int, ...]

    def inputs(self, dtype, batch=2):
        """Return random inputs."""
        return (torch.randn(batch, *self.shape).to(dtype),)


class ConvStack(Network):
    """Convolutions of one dimensionality with norms, activations, a residual add and a linear head."""

    def __init__(self, rng):
        super().__init__()
        self.rank = rank = rng.choice([1, 2, 2, 2, 3])
        self.shape = (4, *[rng.choice([6, 8])] * rank)
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


class Encoder(Network):
    """A transformer block; tokens or vectors in; the head may be tied to the embedding."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([32, 64])
        self.tokens = rng.random() < 0.5
        self.shape = (5, width)
        self.embed = nn.Embedding(32, width) if self.tokens else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(rng, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 32, bias=rng.random() < 0.5)
        if self.tokens and rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def inputs(self, dtype, batch=2):
        """Numbers of tokens, or vectors."""
        return (torch.randint(0, 32, (batch, 5)),) if self.tokens else super().inputs(dtype, batch)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


class Recurrent(Network):
    """An LSTM or GRU and a linear head."""

    def __init__(self, rng):
        super().__init__()
        kind = rng.choice([nn.LSTM, nn.GRU])
        both = rng.random() < 0.3
        self.shape = (5, 32)
        self.rnn = kind(32, 32, num_layers=rng.choice([1, 2]), batch_first=True, bidirectional=both)
        self.head = nn.Linear(64 if both else 32, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Perceptron(Network):
    """Linear layers, one of them called twice."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([32, 64, 24])
        self.shape = rng.choice([(width,), (3, width)])
        self.first = nn.Linear(width, 64)
        self.again = nn.Linear(64, 64, bias=rng.random() < 0.5)
        self.last = nn.Linear(64, rng.choice([10, 32]))

    def forward(self, x):
        x = torch.tanh(self.again(F.relu(self.again(F.silu(self.first(x))))))
        return F.log_softmax(self.last(x), -1)


class Assorted(Network):
    """An image and a vector in; the image is resized, joined with the vector, split, gated and pooled; two results."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([8, 16])
        self.resize = rng.choice(["nearest", "bilinear"])
        self.join = rng.choice(["add", "mul", "cat"])
        self.names = rng.random() < 0.4
        padding = rng.choice(["zeros", "reflect", "circular"])
        self.stem = nn.Conv2d(4, width, 3, padding=1, padding_mode=padding)
        self.project = nn.Linear(12, width)
        self.mix = nn.Conv2d(2 * width if self.join == "cat" else width, 2 * width, 1)
        self.act = rng.choice([nn.PReLU(2 * width), nn.Softplus(), nn.ELU(), nn.Tanh(), nn.Hardsigmoid()])
        self.left, self.right = nn.Linear(width, 5), nn.Linear(2 * width, 3, bias=False)

    def inputs(self, dtype, batch=2):
        """Return an image and a vector."""
        return torch.randn(batch, 4, 6, 6).to(dtype), torch.randn(batch, 12).to(dtype)

    def forward(self, image, vector):
        x = F.interpolate(self.stem(image), scale_factor=2.0, mode=self.resize)
        v = self.project(vector)[:, :, None, None]
        x = torch.cat([x, v.expand_as(x)], 1) if self.join == "cat" else x + v if self.join == "add" else x * v
        a, b = self.act(self.mix(x)).chunk(2, 1)
        gated = a * torch.sigmoid(b)
        left = self.left(gated.amax((2, 3)))
        right = self.right(torch.cat([gated.mean((2, 3)), b[:, :, 0, 0].clamp(-1, 1)], -1))
        return {"left": left, "right": right} if self.names else (left, right)


class Reader(Network):
    """Tokens and a mask in: tied embeddings, positions, causal attention by einsum, a convolution over time."""

    def __init__(self, rng):
        super().__init__()
        width = rng.choice([16, 32])
        self.embed = nn.Embedding(32, width, padding_idx=rng.choice([None, 0]))
        self.positions = nn.Parameter(torch.randn(5, width) / 4)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=rng.random() < 0.5) for _ in range(3))
        self.norm = rng.choice([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.over_time = nn.Conv1d(width, width, 3, padding=1, groups=rng.choice([1, width]))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("causal", torch.tril(torch.ones(5, 5, dtype=torch.bool)))

    def inputs(self, dtype, batch=2):
        """Return numbers of tokens, and which of them count."""
        mask = torch.ones(batch, 5, dtype=torch.bool)
        mask[0, -1] = False
        return torch.randint(0, 32, (batch, 5)), mask

    def forward(self, tokens, mask):
        x = self.norm(self.embed(tokens) + self.positions)
        scores = torch.einsum("bqc,bkc->bqk", self.query(x), self.key(x)) / x.shape[-1] ** 0.5
        allowed = self.causal & mask[:, None, :]
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        x = x + torch.einsum("bqk,bkc->bqc", weights, self.value(x))
        x = x + F.silu(self.over_time(x.mT)).mT
        return self.head(x)


NETWORKS = [ConvStack, ConvStack, Encoder, Encoder, Recurrent, Perceptron, Assorted, Assorted, Reader]
