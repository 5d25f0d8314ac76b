"""Range calculators that look at the distribution of values: percentile, least squared error, least entropy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from bitwright import kernels
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels import Grid
from bitwright.kernels.grid import block_view_shape

from ._histogram import Histogram
from .granularity import QuantizationGranularity
from .range_calculator import RangeCalculatorBase

if TYPE_CHECKING:
    from .spec import QuantizationSpec

__all__ = [
    "DistributionRangeCalculatorBase",
    "HistogramRangeCalculator",
    "MSERangeCalculator",
    "PercentileRangeCalculator",
]

_SMALLEST = torch.finfo(torch.float32).tiny
_SEARCH_ELEMENTS = 1 << 22
_TRIES = 64  # thresholds in each of two rounds


class DistributionRangeCalculatorBase(RangeCalculatorBase):
    """Base of range calculators that search in a histogram of each block.

    The range of a weight is that of the tensor at hand. The range of an activation is that of all tensors since
    ``reset``: their histograms are added up, in memory that does not grow with their number. Two calculators merge
    exactly. Where ``accumulates`` was turned off it is that of the tensor at hand, too.

    Args:
        granularity: how the tensor divides into blocks.
        quantization_target: what the tensor is.
        spec: the spec that the range is for.
        **kwargs: the fields that a subclass of ``QuantizationSpec`` adds.
    """

    needs_spec: ClassVar[bool] = True
    accumulates: bool = True

    def __init__(
        self,
        granularity: QuantizationGranularity,
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
        *,
        spec: QuantizationSpec | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(granularity, quantization_target)
        from .spec import QuantizationSpec

        spec = QuantizationSpec() if spec is None else spec
        self.qscheme, self.scale_dtype = spec.qscheme, spec.scale_dtype
        self._grid = Grid(spec.dtype, spec.quant_min, spec.quant_max, spec.qformulation.value)
        self._histogram: Histogram | None = None
        self._counts: tuple[int, ...] = ()
        #: Joins a histogram with those of other processes; set while training in several.
        self._exchange: Callable[[Histogram], Histogram] | None = None

    @abstractmethod
    def _search(self, histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of every block of ``histogram``, float64 or float32 ``[blocks]``."""

    def _search_alone(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of every block of ``blocks [blocks, elements]``, float64 or float32 ``[blocks]``.

        A block has the range that ``_search`` finds in the histogram of all; only some are counted at a time, since
        the histogram of many short blocks is far larger than they are.
        """
        bins = Histogram.bins_for(len(blocks))
        parts = torch.split(blocks, max(1, _SEARCH_ELEMENTS // bins))
        lows, highs = zip(*(self._search(Histogram.of(part, bins)) for part in parts), strict=True)
        return torch.cat(lows), torch.cat(highs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = self._block_size(x.shape)
        view, inner, _, counts = block_view_shape(tuple(x.shape), block_size)
        outer = [dim for dim in range(len(view)) if dim not in inner]
        split = x.detach().reshape(view).permute([*outer, *inner])
        blocks = split.reshape(max(1, _product(counts)), -1)
        if self.quantization_target == CompressionTargetTensor.WEIGHT or not (self.accumulates or self._exchange):
            low, high = self._search_alone(blocks)
        else:
            new = Histogram.of(blocks)
            if self._exchange is not None:
                new = self._exchange(new)
            if self.accumulates:
                new = self._histogram = new if self._histogram is None else self._histogram.merged(new)
            low, high = self._search(new)
        self._counts = counts
        return low.to(x.dtype).reshape(counts), high.to(x.dtype).reshape(counts)

    def reset(self) -> None:
        """Forget the tensors seen so far."""
        self._histogram = None

    def merge(self, other: DistributionRangeCalculatorBase) -> None:
        """Take in the tensors that another calculator has seen.

        Raises:
            ValueError: they have another number of blocks.
        """
        if other._histogram is None:
            return
        self._counts = other._counts
        self._histogram = other._histogram if self._histogram is None else self._histogram.merged(other._histogram)

    def current_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of the tensors seen so far, float32, one entry per block.

        Raises:
            RuntimeError: none were seen.
        """
        if self._histogram is None:
            raise RuntimeError(f"{type(self).__name__} has seen no tensor; run a calibration batch first.")
        low, high = self._search(self._histogram)
        return low.float().reshape(self._counts), high.float().reshape(self._counts)

    def get_extra_state(self) -> torch.Tensor:
        """Return the histogram for the state_dict, empty if there is none."""
        if self._histogram is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        shape = torch.tensor([len(self._counts), *self._counts], device=self._histogram.counts.device)
        return torch.cat([shape, self._histogram.to_tensor()])

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take the histogram from a state_dict."""
        if not isinstance(state, torch.Tensor):  # what torch's distributed checkpoints put where a state has none
            return
        self._histogram = None
        if state.numel():
            rank = int(state[0])
            self._counts = tuple(int(size) for size in state[1 : 1 + rank])
            self._histogram = Histogram.from_tensor(state[1 + rank :])


@RangeCalculatorBase.register("percentile")
class PercentileRangeCalculator(DistributionRangeCalculatorBase):
    """The range that leaves out equally many of the smallest and of the largest values.

    Args:
        percentile: share of the values inside the range, in percent; a field of this name in a subclass of
            ``QuantizationSpec`` sets it.
        **kwargs: see the base class.

    Raises:
        ValueError: ``percentile`` is not in (0, 100].
    """

    def __init__(self, *args: Any, percentile: float = 99.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile must be in (0, 100], got {percentile!r}.")
        self.percentile = percentile

    def _search(self, histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
        tail = (100 - self.percentile) / 200
        low = _quantile(histogram, tail)
        high = _quantile(histogram, 1 - tail)
        return torch.maximum(low, histogram.low.double()), torch.minimum(high, histogram.high.double())


@RangeCalculatorBase.register("mse")
class MSERangeCalculator(DistributionRangeCalculatorBase):
    """The range whose quantization has the least mean squared error, for the dtype and scheme of the spec.

    Tried are fractions of the full range, in steps of 1/64, then finer around the best; with an asymmetric scheme both
    ends together and then each by itself. On a normal distribution with 16 even levels the step comes out as
    0.3352 sigma (J. Max, Quantizing for minimum distortion, 1960).
    """

    def _search_alone(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if blocks.shape[1] > Histogram.bins_for(len(blocks)):
            return self._search(Histogram.of(blocks))
        low, high = Histogram.extremes(blocks)
        weights = torch.ones_like(blocks, dtype=torch.float32)
        return self._best(blocks.float(), weights, low.clamp(max=0), high.clamp(min=0))

    def _search(self, histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = histogram.low.clamp(max=0), histogram.high.clamp(min=0)
        # Two Gauss-Legendre points stand for the values in a bin: exact for a squared error within one code.
        edges = histogram.edges
        middle, reach = (edges[:, 1:] + edges[:, :-1]) / 2, edges.diff() / 12**0.5
        points = torch.cat([middle - reach, middle + reach], 1).float()
        used = (histogram.counts > 0).any(0).repeat(2)
        return self._best(points[:, used], histogram.counts.repeat(1, 2).float()[:, used], low, high)

    def _best(
        self, points: torch.Tensor, weights: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.ones_like(low)
        both = self._refine(points, weights, low, high, one, one, (True, True))
        below, above = both
        if self.qscheme == "asymmetric":
            for _ in range(2):
                below, above = self._refine(points, weights, low, high, below, above, (True, False), coarse=False)
                below, above = self._refine(points, weights, low, high, below, above, (False, True), coarse=False)
        return low * below, high * above

    def _refine(
        self,
        points: torch.Tensor,
        weights: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        below: torch.Tensor,
        above: torch.Tensor,
        moves: tuple[bool, bool],
        coarse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move one or both ends to the fraction with the least error."""
        best = torch.ones_like(low) if coarse else (below if moves[0] else above)
        rounds = [(1.0, 64)] if coarse else [(0.25, 33)]
        for reach, tries in [*rounds, (1 / 64, 17), (1 / 512, 17)]:
            if reach == 1.0:
                steps = torch.arange(1, tries + 1, dtype=torch.float32, device=low.device)
                fractions = steps.expand(len(low), -1) / tries
            else:
                spread = torch.linspace(-reach, reach, tries, dtype=torch.float32, device=low.device)
                fractions = (best[:, None] + spread).clamp(1e-4, 1.0)
            lows = low[:, None] * (fractions if moves[0] else below[:, None].expand_as(fractions))
            highs = high[:, None] * (fractions if moves[1] else above[:, None].expand_as(fractions))
            errors = self._errors(points, weights, lows, highs)
            best = fractions.gather(1, errors.argmin(1, keepdim=True)).squeeze(1)
        return (best if moves[0] else below), (best if moves[1] else above)

    def _errors(
        self, points: torch.Tensor, weights: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor
    ) -> torch.Tensor:
        """Return the squared error of every candidate range ``[blocks, candidates]``."""
        rows, tries = lows.shape
        errors = torch.empty(rows, tries, dtype=torch.float64, device=points.device)
        at_once = max(1, _SEARCH_ELEMENTS // (tries * max(1, points.shape[1])))
        for start in range(0, rows, at_once):
            stop = min(rows, start + at_once)
            low, high = (ends[start:stop].reshape(-1, 1).contiguous() for ends in (lows, highs))
            qparams = kernels.choose_qparams(
                low, high, grid=self._grid, scheme=self.qscheme.value, scale_dtype=self.scale_dtype
            )
            x = points[start:stop].repeat_interleave(tries, 0)
            y = kernels.fake_quantize(x, *qparams, block_size=(1, x.shape[1]), grid=self._grid)
            weight = weights[start:stop].repeat_interleave(tries, 0)
            errors[start:stop] = ((x - y).square_() * weight).sum(1, dtype=torch.float64).reshape(-1, tries)
        return errors


@RangeCalculatorBase.register("histogram")
class HistogramRangeCalculator(DistributionRangeCalculatorBase):
    """The range that loses least information: the least Kullback-Leibler divergence of the quantized histogram.

    For a threshold ``t`` the reference ``P`` is the histogram of ``|x|`` up to ``t``, with what lies beyond added to
    its last bin; ``Q`` is the same histogram without that, spread evenly over what each code covers of its bins that
    hold something. The threshold with the least ``KL(P || Q)`` is the range (S. Migacz, 8-bit inference with TensorRT,
    2017). Zeros lose nothing and do not count. Tried are 64 thresholds that cut off at most half of the values, then 64
    between the neighbours of the best.

    Raises:
        ValueError: the dtype is a float format, whose codes are not even.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._grid.is_integer:
            raise ValueError(
                f"range_calculator_cls 'histogram' needs an integer dtype, got dtype={self._grid.dtype}; use 'mse'."
            )

    def _search(self, histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
        half = histogram.bins // 2
        folded = (histogram.counts[:, half:] + histogram.counts[:, :half].flip(1)).double()
        folded[:, 0] = 0.0  # zeros, which every range holds
        levels = max(1, (int(self._grid.quant_max - self._grid.quant_min) + 1) // 2)
        rows = zip(folded, histogram.edges[:, half:], strict=True)
        cut = torch.stack([_least_divergence(counts, edges, levels) for counts, edges in rows])
        full = torch.maximum(-histogram.low, histogram.high).double()
        cut = torch.minimum(cut, full)
        return torch.maximum(histogram.low.double(), -cut), torch.minimum(histogram.high.double(), cut)


def _least_divergence(counts: torch.Tensor, edges: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the right edge of the best bin to end at; tried are bins that hold something."""
    ends = counts.nonzero().flatten() + 1
    if not len(ends):
        return edges[-1]
    inside = counts.cumsum(0)
    last = best = len(ends) - 1
    first = int((inside[ends - 1] * 2 < inside[-1]).sum())
    for _ in range(2):  # over all of them, then between the neighbours of the best
        places = torch.linspace(first, last, min(_TRIES, last - first + 1), dtype=torch.float32, device="cpu")
        tries = sorted(set(places.round().long().tolist()))
        divergences = [_divergence(counts, edges, int(ends[position]), levels) for position in tries]
        place = min(range(len(tries)), key=divergences.__getitem__)
        best = tries[place]
        first, last = tries[max(place - 1, 0)], tries[min(place + 1, len(tries) - 1)]
    return edges[int(ends[best])]


def _divergence(counts: torch.Tensor, edges: torch.Tensor, kept: int, levels: int) -> float:
    inside, widths = counts[:kept], edges[: kept + 1].diff()
    reference = inside.clone()
    reference[-1] += counts[kept:].sum()
    middle = (edges[:kept] + edges[1 : kept + 1]) / 2
    code = (middle * (levels / edges[kept])).long().clamp(max=levels - 1)
    filled = torch.where(inside > 0, widths, 0.0)
    totals = torch.zeros(levels, dtype=torch.float64, device=counts.device).index_add_(0, code, inside)
    covered = torch.zeros_like(totals).index_add_(0, code, filled)
    quantized = torch.where(inside > 0, (totals / covered.clamp(min=_SMALLEST))[code] * widths, 0.0)
    p, q = reference / reference.sum(), quantized / quantized.sum().clamp(min=_SMALLEST)
    terms = torch.where(p > 0, p * (p.clamp(min=_SMALLEST) / q.clamp(min=_SMALLEST)).log(), 0.0)
    return float(terms.sum())


def _quantile(histogram: Histogram, share: float) -> torch.Tensor:
    """Return the value below which ``share`` of the elements lie, interpolated within its bin."""
    cumulated = histogram.counts.cumsum(1).double()
    wanted = cumulated[:, -1:] * share
    index = torch.searchsorted(cumulated, wanted).clamp(max=histogram.bins - 1)
    inside = histogram.counts.gather(1, index).double()
    before = cumulated.gather(1, index) - inside
    part = ((wanted - before) / inside.clamp(min=1)).clamp(0, 1)
    edges = histogram.edges
    left, right = edges.gather(1, index), edges.gather(1, index + 1)
    return torch.lerp(left, right, part).squeeze(1)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
