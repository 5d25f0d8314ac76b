"""What a graph keeps from call to call carries no gradients over: they would lead into a graph that is gone."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitwright.kernels.dispatch import is_exporting
from bitwright.program import Program, StateTensor

from .initialise import written_states

__all__ = ["cut_gradients_between_calls"]


def cut_gradients_between_calls(module: nn.Module, program: Program) -> None:
    """Have ``module`` forget behind each call how the buffers were computed that it wrote to, such as caches.

    Models write to them under ``torch.no_grad``, which a capture without gradients does not keep.
    """
    written = {id(state.tensor) for state in written_states(program) if _may_need_gradients(state)}
    names = tuple(name for name, buffer in module.named_buffers() if id(buffer) in written)
    if names:
        module.register_forward_hook(_Cut(names))


def _may_need_gradients(state: StateTensor) -> bool:
    """Whether a state may become part of autograd's graph; the statistics that a norm keeps never do."""
    by_norm = all(use.op.type.endswith("_norm") for use in state.uses)
    return not (state.is_parameter or by_norm) and state.tensor.is_floating_point()


class _Cut:
    """A forward hook; a class, so that models with it can be copied and pickled."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in self._names:
            buffer = module.get_buffer(name)
            if buffer.requires_grad and not is_exporting():
                buffer.detach_()
