"""Drives the config classes of coreai-opt or of Bitwright, whichever is given, with cases in plain JSON.

As a program it runs inside the peer's interpreter: python config_worker.py CASES RESULTS, both JSON files. The tests
import it to run the same cases here.
"""

from __future__ import annotations

import enum
import importlib
import io
import json
import sys
import warnings
from typing import Any

import torch
from torch import nn

SPEC_FIELDS = (
    "dtype",
    "qscheme",
    "qformulation",
    "granularity",
    "fake_quantize_cls",
    "qparam_calculator_cls",
    "range_calculator_cls",
    "float_range",
    "scale_dtype",
    "n_bits",
    "target_dtype",
    "quant_min",
    "quant_max",
)


def build_model(tree: dict[str, Any], shared: dict[int, nn.Module]) -> nn.Module:
    """Build the module tree that a case describes; ``ref`` names a module built before."""
    if "ref" in tree:
        return shared[tree["ref"]]
    module: nn.Module = getattr(nn, tree["type"])(*tree.get("arguments", ()))
    shared[tree["id"]] = module
    for name, child in tree.get("children", ()):
        module.add_module(name, build_model(child, shared))
    return module


def plain(value: Any) -> Any:
    """Return a dump as JSON: what live objects are called, in place of the objects."""
    if isinstance(value, dict):
        if "qformulation" in value:
            value = {key: value[key] for key in SPEC_FIELDS}
        return [[f"{type(key).__name__}:{key}", plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, type):
        return value.__name__.lstrip("_")
    return str(value) if isinstance(value, torch.dtype) else value


def dump(config: Any) -> Any:
    """Return a config's fields as JSON; the order of keys counts, as it decides precedence."""
    return plain(config.model_dump())


def resolve(lib: Any, case: dict[str, Any]) -> Any:
    """Section to module name and config, in order."""
    config = lib.QuantizerConfig.from_dict({"quantization_config": case["config"]})
    built = config.build_module_config_dict(build_model(case["model"], {}))
    return {level.name: [[name, dump(module)] for name, module in found.items()] for level, found in built.items()}


def construct(lib: Any, case: dict[str, Any]) -> Any:
    """Fields of a config after its defaults are filled in, or the error."""
    return dump(getattr(lib, case["class"])(**case["fields"]))


def load(lib: Any, case: dict[str, Any]) -> Any:
    """Fields of a config read from YAML."""
    return dump(lib.QuantizerConfig.from_yaml(io.StringIO(case["text"])))


def mutate(lib: Any, case: dict[str, Any]) -> Any:
    """State, or the error, after each of a chain of changes."""
    config = lib.QuantizerConfig.from_dict({"quantization_config": case["config"]})
    states = []
    for method, arguments in case["changes"]:
        arguments = [_argument(lib, argument) for argument in arguments]
        try:
            returned = getattr(config, method)(*arguments)
            states.append([returned is config, dump(config)])
        except Exception as error:  # the type of error is part of the comparison
            states.append([type(error).__name__, dump(config)])
    return states


def _argument(lib: Any, argument: Any) -> Any:
    kind, value = argument
    if kind == "class":
        return {"int": int}.get(value) or getattr(nn, value)
    if kind == "module":
        return lib.ModuleQuantizerConfig(**value)
    if kind == "preset":
        return getattr(lib.ModuleQuantizerConfig.presets, value)()
    return value


def look_up(lib: Any, case: dict[str, Any]) -> Any:
    """What a spec dictionary says about a tensor that goes by several keys."""
    return list(lib.get_last_matching_spec(case["keys"], dict(case["specs"])))


def preset(lib: Any, case: dict[str, Any]) -> Any:
    """Fields of a ready-made config."""
    return dump(getattr(getattr(lib, case["class"]).presets, case["name"])(**case["arguments"]))


OPERATIONS = {
    "resolve": resolve,
    "construct": construct,
    "load": load,
    "mutate": mutate,
    "look_up": look_up,
    "preset": preset,
}


class Library:
    """The names of one of the two libraries."""

    def __init__(self, package: str) -> None:
        config = importlib.import_module(f"{package}.quantization.config")
        self.__dict__.update({name: getattr(config, name) for name in config.__all__})
        helpers = importlib.import_module(f"{package}._utils.config_utils")
        self.get_last_matching_spec = helpers.get_last_matching_spec


def run_cases(package: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Return the result of every case, or the type of the error it raised."""
    lib = Library(package)
    results = []
    for case in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(OPERATIONS[case["operation"]](lib, case))
        except Exception as error:  # what a library refuses is part of the comparison
            results.append({"error": type(error).__name__, "message": str(error)})
    return results


def main() -> None:
    """Run the cases of a file on the peer."""
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(run_cases("coreai_opt", cases), file)


if __name__ == "__main__":
    main()
