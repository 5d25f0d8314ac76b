"""Types of spec fields that pydantic does not know: dtypes, and classes named by a registry key."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from bitwright._utils.registry_utils import ClassRegistryMixin
from bitwright.formats import format_names

__all__ = ["DtypeField", "RegisteredClass", "ScaleDtypeField", "dtype_name", "dtype_named"]

_SCALES = ("float8_e8m0fnu", "float8_e8m0")
_ALIASES = {
    "float4_e2m1fn": torch.float4_e2m1fn_x2,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e8m0": torch.float8_e8m0fnu,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the bare name of a dtype, such as ``"int8"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with a bare name or an alias.

    Raises:
        ValueError: there is none; the message proposes the nearest.
    """
    dtype = _ALIASES.get(name, getattr(torch, name, None))
    if isinstance(dtype, torch.dtype):
        return dtype
    near = " or ".join(map(repr, _nearest(name)))
    hint = f"; did you mean {near}?" if near else f"; names are {', '.join(format_names())}."
    raise ValueError(f"Unsupported dtype: {name!r}{hint}")


def _nearest(name: str) -> list[str]:
    """The formats of a family (``float8``, ``fp4``), else the one name that is spelt most alike."""
    plain = name.removeprefix("torch.").lower()
    plain = f"float{plain[2:]}" if plain.startswith("fp") else plain
    # e8m0 is a format of scales: propose it to those only who begin to write it
    names = [known for known in (*format_names(), *_ALIASES) if known not in _SCALES or "e8" in plain]
    family = [known for known in format_names() if known in names and known.startswith(plain)]
    return family if 0 < len(family) < 4 else get_close_matches(plain, names, n=1)


DtypeField = Annotated[
    torch.dtype,
    BeforeValidator(lambda data: dtype_named(data) if isinstance(data, str) else data),
    PlainSerializer(dtype_name, when_used="json"),
    WithJsonSchema({"type": "string", "enum": [name for name in (*format_names(), *_ALIASES) if name not in _SCALES]}),
]
"""The dtype of a tensor's numbers."""

ScaleDtypeField = Annotated[DtypeField, WithJsonSchema({"type": "string", "enum": [*_SCALES]})]
"""The dtype of scales."""


class RegisteredClass:
    """Annotates a field that holds a class of a registry: read from a key or the class, written to JSON as the key."""

    def __init__(self, registry: type[ClassRegistryMixin]) -> None:
        self._registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the registry; serialize to the key in JSON mode."""
        return core_schema.no_info_plain_validator_function(
            self._registry.resolve,
            serialization=core_schema.plain_serializer_function_ser_schema(self._registry.get_key, when_used="json"),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Any key that is registered when the schema is made."""
        return {"type": "string", "enum": self._registry.list_registry_keys()}
