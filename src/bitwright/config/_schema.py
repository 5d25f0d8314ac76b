"""JSON schema of config files."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

_FOR_PYTHON = re.compile(r"\n\n(?:Raises|Example|Attributes):\n.*?(?=\n\n\S|\Z)", re.DOTALL)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([\w.]+)`|``")


class FileSchema(GenerateJsonSchema):
    """Describes what may stand in a file: where Python also takes a live object, only its written form.

    Descriptions come from docstrings: the text for the object, each entry under "Attributes" for its property.
    """

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        """A class is written as its dotted path."""
        return {"type": "string"}

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        """Another live object has no schema of its own; its validator takes a written form."""
        return {}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        """Take anything where the written form is not known, in place of failing."""
        return {}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Describe a model and its properties."""
        described = super().model_schema(schema)
        attributes = {name: text for cls in reversed(schema["cls"].__mro__) for name, text in _attributes(cls).items()}
        for name, field in described.get("properties", {}).items():
            if name in attributes:
                field["description"] = attributes[name]
        return described

    def generate(self, schema: core_schema.CoreSchema, mode: JsonSchemaMode = "validation") -> JsonSchemaValue:
        """Return the whole schema, its descriptions without what only a Python programmer needs."""
        whole = super().generate(schema, mode)
        for described in (whole, *whole.get("$defs", {}).values()):
            if "description" in described:
                text = described["description"]
                described["description"] = _plain(text if "enum" in described else _FOR_PYTHON.sub("", text))
        return whole


def _attributes(cls: type) -> dict[str, str]:
    """Return the entries under "Attributes" in a class's docstring."""
    _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\nAttributes:\n")
    section = re.split(r"\n\n(?=\S)", section, maxsplit=1)[0]
    return {name: _plain(" ".join(text.split())) for name, text in _ATTRIBUTE.findall(section)}


def _plain(text: str) -> str:
    """Return ``text`` without docstring markup."""
    return _ROLE.sub(lambda match: match[1] or "", text)
