"""Operators that coreai-torch translates wrongly for some arguments, or not at all: right in the runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

pytest.importorskip("coreai_torch")

from bitwright.export.conversion import ConversionError
from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.operators import check_operators
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.export.models import Functions, assert_alike, together

ROWS = torch.arange(20.0).view(5, 4)


def _put(x, place, values, *, accumulate=False):
    place = place if isinstance(place, tuple) else (place,)
    return x.index_put(place, torch.as_tensor(values), accumulate=accumulate)


def _set(x, place, values):
    x = x.clone()
    x[place] = values
    return x


ALL = slice(None)
WRITES = {
    "a row for all places": lambda x, i: _put(x, (torch.tensor([0, 1]), torch.tensor([1, 2])), ROWS[0]),
    "a number": lambda x, i: _set(x, (torch.tensor([0, 1]), torch.tensor([1, 2])), 1.0),
    "one place, a row": lambda x, i: _set(x, torch.tensor([1]), ROWS[1]),
    "one place, all rows": lambda x, i: _set(x, torch.tensor([1]), ROWS[None]),
    "second dimension, a number": lambda x, i: _set(x, (ALL, i[0]), 0.5),
    "second dimension, a matrix of places": lambda x, i: _set(x, (ALL, i), ROWS[0]),
    "last dimension": lambda x, i: _set(x, (ALL, ALL, torch.tensor([0, 2])), torch.arange(10.0).view(2, 5, 1)),
    "two dimensions behind another": lambda x, i: _set(x, (ALL, i[1], torch.tensor([0, 1, 2, 3, 0])), ROWS.T[:2, :5]),
    "two dimensions around another": lambda x, i: _set(x, (i[0, :2], ALL, torch.tensor([0, 3])), ROWS.T[:2]),
    "from the end": lambda x, i: _set(x, (ALL, torch.tensor([-1, -2])), ROWS[1]),
    "added": lambda x, i: _put(x, i[0].clamp(max=1), ROWS.expand(5, 5, 4), accumulate=True),
    "added by index_add": lambda x, i: x.index_add(1, i[1], ROWS.expand(2, 5, 4)),
    "added by scatter_add": lambda x, i: x.scatter_add(1, i[..., None].expand(2, 5, 4), ROWS.expand(2, 5, 4)),
    "scattered, fewer places than elements": lambda x, i: x.scatter(1, i[..., None], ROWS[:5, :1].expand(2, 5, 1)),
    "scattered, fewer places than values": lambda x, i: x.scatter(1, i[:, :1, None].expand(2, 1, 4), x * 2),
    "scattered, multiplied": lambda x, i: x.scatter(-1, i[:, :2, None].clamp(max=3), x.flip(1), reduce="multiply"),
    "scattered in one number": lambda x, i: (
        x * x.mean().scatter(0, i[0, 0] * 0, 0.5)
        + x.sum().scatter(0, i[:1, 1] * 0, x[0, 0, :1], reduce="add")
        + x.max().scatter(0, i[0, 0] * 0, x[0, 1, 0])
        + x.amax().scatter_add(0, i[0, 0] * 0, x[1, 0, 0])
    ),
    "scattered nowhere": lambda x, i: x.scatter(1, i[:, :0, None], 0.5),
    "where something holds": lambda x, i: _set(x, x > 0, 0.5),
    "rows of a mask, a row": lambda x, i: _set(x, i > 0, ROWS[2]),
    "rows of a mask, a row of one": lambda x, i: _set(x, i > 0, ROWS[2:3]),
    "rows of a mask, each its own": lambda x, i: _set(x, i > 0, ROWS),
    "rows of a mask, added": lambda x, i: _put(x, i > 0, ROWS[3], accumulate=True),
    "rows of a mask, each its own added": lambda x, i: _put(x, i > 0, ROWS, accumulate=True),
    "an empty mask": lambda x, i: _set(x, i > 9, ROWS[2]),
    "second dimension of a mask, a row": lambda x, i: _set(x, (ALL, i[0] > 0), ROWS[2]),
    "second dimension of a mask, rows": lambda x, i: _set(x, (ALL, i[0] > 0), ROWS[:3]),
    "second dimension of a mask, each its own": lambda x, i: _set(x, (ALL, i[0] > 0), torch.arange(24.0).view(2, 3, 4)),
}
READS = {
    "a fixed mask": lambda x, i: x[:, torch.tensor([True, False, True, False, False])],
    "a mask of rows": lambda x, i: x[i > 0].sum(0),
    "a mask of the second dimension": lambda x, i: x[:, i[0] > 0].sum(1),
    "along a dimension": lambda x, i: torch.take_along_dim(x, i[..., None], 1),
}
NAN = float("nan")
ARITHMETIC = {
    "a product alone": lambda x, i: torch.addmm(x[1] * NAN, x[0], ROWS[:4], beta=0, alpha=2),
    "no product": lambda x, i: (
        torch.addmm(x[1], x[0] * NAN, ROWS[:4], alpha=0)
        + torch.addbmm(x[1, :1], x * NAN, ROWS[:4].expand(2, 4, 4), beta=2, alpha=0)
        + torch.addmv(x[0, 0], ROWS[:4] * NAN, x[1, 0], beta=0.5, alpha=0)
        + torch.addmm(x[1] * NAN, x[0] * NAN, ROWS[:4], beta=0, alpha=0)
    ),
    "norms of an own type": lambda x, i: torch.linalg.vector_norm(x.half(), 3, 2, dtype=torch.float32),
    "norms of all": lambda x, i: torch.linalg.vector_norm(x, 2, ()) + torch.linalg.vector_norm(x, 2.0, (), True),
    "added with a factor": lambda x, i: torch.add(x, x.flip(1), alpha=-3.125),
    "subtracted with a factor": lambda x, i: torch.sub(x, x.flip(1), alpha=2),
    "a number added with a factor": lambda x, i: torch.add(x, 3, alpha=0.5),
    "a remainder": lambda x, i: torch.remainder(x, 0.75),
    "a product with a vector": lambda x, i: torch.addmv(x[0, :, 0], x[0], x[1, 0], beta=0.5, alpha=2),
    "a number reduced": lambda x, i: (
        x * (x.mean() > 5).any()
        + x[0].sum().mean() * x[1].sum().sum(0) * x.max().max()
        + x.min().min() * x.sum().prod()
    ),
    "a number reduced to others": lambda x, i: (
        x * (x.mean() < 5).all() + x.amax().amin() * x.amin().norm() + x.mean().var(correction=0)
    ),
}
F = nn.functional


def _pixels(x):
    """Shape (1, 4, 8, 10) of the numbers of ``x``, all different."""
    return x.flatten()[torch.arange(320) % 40].view(1, 4, 8, 10) + torch.linspace(-2, 2, 10)


SHAPES = {
    "an average without padding": lambda x, i: F.avg_pool2d(_pixels(x), 3, 2, padding=1, count_include_pad=False),
    "an average of windows that stand out": lambda x, i: F.avg_pool2d(_pixels(x), 3, 2, padding=1, ceil_mode=True),
    "both": lambda x, i: F.avg_pool2d(_pixels(x), (2, 3), (3, 2), (1, 1), ceil_mode=True, count_include_pad=False),
    "both with a divisor": lambda x, i: F.avg_pool2d(_pixels(x), 3, 2, 1, ceil_mode=True, divisor_override=5),
    "an average of one channel row": lambda x, i: F.avg_pool1d(_pixels(x)[0, 0], 3, 2, 1, count_include_pad=False),
    "an average of three dimensions": lambda x, i: F.avg_pool3d(_pixels(x), 2, ceil_mode=True),
    "an adaptive average of three dimensions": lambda x, i: F.adaptive_avg_pool3d(_pixels(x), (2, 4, 5)),
    "set back to places": lambda x, i: F.max_unpool2d(*F.max_pool2d(_pixels(x), 2, return_indices=True), 2),
    "fewer windows than sizes rounded up": lambda x, i: sum(
        F.max_pool2d(_pixels(x)[..., :6], 2, (7, 4), (1, 0), ceil_mode=True, return_indices=True)
    ),
    "an adaptive maximum": lambda x, i: F.adaptive_max_pool2d(_pixels(x), (4, 5)),
    "resized by a fraction": lambda x, i: F.interpolate(_pixels(x), scale_factor=1.7),
    "resized to a size": lambda x, i: F.interpolate(_pixels(x), size=(7, 14)),
    "resized to a multiple": lambda x, i: F.interpolate(_pixels(x), size=(16, 30)),
    "squeezed where it is one": lambda x, i: x[:1, :1].squeeze(),
    "squeezed where it can be": lambda x, i: x[:1].squeeze((0, 2)),
    "squeezed to a number": lambda x, i: x[:1, :1, :1].squeeze() + x.mean().squeeze(),
    "viewed as a number": lambda x, i: x[:1, :1, :1].reshape(()),
    "a number, many times": lambda x, i: x.sum().expand(3),
    "a number as it is": lambda x, i: x.sum().expand(()) + x.amax() - x.amin(),
    "windows": lambda x, i: _pixels(x).unfold(-1, 3, 2),
    "a diagonal above": lambda x, i: torch.diagonal(_pixels(x), 2, 2, 3),
    "a diagonal below": lambda x, i: torch.diagonal(_pixels(x), -3, 3, 2),
}
FUNCTIONS = {
    "rounded to integers and back": lambda x, i: (x * 10).int().float() / 3,
    "rounded to integers, averaged": lambda x, i: (x * 10).long().float().mean(1),
    "rounded to integers, multiplied": lambda x, i: (x * 10).int() * 0.5,
    "integers as bools": lambda x, i: i.bool().int() * x[..., 0],
    "sums and products of masks": lambda x, i: ((x > 0) + (x < -1)) * (x < 0.5) * x,
    "one mask or another": lambda x, i: torch.where(x > 0, x < 1, x > -1) * x,
    "finite numbers": lambda x, i: torch.where(torch.isfinite(x / (i[..., None] > 0)), x, 2 * x),
    "a variance": lambda x, i: x.var((0, 2), correction=0.5, keepdim=True),
    "a deviation": lambda x, i: x.std(1),
    "a variance of all": lambda x, i: torch.stack(torch.var_mean(x)),
    "a sorted order": lambda x, i: torch.sort((x / 2).round(), dim=1, stable=True)[1],
    "a sorted order, descending": lambda x, i: torch.argsort((x / 2).round(), dim=1, descending=True, stable=True),
    "sorted": lambda x, i: torch.sort(x)[0],
    "selected": lambda x, i: torch.masked_select(x, x[..., :1] > 0).sum(),
    "bits": lambda x, i: ((i & 3) | 4) * x[..., 0],
    "a logarithm of sums": lambda x, i: torch.logaddexp(x, x.flip(1)),
    "numbers as they are": lambda x, i: (
        torch.where(x > 0, x, 0.3)
        + x.masked_fill(x > 0, 0.7)
        + torch.where(x > 0.1, 0.1, 1e9) * 1e-9
        + torch.arange(0.1, 1.2, 0.3) * x
        + torch.arange(4099.0, 4095.0, -1.0) * x
    ),
    "a hypotenuse": lambda x, i: torch.hypot(x, x.flip(1)),
    "exponential units": lambda x, i: F.elu(x, 0.3),
    "an error function": lambda x, i: torch.erfc(x / 4),
    "functions of integers": lambda x, i: torch.reciprocal(i + 1)[..., None] * x + i.cos()[..., None],
    "integers and numbers that are none": lambda x, i: (
        (
            (i * 1.0001e-5 * 1000 + (i - 0.3) * (0.3001 - i) + i / 30.7 + torch.sub(1.7, i, alpha=2) + i.int() * 0.3001)
            + (i * 2048 + 1 > 2048.5)
            + (i * 2048 + 1 == 2048.5)
            + (i > 1) * 0.3001
        )[..., None]
        * x
    ),
    "powers of integers": lambda x, i: ((i + 2) ** 0.4)[..., None] * x + (i**2)[..., None],
    "an average of moved channels": lambda x, i: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
    "the largest of one picture": lambda x, i: F.max_pool2d(x, 3, 1, 1) + F.max_pool1d(x, 4),
    "adaptive pools of one picture": lambda x, i: F.adaptive_avg_pool2d(x, (5, 2)) * F.adaptive_max_pool2d(x, (1, 2)),
    "sums at places": lambda x, i: x.scatter_reduce(1, i[..., None].expand(2, 5, 4), x.flip(1), "sum"),
    "averages of integers at places": lambda x, i: (
        torch.zeros_like(i).scatter_reduce(1, i, (x * 9).long()[..., 0], "mean")[..., None] * x
    ),
    "a norm of third powers": lambda x, i: F.normalize(x, p=3) + torch.linalg.vector_norm(x, 4),
    "attention without heads under a mask for each": lambda x, i: (
        F.scaled_dot_product_attention(x, x.flip(1), x, attn_mask=i[:, :, None] >= i[:, None])
        + F.scaled_dot_product_attention(x, x, x.flip(1), attn_mask=(i[:, :, None] - i[:, None]).float())
    ),
    "products of three": lambda x, i: F.bilinear(x, x.flip(1), ROWS[:4].view(1, 4, 4)),
}
WEIGHT = torch.linspace(-1, 1, 12).view(4, 3)
LAID_TOGETHER = {
    "two products": lambda x, i: (x.reshape(-1, 4) @ WEIGHT) * (x.reshape(-1, 4) @ -WEIGHT),
    "a product and its gate": lambda x, i: F.silu(x.flatten(0, 1) @ WEIGHT) * (x.flatten(0, 1) @ WEIGHT.flip(0)),
    "a product and a mean": lambda x, i: x.reshape(10, 4) @ WEIGHT + x.reshape(10, 4).mean(-1, keepdim=True),
    "a product and a parameter": lambda x, i: (x @ WEIGHT).reshape(10, 3) * torch.arange(10.0)[:, None],
    "a normalised product": lambda x, i: F.rms_norm(x.clone().flatten(0, 1) @ WEIGHT, (3,)),
    "the variance of a product": lambda x, i: torch.var(x.transpose(0, 1).reshape(10, 4) @ WEIGHT, -1),
}
"""Products of rows that a view has laid together: what coreai-torch makes of them ends the process."""
COLUMNS = torch.linspace(-1, 1, 12).view(3, 4)
AS_MANY_ROWS = {
    "a view": lambda x, i: COLUMNS @ x[:, :4].sin().reshape(4, 8),
    "views of views": lambda x, i: torch.addmm(
        ROWS.view(-1)[:8], COLUMNS, x[:, :4].sin()[None].reshape(8, 4).view(4, 8)
    ),
    "a column": lambda x, i: COLUMNS @ x.flatten(0, 1)[:8].sin().reshape(4, 4, 2)[..., 1],
    "a batch": lambda x, i: COLUMNS[None] @ x[:, :4].sin().reshape(1, 4, 8).clone(),
    "sums of products by index": lambda x, i: torch.einsum("ok,kn->on", COLUMNS, x[:, :4].sin().reshape(4, 8)),
    "an average": lambda x, i: x[0].reshape(20, 1) @ x.sin().reshape(1, 10, 4, 1).mean(2).reshape(1, 10),
    "itself": lambda x, i: x[:, :4].reshape(4, 8).T @ x[:, :4].sin().reshape(4, 8),
}
"""Products with views of tensors of as many rows: Core AI's optimizer takes these tensors in the place of the views."""
CASES = WRITES | READS | ARITHMETIC | SHAPES | FUNCTIONS | LAID_TOGETHER | AS_MANY_ROWS


@pytest.mark.parametrize("names", together(CASES))
def test_right_in_the_runtime(names, tmp_path):
    torch.manual_seed(0)
    example = torch.randn(2, 5, 4), torch.tensor([[0, 1, 0, 3, 4], [4, 0, 0, 0, 2]])
    model = Functions(nn.Linear(4, 4), [lambda x, i, of=CASES[name]: of(x, i) * 2 for name in names]).eval()
    assert not check_operators(model, "coreai", example)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(example).eval()
    with torch.no_grad():
        expected = ready(*example)
    assert_alike(names, expected, run_coreai(export_coreai(ready, example, tmp_path / "model.aimodel"), example))


class Scanned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return scan(lambda total, row: (total + row, total * row), torch.zeros(4), self.layer(x))[1]


def test_operators_on_graphs_that_are_lacking_are_named():
    (problem,) = check_operators(Scanned().eval(), "coreai", (torch.randn(5, 4),))
    assert "no translation of the operator scan" in problem.message


POOLS = {
    "halves": {"kernel_size": 2},
    "overlapping, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)},
    "standing out": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}


class Places(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.layer = pool, nn.Linear(4, 4)

    def forward(self, x, rows):
        values, places = F.max_pool2d(x, return_indices=True, **self.pool)
        return places, values, self.layer(rows)


@pytest.mark.parametrize("name", POOLS)
def test_places_of_largest_values(name, tmp_path):
    """With equal values, infinities and values that are no numbers."""
    x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    x[0] = x[0].round()
    x[1, 0, 2, 3] = x[1, 0, 2, 4] = x[1, 2, 0, 0] = torch.nan
    x[1, 1, :4, :4], x[1, 1, 6, 6] = -torch.inf, torch.inf
    example = x, torch.randn(2, 4)
    model = Places(POOLS[name]).eval()
    assert not check_operators(model, "coreai", example)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(example).eval()
    places, values, _ = run_coreai(export_coreai(ready, example, tmp_path / "model.aimodel"), example)
    expected, largest, _ = ready(*example)
    assert torch.equal(places.long(), expected)
    # Whatever the runtime takes for the largest where there are values that are no numbers.
    numbers = ~largest.isnan()
    assert torch.equal(values[numbers], largest[numbers])


def test_places_in_pictures_of_any_size_are_refused(tmp_path):
    """coreai-torch makes up others."""
    example = torch.randn(2, 3, 8, 8), torch.randn(2, 4)
    ready = Quantizer(Places(POOLS["halves"]).eval(), QuantizerConfig.presets.w8(execution_mode="eager")).prepare(
        example
    )
    shapes = ({2: torch.export.Dim.DYNAMIC}, None)
    with pytest.raises(ConversionError, match="max_pool2d_with_indices"):
        export_coreai(ready.eval(), example, tmp_path / "model.aimodel", dynamic_shapes=shapes)


def test_integers_that_do_not_fit_are_refused(tmp_path):
    """The runtime's have 32 bits, and others would be wrapped."""
    model = Functions(nn.Identity(), [lambda x: x - 1]).eval()
    path = export_coreai(model, (torch.tensor([1, 2]),), tmp_path / "model.aimodel")
    for number in (2**31 - 1, 1 - 2**31):
        assert run_coreai(path, (torch.tensor([number, 3]),))[0].tolist() == [number - 1, 2]
    for number in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(ConversionError, match=rf"have 32 bits, and '.*' holds numbers from .*{number}"):
            run_coreai(path, (torch.tensor([number]).expand(2),))
