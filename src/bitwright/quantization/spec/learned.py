"""Calculators whose parameters are learned by gradient descent: LSQ, LSQ+ and PACT."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from bitwright._utils.sharded import is_sharded, may_change_unseen, whole, write
from bitwright.kernels.dispatch import is_plain_torch, take_snapshot
from bitwright.kernels.grid import block_view_shape

from ._calculator_base import QParams, QParamsCalculatorBase
from ._calculator_state import StatefulQParamsCalculatorBase
from .observers import DistributionRangeCalculatorBase
from .qscheme import QuantizationScheme
from .range_calculator import MinMaxRangeCalculator

__all__ = [
    "LSQPlusQParamsCalculator",
    "LSQQParamsCalculator",
    "LearnedQParamsCalculatorBase",
    "PACTQParamsCalculator",
]

_SMALLEST = torch.finfo(torch.float32).eps


def _bits_of(learned: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the elements of the parameters that lie in main memory, as integers."""
    plain = [p.detach() for p in learned if type(p) is nn.Parameter and p.is_cpu and p.is_contiguous()]
    if not is_plain_torch():
        return []
    return [p.view(-1).view(torch.uint8 if p.element_size() % 4 else torch.int32) for p in plain]


class _Statistics:
    """What the initial values are made from: a monoid over tensors."""

    __slots__ = ("abs_sum", "count", "high", "low")

    def __init__(self, low: torch.Tensor, high: torch.Tensor, abs_sum: torch.Tensor, count: float) -> None:
        self.low, self.high, self.abs_sum, self.count = low, high, abs_sum, count

    def shaped_like(self, known: torch.Tensor | None) -> _Statistics:
        """Return it in the shape of ``known``, if both are one number: a step for a whole tensor fits any rank."""
        if known is None or self.low.numel() != 1 or known.numel() != 1:
            return self
        low, high, abs_sum = (part.reshape(known.shape) for part in (self.low, self.high, self.abs_sum))
        return _Statistics(low, high, abs_sum, self.count)

    def merged(self, other: _Statistics, latest_range: bool = False) -> _Statistics:
        low = other.low if latest_range else torch.minimum(self.low, other.low.to(self.low))
        high = other.high if latest_range else torch.maximum(self.high, other.high.to(self.high))
        return _Statistics(low, high, self.abs_sum + other.abs_sum.to(self.abs_sum), self.count + other.count)


class LearnedQParamsCalculatorBase(StatefulQParamsCalculatorBase):
    """A calculator whose ``_LEARNED`` tensors are parameters that optimizers see as soon as ``prepare`` is done.

    Observation only finds the initial values: on the first tensor, on the first one after ``reset_statistics``, and on
    every tensor in eval mode with the observer on, that is during calibration. Parameters that training has moved, or a
    state_dict has given, stay as they are until ``take_as_found``. A parameter stays the same object.

    Raises:
        ValueError: the dtype is a float format.
    """

    _LEARNED: tuple[str, ...] = ("scale",)

    #: Registry key of the fake quantizer that trains the parameters; the factory takes it in place of ``"default"``.
    fake_quantize_key: ClassVar[str] = "lsq"

    #: Added to both ends of a block of zeros: zero would lie at the edge of its range, where no gradient passes.
    _MARGIN_OF_ZEROS: ClassVar[float] = 1e-6

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__} learns the step of an integer grid; got dtype={self.dtype}.")
        self._buffers["minval"] = None
        for name in self._LEARNED:
            self._buffers.pop(name, None)
            with torch.inference_mode(False):
                self.register_parameter(name, nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")))
        self._statistics: _Statistics | None = None
        self._restart = True
        #: The parameters as observation has left them.
        self._found: tuple[torch.Tensor, ...] = ()
        #: Joins the statistics of a tensor with those of other processes; set while training in several.
        self._exchange: Callable[[_Statistics], _Statistics] | None = None
        #: What identifies the parameters, their elements, and what follows from them.
        self._derived: tuple[Any, Any, QParams] | None = None
        #: The parameters as optimizers see them, where FSDP puts gathered ones in their place during a forward.
        self._sharded: dict[str, nn.Parameter] = {}

    @abstractmethod
    def _initial_values(self, low: torch.Tensor, high: torch.Tensor, mean_abs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the learned parameters, and ``zero_point`` where it is a constant, for a range.

        Args:
            low: smallest value of each block, at most 0, float32.
            high: largest value of each block, at least 0, float32.
            mean_abs: mean absolute value of each block, float32.
        """

    @abstractmethod
    def _derive(self) -> QParams:
        """Return ``(scale, zero_point, minval)`` of the learned parameters."""

    def forward(self, tensor: torch.Tensor) -> QParams:
        """Find initial values where they are due, and return the present ``(scale, zero_point, minval)``."""
        self._resolve_axis(tensor.ndim)
        settled = self._initialized and not self._restart and (self.training or self._is_moved())
        if self._export_mode or settled:
            return self.get_qparams()
        if not self._initialized:
            self._compute_dtype_for_export = tensor.dtype
        if self._restart and isinstance(self.range_calculator, DistributionRangeCalculatorBase):
            self.range_calculator.reset()
        new = self._measure(tensor)
        if self._initialized:
            new = new.shaped_like(self._parameters[self._LEARNED[0]])
        new = new if self._exchange is None else self._exchange(new)
        known = self._statistics
        if known is not None and known.low.shape != new.low.shape:
            known = None
        accumulates = self.range_calculator.accumulates
        weight = self.quantization_target.value == "weight"
        self._start_from(new if known is None or weight else known.merged(new, latest_range=accumulates))
        return self.get_qparams()

    def _measure(self, tensor: torch.Tensor) -> _Statistics:
        low, high = self._get_min_and_max_val(tensor)
        block_size = self.granularity.get_block_size(tensor.shape, self.quantization_target)
        view, inner, _, counts = block_view_shape(tuple(tensor.shape), block_size)
        sizes = tensor.detach().to(torch.float32).abs().reshape(view)
        total = sizes.sum(inner, dtype=torch.float64) if inner else sizes.to(torch.float64)
        return _Statistics(low.float(), high.float(), total.reshape(counts), tensor.numel() / max(1, total.numel()))

    def _start_from(self, statistics: _Statistics) -> None:
        mean_abs = (statistics.abs_sum / max(statistics.count, 1.0)).float()
        empty = ((statistics.low == 0) & (statistics.high == 0)).float() * self._MARGIN_OF_ZEROS
        values = self._initial_values(statistics.low - empty, statistics.high + empty, mean_abs)
        for name, value in values.items():
            if name in self._LEARNED:
                self._set_learned(name, value)
            else:
                self._store_buffer(name, value)
        # A tensor of zeros, such as the output of a new LoRA adapter, says nothing about the step: the next one may.
        readable = not (torch.compiler.is_compiling() or statistics.abs_sum.is_meta)
        blank = readable and not bool(statistics.abs_sum.any())
        self._initialized, self._restart = True, blank
        self._found = tuple(values[name].detach() for name in self._LEARNED)
        self._statistics = None if blank else statistics

    def _set_learned(self, name: str, value: torch.Tensor) -> None:
        parameter: Any = self._parameters[name]
        with torch.no_grad():
            if parameter.shape != value.shape or parameter.device != value.device:
                with torch.inference_mode(False):
                    parameter.data = value.to(torch.float32).clone()
                torch.autograd.graph.increment_version(parameter)
            else:
                write(parameter, value)
            owner = self._sharded.get(name, parameter)
            if owner is not parameter:
                write(owner, value)

    @property
    def is_frozen(self) -> bool:
        """Whether no tensor can change the parameters any more."""
        return self._export_mode

    def get_qparams(self) -> QParams:
        """Return the present ``(scale, zero_point, minval)``, detached; the same tensors while nothing changes.

        A write through ``.data``, which advances no version, is noticed where the elements can be read at once, that is
        on the CPU.
        """
        if torch.compiler.is_compiling():
            return self._derive()
        learned: tuple[Any, ...] = tuple(self._parameters[name] for name in self._LEARNED)
        key = [(id(p), p.data_ptr() if type(p) is nn.Parameter else 0, p._version) for p in learned]
        derived = self._derived
        if derived is not None and derived[0] == key and derived[1].holds() and not may_change_unseen():
            return derived[2]
        with torch.inference_mode(False), torch.no_grad():  # training saves for its backward what is kept
            qparams = self._derive()
            self._derived = key, take_snapshot(*_bits_of(learned)), qparams
        return qparams

    def set_export_mode(self, enabled: bool = True) -> None:
        """Freeze the learned parameters, for the optimizer too, or let them be learned again."""
        super().set_export_mode(enabled)
        for name in self._LEARNED:
            parameter: Any = self._parameters[name]
            parameter.requires_grad_(not enabled)

    def reset_statistics(self) -> None:
        """Find the initial values anew with the next tensor."""
        self._statistics, self._restart = None, True

    def take_as_found(self) -> None:
        """Have observation go on from the present parameters, also where training has moved them."""
        self._found = tuple(self._parameters[name].detach().clone() for name in self._LEARNED)  # type: ignore[union-attr]

    def _is_moved(self) -> bool:
        """Return whether the parameters are others than observation has left, such as those of a training."""
        learned: list[Any] = [self._parameters[name] for name in self._LEARNED]
        if torch.compiler.is_compiling() or any(p.is_meta or p.dtype != torch.float32 for p in learned):
            return False
        if any(map(is_sharded, (*learned, *self._found))):  # this process has a part of them at most
            return False
        if len(self._found) != len(learned):
            return True
        return not all(torch.equal(p, found.to(p.device)) for p, found in zip(learned, self._found, strict=True))

    def remember_parts(self) -> None:
        """Write values that are found in a forward to the present parameters too, if these are sharded."""
        learned: dict[str, Any] = {name: self._parameters[name] for name in self._LEARNED}
        self._sharded = {name: parameter for name, parameter in learned.items() if is_sharded(parameter)}

    def _adopt(self, other: Any) -> None:
        super()._adopt(other)
        self._statistics, self._restart, self._found = other._statistics, other._restart, other._found

    def _merge_statistics(self, other: Any) -> None:
        if other._statistics is None:
            return
        known, finder = self._statistics, self.range_calculator
        if isinstance(finder, DistributionRangeCalculatorBase):
            finder.merge(other.range_calculator)
        self._start_from(self._joint(other._statistics if known is None else known.merged(other._statistics)))

    def _joint(self, statistics: _Statistics) -> _Statistics:
        """Replace the extremes by what the range calculator finds in the histogram of everything, if it has one."""
        finder = self.range_calculator
        if isinstance(finder, DistributionRangeCalculatorBase) and finder._histogram is not None:
            statistics.low, statistics.high = self._bounded(*finder.current_range(), torch.float32)
        return statistics

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_derived": None, "_sharded": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before: dict[str, Any] = {name: self._parameters[name] for name in self._LEARNED}
        values = {name: parameter.data for name, parameter in before.items()}
        super()._apply(fn, recurse)
        for name, value in values.items():
            parameter: Any = self._parameters[name]
            if parameter.dtype != value.dtype:
                parameter.data = value.to(parameter.device)
        self._derived = None
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in self._LEARNED:
            loaded, parameter = state_dict.get(prefix + name), self._parameters[name]
            if isinstance(loaded, torch.Tensor) and parameter is not None and loaded.shape != parameter.shape:
                with torch.inference_mode(False):
                    parameter.data = torch.empty(loaded.shape, dtype=parameter.dtype, device=parameter.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._derived = None
        for name in self._LEARNED:
            assigned: Any = self._parameters[name]
            if assigned.dtype != torch.float32:  # by assign=True
                self._parameters[name] = nn.Parameter(assigned.detach().float(), assigned.requires_grad)
        self._restart = not self._initialized
        if not self._initialized:
            self._statistics = None

    def _step(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the step that is computed with.

        An optimizer may overshoot zero, where a step clamped to its smallest value would quantize everything to
        nothing and so stay there: the size of the number counts.
        """
        return scale.to(torch.float32).abs().clamp(min=_SMALLEST)

    def _computing_scale(self) -> torch.Tensor:
        return self._step(whole(self.scale))

    def extra_repr(self) -> str:
        """Return the learned parameters as text."""
        return ", ".join(f"{name}={self._parameters[name]}" for name in self._LEARNED)


@QParamsCalculatorBase.register("lsq")
class LSQQParamsCalculator(LearnedQParamsCalculatorBase):
    """Learned step size (LSQ, arXiv 1902.08153): ``v' = round(clip(v / s, -Qn, Qp)) * s`` with a learned ``s``.

    The step begins at ``2 * mean|v| / sqrt(Qp)`` (section 2.1 there), or with the range of the spec's range calculator
    where that is not ``minmax`` or ``float_range`` fixes an end. The zero point is that of the scheme and is not
    learned.
    """

    def _initial_values(self, low: torch.Tensor, high: torch.Tensor, mean_abs: torch.Tensor) -> dict[str, torch.Tensor]:
        step, zero_point, _ = self._compute_scale_zero_point_minval(low, low, high)
        assert zero_point is not None
        if isinstance(self.range_calculator, MinMaxRangeCalculator) and list(self.float_range) == [None, None]:
            largest = (self.quant_max - zero_point).clamp(min=1).to(torch.float32)
            step = 2 * mean_abs / largest.sqrt()
        return {"scale": self._step(step), "zero_point": zero_point}

    def _derive(self) -> QParams:
        scale = self._step(whole(self.scale))
        assert self.zero_point is not None
        return scale, self.zero_point, (self.quant_min - self.zero_point) * scale


@QParamsCalculatorBase.register("lsq_plus")
class LSQPlusQParamsCalculator(LearnedQParamsCalculatorBase):
    """Learned step and offset (LSQ+, arXiv 2004.09576): ``v' = round(clip((v - b) / s, n, p)) * s + b``.

    With the formulation ``minval`` the offset ``b`` is used as it is; with ``zp`` it is rounded to the nearest integer
    zero point. Weights of a symmetric scheme begin at ``s = max(|mean - 3 sigma|, |mean + 3 sigma|) / 2**(bits - 1)``
    in the paper; here everything begins with the range that the spec's range calculator finds, which ``mse`` makes the
    paper's choice for activations.

    The offset is for values of both signs. A range that begins with an end at zero, such as that of a ReLU's output,
    keeps it there and learns its step as LSQ does: the offset is 0, and codes are counted from the zero point.
    """

    _LEARNED = ("scale", "offset")
    fake_quantize_key = "lsq_plus"

    offset: torch.Tensor

    def _initial_values(self, low: torch.Tensor, high: torch.Tensor, mean_abs: torch.Tensor) -> dict[str, torch.Tensor]:
        scale, zero_point, _ = self._compute_scale_zero_point_minval(low, low, high)
        assert zero_point is not None
        offset = -zero_point * scale
        if self.qscheme == QuantizationScheme.ASYMMETRIC:
            offset = torch.where((low == 0) | (high == 0), 0.0, low - self.quant_min * scale)
        return {"scale": scale, "offset": offset, "zero_point": zero_point}

    def _derive(self) -> QParams:
        scale, offset = self._step(whole(self.scale)), whole(self.offset).to(torch.float32)
        origin, _ = self.origin_of_codes(offset)
        zero_point = torch.clamp(torch.round(origin - offset / scale), self.quant_min, self.quant_max).to(torch.int32)
        return scale, zero_point, offset + (self.quant_min - origin) * scale

    def origin_of_codes(self, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the code whose value the offset is, and whether it stays at zero: one entry per block."""
        point = self.zero_point
        assert point is not None
        stays = (offset == 0) & ((point == self.quant_min) | (point == self.quant_max))
        return torch.where(stays, point, torch.zeros_like(point)), stays


@QParamsCalculatorBase.register("pact")
class PACTQParamsCalculator(LearnedQParamsCalculatorBase):
    """Learned clipping of activations (PACT, arXiv 1805.06085): ``clip(v, 0, alpha)``, then ``2**bits`` even levels.

    ``alpha`` begins at the largest value that the spec's range calculator finds. The paper adds a penalty on
    ``alpha**2``: give ``alpha`` weight decay in the optimizer.
    """

    _LEARNED = ("alpha",)
    fake_quantize_key = "pact"

    alpha: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers.pop("scale", None)

    @property
    def scale(self) -> torch.Tensor:  # type: ignore[override]
        """``alpha / (quant_max - quant_min)``, one entry per block, float32."""
        return self._step(whole(self.alpha) / float(self.quant_max - self.quant_min)).detach()

    def _initial_values(self, low: torch.Tensor, high: torch.Tensor, mean_abs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"alpha": high.clamp(min=_SMALLEST), "zero_point": torch.full_like(high, self.quant_min).to(torch.int32)}

    def _derive(self) -> QParams:
        scale = self._step(whole(self.alpha) / float(self.quant_max - self.quant_min))
        return scale, self.zero_point, torch.zeros_like(scale)
