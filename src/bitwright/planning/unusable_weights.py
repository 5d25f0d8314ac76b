"""What no compressor can prepare: tensors without data, of ``torch.inference_mode``, quantized or packed already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitwright._utils.packed_weights import PackedWeight, is_packed
from bitwright._utils.parametrization import own_parametrizations
from bitwright._utils.sharded import is_sharded
from bitwright.config.matching import resolve_module_rules
from bitwright.program import Program

from .plan import Plan
from .scripted_modules import asks_for_states

__all__ = ["refuse_quantized", "refuse_unusable", "tensors_needed"]


def tensors_needed(plan: Plan, program: Program) -> dict[str, torch.Tensor]:
    """Return what the simulators of a plan need, by name: their weights; for activations all that a forward reads."""
    states = [placement.state for placement in plan.placements if placement.state is not None]
    if len(states) < len(plan.placements):
        states += [state for state in program.states.values() if state.uses and state not in states]
    return {state.name: state.tensor for state in states}


def refuse_unusable(compressor: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if any of ``tensors`` cannot be prepared.

    Args:
        compressor: its name, for the message.
        tensors: by dotted name, what will be read or gets a simulator.

    Raises:
        ValueError: tensors are on the meta device, or were made under ``torch.inference_mode``; names all of them.
    """
    bare = [name for name, tensor in tensors.items() if tensor.is_meta]
    if bare:
        raise ValueError(
            f"{compressor} cannot prepare weights on the meta device, which have no data: "
            f"{', '.join(map(repr, bare))}. Load the model first: model.to_empty(device=...) and "
            "model.load_state_dict(...). plan() works without data."
        )
    frozen = [name for name, tensor in tensors.items() if tensor.is_inference()]
    if frozen and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{compressor} cannot prepare weights that were made under torch.inference_mode, which nothing may change "
            f"afterwards: {', '.join(map(repr, frozen))}. Build or load the model outside of it, or prepare "
            "copy.deepcopy(model), made outside. torch.no_grad needs none of this."
        )


def refuse_quantized(compressor: str, model: nn.Module, config: Any) -> None:
    """Raise if ``config`` asks for weights that other tensors stand for, such as torchao's ``Int8Tensor``, or codes.

    To be called before anything is traced: such a tensor has a few ops of its own and no others, and ``torch.export``
    takes it apart; what decodes packed codes looks like any other arithmetic. Tensors that are spread over processes
    (``DTensor``) are none of them.

    Args:
        compressor: its name, for the message.
        model: the model.
        config: the compressor's configuration.

    Raises:
        ValueError: there are such weights; names all of them.
    """
    packed = _asked_for({path: _packed(module) for path, module in model.named_modules()}, config, model)
    if packed:
        raise ValueError(
            f"{compressor} cannot prepare weights that are packed: {', '.join(repr(name) for name, _ in packed)}. "
            "Their codes are all there is of them. Fill a float model, as in "
            "Artifact.from_model(packed).load_into(float_model), and prepare that one, or exclude their modules with "
            "set_module_name(..., None)."
        )
    asked = _asked_for({path: _wrapped(module) for path, module in model.named_modules()}, config, model)
    if asked:
        listed = ", ".join(f"{name!r} ({kind})" for name, kind in asked)
        raise ValueError(
            f"{compressor} cannot prepare weights that are already quantized: {listed}. Prepare the float model, "
            "replace them by what they stand for, as in layer.weight = nn.Parameter(layer.weight.dequantize()), or "
            "exclude their modules with set_module_name(..., None)."
        )


def _asked_for(states: Mapping[str, Mapping[str, str]], config: Any, model: nn.Module) -> list[tuple[str, str]]:
    """Return dotted names and classes of those of ``states``, by module path, that a configuration asks for."""
    found = {path: own for path, own in states.items() if own}
    rules = resolve_module_rules(config, model) if found else {}
    return [
        (f"{path}.{name}" if path else name, kind)
        for path, own in found.items()
        if asks_for_states(rules[path].config)
        for name, kind in own.items()
    ]


def _packed(module: nn.Module) -> dict[str, str]:
    """Return the names of a module's weights of which only codes are held; in a graph, of what holds them."""
    names = [name for name, chain in own_parametrizations(module).items() if is_packed(chain)]
    if isinstance(module, fx.GraphModule):
        names += [name for name, child in module._modules.items() if isinstance(child, PackedWeight)]
    return dict.fromkeys(names, "packed")


def _wrapped(module: nn.Module) -> dict[str, str]:
    """Return the names of a module's own tensors that other tensors stand for, and their classes."""
    own = {**module._parameters, **module._buffers}
    return {
        name: type(tensor).__name__
        for name, tensor in own.items()
        if tensor is not None and is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)
    }
