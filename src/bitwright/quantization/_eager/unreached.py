"""Modules that the example inputs do not come to, as an auxiliary head that runs in training only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _forward_unimplemented

from bitwright._utils.parametrization import own_parametrizations
from bitwright.config.matching import ModuleRule
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.config.spec_dicts import spec_dict_is_active

__all__ = ["unreached_modules"]


def unreached_modules(
    model: nn.Module, called: Iterable[str], rules: Mapping[str, ModuleRule]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules with a forward in those subtrees of a model that nothing was called in.

    Args:
        model: the model, before simulators are put into it.
        called: paths of the modules that were called.
        rules: which config entry owns each module.

    Yields:
        The path of the subtree, the module, and whether the config would quantize anything in it.
    """
    reached = {id(model.get_submodule(path)) for path in called}
    found: set[int] = set()

    def search(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        inside = list(module.named_modules(prefix=path))
        if any(id(one) in reached for _, one in inside):
            for name, child in module.named_children():
                if not _stands_on_tensors(module, name, child):
                    yield from search(f"{path}.{name}" if path else name, child)
            return
        for name, one in inside:
            if id(one) not in found and _has_forward(one):
                found.add(id(one))
                yield path, one, name in rules and _quantizes(rules[name].config)

    return search("", model)


def _stands_on_tensors(module: nn.Module, name: str, child: nn.Module) -> bool:
    """Whether a child computes one of the module's tensors, and is no part of what the module calls."""
    return isinstance(child, CompressionSimulatorBase) or (
        name == "parametrizations" and bool(own_parametrizations(module))
    )


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not _forward_unimplemented


def _quantizes(config: Any) -> bool:
    """Whether a module's config has a spec for any tensor of the ops that the module calls."""
    parts = [config, *config.op_type_config.values(), *config.op_name_config.values()]
    specs = (
        spec_dict
        for part in parts
        if part is not None
        for spec_dict in (part.op_input_spec, part.op_output_spec, part.op_state_spec)
    )
    return any(map(spec_dict_is_active, specs))
