"""Ready-made quantization configs.

All are symmetric and have no offsets to store. Weights: one scale per output channel, or per block along the input
axis. ``axis=None`` leaves the axis to the op that uses the weight (0 for linear, convolution and embedding; blocks run
along 1; the other way round for transposed convolutions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationSpec,
    default_activation_quantization_spec,
)

from .execution_mode import ExecutionMode

if TYPE_CHECKING:
    from .quantization_config import ModuleQuantizerConfig, QuantizerConfig

__all__ = ["ModuleQuantizerPresets", "QuantizerPresets"]

_MX_BLOCK = 32  # OCP Microscaling Formats (MX) v1.0, section 5.2: all concrete formats have blocks of 32


def _per_channel(dtype: str, axis: int | None) -> QuantizationSpec:
    return QuantizationSpec(dtype=dtype, granularity=PerChannelGranularity(axis=axis))


def _per_block(dtype: str, axis: int | None, block_size: int, **fields: Any) -> QuantizationSpec:
    return QuantizationSpec(dtype=dtype, granularity=PerBlockGranularity(axis=axis, block_size=block_size), **fields)


def _searched_int4() -> QuantizationSpec:
    return QuantizationSpec(dtype="int4", qscheme="asymmetric", range_calculator_cls="mse")


class ModuleQuantizerPresets:
    """Ready-made module configs, bound as ``ModuleQuantizerConfig.presets``."""

    def __init__(self, owner_cls: type[ModuleQuantizerConfig]) -> None:
        self._owner_cls = owner_cls

    def _config(
        self,
        weight: QuantizationSpec,
        inputs: QuantizationSpec | None = None,
        outputs: QuantizationSpec | None = None,
    ) -> ModuleQuantizerConfig:
        return self._owner_cls(
            op_input_spec=None if inputs is None else {"*": inputs},
            op_output_spec=None if outputs is None else {"*": outputs},
            op_state_spec={"weight": weight},
        )

    def w8(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int8 weights, one scale per channel; activations stay in float.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        return self._config(_per_channel("int8", axis))

    def w4(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int4 weights, one scale per channel; activations stay in float.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        return self._config(_per_channel("int4", axis))

    def w4_per_block(self, *, block_size: int = 32, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int4 weights, one scale per block along one axis; activations stay in float.

        Args:
            block_size: elements of ``axis`` in a block; must divide the dimension.
            axis: axis that is divided; None for the op's input axis.
        """
        return self._config(_per_block("int4", axis, block_size))

    def w8a8(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int8 weights per channel, and int8 activations per tensor whose range is learnt in calibration.

        Differs from the default config in the weight's channel axis, which follows the op here and is 0 there.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        activation = default_activation_quantization_spec()
        return self._config(_per_channel("int8", axis), activation, activation)

    def w4a8(self, *, axis: int | None = None, block_size: int | None = None) -> ModuleQuantizerConfig:
        """Return int4 weights, and int8 activations per tensor whose range is learnt in calibration.

        Args:
            axis: channel axis, or with ``block_size`` the axis that is divided; None for the op's own.
            block_size: elements in a block of the weight; None for one scale per channel.
        """
        activation = default_activation_quantization_spec()
        weight = _per_channel("int4", axis) if block_size is None else _per_block("int4", axis, block_size)
        return self._config(weight, activation, activation)

    def w4a4(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int4 weights per channel, and int4 inputs per tensor whose range has the least squared error.

        Meant for training (``training_mode``) behind a calibration, which finds the ranges: sixteen levels between the
        extremes of an activation waste most of them on outliers. Outputs stay in float, as the next op quantizes what
        it reads.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        return self._config(_per_channel("int4", axis), _searched_int4())

    def w2a4(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return int2 weights per channel whose step is learned (LSQ), and the int4 inputs of :meth:`w4a4`.

        Meant for training behind a calibration. With four codes, a range that follows the largest weight of a channel
        jumps from step to step and rounds most weights to zero. Give the optimizer
        ``bitwright.quantization.qat.parameter_groups``, and freeze batch norms in the second half of the training
        (``QATSchedule.freeze_batch_norm``): their averages lag behind weights that jump between so few codes.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        weight = QuantizationSpec(
            dtype="int2",
            granularity=PerChannelGranularity(axis=axis),
            fake_quantize_cls="lsq",
            range_calculator_cls="mse",
        )
        return self._config(weight, _searched_int4())

    def w8a8_dynamic(self, *, axis: int | None = None, per_token: bool = True) -> ModuleQuantizerConfig:
        """Return int8 weights per channel, and int8 inputs whose scale is computed anew in every forward.

        Needs no calibration. Outputs stay in float, as the next op quantizes what it reads.

        Args:
            axis: channel axis of the weight; None for the op's own.
            per_token: one scale for each row of an input (each index of all dimensions but the last), which suits
                linear layers; False for one scale per tensor.
        """
        inputs = QuantizationSpec(
            dtype="int8",
            granularity=PerTokenGranularity() if per_token else PerTensorGranularity(),
            qparam_calculator_cls="dynamic",
        )
        return self._config(_per_channel("int8", axis), inputs)

    def fp8(self, *, axis: int | None = None) -> ModuleQuantizerConfig:
        """Return FP8 (e4m3) weights per channel, and FP8 activations per tensor with a range learnt in calibration.

        Args:
            axis: channel axis of the weight; None for the op's own.
        """
        activation = QuantizationSpec(dtype="float8_e4m3fn", qparam_calculator_cls="moving_average")
        return self._config(_per_channel("float8_e4m3fn", axis), activation, activation)

    def mxfp8(self, *, axis: int | None = None, activations: bool = False) -> ModuleQuantizerConfig:
        """Return MXFP8 weights: FP8 (e4m3) in blocks of 32 with a power of two as scale.

        Source of the format: OCP Microscaling Formats (MX) v1.0, section 5.2. In a convolution a block also spans the
        kernel window.

        Args:
            axis: axis that is divided into blocks; None for the op's input axis.
            activations: quantize inputs too, in blocks of 32 along their last axis, anew in every forward.
        """
        return self._mx("float8_e4m3fn", axis, activations)

    def mxfp4(self, *, axis: int | None = None, activations: bool = False) -> ModuleQuantizerConfig:
        """Return MXFP4 weights: FP4 (e2m1) in blocks of 32 with a power of two as scale.

        Source of the format: OCP Microscaling Formats (MX) v1.0, section 5.2. In a convolution a block also spans the
        kernel window.

        Args:
            axis: axis that is divided into blocks; None for the op's input axis.
            activations: quantize inputs too, in blocks of 32 along their last axis, anew in every forward.
        """
        return self._mx("float4_e2m1fn", axis, activations)

    def _mx(self, dtype: str, axis: int | None, activations: bool) -> ModuleQuantizerConfig:
        scale: dict[str, Any] = {"scale_dtype": "float8_e8m0fnu"}
        inputs = _per_block(dtype, -1, _MX_BLOCK, qparam_calculator_cls="dynamic", **scale) if activations else None
        return self._config(_per_block(dtype, axis, _MX_BLOCK, **scale), inputs)


class QuantizerPresets:
    """Ready-made configs, bound as ``QuantizerConfig.presets``: a module preset as ``global_config``."""

    def __init__(self, owner_cls: type[QuantizerConfig], modules: ModuleQuantizerPresets) -> None:
        self._owner_cls = owner_cls
        self._modules = modules

    def _wrap(self, module_config: ModuleQuantizerConfig, execution_mode: ExecutionMode) -> QuantizerConfig:
        return self._owner_cls(global_config=module_config, execution_mode=execution_mode)

    def w8(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w8` for the whole model."""
        return self._wrap(self._modules.w8(axis=axis), execution_mode)

    def w4(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w4` for the whole model."""
        return self._wrap(self._modules.w4(axis=axis), execution_mode)

    def w4_per_block(
        self,
        *,
        block_size: int = 32,
        axis: int | None = None,
        execution_mode: ExecutionMode = ExecutionMode.GRAPH,
    ) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w4_per_block` for the whole model."""
        return self._wrap(self._modules.w4_per_block(block_size=block_size, axis=axis), execution_mode)

    def w8a8(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w8a8` for the whole model."""
        return self._wrap(self._modules.w8a8(axis=axis), execution_mode)

    def w4a8(
        self,
        *,
        axis: int | None = None,
        block_size: int | None = None,
        execution_mode: ExecutionMode = ExecutionMode.GRAPH,
    ) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w4a8` for the whole model."""
        return self._wrap(self._modules.w4a8(axis=axis, block_size=block_size), execution_mode)

    def w4a4(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w4a4` for the whole model."""
        return self._wrap(self._modules.w4a4(axis=axis), execution_mode)

    def w2a4(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w2a4` for the whole model."""
        return self._wrap(self._modules.w2a4(axis=axis), execution_mode)

    def w8a8_dynamic(
        self,
        *,
        axis: int | None = None,
        per_token: bool = True,
        execution_mode: ExecutionMode = ExecutionMode.GRAPH,
    ) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.w8a8_dynamic` for the whole model."""
        return self._wrap(self._modules.w8a8_dynamic(axis=axis, per_token=per_token), execution_mode)

    def fp8(self, *, axis: int | None = None, execution_mode: ExecutionMode = ExecutionMode.GRAPH) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.fp8` for the whole model."""
        return self._wrap(self._modules.fp8(axis=axis), execution_mode)

    def mxfp8(
        self,
        *,
        axis: int | None = None,
        activations: bool = False,
        execution_mode: ExecutionMode = ExecutionMode.GRAPH,
    ) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.mxfp8` for the whole model."""
        return self._wrap(self._modules.mxfp8(axis=axis, activations=activations), execution_mode)

    def mxfp4(
        self,
        *,
        axis: int | None = None,
        activations: bool = False,
        execution_mode: ExecutionMode = ExecutionMode.GRAPH,
    ) -> QuantizerConfig:
        """Return :meth:`ModuleQuantizerPresets.mxfp4` for the whole model."""
        return self._wrap(self._modules.mxfp4(axis=axis, activations=activations), execution_mode)
