"""The state of a prepared model, loaded into a model that is just being prepared alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.config.spec import CompressionSimulatorBase

from .missing_names import add_known_names

__all__ = ["load_prepared_state"]

_MOST_NAMES = 5


def load_prepared_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    is_settled: Callable[[nn.Module], bool],
    further_problems: Callable[[], list[str]] = list,
) -> None:
    """Load a whole ``state_dict``, strictly; on an error only simulators have been written to.

    Args:
        model: with its simulators.
        state_dict: of a model that was prepared with the same configuration.
        is_settled: whether a simulator has all that it needs to compute.
        further_problems: called when the simulators have been loaded; what it returns is an error.

    Raises:
        TypeError: ``state_dict`` is no mapping.
        RuntimeError: it does not fit the model, or leaves a simulator without parameters; names what.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must be what a prepared model's state_dict() returned, got {type(state_dict).__name__}."
        )
    state_dict = _complete(model, state_dict)
    simulators = dict(_outermost_simulators(model))
    prefixes = tuple(f"{name}." for name in simulators)
    expected = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    given = {key: value for key, value in state_dict.items() if not key.startswith(prefixes)}
    problems = [
        *_listed("missing", [key for key in expected if key not in given]),
        *_listed("unexpected", [key for key in given if key not in expected]),
        *_listed("of another shape", list(_misshapen(expected, given))),
    ]
    for name, simulator in simulators.items():
        try:
            simulator.load_state_dict(_below(state_dict, f"{name}."))
        except RuntimeError as error:
            problems.append(f"{name!r}: {error}")
    if not problems:
        names = [name for name, simulator in simulators.items() if not is_settled(simulator)]
        problems += [*_listed("without parameters", names), *further_problems()]
    if problems:
        raise RuntimeError(
            "State dict does not match the prepared model. It must come from a model that was prepared with the same "
            "configuration and code, in graph mode also with example inputs of the same shapes. The model is as it "
            "was. " + "; ".join(problems)
        )
    model.load_state_dict(state_dict)


def _complete(model: nn.Module, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of a state, with the names that need not be there, and the versions that it was saved with."""
    whole: Any = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        whole._metadata = state_dict._metadata
    add_known_names(model, whole)
    found: OrderedDict[str, Any] = whole
    return found


def _outermost_simulators(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the simulators under each of their names, but not those inside of another."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, CompressionSimulatorBase) and not (inside and name.startswith(inside)):
            inside = (*inside, f"{name}.")
            yield name, module


def _misshapen(expected: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    for key, own in expected.items():
        other = given.get(key)
        if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor) and own.shape != other.shape:
            yield f"{key} {tuple(other.shape)} for {tuple(own.shape)}"


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [f"{what}: {', '.join(names[:_MOST_NAMES])}{more}"]


def _below(state_dict: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return the part of a ``state_dict`` below a module, with the versions that it was saved with."""
    part: Any = OrderedDict((key[len(prefix) :], value) for key, value in state_dict.items() if key.startswith(prefix))
    versions: Mapping[str, Any] = getattr(state_dict, "_metadata", {})
    dotted = {f"{name}.": value for name, value in versions.items()}
    part._metadata = {name[len(prefix) : -1]: value for name, value in dotted.items() if name.startswith(prefix)}
    found: OrderedDict[str, Any] = part
    return found
