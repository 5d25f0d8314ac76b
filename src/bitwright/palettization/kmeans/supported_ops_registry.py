"""The ops whose weights can be palettized; further ones are registered here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright._utils.registry_utils import ClassRegistryMixin
from bitwright.planning.ops import PALETTIZER_OPS

from .kmeans_support_mixins import _InputsFirst, _OutputsFirst, _PalettizationSupportMixin

__all__: list[str] = []


class _KMeansPalettizerSupportedOpsRegistry(ClassRegistryMixin):
    """Op key to what palettization knows about the op; ``@register("<key>")`` adds a class."""

    @classmethod
    def get_registry_entry_for_func(
        cls, function: Callable[..., Any] | None
    ) -> type[_PalettizationSupportMixin] | None:
        """Return the entry for a function, None if there is none."""
        return next((entry for entry in cls.REGISTRY.values() if function in entry.ops), None)

    @classmethod
    def default_axis_of(cls, function: Callable[..., Any]) -> int | None:
        """Return the dimension of output channels of a function's weight, None if it is not known."""
        entry = cls.get_registry_entry_for_func(function)
        return None if entry is None else entry.default_axis

    @classmethod
    def key_for_func(cls, function: Callable[..., Any]) -> str | None:
        """Return the ``op_type_config`` key of a function, None for one whose weights are not palettized."""
        name = PALETTIZER_OPS.get(getattr(function, "__name__", "").partition(".")[0])
        if name is not None:
            return name
        return next((key for key, entry in cls.REGISTRY.items() if function in entry.ops), None)


_KMeansPalettizerSupportedOpsRegistry.register("outputs_first")(_OutputsFirst)
_KMeansPalettizerSupportedOpsRegistry.register("inputs_first")(_InputsFirst)
