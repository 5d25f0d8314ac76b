"""Quantization of what a cache-update op writes into a key-value cache."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, model_validator

from bitwright.config._strict import StrictModel
from bitwright.config.spec_dicts import spec_dict_is_active

from .op_quantizer_config import OpQuantizerConfig

__all__ = ["KVCacheQuantConfig"]


class KVCacheQuantConfig(StrictModel):
    """How the new keys or values that enter a cache-update op are quantized.

    Attributes:
        op_quantizer_config: its ``op_input_spec`` has one key, the position of the new keys or values among the op's
            inputs; its other two fields are off (None or ``{}``, given explicitly since omitting them means int8).

    Raises:
        pydantic.ValidationError: the inner config has another form, or there is an unknown field.
    """

    model_config = ConfigDict(frozen=True)

    op_quantizer_config: OpQuantizerConfig

    @property
    def quant_input_idx(self) -> int:
        """Position of the quantized input among the op's inputs."""
        (index,) = self.op_quantizer_config.op_input_spec or {}
        return int(index)

    @model_validator(mode="after")
    def _check_op_config(self) -> Self:
        inner = "KVCacheQuantConfig.op_quantizer_config"
        inputs = self.op_quantizer_config.op_input_spec or {}
        if len(inputs) != 1 or not all(type(key) is int and key >= 0 for key in inputs):
            raise ValueError(
                f"{inner}.op_input_spec must contain exactly one key, a non-negative int (the input index of the new "
                f"keys or values); got keys {list(inputs)}."
            )
        if not spec_dict_is_active(inputs):
            raise ValueError(f"{inner}.op_input_spec must map its key to a non-None QuantizationSpec.")
        for field, reason in (
            ("op_output_spec", "the cache holds what the input's spec says"),
            ("op_state_spec", "cache-update ops have no weights"),
        ):
            if spec_dict_is_active(getattr(self.op_quantizer_config, field)):
                raise ValueError(f"{inner}.{field} must be empty or None; {reason}. Set it to None explicitly.")
        return self
