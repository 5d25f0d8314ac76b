"""Models, data and recipes by the names that the command line gives them."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import nn

from bitwright.config import CompressionConfig
from bitwright.config.files import read_json, read_yaml
from bitwright.config.matching import refuse_invalid_patterns
from bitwright.program.unlift import unlift

from .output import CommandError

__all__ = ["Recipe", "load_data", "load_metric", "load_model", "load_recipe", "recipe_schema"]

_WHERE = "(BITWRIGHT_TRACEBACK=1 shows where.)"


def load_model(name: str) -> nn.Module:
    """Return the model that ``module:attribute`` or a ``.pt2`` file stands for, in eval mode.

    The attribute may be a module, or a function without arguments that returns one. A file is a program saved with
    ``torch.export.save``.

    Raises:
        CommandError: there is no such thing.
    """
    if name.endswith(".pt2"):
        if not Path(name).is_file():
            raise CommandError(f"There is no file {name!r}.")
        try:
            program = torch.export.load(name)
        except Exception as error:
            raise CommandError(f"{name!r} is no program of torch.export.save: {_reason(error)}") from error
        return unlift(program, program.module()).eval()
    if name.endswith((".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".onnx")):
        raise CommandError(
            f"{name!r} is a file of weights; give a Python function that builds the model and loads them, as "
            "module:function, or a program that torch.export.save wrote (.pt2)."
        )
    found = _attribute(name, "model")
    if not isinstance(found, nn.Module) and callable(found):
        found = _called(found, name, "model")
    if not isinstance(found, nn.Module):
        raise CommandError(
            f"The model {name!r} is a {type(found).__name__}; it must be a torch.nn.Module or a function without "
            "arguments that returns one."
        )
    return found.eval()


def load_data(name: str, limit: int | None = None) -> list[Any]:
    """Return the batches that ``module:attribute`` stands for: an iterable, or a function that returns one.

    Raises:
        CommandError: there is no such thing, or it is empty.
    """
    found = _attribute(name, "data")
    if callable(found) and not isinstance(found, (torch.Tensor, torch.utils.data.DataLoader)):
        found = _called(found, name, "data")
    if isinstance(found, (torch.Tensor, Mapping)):
        found = [found]
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise CommandError(f"The data {name!r} is a {type(found).__name__}; it must be an iterable of batches.")
    batches = list(itertools.islice(found, limit))
    if not batches:
        raise CommandError(f"The data {name!r} is empty; give at least one batch.")
    return batches


def load_metric(name: str) -> Callable[[Any, Any], float]:
    """Return the function of an output and its batch that ``module:attribute`` stands for.

    Raises:
        CommandError: there is none; when it is called, it failed or returned no number.
    """
    found = _attribute(name, "metric")
    if not callable(found):
        raise CommandError(f"The metric {name!r} is a {type(found).__name__}; it must be a function.")

    def metric(output: Any, batch: Any) -> float:
        try:
            value = found(output, batch)
        except Exception as error:
            raise CommandError(f"The metric {name!r} failed: {_reason(error)} {_WHERE}") from error
        try:
            return float(value)
        except Exception as error:
            raise CommandError(f"The metric {name!r} returned {value!r}; it must return a number.") from error

    metric.__qualname__ = name  # by which a sweep's file knows it
    return metric


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe file.

    Attributes:
        name: the file's name without extension.
        configs: its sections, in the order in which they are applied: pruning, palettization, quantization.
    """

    name: str
    configs: tuple[CompressionConfig[Any], ...]


def load_recipe(name: str) -> Recipe:
    """Read a recipe: a YAML or JSON file with a section for each technique, or ``preset:name`` (``preset:w8a8``).

    Raises:
        CommandError: there is no such file or preset, it cannot be read, names a key twice, has no known section, or
            a section is not valid.
    """
    if name.startswith("preset:"):
        return _preset(name.removeprefix("preset:"))
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"There is no recipe {name!r}; give a YAML or JSON file, or a preset such as preset:w8a8.")
    try:
        text = path.read_text(encoding="utf-8")
        content = read_json(text) if path.suffix == ".json" else read_yaml(text, name)
    except (yaml.YAMLError, ValueError) as error:
        raise CommandError(f"The recipe {name!r} cannot be read: {error}") from error
    known = {cls._CONFIG_KEY: cls for cls in _config_classes()}
    sections = [key for key in known if isinstance(content, dict) and key in content]
    if not sections:
        raise CommandError(f"The recipe {name!r} has none of the sections {', '.join(known)}; it needs at least one.")
    allowed = {*known, *(cls._SPEC_KEY for cls in known.values())}
    unknown = [key for key in content if key not in allowed]
    if unknown:
        raise CommandError(
            f"The recipe {name!r} has unknown sections: {', '.join(map(str, unknown))}. Known: {', '.join(allowed)}."
        )
    configs = []
    for key in sections:
        cls = known[key]
        part = {key: content[key], **({cls._SPEC_KEY: content[cls._SPEC_KEY]} if cls._SPEC_KEY in content else {})}
        try:
            configs.append(cls.from_dict(part))
            refuse_invalid_patterns(configs[-1])
        except ValidationError as error:
            raise CommandError(f"The recipe {name!r} is not valid:\n{error}") from error
        except (TypeError, ValueError) as error:
            raise CommandError(f"The recipe {name!r} is not valid: {error}") from error
    return Recipe(path.stem, tuple(configs))


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of recipe files, for editors."""
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    for cls in _config_classes():
        schema = cls.json_schema()
        prefix = cls.__name__
        names = {name: name if name not in definitions or definitions[name] == entry else f"{prefix}_{name}"
                 for name, entry in schema["$defs"].items()}  # fmt: skip
        definitions |= {names[name]: _renamed(entry, names) for name, entry in schema["$defs"].items()}
        properties |= _renamed(schema["properties"], names)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Bitwright recipe",
        "type": "object",
        "properties": properties,
        "anyOf": [{"required": [cls._CONFIG_KEY]} for cls in _config_classes()],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _renamed(entry: Any, names: dict[str, str]) -> Any:
    if isinstance(entry, dict):
        return {
            key: f"#/$defs/{names[value.removeprefix('#/$defs/')]}"
            if key == "$ref" and isinstance(value, str)
            else _renamed(value, names)
            for key, value in entry.items()
        }
    return [_renamed(part, names) for part in entry] if isinstance(entry, list) else entry


def _config_classes() -> tuple[Any, ...]:
    from bitwright.palettization import KMeansPalettizerConfig
    from bitwright.pruning import MagnitudePrunerConfig
    from bitwright.quantization import QuantizerConfig

    return MagnitudePrunerConfig, KMeansPalettizerConfig, QuantizerConfig


def _preset(name: str) -> Recipe:
    """Return a quantizer's preset (``w8``), or with ``palette-`` in front a palettizer's (``palette-w4``)."""
    _, palettizer, quantizer = _config_classes()
    known = {entry: (quantizer.presets, entry) for entry in _preset_names(quantizer)}
    known |= {f"palette-{entry}": (palettizer.presets, entry) for entry in _preset_names(palettizer)}
    if name not in known:
        raise CommandError(f"There is no preset {name!r}; there are {', '.join(known)}.")
    presets, entry = known[name]
    return Recipe(name, (getattr(presets, entry)(),))


def _preset_names(cls: Any) -> list[str]:
    return [name for name in dir(cls.presets) if not name.startswith("_")]


def _attribute(name: str, role: str) -> Any:
    module_name, colon, path = name.partition(":")
    if ".py" in (Path(name).suffix, Path(module_name).suffix):
        proposal = f"{Path(module_name).stem}:{path or 'NAME'}"
        raise CommandError(f"The {role} {name!r} names a file; write a module: {proposal}, from the file's folder.")
    if not colon or not path or not all(module_name.split(".")):  # a dot in front is for imports within packages
        example = {"model": "net:make", "data": "net:batches"}.get(role, f"net:{role}")
        hint = " or a .pt2 file" if role == "model" else ""
        raise CommandError(f"The {role} {name!r} must be written as module:attribute{hint}, for example {example}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            where = "on the Python path or in this folder"
            raise CommandError(
                f"There is no Python module {module_name!r} {where} (for the {role} {name!r})."
            ) from error
        raise CommandError(_import_problem(module_name, name, role, error)) from error
    except (Exception, SystemExit) as error:
        raise CommandError(_import_problem(module_name, name, role, error)) from error
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            names = [known for known in vars(value) if not known.startswith("_")] if hasattr(value, "__dict__") else []
            near = get_close_matches(part, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(names)[:20])}."
            raise CommandError(f"{module_name!r} has no {path!r}; {hint}") from error
    return value


def _called(function: Callable[[], Any], name: str, role: str) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"The {role} {name!r} failed when it was called without arguments: {_reason(error)} {_WHERE}"
        ) from error


def _import_problem(module_name: str, name: str, role: str, error: BaseException) -> str:
    return f"The Python module {module_name!r} (for the {role} {name!r}) cannot be imported: {_reason(error)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return (
            f"it ends the process ({error!r}), as a script does that reads a command line of its own; put what is for "
            "the script alone below `if __name__ == '__main__':`."
        )
    return f"{type(error).__name__}: {error}"
