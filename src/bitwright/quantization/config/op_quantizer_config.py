"""How the tensors around one op are quantized."""

from __future__ import annotations

from bitwright.config import OpCompressionConfig
from bitwright.config.spec_dicts import ALL_TENSORS
from bitwright.quantization.spec import (
    QuantizationSpec,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)

__all__ = ["OpQuantizerConfig"]


class OpQuantizerConfig(OpCompressionConfig[QuantizationSpec]):
    """Quantization of an op's inputs, outputs and state.

    An omitted ``op_input_spec`` or ``op_output_spec`` gives all tensors the spec of
    :func:`~bitwright.quantization.spec.default_activation_quantization_spec`, an omitted ``op_state_spec`` gives
    ``weight`` that of :func:`~bitwright.quantization.spec.default_weight_quantization_spec`; both are int8. None
    switches a field off.

    Example:
        >>> spec = QuantizationSpec(dtype="int4", granularity={"type": "per_channel", "axis": 0})
        >>> config = OpQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
        >>> config.op_input_spec
        {'*': None}
    """

    @classmethod
    def get_default_input_spec(cls) -> dict[str | int, QuantizationSpec | None]:
        """Return int8 activations for all inputs."""
        return {ALL_TENSORS: default_activation_quantization_spec()}

    @classmethod
    def get_default_output_spec(cls) -> dict[str | int, QuantizationSpec | None]:
        """Return int8 activations for all outputs."""
        return {ALL_TENSORS: default_activation_quantization_spec()}

    @classmethod
    def get_default_state_spec(cls) -> dict[str, QuantizationSpec | None]:
        """Return int8 for ``weight``."""
        return {"weight": default_weight_quantization_spec()}
