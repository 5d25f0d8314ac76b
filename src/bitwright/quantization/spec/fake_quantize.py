"""Simulators of quantization: modules that map a tensor to what it decodes to after quantization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from bitwright import _torchao, kernels
from bitwright._utils.spec_utils import PartialConstructor, with_args
from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.formats import n_bits_of, round_to_fp4
from bitwright.kernels import reference

from ._forward import FakeQuantizeForward
from ._ste import _FusedFakeQuantizeIntSTE as _FusedFakeQuantizeIntSTE
from .granularity import QuantizationGranularity
from .qformulation import QuantizationFormulation
from .qparams_calculator import (
    QParams,
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from .qscheme import QuantizationScheme

__all__ = ["FakeQuantizeImplBase", "fp4_forward"]


class FakeQuantizeImplBase(FakeQuantizeForward, CompressionSimulatorBase, ABC):
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
        self.behind: nn.Module | None = None

    def __call__(self, tensor: torch.Tensor, *context: Any) -> Any:
        """Return the fake-quantized tensor; given more, what the module ``behind`` makes of it and of the rest."""
        if not context or self.behind is None:
            return super().__call__(tensor)
        behind: Any = self.behind
        y = behind.at_once(self, tensor, *context)
        return behind(super().__call__(tensor), *context) if y is None else y

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

    def keeps_input(self) -> bool:
        """Return whether the backward pass needs the tensor as it was quantized, so that nobody may change it."""
        return True

    @property
    def is_stateless(self) -> bool:
        """Whether the parameters are computed anew for every tensor; then the observer cannot be turned off."""
        return isinstance(self.qparams_calculator, StatelessQParamsCalculatorBase)

    def get_block_size(self, tensor_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the blocks that share parameters in a tensor of this shape.

        Raises:
            ValueError: the granularity does not fit the shape.
        """
        return self._block_size(torch.Size(tensor_shape))

    def enable_observer(self, enabled: bool = True) -> None:
        """Turn the gathering of statistics on or off; a stateless quantizer's cannot be turned off."""
        if enabled or not self.is_stateless:
            super().enable_observer(enabled)

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
            cast_to_target_dtype: return the codes in ``target_dtype``, without a gradient; else in the dtype of
                ``tensor``, with the gradient of the formula: rounding to integers has none, rounding to a float format
                that of the identity.
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
        """Return the values that the codes ``tensor`` stand for, computed in float32, as ``output_dtype``.

        The gradient is that of the formula, for codes, scale and minval.
        """

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

    def expect_new_weight(self) -> None:
        """Forget the kept quantized weight, and measure the range of the one that comes, unless the range is learned.

        PEFT's adapters ask for it when they are merged.
        """
        self._memory.forget()
        if type(self.qparams_calculator) is StaticQParamsCalculator:
            self.enable_observer()

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

    def keeps_input(self) -> bool:
        """Return whether the backward pass needs more than where values were clipped."""
        return not self._is_fused()

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
        recorded = not cast_to_target_dtype and _wants_gradient(tensor, scale, zero_point, minval)
        form: Any = reference if recorded else kernels
        codes: torch.Tensor = form.quantize(
            tensor, scale, zero_point, minval, block_size=block_size, grid=self._current_grid()
        )
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
        form: Any = reference if _wants_gradient(tensor, scale, zero_point, minval) else kernels
        values: torch.Tensor = form.dequantize(
            tensor,
            scale,
            zero_point,
            minval,
            block_size=self.get_block_size(tensor.shape),
            grid=self._current_grid(),
            output_dtype=output_dtype,
        )
        return values


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def fp4_forward(tensor: torch.Tensor) -> torch.Tensor:
    """Round to the nearest FP4 (E2M1) value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Halfway values go to the even code, larger ones to 6, and NaN stays NaN.

    Args:
        tensor: float32, any shape.
    """
    return round_to_fp4(tensor)


_torchao.register_fake_quantize(FakeQuantizeImplBase)
