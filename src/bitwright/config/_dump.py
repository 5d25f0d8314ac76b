"""Configs as plain data: only what JSON can hold, and only what says something."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from ._polymorphic import dump_spec
from ._strict import StrictModel
from .spec import CompressionSpec

_ALWAYS_WRITTEN = frozenset({"global_config", "op_input_spec", "op_output_spec", "op_state_spec"})
"""Fields in which leaving out means something else than writing the empty value."""

_SpecWriter = Callable[[CompressionSpec], Any]


def plain_config(config: BaseModel, write_spec: _SpecWriter = dump_spec) -> dict[str, Any]:
    """Return ``config`` as nested dicts of plain values, without the fields that hold their default.

    Args:
        config: a config of any level.
        write_spec: what to put in the place of a spec.
    """
    result: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name not in _ALWAYS_WRITTEN and value == field.get_default(call_default_factory=True):
            continue
        if _is_config(value):
            result[name] = plain_config(value, write_spec)
        elif isinstance(value, Mapping) and all(item is None or isinstance(item, BaseModel) for item in value.values()):
            result[name] = {key: _plain_entry(item, write_spec) for key, item in value.items()}
        else:
            result[name] = config.model_dump(mode="json", include={name})[name]
    return result


def _is_config(value: object) -> bool:
    """Return whether the fields of ``value`` are written one by one, not by a serializer of its class."""
    return isinstance(value, StrictModel) and not type(value).__pydantic_decorators__.model_serializers


def _plain_entry(value: BaseModel | None, write_spec: _SpecWriter) -> Any:
    if value is None:
        return None
    if isinstance(value, CompressionSpec):
        return write_spec(value)
    return plain_config(value, write_spec) if _is_config(value) else value.model_dump(mode="json")


class _Anchored(dict[str, Any]):
    """A mapping that is written once, under an anchor of its own name."""

    name: str


class _Dumper(yaml.SafeDumper):
    """Writes anchored mappings under their names."""

    def generate_anchor(self, node: Any) -> str:
        name: str | None = getattr(node, "anchor_name", None)
        return name if name is not None else super().generate_anchor(node)

    def represent_anchored(self, data: _Anchored) -> yaml.MappingNode:
        node = self.represent_mapping("tag:yaml.org,2002:map", list(data.items()))
        node.anchor_name = data.name  # type: ignore[attr-defined]  # read back by generate_anchor
        return node


_Dumper.add_representer(_Anchored, _Dumper.represent_anchored)


def yaml_document(config: BaseModel, config_key: str, spec_key: str) -> str:
    """Return ``config`` as a YAML document in which equal specs are written once and referred to by name."""
    anchored: dict[str, _Anchored] = {}

    def write_spec(spec: CompressionSpec) -> _Anchored:
        fields = dump_spec(spec)
        for known in anchored.values():
            if known == fields:
                return known
        added = _Anchored(fields)
        added.name = _free_name(fields, anchored)
        anchored[added.name] = added
        return added

    section = plain_config(config, write_spec)
    document = {spec_key: dict(anchored), config_key: section} if anchored else {config_key: section}
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


def _free_name(fields: Mapping[str, Any], taken: Mapping[str, Any]) -> str:
    """Return a readable name for a spec, such as ``int8_per_channel``, that is not taken yet."""
    granularity = fields.get("granularity")
    kind = granularity.get("type") if isinstance(granularity, Mapping) else None
    base = "_".join(str(part) for part in (fields.get("dtype"), kind) if part) or "spec"
    base = re.sub(r"[^0-9A-Za-z_-]", "_", base)  # what an anchor may consist of
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    return name
