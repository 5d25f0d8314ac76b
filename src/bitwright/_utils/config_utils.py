"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.config.matching import ConfigLevel, lookup_spec
from bitwright.config.spec_dicts import ALL_TENSORS, spec_dict_is_active

__all__ = ["ALL_TENSORS", "ConfigLevel", "get_last_matching_spec", "spec_dict_is_active"]


def get_last_matching_spec(identifiers: Sequence[str | int], spec_dict: Mapping[Any, Any]) -> tuple[Any, bool]:
    """Return the spec for a tensor that goes by any of ``identifiers``, and whether a key named it."""
    match = lookup_spec(spec_dict, identifiers)
    return match.spec, match.found
