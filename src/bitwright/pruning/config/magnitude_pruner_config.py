"""How a model is pruned, module by module."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from bitwright.config import (
    CompressionConfig,
    ModuleCompressionConfig,
    OpCompressionConfig,
    WeightOnlyModuleValidationMixin,
    WeightOnlyOpValidationMixin,
)
from bitwright.pruning.spec import PruningSpec, default_weight_pruning_spec

from .sparsity_schedule import SparsityScheduleBase

__all__ = ["MagnitudePrunerConfig", "ModuleMagnitudePrunerConfig", "OpMagnitudePrunerConfig"]


class OpMagnitudePrunerConfig(WeightOnlyOpValidationMixin, OpCompressionConfig[PruningSpec]):
    """Pruning of an op's state; an omitted ``op_state_spec`` prunes ``weight`` and ``in_proj_weight`` to 50 %.

    Raises:
        pydantic.ValidationError: also when an input or output spec is set, as only weights are pruned.
    """

    @classmethod
    def get_default_input_spec(cls) -> dict[str | int, PruningSpec | None]:
        """Return nothing: activations are not pruned."""
        return {}

    @classmethod
    def get_default_output_spec(cls) -> dict[str | int, PruningSpec | None]:
        """Return nothing: activations are not pruned."""
        return {}

    @classmethod
    def get_default_state_spec(cls) -> dict[str, PruningSpec | None]:
        """Return the default spec for ``weight``, and for the joint projection of an attention module."""
        return {"weight": default_weight_pruning_spec(), "in_proj_weight": default_weight_pruning_spec()}


class ModuleMagnitudePrunerConfig(
    WeightOnlyModuleValidationMixin, ModuleCompressionConfig[OpMagnitudePrunerConfig, PruningSpec]
):
    """Pruning of the weights inside a module, with the fields of :class:`~bitwright.config.ModuleCompressionConfig`.

    Attributes:
        sparsity_schedule: how sparsity grows with ``pruner.step()``; a schedule or a mapping such as
            ``{"type": "polynomial_decay", "total_iters": 1000}``. None: the target from the beginning.
    """

    sparsity_schedule: Annotated[
        SparsityScheduleBase | None, BeforeValidator(SparsityScheduleBase.maybe_build_from_dict)
    ] = None


class MagnitudePrunerConfig(CompressionConfig[ModuleMagnitudePrunerConfig]):
    """Pruning of a whole model, with the fields of :class:`~bitwright.config.CompressionConfig`.

    Without arguments, half of all weights by magnitude. Its section of a config file is ``magnitude_pruning_config``;
    ``pruning_spec`` is free for YAML anchors.

    Example:
        >>> MagnitudePrunerConfig().without("lm_head").module_name_configs["lm_head"].op_state_spec
        {'*': None}
    """

    _CONFIG_KEY: ClassVar[str] = "magnitude_pruning_config"
    _SPEC_KEY: ClassVar[str] = "pruning_spec"
