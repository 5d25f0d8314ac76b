"""Calculators that remember the parameters in buffers, and those that compute them anew for each tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ._calculator_base import QParams, QParamsCalculatorBase

__all__ = ["StatefulQParamsCalculatorBase", "StatelessQParamsCalculatorBase"]


class StatefulQParamsCalculatorBase(QParamsCalculatorBase):
    """A calculator that keeps the parameters in buffers, so that they stay when observation ends.

    Attributes:
        scale: float32 buffer, one entry per block; empty until the first tensor.
        zero_point: int32 buffer like ``scale``; None for float formats.
        minval: float32 buffer like ``scale``; None for float formats.
        is_provisional: whether what it has seen are example inputs, which calibration and training do not count.
        is_loaded: whether a state_dict has replaced what example inputs gave.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    minval: torch.Tensor | None

    #: Buffers whose size is known only after the first tensor; they are resized to fit a loaded state_dict.
    _STATE_BUFFERS: tuple[str, ...] = ("scale", "zero_point", "minval")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._export_mode = False
        self.is_provisional = False
        self.is_loaded = False
        # Buffers must carry version counters, also when the model is prepared under inference_mode.
        with torch.inference_mode(False):
            self.register_buffer("scale", torch.empty(0, dtype=torch.float32, device="cpu"))
            integer = not self.dtype.is_floating_point
            self.register_buffer("zero_point", torch.empty(0, dtype=torch.int32, device="cpu") if integer else None)
            self.register_buffer("minval", torch.empty_like(self.scale) if integer else None)

    def forward(self, tensor: torch.Tensor) -> QParams:
        """Observe ``tensor`` and return ``(scale, zero_point, minval)``; the buffers keep a copy.

        When nothing can change (export mode, or both ends of ``float_range`` fixed) the buffers themselves are
        returned and ``tensor`` is not looked at.

        Raises:
            ValueError: the granularity does not fit the tensor's shape.
        """
        self._resolve_axis(tensor.ndim)
        if self.is_frozen:
            return self.scale, self.zero_point, self.minval
        low, high = self._get_min_and_max_val(tensor)
        first = not self._initialized
        if first:
            self._compute_dtype_for_export = tensor.dtype
            self._initialize_state(tensor, low, high)
        elif low.shape != self.scale.shape:
            low, high = self._fit_state(tensor, low, high)
        qparams = self.compute_qparams(tensor, low, high)
        self._store(qparams)
        return qparams

    @property
    def is_frozen(self) -> bool:
        """Whether no tensor can change the parameters any more; a class with a ``forward`` of its own never says so."""
        if type(self).forward is not StatefulQParamsCalculatorBase.forward:
            return False
        if self._export_mode:
            return True
        fixed_low, fixed_high = self.float_range
        return self._initialized and fixed_low is not None and fixed_high is not None

    def get_qparams(self) -> QParams:
        """Return the stored ``(scale, zero_point, minval)``, with a warning if no tensor has been seen yet."""
        if not self._initialized:
            warnings.warn(
                "Using default scale and zero point: no tensor has been observed yet. Call forward to compute them.",
                stacklevel=2,
            )
        return self.scale, self.zero_point, self.minval

    def set_export_mode(self, enabled: bool = True) -> None:
        """Freeze the parameters, or let them change again."""
        self._export_mode = enabled

    def reset_statistics(self) -> None:
        """Forget what was observed, with effect from the next tensor; until then the parameters stay as they are.

        Called when calibration starts for the first time, so that the example inputs of ``prepare``, which need not
        look like real data, have no part in the statistics.
        """

    def merge(self, other: StatefulQParamsCalculatorBase) -> None:
        """Take the statistics of another calculator into this one, as if this one had seen its tensors too.

        A calculator that has seen nothing is the neutral element.

        Raises:
            TypeError: ``other`` is of another class, or the class keeps no statistics that could be combined.
            ValueError: the two have seen tensors with different numbers of blocks.
        """
        if type(other) is not type(self):
            raise TypeError(f"Cannot merge a {type(other).__name__} into a {type(self).__name__}.")
        if not other._initialized:
            return
        if not self._initialized:
            self._adopt(other)
            return
        if other.scale.shape != self.scale.shape:
            raise ValueError(
                f"Cannot merge statistics over blocks of shape {tuple(other.scale.shape)} into statistics over blocks "
                f"of shape {tuple(self.scale.shape)}."
            )
        self._merge_statistics(other)

    def check_health(self) -> list[str]:
        """Return what is wrong with the parameters, one sentence each; reads them from the device.

        Found are: nothing observed yet, and scales that are NaN, infinite, or not positive.
        """
        if not self._initialized:
            return ["no tensor has been observed, so there is no scale"]
        scale = self._computing_scale().detach().float()
        counts = {
            "NaN": int(scale.isnan().sum()),
            "infinite": int(scale.isinf().sum()),
            "not positive": int((scale <= 0).sum()),
        }
        return [f"{n} of {scale.numel()} scales are {what}" for what, n in counts.items() if n]

    def _adopt(self, other: Any) -> None:
        """Take over what another calculator has seen; a subclass adds the statistics that no state_dict holds."""
        self.load_state_dict(other.state_dict())
        self._compute_dtype_for_export = other._compute_dtype_for_export

    def _computing_scale(self) -> torch.Tensor:
        """Return the scale that is computed with; a subclass may store another number."""
        return self.scale

    def _merge_statistics(self, other: StatefulQParamsCalculatorBase) -> None:
        raise TypeError(
            f"{type(self).__name__} keeps no statistics, only the parameters of the latest tensor, so two of them "
            "cannot be merged; use 'global_minmax' or 'moving_average'."
        )

    def _fit_state(
        self, tensor: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the range of a tensor into the shape of the state: one number per tensor fits any rank."""
        if low.numel() == 1 and self.scale.numel() == 1:
            return low.reshape(self.scale.shape), high.reshape(self.scale.shape)
        return low, high

    def _record(self, tensor: torch.Tensor, qparams: QParams) -> None:
        """Take parameters that were computed for ``tensor`` elsewhere, as if by ``forward``."""
        if not self._initialized:
            self._resolve_axis(tensor.ndim)
            self._compute_dtype_for_export = tensor.dtype
        self._store(qparams)

    def _store(self, qparams: QParams) -> None:
        for name, value in zip(("scale", "zero_point", "minval"), qparams, strict=True):
            if value is not None:
                self._store_buffer(name, value.detach())
        if not self._initialized:
            self._initialized = True

    def _store_buffer(self, name: str, value: torch.Tensor) -> None:
        """Copy ``value`` into a buffer in place, which others may hold; a new buffer is made if the shape differs."""
        buffer = self._buffers[name]
        if buffer is None or buffer.shape != value.shape or buffer.device != value.device:
            dtype = value.dtype if buffer is None else buffer.dtype
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(value.shape, dtype=dtype, device=value.device)
        buffer.copy_(value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the buffers to another device, but never cast them: half precision would change the scales."""
        before = {name: self._buffers.get(name) for name in self._STATE_BUFFERS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        # A model that is cast after it was prepared has activations of its new type from then on.
        self._compute_dtype_for_export = fn(torch.empty(0, dtype=self._compute_dtype_for_export, device="cpu")).dtype
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Resize the buffers to what is loaded, whose size is known only after the first tensor; their dtypes stay."""
        dtypes = {name: buffer.dtype for name in self._STATE_BUFFERS if (buffer := self._buffers.get(name)) is not None}
        for name in self._STATE_BUFFERS:
            loaded, buffer = state_dict.get(prefix + name), self._buffers.get(name)
            if isinstance(loaded, torch.Tensor) and buffer is not None and loaded.shape != buffer.shape:
                with torch.inference_mode(False):
                    self._buffers[name] = torch.empty(loaded.shape, dtype=buffer.dtype, device=buffer.device)
        if self.is_provisional and self._differs_from(state_dict, prefix):
            self.is_provisional, self.is_loaded = False, True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, dtype in dtypes.items():
            assigned: Any = self._buffers[name]
            if assigned.dtype != dtype:  # by assign=True
                self._buffers[name] = assigned.to(dtype)
        self._initialized = bool(self.scale.numel())
        if self._initialized:
            self._resolve_axis(self.scale.ndim)

    def _differs_from(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state_dict holds other parameters than these; the same ones are still those of example inputs."""
        held = {**self._buffers, **self._parameters}
        return any(
            not torch.equal(loaded.to(tensor.device, tensor.dtype), tensor)
            for name, tensor in held.items()
            if tensor is not None and isinstance(loaded := state_dict.get(prefix + name), torch.Tensor)
        )

    def extra_repr(self) -> str:
        """Return the parameters as text."""
        return (
            f"scale={self.scale}, zero_point={self.zero_point}, minval={self.minval}, export_mode={self._export_mode}"
        )


class StatelessQParamsCalculatorBase(QParamsCalculatorBase):
    """A calculator without buffers: the parameters are computed anew for every tensor and never stored.

    ``scale``, ``zero_point`` and ``minval`` hold the latest ones, for debugging.

    Raises:
        ValueError: a ``float_range`` is given.
    """

    _TAKES_SINGLE_RANGES = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if any(bound is not None for bound in self.float_range):
            raise ValueError(
                f"{type(self).__name__} requires float_range=[None, None], because the range is measured on every "
                f"tensor; got {list(self.float_range)!r}."
            )
        self.scale: torch.Tensor | None = None
        self.zero_point: torch.Tensor | None = None
        self.minval: torch.Tensor | None = None

    def forward(self, tensor: torch.Tensor) -> QParams:
        """Return ``(scale, zero_point, minval)`` of ``tensor`` alone.

        Raises:
            ValueError: the granularity does not fit the tensor's shape.
        """
        self._resolve_axis(tensor.ndim)
        low, high = self._get_min_and_max_val(tensor)
        if torch.compiler.is_compiling():  # a trace must not store tensors
            return self.compute_qparams(tensor, low, high)
        if not self._initialized:
            self._initialize_state(tensor, low, high)
        qparams = self.compute_qparams(tensor, low, high)
        self._record(tensor, qparams)
        return qparams

    def _record(self, tensor: torch.Tensor, qparams: QParams) -> None:
        """Take note of the parameters that were computed for ``tensor``."""
        if not self._initialized:
            self._resolve_axis(tensor.ndim)
            self._compute_dtype_for_export = tensor.dtype
            self._initialized = True
        # Plain attributes; setting them through nn.Module costs a microsecond each.
        self.__dict__.update(zip(("scale", "zero_point", "minval"), qparams, strict=True))

    def set_export_mode(self, enabled: bool = True) -> None:
        """Leave export mode, which this calculator is never in.

        Raises:
            NotImplementedError: ``enabled`` is True; parameters that depend on each input cannot be frozen.
        """
        if enabled:
            raise NotImplementedError(
                f"Stateless quantization ({type(self).__name__}) does not support export mode, because its "
                "parameters depend on the input. Use a stateful qparam_calculator_cls for export."
            )
