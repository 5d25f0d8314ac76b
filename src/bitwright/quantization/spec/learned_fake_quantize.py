"""Fake quantizers with a gradient for their own parameters: LSQ, LSQ+ and PACT, by the formulas of the papers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.autograd import forward_ad

from bitwright import kernels
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels import Grid
from bitwright.kernels.grid import block_view_shape

from .fake_quantize import FakeQuantizeImplBase, _DefaultFakeQuantizeImpl
from .learned import (
    LearnedQParamsCalculatorBase,
    LSQPlusQParamsCalculator,
    LSQQParamsCalculator,
    PACTQParamsCalculator,
)
from .qparams_calculator import QParamsCalculatorBase

__all__ = ["LSQFakeQuantize", "LSQPlusFakeQuantize", "LearnedFakeQuantizeBase", "PACTFakeQuantize"]

_Block = tuple[int, ...]


class _Blocks:
    """Reductions and broadcasts between a tensor and one number per block."""

    def __init__(self, shape: _Block, block_size: _Block) -> None:
        self.view, self.inner, self.wide, _ = block_view_shape(shape, block_size)

    def spread(self, per_block: torch.Tensor) -> torch.Tensor:
        return per_block.reshape(self.wide if per_block.numel() > 1 else (1,) * len(self.wide))

    def total(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        summed = values.sum(self.inner) if self.inner else values
        return summed.reshape(like.shape)


def _sign(parameter: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the parameter's size, by which alone it counts."""
    return torch.where(parameter < 0, -1.0, 1.0).to(parameter.dtype)


class _LearnedStep(torch.autograd.Function):
    """Fake quantization with gradients for step ``s`` and offset ``b``.

    Inside the range ``dv'/dv = 1``, ``dv'/ds = (v' - v) / s``, ``dv'/db = 0``; outside ``dv'/dv = 0``,
    ``dv'/ds = n`` or ``p``, ``dv'/db = 1`` (LSQ eq. 3, LSQ+ eq. 4 and 6). Gradients of ``s`` and ``b`` are multiplied
    by ``gradient_scale``. With an offset, ``n`` and ``p`` are counted from the code ``origin``; ``dv'/db = 0`` where it
    ``stays``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        learned_scale: torch.Tensor,
        learned_offset: torch.Tensor | None,
        step: torch.Tensor,
        zero_point: torch.Tensor,
        minval: torch.Tensor,
        origin: torch.Tensor | None,
        stays: torch.Tensor | None,
        block_size: _Block,
        grid: Grid,
        gradient_scale: float,
    ) -> torch.Tensor:
        return kernels.fake_quantize(x.detach(), step, zero_point, minval, block_size=block_size, grid=grid)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, learned_scale, learned_offset, step, zero_point, minval, origin, stays = inputs[:8]
        # The result is not saved: whoever gets it may change it in place. Zero point and scale may be measured anew.
        ctx.save_for_backward(x, step, zero_point.clone(), minval, _sign(learned_scale), origin, stays)
        ctx.anchored = learned_offset is not None
        ctx.block_size, ctx.grid, ctx.gradient_scale = inputs[8:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, step, zero_point, minval, sign, origin, stays = ctx.saved_tensors
        grad_offset = None
        grad_x, along, outside = kernels.learned_gradient(
            grad, x, step, zero_point, minval, block_size=ctx.block_size, grid=ctx.grid, anchored=ctx.anchored
        )
        if ctx.anchored:
            along = along - origin * step * outside
            grad_offset = outside * ~stays * ctx.gradient_scale
        # The step is the size of the parameter, which may be negative.
        grad_scale = along / (step * sign) * ctx.gradient_scale
        return grad_x, grad_scale, grad_offset, *(None,) * 8


class _LearnedClip(torch.autograd.Function):
    """PACT: ``dv'/dv = 1`` where ``0 <= v < alpha``, ``dv'/dalpha = 1`` where ``v >= alpha``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        alpha: torch.Tensor,
        step: torch.Tensor,
        zero_point: torch.Tensor,
        minval: torch.Tensor,
        block_size: _Block,
        grid: Grid,
    ) -> torch.Tensor:
        return kernels.fake_quantize(x.detach(), step, zero_point, minval, block_size=block_size, grid=grid)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, alpha, _, _, _, block_size, _ = inputs
        ctx.save_for_backward(x, alpha.detach().clone())  # it may be measured anew
        ctx.block_size = block_size

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, alpha = ctx.saved_tensors
        blocks = _Blocks(tuple(x.shape), ctx.block_size)
        values = x.to(torch.float32).reshape(blocks.view)
        above = values >= blocks.spread(alpha.abs())
        grad_x = grad * ((values >= 0) & ~above).reshape(x.shape) if ctx.needs_input_grad[0] else None
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            grad_alpha = blocks.total(grad.to(torch.float32).reshape(blocks.view) * above, alpha) * _sign(alpha)
        return grad_x, grad_alpha, *(None,) * 5


class LearnedFakeQuantizeBase(_DefaultFakeQuantizeImpl):
    """Base of fake quantizers that train their calculator's parameters.

    A calculator of another kind, such as a spec's default, is replaced by one of the class ``calculator_cls`` with the
    same settings and range calculator, so that naming the fake quantizer in a spec is enough.
    """

    calculator_cls: ClassVar[type[LearnedQParamsCalculatorBase]]

    def __init__(self, *, qparams_calculator: QParamsCalculatorBase, **kwargs: Any) -> None:
        if not isinstance(qparams_calculator, self.calculator_cls):
            given = qparams_calculator
            if given._TAKES_SINGLE_RANGES:  # which the learned one does not
                given.range_calculator.accumulates = type(given.range_calculator).accumulates
            qparams_calculator = self.calculator_cls(
                dtype=given.dtype,
                qscheme=given.qscheme,
                granularity=given.granularity,
                target_dtype=given.target_dtype,
                quant_min=given.quant_min,
                quant_max=given.quant_max,
                range_calculator=given.range_calculator,
                float_range=given.float_range,
                scale_dtype=given.scale_dtype,
            )
        super().__init__(qparams_calculator=qparams_calculator, **kwargs)

    def _is_fused(self) -> bool:
        return False

    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        if forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{self.tensor_fqn}: a learned range has no derivative in forward mode (torch.func.jvp, jacfwd, "
                "hessian, torch.autograd.forward_ad). Take reverse mode: torch.func.vjp, jacrev, "
                "torch.autograd.functional."
            )
        if not self._learns(tensor):
            return self._fused_fake_quant_dequant(tensor, scale, zero_point, minval)
        return self._learn(tensor, scale, zero_point, minval, self._block_size(tensor.shape))

    def _learns(self, tensor: torch.Tensor) -> bool:
        calculator: Any = self.qparams_calculator
        return torch.is_grad_enabled() and (
            tensor.requires_grad or any(p.requires_grad for p in calculator._parameters.values())
        )

    def _learn(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        block_size: _Block,
    ) -> torch.Tensor:
        """Fake-quantize with gradients for the learned parameters."""
        raise NotImplementedError

    def _gradient_scale(self, tensor: torch.Tensor, scale: torch.Tensor) -> float:
        """Return ``1 / sqrt(N * Qp)`` (LSQ section 2.2): N weights, or features of one sample, share a step."""
        shared = tensor.numel() / max(1, scale.numel())
        if self.quantization_target == CompressionTargetTensor.ACTIVATION and tensor.ndim > 1:
            shared = shared / tensor.shape[0] if tensor.shape[0] else shared
        largest = max(abs(self.quant_max), 1)
        return 1.0 / math.sqrt(max(shared, 1.0) * largest)


@FakeQuantizeImplBase.register("lsq")
class LSQFakeQuantize(LearnedFakeQuantizeBase):
    """Learned step size quantization, arXiv 1902.08153."""

    calculator_cls = LSQQParamsCalculator

    def _learn(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        block_size: _Block,
    ) -> torch.Tensor:
        calculator: Any = self.qparams_calculator
        assert zero_point is not None
        y: torch.Tensor = _LearnedStep.apply(  # type: ignore[no-untyped-call]
            tensor, calculator.scale, None, scale, zero_point, minval, None, None,
            block_size, self._current_grid(), self._gradient_scale(tensor, scale),
        )  # fmt: skip
        return y


@FakeQuantizeImplBase.register("lsq_plus")
class LSQPlusFakeQuantize(LearnedFakeQuantizeBase):
    """Learned step and offset, arXiv 2004.09576."""

    calculator_cls = LSQPlusQParamsCalculator

    def _learn(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        block_size: _Block,
    ) -> torch.Tensor:
        calculator: Any = self.qparams_calculator
        assert zero_point is not None
        assert minval is not None
        y: torch.Tensor = _LearnedStep.apply(  # type: ignore[no-untyped-call]
            tensor, calculator.scale, calculator.offset, scale, zero_point, minval,
            *calculator.origin_of_codes(calculator.offset.detach()),
            block_size, self._current_grid(), self._gradient_scale(tensor, scale),
        )  # fmt: skip
        return y


@FakeQuantizeImplBase.register("pact")
class PACTFakeQuantize(LearnedFakeQuantizeBase):
    """Learned clipping of activations that are not negative, arXiv 1805.06085.

    Raises:
        ValueError: the tensor is a weight.
    """

    calculator_cls = PACTQParamsCalculator

    def __init__(self, *, qparams_calculator: QParamsCalculatorBase, **kwargs: Any) -> None:
        if qparams_calculator.quantization_target != CompressionTargetTensor.ACTIVATION:
            raise ValueError(
                "fake_quantize_cls 'pact' clips at zero, which is for activations behind a ReLU; the tensor is a "
                f"{qparams_calculator.quantization_target.value}. Use 'lsq' for weights."
            )
        super().__init__(qparams_calculator=qparams_calculator, **kwargs)

    def _learn(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        block_size: _Block,
    ) -> torch.Tensor:
        calculator: Any = self.qparams_calculator
        y: torch.Tensor = _LearnedClip.apply(  # type: ignore[no-untyped-call]
            tensor, calculator.alpha, scale, zero_point, minval, block_size, self._current_grid()
        )
        return y
