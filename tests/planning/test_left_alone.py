"""Values that no scale fits, in both modes: masks, indices, flags, coordinates and angles are not simulated."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.planning.exact_values import exact_values
from bitwright.program import trace_eager
from bitwright.program.masks import holds_mask
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.lambda_module import Lambda
from tests.measures import sqnr

MODES = ("graph", "eager")
TOKENS = torch.randint(0, 30, (2, 40), generator=torch.Generator().manual_seed(0))
INFINITE = float("inf")


def calibrated(model: nn.Module, mode: str, *inputs: Any) -> nn.Module:
    """Quantize weights and activations."""
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig(execution_mode=mode))
    prepared = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(*inputs)
    return prepared.eval()


def learned_positions(s: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Positions counted in floats, as OPT does it."""
    ones = torch.ones(tokens.shape)
    positions = (torch.cumsum(ones, 1) * ones - 1).long()
    return s.head(s.words(tokens) + s.places(positions))


def rotary(s: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings at positions in the thousands."""
    positions = torch.arange(3000, 3000 + tokens.shape[1]).float()
    phases = torch.outer(positions, s.rates) @ torch.eye(4)
    phases = torch.cat([phases, phases], -1) * 1.0
    x = s.words(tokens)
    turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return s.head(x * phases.cos() + turned * phases.sin())


def network(function: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Lambda(function, words=nn.Embedding(30, 8), places=nn.Embedding(64, 8), head=nn.Linear(8, 8))
    model.register_buffer("rates", 10000.0 ** (-torch.arange(4) / 4))
    return model.eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [learned_positions, rotary])
def test_positions_are_exact(function: Callable[..., Any], mode: str) -> None:
    """A position that is off by one names another row; an angle in the thousands has no eight-bit form."""
    model = network(function)
    with torch.no_grad():
        assert sqnr(model(TOKENS), calibrated(model, mode, TOKENS)(TOKENS)) > 28


def assigned(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Scale coordinates in place, as promptable segmentation does it, before they become angles."""
    y = x.clone()
    y[:4] = y[:4] / 64
    y[4:] /= 32
    return torch.sin((2 * y - 1) * s.gain).cumsum(0)


def decayed(s: Any, x: torch.Tensor) -> torch.Tensor:
    """How much of a state is left between two steps, as recurrent attention has it: exp of differences of sums."""
    total = (x * s.ones * -2).cumsum(0)
    return torch.exp((total[:, None] - total[None]).tril()).cumsum(0)


def returned_and_assigned(s: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:4] = y[:4] / 64
    return torch.sin(y * s.gain).cumsum(0), y


def overwritten(s: Any, x: torch.Tensor) -> torch.Tensor:
    """What is read before the write are numbers, what is read after it are angles."""
    y = x.clone()
    z = y * 3
    y[:4] = x[:4] * 2
    return torch.sin(y).cumsum(0) + z.cumsum(0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, x: s.table[(x * 7 + 1).long()], []),
        (lambda s, x: s.table[torch.bucketize(x * 3, s.edges)], []),
        (lambda s, x: s.table[((x / 4).log() * 2 - 1).ceil().int()], []),
        (lambda s, x: torch.where((x * 2) == 4, 1.0, 0.0).cumsum(0), []),
        (lambda s, x: ((y := x * 2) - y.floor()).cumsum(0), ["sub"]),
        (lambda s, x: torch.sin(x * 50).cumsum(0), []),
        (lambda s, x: torch.sin(x * 50 * s.gain).cumsum(0), []),
        (lambda s, x: torch.sin((x * s.gain).cumsum(0) * 50 * s.gain).cumsum(0), ["mul"]),
        (lambda s, x: F.grid_sample(s.image, (x.view(1, 2, 2, 2) * 2), align_corners=False).cumsum(0), []),
        (assigned, []),
        (returned_and_assigned, ["div"]),
        (overwritten, ["add", "mul"]),
        (decayed, []),
        (lambda s, x: torch.exp(x[:, None] @ x[None] - 40).cumsum(0), ["matmul"]),
        (lambda s, x: ((1.0 - (x > 5.5).float() * s.ones) * -10000.0).amax(0), []),
        (lambda s, x: (x * 7 + 1).cumsum(0), ["add", "mul"]),
    ],
    ids=[
        *("index", "bucket", "rounded", "flag", "fraction", "angle", "fourier", "learned-angle", "coordinate"),
        *("assigned", "returned-and-assigned", "overwritten", "exponent", "scores", "masking", "number"),
    ],
)
def test_which_ops_are_left_alone(function: Callable[..., Any], expected: list[str], mode: str) -> None:
    """Ops that only make such values; one that makes numbers besides, or angles of learned numbers, is simulated."""

    class Holder(Lambda):
        def __init__(self) -> None:
            super().__init__(function)
            self.register_buffer("table", torch.randn(1000))
            self.register_buffer("edges", torch.arange(10.0))
            self.register_buffer("ones", torch.ones(8))
            self.register_buffer("image", torch.randn(1, 1, 4, 4))
            self.gain = nn.Parameter(torch.ones(8))

    plan = Quantizer(Holder().eval(), QuantizerConfig(execution_mode=mode)).plan((torch.rand(8) + 5,))
    sites = [site for placement in plan.placements if placement.state is None for site in placement.sites]
    assert sorted({site.op.type.strip("_").removeprefix("r") for site in sites}) == expected


@pytest.mark.parametrize("mode", MODES)
def test_masks_stay_masks_in_training(mode: str) -> None:
    """One minus a mask of ones is zero, not a small number that is true; nothing is masked by the example inputs."""

    def attended(s: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = s.words(tokens)
        inverted = 1.0 - mask[:, None, :].expand(-1, tokens.shape[1], -1).to(x.dtype)
        lowest = inverted.masked_fill(inverted.bool(), torch.finfo(x.dtype).min) * inverted
        return s.head(torch.softmax(x @ x.mT + lowest, -1) @ x)

    model = network(attended)
    mask = torch.ones(TOKENS.shape, dtype=torch.long)
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig(execution_mode=mode))
    prepared = quantizer.prepare((TOKENS, mask))
    with quantizer.training_mode():
        for _ in range(2):
            loss = prepared(TOKENS, mask).square().mean()
            loss.backward()
    prepared.eval()
    mask[1, 20:] = 0
    with torch.no_grad():
        assert loss.isfinite()
        assert sqnr(model(TOKENS, mask), prepared(TOKENS, mask)) > 22


@pytest.mark.parametrize("mode", MODES)
def test_masks_of_modules_that_run_more_than_once(mode: str) -> None:
    """Parts of one mask go to several calls of an attention, as in attention over local windows."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            masked = (1.0 - mask.float()) * torch.finfo(x.dtype).min
            return torch.softmax(x @ x.mT + masked, -1) @ x

    def windows(s: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = s.words(tokens)
        mask = torch.ones(1, x.shape[1], 1) * (tokens > 3).float()[:, None, :] * 1.0
        parts = [s.attention(x[:, at : at + 20], mask[:, at : at + 20, at : at + 20]) for at in (0, 20)]
        return s.head(torch.cat(parts, 1))

    torch.manual_seed(0)
    model = Lambda(windows, words=nn.Embedding(30, 8), attention=Attention(), head=nn.Linear(8, 8)).eval()
    with torch.no_grad():
        assert sqnr(model(TOKENS), calibrated(model, mode, TOKENS)(TOKENS)) > 28


def test_values_that_are_returned_are_numbers() -> None:
    """A result of the model is simulated even if it is rounded besides."""
    program = trace_eager(Lambda(lambda s, x: ((y := x * 3), (y == 2).float().cumsum(0))), (torch.rand(8),))
    assert not exact_values(program).ops


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "masked",
    [
        lambda x, mask: x - 1e30 * mask,
        lambda x, mask: x - 65500 * (1 - mask),
        lambda x, mask: x + (-(mask * 1e9)),
        lambda x, mask: x.masked_fill(mask > 0, INFINITE).neg(),
        lambda x, mask: torch.where(mask > 0, x, torch.finfo(x.dtype).min),
    ],
    ids=["subtracted", "subtracted-inverse", "negative", "infinite", "where"],
)
def test_ways_to_mask(masked: Callable[..., torch.Tensor], mode: str) -> None:
    """Whatever writes sentinels into scores, their range does not become the scale of anything."""
    mask = torch.tensor([0.0] * 6 + [1.0] * 2)
    model = Lambda(lambda s, x: torch.softmax(masked(s.layer(x) * 1.5, mask.clone()), -1), layer=nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    prepared = calibrated(model, mode, x)
    with torch.no_grad():
        assert sqnr(model(x), prepared(x)) > 25


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -INFINITE, -1e4])
def test_masks_that_are_given_to_the_model(lowest: float, mode: str) -> None:
    """An additive mask among the inputs is known by its numbers."""
    mask = torch.tensor([0.0] * 6 + [lowest] * 2)
    model = Lambda(lambda s, x, m: torch.softmax(s.layer(x) + m, -1), layer=nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    prepared = calibrated(model, mode, x, mask)
    with torch.no_grad():
        assert sqnr(model(x, mask), prepared(x, mask)) > 25


def rms_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.last(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def power_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.last(x * ((x * x).mean(-1, keepdim=True) + 1e-6) ** -0.5)


def layer_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return s.last(centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6))


def inverse_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.last(x * (2.0 * (1.0 / (x.norm(dim=-1, keepdim=True) + 1e-6))))


def linear_attention(s: Any, x: torch.Tensor) -> torch.Tensor:
    q, k = torch.relu(x), torch.relu(s.last(x)) + 1e-3
    return q @ (k.transpose(-1, -2) @ x) / ((q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-2)


def log_probabilities(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.softmax(s.last(x), -1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function", [rms_norm, power_norm, layer_norm, inverse_norm, linear_attention, log_probabilities]
)
def test_relative_errors_count_in_divisors(function: Callable[..., Any], mode: str) -> None:
    """Beside a token that is ten times as large, the divisors of the others would become 0, or one of a few numbers."""
    torch.manual_seed(0)
    model = Lambda(lambda s, x: function(s, s.first(x)), first=nn.Linear(8, 8), last=nn.Linear(8, 8)).eval()
    x = torch.randn(2, 16, 8)
    x[:, 0] *= 10
    prepared = calibrated(model, mode, x)
    with torch.no_grad():
        assert sqnr(model(x), prepared(x)) > 18


def test_what_a_norm_is_divided_by_is_not_simulated() -> None:
    """Neither the variance nor its root; the numbers in front of the norm and behind it are."""
    model = Lambda(rms_norm, last=nn.Linear(8, 8)).eval()
    plan = Quantizer(model, QuantizerConfig()).plan((torch.randn(2, 8),))
    found = [row.tensor for row in plan if row.kind == "activation"]
    assert found == ["mul[input]", "mul[output 0]", "linear[output 0]"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", [False, True])
def test_windows_hidden_by_small_numbers(stored: bool, mode: str) -> None:
    """Shifted windows add -100, twice in Swin V2, given by an op or kept in a buffer."""
    torch.manual_seed(0)
    region = torch.arange(8) // 5

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            mask = (region[:, None] != region[None]).float()
            self.register_buffer("mask", mask * -100.0 if stored else mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: Any = self.mask if stored else self.mask.masked_fill(self.mask != 0, -100.0)
            scores = self.layer(x)
            return torch.softmax((scores + hidden + hidden).view(-1, 8, 8), -1)

    model = Windows().eval()
    x = torch.randn(4, 8, 8)
    prepared = calibrated(model, mode, x)
    with torch.no_grad():
        assert sqnr(model(x), prepared(x)) > 35


def test_small_numbers_hide_nothing_without_a_softmax() -> None:
    """A result with -100 in it is a number like any other where no softmax follows."""
    model = Lambda(
        lambda s, x: s.last(torch.masked_fill(s.first(x), x > 1, -100.0)), first=nn.Linear(8, 8), last=nn.Linear(8, 8)
    ).eval()
    plan = Quantizer(model, QuantizerConfig()).plan((torch.randn(2, 8),))
    assert "linear_1[input]" in [row.tensor for row in plan]


def test_what_is_a_mask() -> None:
    """Nothing but zeros and sentinels, or the smallest number that there is; large data is none."""
    assert holds_mask(torch.tensor([0.0, -1e4]))
    assert holds_mask(torch.tensor([3.0, -math.inf]))
    assert not holds_mask(torch.tensor([0.0, -32768.0, 5.0]))
    assert not holds_mask(torch.tensor([0, -(10**6)]))
    assert not holds_mask(torch.zeros(0))
    assert not holds_mask(torch.full((2,), -math.inf, device="meta"))


def test_sentinels_that_no_op_shows() -> None:
    """Numbers that stand for infinity are found with the example inputs at the latest, and the user is told."""
    hidden = torch.finfo(torch.float32).min

    def scores(s: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(s.layer(x) + torch.log(mask).nan_to_num(neginf=hidden), -1)

    model = Lambda(scores, layer=nn.Linear(8, 8)).eval()
    x, mask = torch.randn(4, 8), torch.tensor([1.0] * 6 + [0.0] * 2)
    with pytest.warns(UserWarning, match="stand for infinity in masks"):
        prepared = calibrated(model, "graph", x, mask)
    with torch.no_grad():
        assert sqnr(model(x, mask), prepared(x, mask)) > 25


def test_weights_that_no_output_depends_on() -> None:
    """The plan of a graph says so of an auxiliary head; it is not simulated."""

    def auxiliary(s: Any, x: torch.Tensor) -> torch.Tensor:
        s.aside(x)
        return s.layer(x)

    model = Lambda(auxiliary, layer=nn.Linear(8, 8), aside=nn.Linear(8, 4)).eval()
    rows = {row.tensor: row for row in Quantizer(model, QuantizerConfig()).plan((torch.randn(2, 8),))}
    assert rows["aside.weight"].spec is None
    assert rows["aside.weight"].note == "no output of the model depends on it"
    assert rows["layer.weight"].spec is not None


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_nothing_reads(mode: str) -> None:
    """The plans of both modes tell of a layer that forward never calls, and do not simulate it."""
    model = Lambda(lambda s, x: s.layer(x), layer=nn.Linear(8, 8), unused=nn.Linear(8, 4)).eval()
    plan = Quantizer(model, QuantizerConfig(execution_mode=mode)).plan((torch.randn(2, 8),))
    rows = {row.tensor: row for row in plan}
    assert rows["unused.weight"].spec is None
    assert rows["unused.weight"].compressed_bytes == rows["unused.weight"].dense_bytes == 4 * 4 * 8
    told = {"graph": "no output of the model depends on it", "eager": "no call of the model reads it"}
    assert rows["unused.weight"].note.startswith(told[mode])
    assert not plan.problems


@pytest.mark.parametrize("mode", MODES)
def test_learned_tokens_pass_presets(mode: str) -> None:
    """Queries that are kept in an embedding and joined to the sequence have no axis, and stop no preset."""

    def joined(s: Any, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([s.first.weight, s.others.weight]).unsqueeze(0).expand(len(x), -1, -1)
        return s.layer(torch.cat([tokens, x], 1))

    model = Lambda(joined, first=nn.Embedding(1, 8), others=nn.Embedding(4, 8), layer=nn.Linear(8, 8)).eval()
    plan = Quantizer(model, QuantizerConfig.presets.w4(execution_mode=mode)).plan((torch.randn(2, 3, 8),))
    assert not plan.problems
    found = {row.tensor: row for row in plan}
    assert found["layer.weight"].spec is not None
    assert found["others.weight"].spec is None
    assert "no axis" in found["others.weight"].note


@pytest.mark.parametrize("mode", MODES)
def test_products_by_any_function_are_weighted(mode: str) -> None:
    """``mm``, ``baddbmm`` and ``@`` read weights, in both modes the same."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(2, 6, 4))
            self.c = nn.Parameter(torch.randn(2, 1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, self.a)
            return torch.baddbmm(self.c, y.expand(2, *y.shape), self.b)

    plan = Quantizer(Products().eval(), QuantizerConfig.presets.w4(execution_mode=mode)).plan((torch.randn(5, 8),))
    assert {row.tensor: row.spec.granularity.axis for row in plan if row.spec is not None} == {"b": 2}


class Counting(nn.Module):
    """Multiplies by a number that grows with every call, in one of the ways to keep it."""

    def __init__(self, way: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.way = way
        self.head = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.count * 1.5 + 1
        y = self.head(x) * (self.count if self.way == "copied" else count)
        if self.way == "copied":
            with torch.no_grad():
                self.count.copy_(count)
        else:
            self.count = count
        return y


@pytest.mark.parametrize("shape", [(), (4,)], ids=["number", "vector"])
@pytest.mark.parametrize("way", ["assigned", "copied"])
@pytest.mark.parametrize("mode", MODES)
def test_counts_of_calls_go_on(mode: str, way: str, shape: tuple[int, ...]) -> None:
    """They were simulated with the range of calibration, where they stopped; its products are as before."""
    x = torch.randn(2, 4)
    quantizer = Quantizer(nn.Sequential(Counting(way, shape)).eval(), QuantizerConfig(execution_mode=mode))
    prepared = quantizer.prepare((x,))
    assert quantizer.applied_plan is not None
    simulated = {row.tensor.rpartition(".")[2] for row in quantizer.applied_plan if row.spec is not None}  # type: ignore[attr-defined]
    assert simulated & {"mul[output 0]", "mul_1[output 0]"}
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    for _ in range(3):
        prepared(x)
    torch.testing.assert_close(prepared.get_buffer("0.count"), torch.full(shape, 8.125))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_computed_of_counts_goes_on(mode: str) -> None:
    """The correction of a bias, which approaches 1, was cut off at what calibration had seen of it."""

    def corrected(s: Any, x: torch.Tensor) -> torch.Tensor:
        s.calls += 1
        return s.head(x) * (1 - 0.5**s.calls)

    x = torch.randn(2, 4)
    model = Lambda(corrected, head=nn.Linear(4, 4))
    model.register_buffer("calls", torch.zeros(4))
    plan = Quantizer(model.eval(), QuantizerConfig(execution_mode=mode)).plan((x,))
    rows = {row.tensor for row in plan if row.spec is not None}  # type: ignore[attr-defined]
    assert "mul[output 0]" in rows
    assert not rows & {"mul[other]", "rsub[output 0]", "__rsub__[output 0]"}


@pytest.mark.parametrize("mode", MODES)
def test_averages_of_activations_are_simulated(mode: str) -> None:
    """A state that an activation enters is one; the state before is read as it is, in a graph too."""

    def averaged(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.head(x)
        s.level = s.level * 0.5 + y.mean(0) * 0.5
        return y + s.level

    model = Lambda(averaged, head=nn.Linear(4, 4))
    model.register_buffer("level", torch.zeros(4))
    plan = Quantizer(model.eval(), QuantizerConfig(execution_mode=mode)).plan((torch.randn(2, 4),))
    rows = {row.tensor for row in plan if row.spec is not None}  # type: ignore[attr-defined]
    assert "add[output 0]" in rows
    assert "mul[input]" not in rows
