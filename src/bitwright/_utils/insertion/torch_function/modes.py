"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from bitwright.config.matching import ModuleRule

__all__ = ["RegisterEagerOptimizationMode"]


class RegisterEagerOptimizationMode:
    """Questions about a model that planning asks before it places simulators."""

    @staticmethod
    def _fill_module_has_module_spec_dict(
        module_name: str,
        module: nn.Module,
        parent_has_module_spec: bool,
        module_components_dict: Mapping[str, ModuleRule],
        module_has_module_spec_dict: dict[str, bool],
    ) -> None:
        """Tell for ``module`` and all below whether it, or a module around it, has a ``module_*_spec``."""
        rule = module_components_dict.get(module_name)
        specified = parent_has_module_spec or (
            rule is not None and any((rule.module_input_spec, rule.module_output_spec, rule.module_state_spec))
        )
        module_has_module_spec_dict[module_name] = specified
        for name, child in module.named_children():
            RegisterEagerOptimizationMode._fill_module_has_module_spec_dict(
                f"{module_name}.{name}" if module_name else name,
                child,
                specified,
                module_components_dict,
                module_has_module_spec_dict,
            )
