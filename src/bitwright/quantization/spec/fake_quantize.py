"""Simulators of quantization: modules that map a tensor to what it decodes to after quantization."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch

from bitwright import _torchao, kernels
from bitwright._utils.spec_utils import PartialConstructor, with_args
from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.formats import n_bits_of, round_to_fp4
from bitwright.kernels import Grid

from ._block_layout import BlockLayout
from ._one_pass import follows_latest, is_plainly_static, is_settled_dynamic, measures_both_ends, tracks_in_place
from ._ste import _FusedFakeQuantizeIntSTE as _FusedFakeQuantizeIntSTE
from ._switches import SwitchedModule
from ._weight_memory import WeightMemory
from .errors import _BlockSizeMismatchError
from .granularity import QuantizationGranularity
from .qformulation import QuantizationFormulation
from .qparams_calculator import (
    QParams,
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
)
from .qscheme import QuantizationScheme

__all__ = ["FakeQuantizeImplBase", "fp4_forward"]

_logger = logging.getLogger(__name__)


class FakeQuantizeImplBase(SwitchedModule, CompressionSimulatorBase, ABC):
    """Base class of fake quantizers: implement the three abstract methods and register the class.

    Observation happens when the observer is on, quantization when fake-quantize is on; both are on at first. torchao's
    PT2E switches (``model.apply(enable_observer)``) work, for the class counts as a ``FakeQuantizeBase`` there.

    Args:
        dtype: the quantized number format.
        qformulation: how codes and values are related.
        granularity: how the tensor divides into blocks.
        target_dtype: dtype of a tensor that holds the codes.
        quant_min: smallest code.
        quant_max: largest code.
        qparams_calculator: computes scale, zero point and minval.
        n_bits: bits of a code; from ``dtype`` if None.
        **kwargs: the fields that a subclass of ``QuantizationSpec`` adds, and ``op_to_optimize`` in eager mode;
            ignored here.

    Attributes:
        keep_frozen_weight: in eval mode, a weight that is no longer observed is quantized once and its result kept
            until the weight or its parameters change. False saves the memory and quantizes at every call.
    """

    keep_frozen_weight: bool = True

    def __init__(
        self,
        dtype: torch.dtype,
        qformulation: QuantizationFormulation,
        granularity: QuantizationGranularity,
        target_dtype: torch.dtype,
        quant_min: int | float,
        quant_max: int | float,
        qparams_calculator: QParamsCalculatorBase,
        n_bits: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.qformulation = qformulation
        self._granularity = granularity
        self.target_dtype = target_dtype
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qparams_calculator = qparams_calculator
        self.n_bits = n_bits_of(dtype) if n_bits is None else n_bits
        self._layout = BlockLayout()
        self._grid: Grid | None = None
        self._memory = WeightMemory()

    @property
    def granularity(self) -> QuantizationGranularity:
        """How the tensor divides into blocks; may be set until the first tensor has been seen.

        Raises:
            RuntimeError: set later than that.
        """
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: QuantizationGranularity) -> None:
        self.qparams_calculator.granularity = granularity
        self._granularity = granularity

    @property
    def qscheme(self) -> QuantizationScheme:
        """How a range is laid over the codes; kept by the calculator."""
        return self.qparams_calculator.qscheme

    @property
    def quantization_target(self) -> CompressionTargetTensor:
        """What the tensor is; kept by the calculator."""
        return self.qparams_calculator.quantization_target

    @property
    def is_stateless(self) -> bool:
        """Whether the parameters are computed anew for every tensor; then the observer cannot be turned off."""
        return isinstance(self.qparams_calculator, StatelessQParamsCalculatorBase)

    def get_block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the blocks that share parameters in a tensor of this shape.

        Raises:
            ValueError: the granularity does not fit the shape.
        """
        return self._block_size(torch.Size(shape))

    def _block_size(self, shape: torch.Size) -> tuple[int, ...]:
        calculator: Any = self._modules["qparams_calculator"]
        target = calculator._modules["range_calculator"].quantization_target
        return self._layout.block_size(shape, self._granularity, target)

    def enable_observer(self, enabled: bool = True) -> None:
        """Turn the gathering of statistics on or off; without effect on a stateless quantizer."""
        if not self.is_stateless:
            super().enable_observer(enabled)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Observe and fake-quantize ``tensor``, as far as each is on.

        Args:
            tensor: floating point, any shape that the granularity fits. Arithmetic is float32.

        Returns:
            Tensor of the same shape and dtype. The gradient is that of the identity where nothing is clamped, zero
            elsewhere. Scale, zero point and minval get no gradient.

        Raises:
            ValueError: the granularity does not fit the shape. Blocks that do not divide it are no error: the
                quantizer logs a warning and takes itself out of use.
            RuntimeError: the observer is off and no tensor has been observed.
        """
        tracing = torch.compiler.is_compiling()
        if not tracing:
            self._sync_switches()
        if self._is_off:
            return tensor
        calculator: Any = self._modules["qparams_calculator"]
        stateful = isinstance(calculator, StatefulQParamsCalculatorBase)
        if stateful and not tracing and type(tensor) is torch.nn.Parameter:
            return self._forward_weight(tensor, calculator)
        qparams: QParams | None = None
        if not stateful or (self._observer_on and not calculator.is_frozen):
            y = None if tracing else self._at_once(tensor, calculator)
            if y is not None:
                return y
            if tracing or tensor.numel():
                qparams = self._observe(tensor, calculator)
        elif self._fake_quant_on:
            qparams = self._stored(calculator)
        if qparams is None or not self._fake_quant_on:
            return tensor
        return self._fake_quantize(tensor, *qparams)

    def _at_once(self, tensor: torch.Tensor, calculator: Any) -> torch.Tensor | None:
        """Observe and fake-quantize in one kernel call, where the classes are Bitwright's own; None where not."""
        if not self._is_fused() or _is_in_backward() or not tensor.numel():
            return None
        if follows_latest(calculator):
            if self._fake_quant_on:
                return self._follow(tensor, calculator)
            return tensor if is_settled_dynamic(calculator) else None
        if not tracks_in_place(calculator, tensor.dtype, tensor.device):
            return None
        with contextlib.suppress(_BlockSizeMismatchError):  # the calculator meets it again and says so
            self._block_size(tensor.shape)
            if self._layout.counts == calculator._buffers["running_min"].shape:
                return self._track(tensor, calculator)
        return None

    def _track(self, tensor: torch.Tensor, calculator: Any) -> torch.Tensor:
        """Update a running range and fake-quantize, in one call that changes the calculator's buffers in place."""
        buffers = calculator._buffers
        y = kernels.observe_running_and_fake_quantize(
            tensor,
            buffers["running_min"],
            buffers["running_max"],
            buffers["scale"],
            buffers["zero_point"],
            buffers["minval"],
            block_size=self._block_size(tensor.shape),
            grid=self._current_grid(),
            scheme=calculator.qscheme.value,
            scale_dtype=calculator.scale_dtype,
            averaging_constant=getattr(calculator, "averaging_constant", None),
            restart=calculator._progress.restart,
            quantize=self._fake_quant_on,
        )
        torch.autograd.graph.increment_version(buffers["scale"])  # the kernel writes behind autograd's back
        calculator._progress.count()
        return y

    def _follow(self, tensor: torch.Tensor, calculator: Any) -> torch.Tensor:
        """Take the range of this tensor alone and fake-quantize; the tensor itself if blocks do not divide it."""
        try:
            block_size = self._block_size(tensor.shape)
        except _BlockSizeMismatchError as error:
            self._warn_and_disable(error)
            return tensor
        y, scale, zero_point, minval = kernels.observe_and_fake_quantize(
            tensor,
            block_size=block_size,
            grid=self._current_grid(),
            scheme=calculator.qscheme.value,
            scale_dtype=calculator.scale_dtype,
        )
        calculator._record(tensor, (scale, zero_point, minval))
        return y

    def _forward_weight(self, weight: torch.nn.Parameter, calculator: StatefulQParamsCalculatorBase) -> torch.Tensor:
        """``forward`` for a parameter, which often is the same as at the last call."""
        if weight.numel() == 0 or not (self._observer_on or self._fake_quant_on):
            return weight
        memory, static = self._memory, is_plainly_static(calculator)
        known = calculator._initialized and memory.knows(weight, self._stored(calculator), self._current_grid())
        y: torch.Tensor | None = None
        qparams: QParams | None
        if self._observer_on and not (static and (calculator.is_frozen or (known and memory.observed))):
            y, qparams = self._observe_weight(weight, calculator, static)
            known = False
        else:
            qparams = self._stored(calculator)
        if qparams is None or not self._fake_quant_on:
            return weight
        settled = static or not self._observer_on
        if settled and self.keep_frozen_weight and not self.training and not _needs_grad(weight):
            return self._kept(weight, calculator, known, y)
        return self._fake_quantize(weight, *qparams) if y is None else y

    def _observe_weight(
        self, weight: torch.nn.Parameter, calculator: StatefulQParamsCalculatorBase, static: bool
    ) -> tuple[torch.Tensor | None, QParams | None]:
        """Observe a parameter, in one pass with its quantization where the classes are Bitwright's own."""
        if static and self._fake_quant_on and self._is_fused() and measures_both_ends(calculator):
            y = self._follow(weight, calculator)
            qparams: QParams | None = None if self._is_off else self._stored(calculator)
        else:
            y, qparams = None, self._observe(weight, calculator)
        if static and qparams is not None:
            self._memory.remember(weight, self._stored(calculator), self._current_grid(), observed=True)
        return y, qparams

    def _kept(
        self,
        weight: torch.nn.Parameter,
        calculator: StatefulQParamsCalculatorBase,
        known: bool,
        y: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the quantized weight from memory, or quantize it (unless ``y`` is it) and keep it."""
        kept = self._memory.output if known else None
        if kept is not None:
            return kept
        qparams = self._stored(calculator)
        if not known and y is None:
            self._memory.remember(weight, qparams, self._current_grid(), observed=False)
        if y is None:
            y = self._fake_quantize(weight, *qparams)
        self._memory.keep(y)
        return y

    def _observe(self, tensor: torch.Tensor, calculator: QParamsCalculatorBase) -> QParams | None:
        """Let the calculator see ``tensor``; None if its blocks do not divide it."""
        # A recomputed forward (gradient checkpointing) must quantize as the first one did, and not count twice.
        if _is_in_backward() and calculator._initialized and isinstance(calculator, StatefulQParamsCalculatorBase):
            return self._stored(calculator)
        try:
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
                qparams: QParams = calculator(tensor)
        except _BlockSizeMismatchError as error:
            self._warn_and_disable(error)
            return None
        return qparams

    def _stored(self, calculator: Any) -> QParams:
        """Return the parameters that the calculator keeps.

        Raises:
            RuntimeError: it has seen no tensor yet.
        """
        if type(calculator).get_qparams is StatefulQParamsCalculatorBase.get_qparams:
            buffers = calculator._buffers
            qparams: QParams = buffers["scale"], buffers["zero_point"], buffers["minval"]
        else:
            qparams = calculator.get_qparams()
        if qparams[0].numel() == 0:
            raise RuntimeError(
                f"The quantizer of {self.tensor_fqn!r} has no scale, because its observer has seen no tensor. Run "
                "prepare or a calibration batch through it, load a calibrated state_dict, or turn its observer on."
            )
        return qparams

    def _current_grid(self) -> Grid:
        grid = self._grid
        if grid is None or (grid.dtype, grid.quant_min, grid.quant_max, grid.formulation) != (
            self.dtype,
            self.quant_min,
            self.quant_max,
            self.qformulation,
        ):
            formulation = QuantizationFormulation(self.qformulation).value
            grid = Grid(self.dtype, self.quant_min, self.quant_max, formulation)
            if not torch.compiler.is_compiling():  # a traced change of an attribute would have the graph compiled anew
                self._grid = grid
        return grid

    def _warn_and_disable(self, error: Exception) -> None:
        _logger.warning("%s (%s) is not quantized: %s.", self.tensor_fqn, self.quantization_target.value, error)
        self._set_switch("_disabled", True)

    def _is_fused(self) -> bool:
        """Return whether one kernel may do what the overridable methods describe."""
        return False

    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        """Fake-quantize in float32 and return the tensor's own dtype."""
        y = self._fused_fake_quant_dequant(tensor.to(torch.float32), scale, zero_point, minval)
        return y.to(tensor.dtype)

    @abstractmethod
    def quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> torch.Tensor:
        """Return the codes of ``tensor``.

        Args:
            tensor: floating point.
            scale: one entry per block.
            zero_point: like ``scale``; None for float formats.
            minval: like ``scale``; None for float formats.
            cast_to_target_dtype: return the codes in ``target_dtype``; else in the dtype of ``tensor``.
        """

    @abstractmethod
    def dequantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return the values that the codes ``tensor`` stand for, computed in float32, as ``output_dtype``."""

    @abstractmethod
    def _fused_fake_quant_dequant(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        """Quantize and dequantize a float32 tensor with a straight-through gradient; return float32."""

    def calculate_qparams(self) -> QParams:
        """Return the stored ``(scale, zero_point, minval)``; the last two are None for float formats."""
        return self._stateful().get_qparams()

    def set_export_mode(self, enabled: bool = True) -> None:
        """Freeze the parameters for export, or let them change again."""
        self._stateful().set_export_mode(enabled)

    def reset_statistics(self) -> None:
        """Have the calculator forget what it observed as soon as it sees a further tensor."""
        if not self.is_stateless:
            self._stateful().reset_statistics()

    def check_health(self) -> list[str]:
        """Return what is wrong with the parameters, one sentence each that names the tensor; reads the device."""
        if self.is_stateless or self.is_disabled():
            return []
        return [f"{self.tensor_fqn}: {problem}" for problem in self._stateful().check_health()]

    def clear_weight_memory(self) -> None:
        """Forget the kept quantized weight; call it after writing to a weight through ``.data`` on a GPU."""
        self._memory.forget()

    def _stateful(self) -> StatefulQParamsCalculatorBase:
        calculator: Any = self.qparams_calculator
        return calculator  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a kept quantized weight is freed for training."""
        if mode:
            self._memory.drop_output()
        return super().train(mode)

    def convert(self, model: torch.fx.GraphModule, observer_node: torch.fx.Node) -> None:
        """Do nothing, so that torchao's ``convert_pt2e`` leaves this simulator where it stands."""

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialConstructor[Self]:
        """Return a constructor of this class with some arguments given."""
        return with_args(cls, **kwargs)

    def extra_repr(self) -> str:
        """Return the formulation and the switches as text."""
        self._sync_switches()
        observer = "on" if self._observer_on else "off"
        fake_quant = "on" if self._fake_quant_on else "off"
        return f"qformulation={self.qformulation}, observer={observer}, fake_quant={fake_quant}"


@FakeQuantizeImplBase.register("default")
class _DefaultFakeQuantizeImpl(FakeQuantizeImplBase):
    """Integers in both formulations, FP8 and FP4, by the kernels of ``bitwright.kernels``."""

    def _is_fused(self) -> bool:
        return type(self)._fused_fake_quant_dequant is _DefaultFakeQuantizeImpl._fused_fake_quant_dequant

    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._is_fused():  # the kernel computes in float32 by itself
            return kernels.fake_quantize(
                tensor,
                scale,
                zero_point,
                minval,
                block_size=self._block_size(tensor.shape),
                grid=self._current_grid(),
            )
        return super()._fake_quantize(tensor, scale, zero_point, minval)

    def _fused_fake_quant_dequant(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        block_size = self._block_size(tensor.shape)
        return kernels.fake_quantize(
            tensor, scale, zero_point, minval, block_size=block_size, grid=self._current_grid()
        )

    def quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> torch.Tensor:
        """Return the codes of ``tensor``; see the base class."""
        block_size = self.get_block_size(tensor.shape)
        codes = kernels.quantize(tensor, scale, zero_point, minval, block_size=block_size, grid=self._current_grid())
        return codes.to(self.target_dtype if cast_to_target_dtype else tensor.dtype)

    def dequantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return the values that codes stand for; see the base class."""
        return kernels.dequantize(
            tensor,
            scale,
            zero_point,
            minval,
            block_size=self.get_block_size(tensor.shape),
            grid=self._current_grid(),
            output_dtype=output_dtype,
        )


def fp4_forward(tensor: torch.Tensor) -> torch.Tensor:
    """Round to the nearest FP4 (E2M1) value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Halfway values go to the even code, larger ones to 6, and NaN stays NaN.

    Args:
        tensor: float32, any shape.
    """
    return round_to_fp4(tensor)


def _is_in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _needs_grad(weight: torch.Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


_torchao.register_fake_quantize(FakeQuantizeImplBase)
