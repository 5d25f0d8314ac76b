"""Tensors that no compressor can prepare as they are: those without data, and those of ``torch.inference_mode``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bitwright.program import Program

from .plan import Plan

__all__ = ["refuse_unusable", "tensors_needed"]


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
