"""The public functions of ``bitwright.casting`` under the module path that coreai-opt gives them."""

from ._api import cast_fp32_to_fp16, cast_int32_to_int16, cast_to_16_bit_precision

__all__ = ["cast_fp32_to_fp16", "cast_int32_to_int16", "cast_to_16_bit_precision"]
