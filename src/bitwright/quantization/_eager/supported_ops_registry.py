"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from bitwright.planning.ops import EAGER_FAMILIES, FunctionFamily

__all__ = ["EagerQuantizerSupportedOpsRegistry"]


class EagerQuantizerSupportedOpsRegistry:
    """The functions that eager quantization recognises, by ``op_type_config`` key."""

    @classmethod
    def get_class(cls, key: str) -> FunctionFamily:
        """Return the functions of a key; its list ``ops`` may be edited.

        Raises:
            KeyError: eager quantization has no such key.
        """
        if key not in EAGER_FAMILIES:
            raise KeyError(f"No function is registered with key {key!r}. Available keys: {sorted(EAGER_FAMILIES)}.")
        return EAGER_FAMILIES[key]

    @classmethod
    def list_registry_keys(cls) -> list[str]:
        """Return all keys."""
        return list(EAGER_FAMILIES)
