"""Statistics of several processes: merged after calibration, synchronized while training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bitwright._utils.sharded import may_change_unseen

from ._statistics import gathering
from .spec import GlobalMinMaxQParamsCalculator, RunningRangeMixin
from .spec._histogram import Histogram
from .spec.fake_quantize import FakeQuantizeImplBase
from .spec.learned import LearnedQParamsCalculatorBase, _Statistics
from .spec.observers import DistributionRangeCalculatorBase

__all__ = ["merged_statistics", "sharded_again", "synchronized_observers"]

_Range = tuple[torch.Tensor, torch.Tensor]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sharded_again(model: nn.Module) -> nn.Module:
    """Have FSDP put parts of parameters where a forward left gathered ones, and learned ranges remember the parts.

    The root of a sharded model keeps what it has gathered until a backward. Values that are found in a forward are
    written to the parts too, which optimizers see.
    """
    if may_change_unseen():
        from torch.distributed.fsdp import FSDPModule

        modules = list(model.modules())
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        for module in modules:
            if isinstance(module, LearnedQParamsCalculatorBase):
                module.remember_parts()
    return model


class _RangeBetween(nn.Module):
    """Stands in front of a range calculator for a while and sees the ranges that it finds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.needs_spec, self.accumulates = inner.needs_spec, inner.accumulates

    @property
    def granularity(self) -> Any:
        """Granularity of the range calculator."""
        return self.inner.granularity

    @property
    def quantization_target(self) -> Any:
        """Target of the range calculator."""
        return self.inner.quantization_target


class _JoinedRange(_RangeBetween):
    """The range of the tensors of all processes."""

    def forward(self, x: torch.Tensor) -> _Range:
        low, high = self.inner(x)
        ends = torch.stack([low, -high])
        dist.all_reduce(ends, dist.ReduceOp.MIN)
        return ends[0], -ends[1]


class _RecordedRange(_RangeBetween):
    """Keeps the range of every tensor, to be joined with those of other processes later."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.record: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> _Range:
        low, high = self.inner(x)
        self.record.append(torch.stack([low, high]))  # a simulator at several places may see tensors of several ranks
        return low, high


@contextmanager
def synchronized_observers(simulators: Sequence[FakeQuantizeImplBase]) -> Iterator[None]:
    """Have every observed range be that of the tensors of all processes, which must run the same steps."""
    calculators = gathering(simulators) if _is_distributed() else []
    try:
        for calculator in calculators:
            finder = calculator.range_calculator
            if isinstance(calculator, LearnedQParamsCalculatorBase):
                calculator._exchange = _joined_statistics
            if isinstance(finder, DistributionRangeCalculatorBase):
                finder._exchange = _joined_histogram
            elif not isinstance(calculator, LearnedQParamsCalculatorBase):
                calculator.range_calculator = _JoinedRange(finder)
        yield
    finally:
        for calculator in calculators:
            if isinstance(calculator.range_calculator, _JoinedRange):
                calculator.range_calculator = calculator.range_calculator.inner
            for holder in (calculator, calculator.range_calculator):
                if hasattr(holder, "_exchange"):
                    holder._exchange = None


@contextmanager
def merged_statistics(simulators: Sequence[FakeQuantizeImplBase]) -> Iterator[None]:
    """Merge the statistics of all processes when the block ends; not if it raises."""
    calculators = gathering(simulators) if _is_distributed() else []
    replayed: list[Any] = [
        calculator
        for calculator in calculators
        if isinstance(calculator, RunningRangeMixin) and type(calculator) is not GlobalMinMaxQParamsCalculator
    ]
    before = [_position(calculator) for calculator in replayed]
    for calculator in replayed:
        calculator.range_calculator = _RecordedRange(calculator.range_calculator)
    records = []
    try:
        yield
    finally:
        for calculator in replayed:
            records.append(calculator.range_calculator.record)
            calculator.range_calculator = calculator.range_calculator.inner
    for calculator, position, record in zip(replayed, before, records, strict=True):
        _replay(calculator, position, record)
    for calculator in calculators:
        if not any(calculator is other for other in replayed):
            _merge(calculator)


def _position(calculator: Any) -> tuple[Any, ...]:
    progress = calculator._progress
    return calculator.running_min.clone(), calculator.running_max.clone(), progress.observations, progress.restart


def _replay(calculator: Any, position: tuple[Any, ...], record: list[torch.Tensor]) -> None:
    """Observe again from where calibration began, tensor ``i`` of all processes at once."""
    entry = torch.stack([calculator.running_min, calculator.running_max])
    flat = torch.stack([ends.flatten(1) for ends in record]) if record else entry.flatten(1)[None][:0]
    records = _gather(flat)
    calculator._store_buffer("running_min", position[0])
    calculator._store_buffer("running_max", position[1])
    calculator._progress.observations, calculator._progress.restart = position[2], position[3]
    for step in range(max(len(ranges) for ranges in records)):
        present = torch.stack([ranges[step] for ranges in records if step < len(ranges)])
        low, high = (ends.reshape(entry.shape[1:]) for ends in (present[:, 0].amin(0), present[:, 1].amax(0)))
        low, high = calculator._bounded(low, high, low.dtype)
        calculator._store(calculator.compute_qparams(low, low, high))


def _merge(calculator: Any) -> None:
    finder = calculator.range_calculator
    if isinstance(calculator, LearnedQParamsCalculatorBase):
        if isinstance(finder, DistributionRangeCalculatorBase):
            _merge_histograms(finder)
        _merge_learned(calculator)
    elif isinstance(finder, DistributionRangeCalculatorBase):
        _merge_histograms(finder)
        if finder._histogram is not None:
            low, high = calculator._bounded(*finder.current_range(), torch.float32)
            calculator._store(calculator._compute_scale_zero_point_minval(low, low, high))
    elif isinstance(calculator, RunningRangeMixin):
        ends = torch.stack([calculator.running_min, -calculator.running_max])
        dist.all_reduce(ends, dist.ReduceOp.MIN)
        low, high = ends[0], -ends[1]
        calculator._store_buffer("running_min", low)
        calculator._store_buffer("running_max", high)
        calculator._store(calculator._compute_scale_zero_point_minval(low, low, high))


def _merge_learned(calculator: Any) -> None:
    known = calculator._statistics
    shape = calculator.get_qparams()[0].shape
    device = calculator.get_qparams()[0].device
    blank = torch.zeros(0, *shape, dtype=torch.float64, device=device)
    total: _Statistics | None = None
    for packed in _gather(blank if known is None else _packed(known)):
        if len(packed):
            one = _Statistics(packed[0].float(), packed[1].float(), packed[2], float(packed[3].flatten()[0]))
            total = one if total is None else total.merged(one)
    if total is not None:
        calculator._start_from(calculator._joint(total))


def _merge_histograms(finder: DistributionRangeCalculatorBase) -> None:
    own = finder._histogram
    empty = torch.empty(0, dtype=torch.int64)
    total: Histogram | None = None
    for packed in _gather(empty if own is None else own.to_tensor()):
        if len(packed):
            one = Histogram.from_tensor(packed)
            total = one if total is None else total.merged(one)
    finder._histogram = total


def _joined_statistics(own: _Statistics) -> _Statistics:
    ends = torch.stack([own.low, -own.high])
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    sums = torch.stack([own.abs_sum, torch.full_like(own.abs_sum, own.count)])
    dist.all_reduce(sums)
    return _Statistics(ends[0], -ends[1], sums[0], float(sums[1].flatten()[0]))


def _joined_histogram(own: Histogram) -> Histogram:
    first, *others = (Histogram.from_tensor(packed) for packed in _gather(own.to_tensor()))
    for other in others:
        first = first.merged(other)
    return first


def _packed(statistics: _Statistics) -> torch.Tensor:
    count = torch.full_like(statistics.abs_sum, statistics.count)
    return torch.stack([statistics.low.double(), statistics.high.double(), statistics.abs_sum, count])


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all processes, in order of rank; they may differ in length."""
    world = dist.get_world_size()
    length = torch.tensor([len(tensor)], device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length)
    longest = int(max(int(one) for one in lengths))
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    return [one[: int(size)] for one, size in zip(gathered, lengths, strict=True)]
