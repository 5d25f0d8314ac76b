"""Frozen models of which a config names the class: written as a mapping with a ``type`` key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from .registry_utils import ConfigRegistryMixin

__all__ = ["RegisteredModel"]


class RegisteredModel(BaseModel, ConfigRegistryMixin):
    """Base of granularities, schemes, schedules and strategies: frozen, strict, and registered under a key.

    A family is a direct subclass; its members are registered with ``@Family.register("<key>")``. A field of a config
    takes them with ``Annotated[Family, BeforeValidator(Family.maybe_build_from_dict)]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _accept_own_key(cls, data: Any) -> Any:
        """Take what ``model_dump`` wrote: the class's own key is no field, any other key is another class."""
        if not isinstance(data, Mapping) or "type" not in data or "type" in cls.model_fields:
            return data
        fields = dict(data)
        key, own = fields.pop("type"), cls.registry_key()
        if key != own:
            raise ValueError(f"{cls.__name__} is written with type {own!r}, got {key!r}.")
        return fields

    @model_serializer(mode="plain")
    def _serialize_model(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields} | {"type": type(self).registry_key()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if RegisteredModel not in cls.__bases__:
            return handler(core_schema)
        return {"oneOf": [_member_schema(key, member) for key, member in cls.REGISTRY.items()]}


def _member_schema(key: str, member: type[BaseModel]) -> dict[str, Any]:
    required = [name for name, field in member.model_fields.items() if field.is_required()]
    return {
        "type": "object",
        "properties": {"type": {"const": key}, **{name: {"title": name} for name in member.model_fields}},
        "required": ["type", *required],
        "additionalProperties": False,
    }
