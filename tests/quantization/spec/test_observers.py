"""Range calculators that look at the distribution: known answers, exact merging, bounded memory."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import PerChannelGranularity, QuantizationComponentFactory, observers
from bitwright.quantization.spec._histogram import Histogram

KINDS = ("percentile", "mse", "histogram")


def make(target="activation", **spec):
    return QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(**spec), target)


def gaussian(n=400_000, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def gaussian_error(levels):
    """Mean squared error of a normal variable rounded to the nearest level, from the closed form in float64."""
    levels = torch.tensor(levels, dtype=torch.float64)
    inner = (levels[1:] + levels[:-1]) / 2
    a, b = torch.cat([inner.new_tensor([-40.0]), inner]), torch.cat([inner, inner.new_tensor([40.0])])
    cdf = lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # noqa: E731
    pdf = lambda x: torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    mass = cdf(b) - cdf(a)
    return float((mass + a * pdf(a) - b * pdf(b) - 2 * levels * (pdf(a) - pdf(b)) + levels**2 * mass).sum())


@pytest.mark.parametrize("target", ["weight", "activation"])
def test_mse_step_on_a_gaussian_is_that_of_max(target):
    """16 levels at odd half steps: 0.3352 sigma (Max 1960, table II)."""
    fq = make(target, dtype="int4", qformulation="minval", range_calculator_cls="mse")
    fq(gaussian())
    assert fq.qparams_calculator.scale.item() == pytest.approx(0.3352, rel=0.01)


@pytest.mark.parametrize(("dtype", "codes"), [("int4", range(-8, 8)), ("int3", range(-4, 4)), ("int2", range(-2, 2))])
def test_mse_finds_the_minimum_of_the_closed_form(dtype, codes):
    """The step's expected error is within 0.1 % of the least over a fine scan."""
    fq = make(dtype=dtype, range_calculator_cls="mse")
    fq(gaussian())
    least = min(gaussian_error([c * d / 1000 for c in codes]) for d in range(100, 1500, 2))
    step = fq.qparams_calculator.scale.item()
    assert gaussian_error([c * step for c in codes]) <= least * 1.001


def test_mse_moves_both_ends_of_an_asymmetric_range():
    """A far outlier on one side does not drag the other end along; the error beats the full range's."""
    x = torch.cat([gaussian(50_000).abs() * 0.5 - 0.2, torch.tensor([30.0])])
    best, full = (make(dtype="int4", qscheme="asymmetric", range_calculator_cls=k) for k in ("mse", "minmax"))
    assert (best(x) - x)[:-1].square().mean() < 0.1 * (full(x) - x)[:-1].square().mean()


def test_percentile_on_a_gaussian_is_the_quantile():
    """99.99 % of a normal distribution lies within 3.8906 sigma; other shares come from a field of the spec."""
    fq = make(range_calculator_cls="percentile")
    fq(gaussian(2_000_000))
    assert fq.qparams_calculator.scale.item() * 127.5 == pytest.approx(3.8906, rel=0.02)

    class Spec(QuantizationSpec):
        percentile: float = 99.0

    fq = QuantizationComponentFactory.create_fake_quantizer(Spec(range_calculator_cls="percentile"), "activation")
    fq(gaussian())
    assert fq.qparams_calculator.scale.item() * 127.5 == pytest.approx(2.5758, rel=0.01)


def test_entropy_threshold_is_the_one_of_a_plain_search():
    """The threshold is the best of all, up to the distance of the tries, by a direct float64 transcription."""
    x = gaussian(100_000)
    fq = make(dtype="int4", range_calculator_cls="histogram")
    fq(x)
    top = math.ceil(math.log2(x.abs().max()))
    edges = [2.0**octave * (1 + i / 128) for octave in range(top - 12, top) for i in range(128)] + [2.0**top]
    counts = torch.histogram(x.abs().double(), torch.tensor(edges, dtype=torch.float64)).hist.tolist()

    def divergence(kept):
        codes = [int((edges[j] + edges[j + 1]) / 2 / edges[kept] * 8) for j in range(kept)]
        p, q = counts[:kept], [0.0] * kept
        for level in range(8):
            members = [j for j in range(kept) if codes[j] == level and p[j]]
            covered = sum(edges[j + 1] - edges[j] for j in members)
            total = sum(p[j] for j in members)
            for j in members:
                q[j] = total * (edges[j + 1] - edges[j]) / covered
        p = [*p[:-1], p[-1] + sum(counts[kept:])]
        if any(a and not b for a, b in zip(p, q, strict=True)):
            return math.inf
        return sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True) if a)

    threshold = fq.qparams_calculator.scale.item() * 7.5
    kept = min(range(len(edges)), key=lambda j: abs(edges[j] - threshold))
    assert edges[kept] == pytest.approx(threshold, rel=1e-4)
    middle = next(j for j, edge in enumerate(edges) if edge > 0.6745)
    assert divergence(kept) <= min(divergence(k) for k in range(middle, len(edges), 5)) * 1.02


def with_outliers(size, count=4):
    """A million normal numbers, of which a few are as large as the massive activations of language models."""
    x = gaussian(1_000_000)
    x[:: len(x) // count] = size
    return x


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("batches", [1, 20])
def test_a_few_huge_values_do_not_hide_the_others(size, batches):
    """Percentile and entropy find the range of the bulk, however far away some values are and in whichever batch."""
    x = with_outliers(size)
    for kind, least, most in (("percentile", 3.85, 3.93), ("histogram", 3.5, 4.6)):
        fq = make(range_calculator_cls=kind, qscheme="symmetric")
        for batch in x.chunk(batches):
            fq(batch)
        assert least < fq.qparams_calculator.scale.item() * 127.5 < most, kind


def test_percentiles_of_heavy_tails_are_the_quantiles():
    """Cauchy's distribution, whose largest value is a million times the median: quantiles to within a percent."""
    x = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(1))
    x = (x[0] / x[1]).abs()
    for percent in (90.0, 99.0, 99.9):

        class Spec(QuantizationSpec):
            percentile: float = percent

        fq = QuantizationComponentFactory.create_fake_quantizer(Spec(range_calculator_cls="percentile"), "activation")
        for batch in x.chunk(10):
            fq(batch)
        high = fq.qparams_calculator.range_calculator.current_range()[1].item()
        assert high == pytest.approx(x.sort().values[int(len(x) * (0.5 + percent / 200))].item(), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bins_hold_their_elements(dtype):
    """Every element lies between the edges of the bin that counts it, from the largest float to subnormal ones."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, 1e-3, -1e-7, 1e-40, 6e4, -5.7], dtype=dtype)
    for scale in (1.0, 1e-30, 1e30) if dtype != torch.float16 else (1.0,):
        values = (x * scale).nan_to_num(posinf=1.0)
        histogram = Histogram.of(values[None])
        edges = histogram.edges[0]
        assert (edges.diff() >= 0).all()
        for value in values.float().double():
            place = Histogram.of(torch.tensor([[value, values.double().abs().max()]])).counts[0]
            bins = [b for b in place.nonzero().flatten().tolist() if edges[b] <= value <= edges[b + 1]]
            assert bins, value
        assert histogram.counts.sum() == len(values)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=40), st.data())
def test_histograms_merge_exactly(values, data):
    """However the elements are split and ordered, the histogram is the same, bit for bit."""
    x = torch.tensor(values)[None]
    cut = data.draw(st.integers(1, len(values) - 1))
    whole = Histogram.of(x)
    for first, second in ((x[:, :cut], x[:, cut:]), (x[:, cut:], x[:, :cut])):
        merged = Histogram.of(first).merged(Histogram.of(second))
        assert torch.equal(merged.to_tensor(), whole.to_tensor())
    again = Histogram.from_tensor(whole.to_tensor())
    assert torch.equal(again.to_tensor(), whole.to_tensor())
    assert whole.counts.sum() == len(values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", [None, PerChannelGranularity(axis=1)])
def test_shards_equal_the_whole(kind, granularity):
    """Three calculators on shards, merged, hold the parameters of one that saw everything."""
    spec = {"range_calculator_cls": kind, "dtype": "int4"} | ({"granularity": granularity} if granularity else {})
    batches = gaussian(6 * 12 * 200).reshape(6, 12, 200).transpose(1, 2) * torch.arange(1, 7.0).reshape(6, 1, 1)
    whole, *shards = (make(**spec) for _ in range(4))
    for i, batch in enumerate(batches):
        whole(batch)
        shards[i % 3](batch)
    merged, *others = (shard.qparams_calculator for shard in shards)
    for other in others:
        merged.merge(other)
    for a, b in zip(merged.get_qparams(), whole.qparams_calculator.get_qparams(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_copies_and_checkpoints(kind):
    """Reset forgets; a pickle and a state_dict remember, so that both go on alike; memory stays bounded."""
    fq = make(range_calculator_cls=kind)
    fq(gaussian(1000) * 9)
    fq.reset_statistics()
    fq(gaussian(1000, 1))
    copy = pickle.loads(pickle.dumps(fq))
    loaded = make(range_calculator_cls=kind)
    loaded.load_state_dict(fq.state_dict())
    fresh = make(range_calculator_cls=kind)
    fresh(gaussian(1000, 1))
    for one in (fq, copy, loaded, fresh):
        one(gaussian(1000, 2) * 2)
    scales = {one.qparams_calculator.scale.item() for one in (fq, copy, loaded, fresh)}
    assert len(scales) == 1
    before = fq.qparams_calculator.range_calculator.get_extra_state().numel()
    for seed in range(3):
        fq(gaussian(1000, seed) * 100)
    assert fq.qparams_calculator.range_calculator.get_extra_state().numel() == before


@pytest.mark.parametrize("kind", KINDS)
def test_odd_tensors(kind):
    """Zeros give the smallest scale, a NaN or an infinity is left out, a scalar block is kept whole."""
    fq = make("weight", range_calculator_cls=kind)
    assert torch.equal(fq(torch.zeros(4, 4)), torch.zeros(4, 4))
    x = gaussian(500)
    x[3], x[7] = math.nan, math.inf
    fq = make("weight", range_calculator_cls=kind)
    fq(x)
    assert 0 < fq.qparams_calculator.scale.item() < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calculator", ["default", "moving_average", "dynamic", "lsq"])
def test_a_number_is_a_tensor_of_one_element(kind, calculator):
    """Scales that models compute, such as the mean of a tensor, have no dimensions."""
    number, row = (
        make(dtype="int8", qscheme="asymmetric", range_calculator_cls=kind, qparam_calculator_cls=calculator)
        for _ in range(2)
    )
    for value in (2.5, -1.25, 7.0):
        assert torch.equal(number(torch.tensor(value)).reshape(1), row(torch.tensor([value])))
    if calculator != "dynamic":
        number.load_state_dict(copy.deepcopy(number.state_dict()))
        number.disable_observer()
        row.disable_observer()
        assert number(torch.tensor(3.0)) == row(torch.tensor([3.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_many_blocks_are_searched_as_by_one_histogram_of_all(kind, monkeypatch):
    """Only some are counted at a time, and none where the elements themselves are searched."""
    blocks = gaussian(300 * 8).reshape(300, 8) ** 3
    finder = make("weight", dtype="int4", range_calculator_cls=kind).qparams_calculator.range_calculator
    finder.granularity = PerChannelGranularity(axis=0)
    whole = finder._search(Histogram.of(blocks)) if kind != "mse" else finder(blocks)
    counted, of = [], Histogram.of
    monkeypatch.setattr(observers, "_SEARCH_ELEMENTS", 70 * Histogram.bins_for(300))
    monkeypatch.setattr(Histogram, "of", lambda part, bins=None: counted.append(len(part)) or of(part, bins))
    low, high = finder(blocks)
    assert counted == ([] if kind == "mse" else [70, 70, 70, 70, 20])
    assert torch.equal(low.flatten(), whole[0].float().flatten())
    assert torch.equal(high.flatten(), whole[1].float().flatten())


def test_entropy_needs_even_codes():
    """FP8 is refused, with the field and the way out."""
    with pytest.raises(ValueError, match=r"'histogram' needs an integer dtype.*'mse'"):
        make(dtype="float8_e4m3fn", range_calculator_cls="histogram")


def test_histograms_of_other_bins_are_refused():
    """A checkpoint of an earlier version is not taken for something else."""
    state = Histogram.of(torch.randn(2, 100)).to_tensor()
    assert torch.equal(Histogram.from_tensor(state).to_tensor(), state)
    state[1] = 4096
    with pytest.raises(ValueError, match=r"4096 bins.*Calibrate again"):
        Histogram.from_tensor(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calculator", ["static", "dynamic", "moving_average", "global_minmax"])
def test_calculators_of_single_ranges_see_one_tensor_at_a_time(kind, calculator):
    """Each tensor's range is searched for in it alone, so that what came before leaves no trace but theirs."""
    combined, alone = (make(range_calculator_cls=kind, qparam_calculator_cls=calculator) for _ in range(2))
    x, large = gaussian(2000), gaussian(2000, 1) * 100
    combined(large)
    if calculator in ("moving_average", "global_minmax"):
        combined.qparams_calculator.reset_statistics()
    assert torch.equal(combined(x), alone(x))
    if calculator == "global_minmax":
        for one, tensors in ((combined, [large]), (alone, [large * 0.5, large])):
            for tensor in tensors:
                one(tensor)
        assert torch.equal(combined.qparams_calculator.scale, alone.qparams_calculator.scale)
