"""How a model is palettized, module by module."""

from __future__ import annotations

from typing import Any, ClassVar, Self, final

from pydantic import PositiveInt, model_validator

from bitwright.config import (
    CompressionConfig,
    ModuleCompressionConfig,
    OpCompressionConfig,
    WeightOnlyModuleValidationMixin,
    WeightOnlyOpValidationMixin,
)
from bitwright.palettization.spec import PalettizationSpec, default_weight_palettization_spec

from ._presets import KMeansPalettizerPresets, ModuleKMeansPalettizerPresets
from .pat_schedule import PATSchedule
from .vector_kmeans import VectorKMeansConfig

__all__ = ["KMeansPalettizerConfig", "ModuleKMeansPalettizerConfig", "OpKMeansPalettizerConfig"]


class OpKMeansPalettizerConfig(WeightOnlyOpValidationMixin, OpCompressionConfig[PalettizationSpec]):
    """Palettization of an op's state; an omitted ``op_state_spec`` is 4 bit for ``weight`` and ``in_proj_weight``.

    Raises:
        pydantic.ValidationError: also when an input or output spec is set, as only weights are palettized.
    """

    @classmethod
    def get_default_input_spec(cls) -> dict[str | int, PalettizationSpec | None]:
        """Return nothing: activations are not palettized."""
        return {}

    @classmethod
    def get_default_output_spec(cls) -> dict[str | int, PalettizationSpec | None]:
        """Return nothing: activations are not palettized."""
        return {}

    @classmethod
    def get_default_state_spec(cls) -> dict[str, PalettizationSpec | None]:
        """Return the default spec for ``weight``, and for the joint projection of an attention module."""
        return {"weight": default_weight_palettization_spec(), "in_proj_weight": default_weight_palettization_spec()}


@final
class ModuleKMeansPalettizerConfig(
    WeightOnlyModuleValidationMixin, ModuleCompressionConfig[OpKMeansPalettizerConfig, PalettizationSpec]
):
    """Palettization of a module's weights, with the fields of :class:`~bitwright.config.ModuleCompressionConfig`.

    Attributes:
        enable_fast_kmeans_mode: find scalar palettes from a histogram of the weight, a little off the optimum;
            False finds the optimum itself. Must be False where ``op_state_spec`` has ``cluster_dim > 1``; as in
            coreai-opt the other sections are not checked, and their vectors are clustered as without it.
        rounding_precision: accepted for code written for coreai-opt, without effect: the histogram follows the range
            of the weight.
        pat_schedule: when palettization starts in training; None for at once.
        vector_kmeans_config: how palettes of vectors are sought; only where some spec has ``cluster_dim > 1``.
        presets: ready-made configs, e.g. ``ModuleKMeansPalettizerConfig.presets.w4()``.
    """

    presets: ClassVar[ModuleKMeansPalettizerPresets]

    enable_fast_kmeans_mode: bool = True
    rounding_precision: PositiveInt = 4
    pat_schedule: PATSchedule | None = None
    vector_kmeans_config: VectorKMeansConfig | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot subclass ModuleKMeansPalettizerConfig, which is final.")

    @model_validator(mode="after")
    def _refuse_fast_vectors(self) -> Self:
        if not self.enable_fast_kmeans_mode:
            return self
        for key, spec in (self.op_state_spec or {}).items():
            if spec is not None and spec.cluster_dim > 1:
                raise ValueError(
                    f"op_state_spec[{key!r}] has cluster_dim={spec.cluster_dim}, but the fast k-means mode is for "
                    "scalar palettes (cluster_dim=1) only. Set enable_fast_kmeans_mode=False in this module config."
                )
        return self

    @model_validator(mode="after")
    def _refuse_settings_of_no_vectors(self) -> Self:
        if self.vector_kmeans_config is None:
            return self
        ops = (*(self.op_type_config or {}).values(), *(self.op_name_config or {}).values())
        sections = [self.op_state_spec, self.module_state_spec, *(op.op_state_spec for op in ops if op is not None)]
        specs = [spec for section in sections for spec in (section or {}).values() if spec is not None]
        if all(spec.cluster_dim == 1 for spec in specs):
            raise ValueError(
                "vector_kmeans_config is for palettes of vectors, and no spec of this module config has cluster_dim > "
                "1. Leave it out, or set cluster_dim."
            )
        return self


@final
class KMeansPalettizerConfig(CompressionConfig[ModuleKMeansPalettizerConfig]):
    """Palettization of a whole model, with the fields of :class:`~bitwright.config.CompressionConfig`.

    Without arguments, 4 bit and one palette per weight. Its section of a config file is
    ``kmeans_palettization_config``; ``palettization_spec`` is free for YAML anchors.

    Attributes:
        presets: ready-made configs, e.g. ``KMeansPalettizerConfig.presets.w4()``.

    Example:
        >>> KMeansPalettizerConfig.presets.w6(group_size=8).global_config.op_state_spec["weight"].n_bits
        6
    """

    _CONFIG_KEY: ClassVar[str] = "kmeans_palettization_config"
    _SPEC_KEY: ClassVar[str] = "palettization_spec"

    presets: ClassVar[KMeansPalettizerPresets]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot subclass KMeansPalettizerConfig, which is final.")


ModuleKMeansPalettizerConfig.presets = ModuleKMeansPalettizerPresets(ModuleKMeansPalettizerConfig)
KMeansPalettizerConfig.presets = KMeansPalettizerPresets(KMeansPalettizerConfig, ModuleKMeansPalettizerConfig.presets)
