"""Models that are a random graph of ordinary operators: which of them meet is up to the seed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .random_networks import Network

__all__ = ["Graph"]

LARGEST = 3000


def _axis(rng, x, first=0):
    axis = rng.randrange(first, x.dim())
    return axis if rng.random() < 0.5 else axis - x.dim()


def _function(*functions):
    """Make an operator of one value that always applies."""

    def make(rng, x):
        return rng.choice(functions)

    return make


def _reduction(*functions):
    def make(rng, x):
        if x.dim() < 2:
            return None
        function, axis, keeps = rng.choice(functions), _axis(rng, x, 1), rng.random() < 0.5
        return lambda x: function(x, axis, keepdim=keeps)

    return make


def _along(*functions):
    def make(rng, x):
        if x.dim() < 1:
            return None
        function, axis = rng.choice(functions), _axis(rng, x)
        return lambda x: function(x, axis)

    return make


def _reduction_of_all(rng, x):
    if x.dim() < 3:
        return None
    axes, keeps = rng.sample(range(1, x.dim()), 2), rng.random() < 0.5
    function = rng.choice([torch.mean, torch.sum, torch.amax, torch.var, torch.std, torch.logsumexp])
    return lambda x: function(x, dim=axes, keepdim=keeps)


def _permute(rng, x):
    order = rng.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(order)


def _transpose(rng, x):
    if x.dim() < 2:
        return None
    one, other = rng.sample(range(x.dim()), 2)
    return lambda x: x.transpose(one, other - x.dim())


def _swap_to_rows(rng, x):
    if x.dim() < 3:
        return None
    axis = rng.randrange(1, x.dim() - 1)
    return lambda x: x.movedim(axis, -1).flatten(-2)


def _flatten(rng, x):
    if x.dim() < 2:
        return None
    first = rng.randrange(x.dim() - 1)
    last = rng.randrange(first + 1, x.dim())
    return lambda x: x.flatten(first, last)


def _split_axis(rng, x):
    axes = [axis for axis in range(1, x.dim()) if x.shape[axis] % 2 == 0 and x.shape[axis] > 2]
    if not axes or x.dim() > 4:
        return None
    axis = rng.choice(axes)
    sizes = rng.choice([(2, -1), (-1, 2)])
    return lambda x: x.unflatten(axis, sizes)


def _unsqueeze(rng, x):
    if x.dim() > 4:
        return None
    axis = rng.randrange(x.dim() + 1)
    return lambda x: x.unsqueeze(axis)


def _squeeze(rng, x):
    axes = [axis for axis in range(x.dim()) if x.shape[axis] == 1]
    if not axes:
        return None
    axis = rng.choice(axes)
    return lambda x: x.squeeze(axis)


def _narrow(rng, x):
    axes = [axis for axis in range(x.dim()) if x.shape[axis] > 2]
    if not axes:
        return None
    axis = rng.choice(axes)
    piece = rng.choice([slice(1, None), slice(None, -1), slice(None, None, 2), slice(-2, None), slice(1, 2)])
    index = (slice(None),) * axis + (piece,)
    return lambda x: x[index]


def _select(rng, x):
    if x.dim() < 2:
        return None
    axis, at = rng.randrange(1, x.dim()), rng.choice([0, -1])
    return lambda x: x.select(axis, at)


def _pieces(rng, x):
    axes = [axis for axis in range(1, x.dim()) if x.shape[axis] % 2 == 0]
    if not axes:
        return None
    axis = rng.choice(axes)
    how = rng.choice(["product", "swap", "glu", "stack", "difference"])

    def call(x):
        if how == "glu":
            return F.glu(x, axis)
        one, other = x.chunk(2, axis)
        if how == "product":
            return one * torch.sigmoid(other)
        if how == "swap":
            return torch.cat([-other, one], axis)
        return torch.stack([one, other], axis) if how == "stack" and x.dim() < 5 else one - other

    return call


def _unbind(rng, x):
    if x.dim() < 2 or x.shape[1] > 5:
        return None
    return lambda x: sum(part * (i + 1) for i, part in enumerate(x.unbind(1)))


def _split(rng, x):
    axes = [axis for axis in range(1, x.dim()) if x.shape[axis] > 2]
    if not axes:
        return None
    axis = rng.choice(axes)
    sizes = [1, x.shape[axis] - 2, 1]
    return lambda x: torch.cat(x.split(sizes, axis)[::-1], axis)


def _pad(rng, x):
    if x.dim() < 3 or x.shape[-1] < 3:
        return None
    mode = rng.choice(["constant", "reflect", "replicate", "circular"])
    if mode == "constant":
        return lambda x: F.pad(x, (1, 2), value=0.5)
    if x.dim() == 3:
        return lambda x: F.pad(x, (1, 2), mode=mode)
    return (lambda x: F.pad(x, (2, 1, 1, 1), mode=mode)) if x.dim() == 4 and x.shape[-2] > 2 else None


def _repeat(rng, x):
    if x.dim() < 1 or x.numel() > 500:
        return None
    axis = rng.randrange(x.dim())
    how = rng.choice(["repeat", "interleave", "tile", "expand"])
    if how == "repeat":
        return lambda x: x.repeat(*(2 if i == axis else 1 for i in range(x.dim())))
    if how == "tile":
        return lambda x: x.tile(2)
    if how == "interleave":
        return lambda x: x.repeat_interleave(2, axis)
    return (lambda x: x.unsqueeze(axis).expand(*x.shape[:axis], 2, *x.shape[axis:])) if x.dim() < 5 else None


def _roll(rng, x):
    axis, by = _axis(rng, x), rng.choice([1, -1, 2])
    return rng.choice([lambda x: x.roll(by, axis), lambda x: x.flip(axis), lambda x: x.flip((0, axis % x.dim()))
                       if axis % x.dim() else x.flip(0)])  # fmt: skip


def _triangle(rng, x):
    if x.dim() < 2:
        return None
    k, function = rng.choice([0, 1, -1]), rng.choice([torch.tril, torch.triu])
    return lambda x: function(x, k)


def _pick(rng, x):
    """Rows by numbers that are part of the model."""
    axes = [axis for axis in range(1, x.dim()) if x.shape[axis] > 1]
    if not axes:
        return None
    axis = rng.choice(axes)
    numbers = nn.Parameter(torch.randint(0, x.shape[axis], (3,)), requires_grad=False)
    if rng.random() < 0.5:
        return _With(numbers, lambda x, numbers: x.index_select(axis, numbers))
    return _With(numbers, lambda x, numbers: x[(slice(None),) * axis + (numbers,)])


def _take_along(rng, x):
    if x.dim() < 2:
        return None
    how = rng.choice(["argsort", "argmax", "sort", "topk"])
    if how == "argsort":
        return lambda x: x.gather(-1, x.argsort(-1))
    if how == "argmax":
        return lambda x: x.gather(-1, x.argmax(-1, keepdim=True))
    return (lambda x: x.sort(-1, descending=True)[0]) if how == "sort" else lambda x: x.topk(1, -1)[0]


class _With(nn.Module):
    """A function of values and of a parameter or a layer."""

    def __init__(self, own, function):
        super().__init__()
        self.own, self.function = own, function

    def forward(self, *values):
        return self.function(*values, self.own)


def _parameter(rng, x):
    if x.dim() < 2:
        return None
    first = rng.randrange(1, x.dim())
    own = nn.Parameter(torch.rand(x.shape[first:]) + 0.5)
    function = rng.choice([torch.add, torch.mul, torch.sub, torch.div, torch.maximum])
    return _With(own, function)


def _linear(rng, x):
    if x.dim() < 2 or x.shape[-1] < 4:
        return None
    return nn.Linear(x.shape[-1], rng.choice([4, 8, 16]), bias=rng.random() < 0.6)


def _function_linear(rng, x):
    if x.dim() < 2 or x.shape[-1] < 4:
        return None
    weight = nn.Parameter(torch.randn(8, x.shape[-1]) / 3)
    products = [
        F.linear,
        lambda x, w: x @ w.t(),
        lambda x, w: torch.einsum("...i,oi->...o", x, w),
        lambda x, w: torch.matmul(w, x.mT).mT,
        lambda x, w: torch.tensordot(x, w, ([-1], [1])),
    ]
    return _With(weight, rng.choice(products))


def _convolution(rng, x):
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 2:
        return None
    channels, conv = x.shape[1], (nn.Conv1d, nn.Conv2d)[x.dim() - 3]
    groups = rng.choice([1, 1, channels]) if channels < 9 else 1
    options = {"bias": rng.random() < 0.6, "groups": groups}
    if rng.random() < 0.2:
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d)[x.dim() - 3]
        return transposed(channels, 4 * groups if groups == 1 else channels, 2, stride=2, **options)
    return conv(channels, channels if groups > 1 else rng.choice([4, 8]), rng.choice([1, 3]), padding=1,
                stride=rng.choice([1, 1, 2]), **options)  # fmt: skip


def _norm(rng, x):
    if x.dim() < 2 or x.shape[-1] < 3:
        return None
    kinds = [nn.LayerNorm(x.shape[-1]), nn.RMSNorm(x.shape[-1])]
    if 2 < x.dim() < 5 and min(x.shape[1:]) > 1:
        batch = (nn.BatchNorm1d, nn.BatchNorm2d)[x.dim() - 3](x.shape[1])
        batch.running_mean.uniform_(-0.5, 0.5)
        batch.running_var.uniform_(0.5, 2)
        kinds += [batch, nn.GroupNorm(1, x.shape[1]), (nn.InstanceNorm1d, nn.InstanceNorm2d)[x.dim() - 3](x.shape[1])]
    return rng.choice(kinds)


def _pool(rng, x):
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 4:
        return None
    rank = x.dim() - 3
    kinds = [
        lambda x: (F.max_pool1d, F.max_pool2d)[rank](x, 2),
        lambda x: (F.max_pool1d, F.max_pool2d)[rank](x, 3, 2, 1),
        lambda x: (F.avg_pool1d, F.avg_pool2d)[rank](x, 2),
        lambda x: (F.avg_pool1d, F.avg_pool2d)[rank](x, 3, 1, 1),
        lambda x: (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[rank](x, 1),
        lambda x: (F.adaptive_max_pool1d, F.adaptive_max_pool2d)[rank](x, 1),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, scale_factor=2, mode=("linear", "bilinear")[rank], align_corners=True),
        lambda x: F.interpolate(x, scale_factor=0.5, mode=("linear", "bilinear")[rank]),
    ]
    return rng.choice(kinds)


def _attention(rng, x):
    if x.dim() not in (3, 4) or x.shape[-1] < 4 or x.shape[-2] < 2:
        return None
    causal = rng.random() < 0.5
    if x.dim() == 3 and x.shape[-1] % 2 == 0 and rng.random() < 0.5:
        layer = nn.MultiheadAttention(x.shape[-1], 2, batch_first=True)
        return _With(layer, lambda x, layer: layer(x, x, x, need_weights=False)[0])
    return lambda x: F.scaled_dot_product_attention(x, x.tanh(), x, is_causal=causal)


def _assignment(rng, x):
    """A change of a copy in place."""
    if x.dim() < 2 or x.shape[1] < 2:
        return None
    how = rng.choice(["slice", "add", "fill", "row", "index", "relu"])

    def call(x):
        y = x.clone()
        if how == "slice":
            y[:, 1:] = y[:, :-1] * 2
        elif how == "add":
            y += 1
            y.mul_(x)
        elif how == "fill":
            y[:, 0] = 0.25
        elif how == "row":
            y[:, 1] += y[:, 0]
        elif how == "index":
            y.index_add_(1, torch.tensor([0, 1]), x[:, :2])
        else:
            F.relu(y, inplace=True).sub_(0.1)
        return y

    return call


def _layer_of_shapes(rng, x):
    """What models compute from sizes: positions, masks, scales."""
    if x.dim() < 2:
        return None
    return rng.choice([
        lambda x: x + torch.arange(x.shape[-1]) / x.shape[-1],
        lambda x: x * x.shape[-1] ** -0.5,
        lambda x: x.masked_fill(torch.arange(x.shape[-1]) > 1, -1.0),
        lambda x: x + torch.linspace(0, 1, x.shape[-1]).to(x.dtype),
        lambda x: x - torch.full_like(x, 0.3),
        lambda x: torch.cat([x, torch.zeros_like(x[..., :1])], -1),
        lambda x: torch.cat([x.new_ones(*x.shape[:-1], 1), x], -1),
        lambda x: x * torch.ones(x.shape[-1], x.shape[-1]).tril().sum(0),
        lambda x: x.masked_fill(x > 0.5, 0.0),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: x * (x.abs() < 1).to(x.dtype),
        lambda x: x * F.one_hot(torch.arange(x.shape[-1]) % 2, 2)[:, 0],
    ])  # fmt: skip


def _unfold(rng, x):
    if x.dim() == 4 and min(x.shape[2:]) >= 3 and rng.random() < 0.5:
        return lambda x: F.unfold(x, 2, stride=1)
    if 1 < x.dim() < 5 and x.shape[-1] >= 4:
        return lambda x: x.unfold(-1, 2, 2)
    return None


def _shuffle(rng, x):
    if x.dim() != 4:
        return None
    if x.shape[1] % 4 == 0:
        return lambda x: F.pixel_shuffle(x, 2)
    return (lambda x: F.pixel_unshuffle(x, 2)) if x.shape[2] % 2 == x.shape[3] % 2 == 0 else None


def _normalized(rng, x):
    if x.dim() < 2:
        return None
    axis = _axis(rng, x, 1)
    return rng.choice([
        lambda x: F.normalize(x, dim=axis),
        lambda x: x / (x.norm(dim=axis, keepdim=True) + 1),
        lambda x: (x - x.mean(axis, keepdim=True)) / (x.std(axis, keepdim=True, unbiased=False) + 0.5),
        lambda x: x / x.abs().amax(axis, keepdim=True).clamp_min(0.5),
        lambda x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-2),
        lambda x: torch.cumsum(x, axis) / x.shape[axis],
    ])  # fmt: skip


def _lookup(rng, x):
    """Values become numbers of rows of a table."""
    if x.numel() > 200:
        return None
    table = nn.Embedding(8, 4)
    return _With(table, lambda x, table: table((x.abs() * 3.7).long().clamp(0, 7)))


UNARY = [
    _function(torch.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, F.softplus, F.elu, F.leaky_relu, F.hardswish),
    _function(F.hardsigmoid, F.hardtanh, F.mish, F.logsigmoid, F.softsign, F.relu6, F.selu, F.celu, F.tanhshrink),
    _function(torch.abs, torch.neg, torch.square, torch.sin, torch.cos, torch.erf, torch.atan, torch.nan_to_num),
    _function(lambda x: (x.abs() + 0.1).log(), lambda x: x.abs().sqrt(), lambda x: (x.square() + 0.5).rsqrt()),
    _function(lambda x: x.clamp(-1, 1).exp(), lambda x: 1 / (x.abs() + 1), lambda x: 1 - x, lambda x: x / 3),
    _function(lambda x: x.clamp(min=-0.5), lambda x: x.clamp(max=0.7), lambda x: x**2, lambda x: x**3, lambda x: 2 * x),
    _function(lambda x: F.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x), lambda x: x.float()),
    _function(lambda x: x.abs().pow(0.5), lambda x: x.abs().log1p(), lambda x: x.clamp(-2, 2).expm1(), torch.clone),
    _function(lambda x: F.dropout(x, 0.5, training=False), lambda x: x.contiguous(), lambda x: x.detach()),
    _function(lambda x: F.threshold(x, 0.2, 0.1), lambda x: F.hardshrink(x, 0.3), lambda x: F.softshrink(x, 0.2)),
    _reduction(torch.mean, torch.sum, torch.amax, torch.amin, torch.logsumexp, torch.var, torch.std),
    _reduction(lambda x, axis, keepdim: x.max(axis, keepdim)[0]),
    _reduction(lambda x, axis, keepdim: x.norm(dim=axis, keepdim=keepdim)),
    _along(torch.softmax, torch.log_softmax, F.softmin, torch.cumsum),
    _reduction_of_all, _permute, _transpose, _swap_to_rows, _flatten, _split_axis, _unsqueeze, _squeeze, _narrow,
    _select, _pieces, _unbind, _split, _pad, _repeat, _roll, _triangle, _pick, _take_along, _parameter, _assignment,
    _layer_of_shapes, _unfold, _shuffle, _normalized, _lookup, _norm, _pool, _attention,
]  # fmt: skip
LAYERS = [_linear, _linear, _linear, _function_linear, _convolution, _convolution]


def _broadcast(*shapes):
    """Whether shapes go together."""
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


def _elementwise(rng, x, y):
    if not _broadcast(x.shape, y.shape):
        return None
    return rng.choice([
        torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, lambda x, y: x / (y.abs() + 1),
        lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x + 0.5 * y,
        lambda x, y: torch.addcmul(x, x, y, value=0.5), lambda x, y: torch.atan2(x, y.abs() + 1),
        lambda x, y: x * torch.sigmoid(y), lambda x, y: torch.add(x, y, alpha=2), torch.hypot,
    ])  # fmt: skip


def _join(rng, x, y):
    if x.dim() != y.dim():
        return None
    axes = [i for i in range(x.dim()) if x.shape[:i] + x.shape[i + 1 :] == y.shape[:i] + y.shape[i + 1 :]]
    if not axes:
        return None
    axis = rng.choice(axes)
    if x.shape == y.shape and x.dim() < 5 and rng.random() < 0.3:
        return lambda x, y: torch.stack([x, y], axis)
    return lambda x, y: torch.cat([x, y], axis)


def _product(rng, x, y):
    if x.dim() < 2 or y.dim() < 2 or not _broadcast(x.shape[:-2], y.shape[:-2]):
        return None
    scale = x.shape[-1] ** -0.5
    if x.shape[-1] == y.shape[-2]:
        return lambda x, y: (x @ y) * scale
    if x.shape[-1] == y.shape[-1]:
        return rng.choice([lambda x, y: x @ y.transpose(-1, -2) * scale,
                           lambda x, y: torch.softmax(x @ y.mT * scale, -1),
                           lambda x, y: torch.einsum("...ij,...kj->...ik", x * scale, y)])  # fmt: skip
    return (lambda x, y: x.mT @ y * scale) if x.shape[-2] == y.shape[-2] else None


BINARY = [_elementwise, _elementwise, _elementwise, _join, _product, _product]


class Graph(Network):
    """Random operators applied to an input and to each other's results; several are layers with weights."""

    def __init__(self, rng):
        super().__init__()
        self.shape = rng.choice([(8,), (5, 8), (4, 6, 6), (8, 6), (2, 3, 8), (8, 4, 4)])
        self.functions, self.steps = nn.ModuleList(), []
        values = [torch.randn(2, *self.shape)]
        wanted = rng.randint(4, 14)
        with torch.no_grad():
            for _ in range(400):
                if len(self.steps) >= wanted:
                    break
                self._try_step(rng, values)
        used = {i for _, inputs in self.steps for i in inputs}
        self.results = [i for i in range(len(values)) if i not in used]

    def _try_step(self, rng, values):
        layers = sum(isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) for module in self.modules())
        kinds = BINARY if rng.random() < 0.3 else LAYERS if rng.random() < 0.4 or not layers else UNARY
        recent = values[-4:] if rng.random() < 0.8 else values
        numbers, count = range(len(values) - len(recent), len(values)), 2 if kinds is BINARY else 1
        inputs = tuple(rng.choice(numbers) for _ in range(count))
        found = [values[i] for i in inputs]
        function = rng.choice(kinds)(rng, *found)
        if function is None:
            return
        y = function.eval()(*found) if isinstance(function, nn.Module) else function(*found)
        if not (0 < y.numel() <= LARGEST and 0 < y.dim() < 6 and y.isfinite().all() and y.abs().max() < 1e3):
            return
        self.functions.append(function if isinstance(function, nn.Module) else _Call(function))
        self.steps.append((len(self.functions) - 1, inputs))
        values.append(y)

    def forward(self, x):
        values = [x]
        for number, inputs in self.steps:
            values.append(self.functions[number](*(values[i] for i in inputs)))
        return tuple(values[i] for i in self.results)


class _Call(nn.Module):
    """A function as a module, so that a message names it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *values):
        return self.function(*values)
