"""Spec dictionaries: which tensor of an op or module gets which spec.

Keys are a position, a tensor's name, or ``"*"`` for all tensors that no other key names. A value of None opts the
tensor out. ``{}`` says nothing about any tensor, while ``{"*": None}`` switches all of them off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALL_TENSORS", "spec_dict_is_active"]

ALL_TENSORS = "*"


def spec_dict_is_active(spec_dict: Mapping[Any, Any] | None) -> bool:
    """Return whether ``spec_dict`` asks for compression of any tensor (has a value that is not None)."""
    return spec_dict is not None and any(spec is not None for spec in spec_dict.values())


def _disabled_if_none(value: Any) -> Any:
    return {ALL_TENSORS: None} if value is None else value


def _empty_if_none(value: Any) -> Any:
    return {} if value is None else value


def _digit_keys_to_int(value: Any) -> Any:
    """Turn keys such as ``"0"`` into ``0``: JSON and quoted YAML keys have no other way to say a position."""
    if not isinstance(value, Mapping):
        return value
    result: dict[Any, Any] = {}
    written: dict[Any, Any] = {}
    for key, spec in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit()
        position = int(key) if is_digits else key
        if position in result:
            raise ValueError(
                f"Key collision detected: keys {written[position]!r} and {key!r} both convert to {position!r}. "
                "Keep one of them."
            )
        result[position], written[position] = spec, key
    return result
