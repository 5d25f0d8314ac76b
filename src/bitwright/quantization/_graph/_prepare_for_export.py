"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from bitwright.export.coreml_graph import ACTIVATION_PREFIX as MIL_ACT_QUANT_MODULE_PREFIX

__all__ = ["MIL_ACT_QUANT_MODULE_PREFIX"]
