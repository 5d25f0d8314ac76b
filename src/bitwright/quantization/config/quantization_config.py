"""How a model is quantized, module by module."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Self, final

from pydantic import model_validator

from bitwright.config import CompressionConfig, ModuleCompressionConfig
from bitwright.quantization.spec import QuantizationSpec

from .execution_mode import ExecutionMode, InvalidExecutionModeError
from .kv_cache import KVCacheQuantConfig
from .op_quantizer_config import OpQuantizerConfig
from .presets import ModuleQuantizerPresets, QuantizerPresets
from .qat_schedule import QATSchedule

__all__ = [
    "ExecutionMode",
    "InvalidExecutionModeError",
    "KVCacheQuantConfig",
    "ModuleQuantizerConfig",
    "OpQuantizerConfig",
    "QATSchedule",
    "QuantizerConfig",
]

_logger = logging.getLogger(__name__)

_QUANTIZATION_CONFIG = "quantization_config"
_QUANTIZATION_SPEC = "quantization_spec"


@final
class ModuleQuantizerConfig(ModuleCompressionConfig[OpQuantizerConfig, QuantizationSpec]):
    """Quantization of the ops inside a module, and of the module's boundary.

    The fields of :class:`~bitwright.config.ModuleCompressionConfig`, with the defaults of :class:`OpQuantizerConfig`
    for the three op-level fields: int8 for all inputs and outputs of ops and for ``weight``.

    Attributes:
        qat_schedule: when the module's observers and fake quantization run in training; None for always.
        presets: ready-made configs, e.g. ``ModuleQuantizerConfig.presets.w8()``.

    Example:
        >>> config = ModuleQuantizerConfig(op_type_config={"softmax": None})
        >>> config.op_type_config["softmax"].op_input_spec
        {'*': None}
    """

    presets: ClassVar[ModuleQuantizerPresets]

    qat_schedule: QATSchedule | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot subclass ModuleQuantizerConfig, which is final.")


@final
class QuantizerConfig(CompressionConfig[ModuleQuantizerConfig]):
    """Quantization of a whole model.

    The fields of :class:`~bitwright.config.CompressionConfig`; without arguments, int8 for activations and weights of
    all modules. Its section of a config file is ``quantization_config``; ``quantization_spec`` is there for YAML
    anchors.

    Attributes:
        preserved_attributes: names of attributes of the model that a captured graph carries over.
        execution_mode: the front end that reads the model.
        kv_cache_quant_configs: by op type, how what enters a key-value cache is quantized; graph mode only.
        presets: ready-made configs, e.g. ``QuantizerConfig.presets.w4()``.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest), a bad value,
            ``kv_cache_quant_configs`` in eager mode, or module-level specs in ``global_config``.

    Example:
        >>> from torch import nn
        >>> config = QuantizerConfig.presets.w8().set_module_type(nn.Embedding, ModuleQuantizerConfig.presets.w4())
        >>> config.without("lm_head").execution_mode
        <ExecutionMode.GRAPH: 'graph'>
    """

    _CONFIG_KEY: ClassVar[str] = _QUANTIZATION_CONFIG
    _SPEC_KEY: ClassVar[str] = _QUANTIZATION_SPEC

    presets: ClassVar[QuantizerPresets]

    preserved_attributes: list[str] | None = None
    execution_mode: ExecutionMode = ExecutionMode.GRAPH
    kv_cache_quant_configs: dict[str, KVCacheQuantConfig] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot subclass QuantizerConfig, which is final.")

    @model_validator(mode="after")
    def _check_kv_cache(self) -> Self:
        if not self.kv_cache_quant_configs:
            return self
        if self.execution_mode is not ExecutionMode.GRAPH:
            raise ValueError(
                f"kv_cache_quant_configs is only supported with ExecutionMode.GRAPH (got {self.execution_mode!r}). "
                "Remove it or set execution_mode='graph'."
            )
        modules = [
            self.global_config,
            *(self.module_type_configs or {}).values(),
            *(self.module_name_configs or {}).values(),
        ]
        named = {key for module in modules if module is not None for key in module.op_type_config or {}}
        for key in sorted(named & self.kv_cache_quant_configs.keys()):
            _logger.warning(
                "Op type %r is in kv_cache_quant_configs and in an op_type_config; the former decides.", key
            )
        return self

    def set_execution_mode(self, mode: ExecutionMode | str) -> Self:
        """Set the front end that reads the model.

        Raises:
            ValueError: there is no such mode, or this config cannot be used with it; this object is as it was.
        """
        try:
            known = ExecutionMode(mode)
        except ValueError as error:
            raise ValueError(f"{error}. {InvalidExecutionModeError(mode)}") from None
        self.execution_mode = known
        return self


ModuleQuantizerConfig.presets = ModuleQuantizerPresets(ModuleQuantizerConfig)
QuantizerConfig.presets = QuantizerPresets(QuantizerConfig, ModuleQuantizerConfig.presets)
