"""JSON schema of config files."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


class FileSchema(GenerateJsonSchema):
    """Describes what may stand in a file: where Python also takes a live object, only its written form."""

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        """A class is written as its dotted path."""
        return {"type": "string"}

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        """Another live object has no schema of its own; its validator takes a written form."""
        return {}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        """Take anything where the written form is not known, in place of failing."""
        return {}
