"""Ready-made palettization configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.palettization.spec import PalettizationSpec, PerGroupedChannelGranularity

if TYPE_CHECKING:
    from .palettization_config import KMeansPalettizerConfig, ModuleKMeansPalettizerConfig

__all__ = ["KMeansPalettizerPresets", "ModuleKMeansPalettizerPresets"]


class ModuleKMeansPalettizerPresets:
    """Ready-made module configs, bound as ``ModuleKMeansPalettizerConfig.presets``."""

    def __init__(self, owner_cls: type[ModuleKMeansPalettizerConfig]) -> None:
        self._owner_cls = owner_cls

    def _config(self, spec: PalettizationSpec) -> ModuleKMeansPalettizerConfig:
        return self._owner_cls(
            op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec, "in_proj_weight": spec}
        )

    def _grouped(self, n_bits: int, axis: int | None, group_size: int) -> ModuleKMeansPalettizerConfig:
        granularity = PerGroupedChannelGranularity(axis=axis, group_size=group_size)
        return self._config(PalettizationSpec(n_bits=n_bits, granularity=granularity))

    def w2(self, *, axis: int | None = 0, group_size: int = 16) -> ModuleKMeansPalettizerConfig:
        """Return 2 bit with a palette for each group of channels; meant for training with ``"dkm"``.

        Args:
            axis: dimension that is divided into groups; None for the output axis of the op.
            group_size: channels in a group; weights that it does not divide stay dense, with a warning.
        """
        return self._grouped(2, axis, group_size)

    def w3(self, *, axis: int | None = 0, group_size: int = 16) -> ModuleKMeansPalettizerConfig:
        """Return 3 bit with a palette for each group of channels; see :meth:`w2`."""
        return self._grouped(3, axis, group_size)

    def w4(self, *, axis: int | None = 0, group_size: int = 16) -> ModuleKMeansPalettizerConfig:
        """Return 4 bit with a palette for each group of channels; see :meth:`w2`."""
        return self._grouped(4, axis, group_size)

    def w6(self, *, axis: int | None = 0, group_size: int = 16) -> ModuleKMeansPalettizerConfig:
        """Return 6 bit with a palette for each group of channels; see :meth:`w2`."""
        return self._grouped(6, axis, group_size)

    def w8(self) -> ModuleKMeansPalettizerConfig:
        """Return 8 bit with one palette for each weight."""
        return self._config(PalettizationSpec(n_bits=8))


class KMeansPalettizerPresets:
    """Ready-made configs, bound as ``KMeansPalettizerConfig.presets``: a module preset as ``global_config``."""

    def __init__(self, owner_cls: type[KMeansPalettizerConfig], modules: ModuleKMeansPalettizerPresets) -> None:
        self._owner_cls = owner_cls
        self._modules = modules

    def w2(self, *, axis: int | None = 0, group_size: int = 16) -> KMeansPalettizerConfig:
        """Return :meth:`ModuleKMeansPalettizerPresets.w2` for the whole model."""
        return self._owner_cls(global_config=self._modules.w2(axis=axis, group_size=group_size))

    def w3(self, *, axis: int | None = 0, group_size: int = 16) -> KMeansPalettizerConfig:
        """Return :meth:`ModuleKMeansPalettizerPresets.w3` for the whole model."""
        return self._owner_cls(global_config=self._modules.w3(axis=axis, group_size=group_size))

    def w4(self, *, axis: int | None = 0, group_size: int = 16) -> KMeansPalettizerConfig:
        """Return :meth:`ModuleKMeansPalettizerPresets.w4` for the whole model."""
        return self._owner_cls(global_config=self._modules.w4(axis=axis, group_size=group_size))

    def w6(self, *, axis: int | None = 0, group_size: int = 16) -> KMeansPalettizerConfig:
        """Return :meth:`ModuleKMeansPalettizerPresets.w6` for the whole model."""
        return self._owner_cls(global_config=self._modules.w6(axis=axis, group_size=group_size))

    def w8(self) -> KMeansPalettizerConfig:
        """Return :meth:`ModuleKMeansPalettizerPresets.w8` for the whole model."""
        return self._owner_cls(global_config=self._modules.w8())
