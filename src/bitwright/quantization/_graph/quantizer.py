"""Registered patterns and ops in a graph, under the names that coreai-opt keeps here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from bitwright.planning.graph_ops import is_quantized
from bitwright.program.aten_names import op_spellings
from bitwright.quantization.quantizer import Quantizer

from ._annotation_pattern_registry import _AnnotationPatternRegistry

__all__ = ["GraphQuantizer"]


class GraphQuantizer(Quantizer):
    """A quantizer in graph mode."""

    @staticmethod
    def get_compressible_op_names(model: fx.GraphModule) -> list[str]:
        """Return the names of the ops of a prepared model that quantization knows; ``op_name_config`` takes them."""
        calls = (node for node in model.graph.nodes if node.op == "call_function")
        return [node.name for node in calls if is_quantized(op_spellings(node)[0])]


class _AnnotationHandler:
    """Finds registered patterns in a graph.

    Args:
        module_configs: module paths to their configurations.
        module_name_to_state_names_map: module paths to the other names of their parameters and buffers.
        canonical_to_aliases: module paths to the other paths of the same module.
    """

    def __init__(
        self,
        module_configs: Mapping[str, Any],
        module_name_to_state_names_map: Mapping[str, Mapping[str, Sequence[str]]],
        canonical_to_aliases: Mapping[str, Sequence[str]],
    ) -> None:
        self._module_configs = module_configs
        self._state_names = module_name_to_state_names_map
        self._aliases = canonical_to_aliases

    def _match_all_annotators(self, model: fx.GraphModule) -> dict[str, dict[fx.Node, tuple[fx.Node, ...]]]:
        """Return the chains that each registered pattern finds in ``model``, by the pattern's key."""
        found: dict[str, dict[fx.Node, tuple[fx.Node, ...]]] = {}
        for key, pattern_cls in _AnnotationPatternRegistry.REGISTRY.items():
            matches: dict[fx.Node, tuple[fx.Node, ...]] = {}
            for pattern in pattern_cls.get_patterns():
                matches.update(pattern_cls.match_single_pattern(model, pattern))
            found[key] = matches
        return found
