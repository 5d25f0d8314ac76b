"""TorchScript modules inside a model, whose weights cannot be replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bitwright.config.matching import ModuleRules
from bitwright.config.spec_dicts import spec_dict_is_active

from .plan import Problem, Severity

__all__ = ["asks_for_states", "scripted_module_problems"]


def scripted_module_problems(model: nn.Module, rules: ModuleRules) -> list[Problem]:
    """Return a problem for each outermost TorchScript module with matrices that the configuration asks for.

    Args:
        model: the model.
        rules: which part of the configuration owns which module.
    """
    found: dict[str, str] = {}
    scripted: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        outermost = next((one for one in scripted if path.startswith(f"{one}.")), path)
        scripted.append(outermost)
        if any(map(_is_matrix, module.parameters(recurse=False))) and asks_for_states(rules[path].config):
            found.setdefault(outermost, rules[path].describe())
    return [_problem(path, rule) for path, rule in found.items()]


def asks_for_states(config: Any) -> bool:
    """Return whether a module's configuration wants any of its weights, by their own names or as states of ops."""
    ops = (config, *config.op_type_config.values(), *config.op_name_config.values())
    return any(map(spec_dict_is_active, (config.module_state_spec, *(op.op_state_spec for op in ops))))


def _is_matrix(tensor: torch.Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) >= 2


def _problem(path: str, rule: str) -> Problem:
    message = (
        f"a TorchScript module, which cannot be compressed ({rule}): its weights cannot be replaced. Use the nn.Module "
        f"that it was scripted or traced from, or leave it out with set_module_name({path!r}, None)."
    )
    return Problem("torchscript", path, message, Severity.ERROR)
