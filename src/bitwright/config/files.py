"""Config files: reading and writing a config as a dict, YAML or JSON, and the JSON schema of such files."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import yaml

from bitwright._utils.json_keys import without_duplicates

from ._dump import plain_config, yaml_document
from ._schema import FileSchema
from ._strict import StrictModel

__all__ = ["ConfigFile", "read_json", "read_yaml"]


class ConfigFile(StrictModel):
    """A config that stands in a file, under the key that its class names.

    A file is a mapping with the section ``_CONFIG_KEY`` and, for YAML anchors, the section ``_SPEC_KEY``, whose content
    is not read by itself.
    """

    _CONFIG_KEY: ClassVar[str]
    _SPEC_KEY: ClassVar[str]

    @classmethod
    def _file_keys(cls) -> tuple[str, str]:
        for name in ("_CONFIG_KEY", "_SPEC_KEY"):
            if not isinstance(getattr(cls, name, None), str):
                raise RuntimeError(f"{cls.__name__} must define {name} to be read from or written to files.")
        return cls._CONFIG_KEY, cls._SPEC_KEY

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Self:
        """Build a config from the content of a file; the argument is left as it is.

        Raises:
            RuntimeError: the section ``_CONFIG_KEY`` is missing, or there is an unexpected one.
            TypeError: the content or its section is not a mapping.
            pydantic.ValidationError: the section holds something that the config refuses.
        """
        config_key, spec_key = cls._file_keys()
        if not isinstance(config_dict, Mapping):
            raise TypeError(f"Expected a mapping with the key {config_key!r}, got {type(config_dict).__name__}.")
        for key in config_dict:
            if key not in (config_key, spec_key):
                near = difflib.get_close_matches(str(key), (config_key, spec_key), n=1)
                raise RuntimeError(
                    f"Found unexpected key {key!r} in config dict. Supported keys are {[config_key, spec_key]}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                )
        if config_key not in config_dict:
            raise RuntimeError(f"Did not find {config_key!r} in config dict. Expected keys: {[config_key, spec_key]}.")
        section = config_dict[config_key]
        if not isinstance(section, Mapping):
            raise TypeError(
                f"The section {config_key!r} must be a mapping, got {type(section).__name__}: {section!r}. "
                "Write {} for the defaults, or global_config: null to switch compression off."
            )
        return cls.model_validate(dict(section))

    @classmethod
    def from_yaml(cls, yml: str | Path | IO[str] | IO[bytes]) -> Self | None:
        """Build a config from YAML; an empty document gives a warning and None.

        Args:
            yml: path, or open file, or YAML text, which is empty or has more than one line.

        Raises:
            ValueError: the document is not a mapping.
            yaml.YAMLError: the document is not YAML, or names a key twice.
        """
        place = _place(yml, "\n")
        content = read_yaml(_read(yml, "\n"), place)
        if content is None:
            warnings.warn(f"The YAML document for {cls.__name__} is empty; no config is built.", stacklevel=2)
            return None
        if not isinstance(content, dict):
            where = f" in {place}" if place else ""
            raise ValueError(f"Invalid YAML{where}: expected a mapping, got {type(content).__name__}.")
        return cls.from_dict(content)

    @classmethod
    def from_json(cls, json_input: str | Path | IO[str] | IO[bytes]) -> Self:
        """Build a config from JSON.

        Args:
            json_input: path, or open file, or JSON text, which is empty or starts with ``{``.

        Raises:
            ValueError: the document is not JSON, names a key twice, or is not an object.
        """
        content = read_json(_read(json_input, "{"))
        if not isinstance(content, dict):
            raise ValueError(f"Invalid JSON: expected an object, got {type(content).__name__}.")
        return cls.from_dict(content)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as nested dicts under its file key; values are live objects such as ``torch.dtype``."""
        return {self._file_keys()[0]: self.model_dump()}

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return the config as a YAML document and write it to ``path``, if one is given.

        Each spec stands once, named, in the section for anchors; settings that say nothing are left out.
        """
        config_key, spec_key = self._file_keys()
        return _write(yaml_document(self, config_key, spec_key), path)

    def to_json(self, path: str | Path | None = None, indent: int | None = 2) -> str:
        """Return the config as a JSON document and write it to ``path``, if one is given."""
        document = {self._file_keys()[0]: plain_config(self)}
        return _write(json.dumps(document, indent=indent) + "\n", path)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema (2020-12) of the config's files, for editors and validators."""
        config_key, spec_key = cls._file_keys()
        schema = cls.model_json_schema(schema_generator=FileSchema)
        definitions = schema.pop("$defs", {})
        definitions[cls.__name__] = schema
        return {
            "$schema": FileSchema.schema_dialect,
            "title": cls.__name__,
            "type": "object",
            "properties": {
                config_key: {"$ref": f"#/$defs/{cls.__name__}"},
                spec_key: {"description": "A place for YAML anchors; not read by itself."},
            },
            "required": [config_key],
            "additionalProperties": False,
            "$defs": definitions,
        }


def read_yaml(text: str | bytes, place: str | None = None) -> Any:
    """Return the content of a YAML document; ``place`` is what errors call it.

    Raises:
        yaml.YAMLError: it is not YAML, or a mapping names a key twice.
    """
    loader = _Loader(text)  # a SafeLoader
    loader.name = place or loader.name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_json(text: str | bytes) -> Any:
    """Return the content of a JSON document.

    Raises:
        ValueError: it is not JSON, or an object names a key twice.
    """
    return json.loads(text, object_pairs_hook=without_duplicates)


def _read(source: str | Path | IO[str] | IO[bytes], text_mark: str) -> str | bytes:
    """Return the text of a path or file; a string that holds ``text_mark`` in the way only text does is text itself."""
    place = _place(source, text_mark)
    if place is not None:
        return Path(place).read_text(encoding="utf-8")
    return source if isinstance(source, str) else source.read()  # type: ignore[union-attr]


def _place(source: str | Path | IO[str] | IO[bytes], text_mark: str) -> str | None:
    """Return the path that is meant; None for text and open files."""
    if not isinstance(source, str | Path):
        return None
    text = str(source)
    marked = text_mark in text if text_mark == "\n" else text.lstrip()[:1] == "{"
    return None if isinstance(source, str) and (marked or not text.strip()) else text


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


class _Loader(yaml.SafeLoader):
    """A safe loader that reports keys written twice in one mapping, of which YAML silently keeps the last."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: Any) -> None:
        """Check the keys that stand in the document, once: flattening adds those of ``<<`` to them."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._refuse_repeated_keys(node)
        super().flatten_mapping(node)

    def _refuse_repeated_keys(self, node: Any) -> None:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:  # the tag tells the number 1 from the text "1"
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"found the key {key.value!r} twice", key.start_mark
                )
            seen.add((key.tag, key.value))
