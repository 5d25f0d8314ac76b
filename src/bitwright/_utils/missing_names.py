"""Names that a state has not, and whose values are known all the same."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["add_known_names"]

_COUNTER, _STATISTIC = "num_batches_tracked", "running_var"


def add_known_names(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
    """Add entries to a state that is going to be loaded, where other writers leave them out.

    A tensor with several names (a tied weight, or that of a shared module) has one of them in a graph's state of
    coreai-opt and in safetensors files. A batch norm's count of batches, which graphs of coreai-opt lack, stays what it
    is, as in ``nn.BatchNorm2d``.

    Args:
        module: what the state is for.
        state_dict: the state; changed.
        prefix: what stands before the names of ``module`` there.
    """
    own = module.state_dict(prefix=prefix, keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        given = next((name for name in tied if name in state_dict), None)
        if given is not None:
            for name in tied:
                state_dict.setdefault(name, state_dict[given])
    for name, tensor in own.items():
        owner, dot, attribute = name.rpartition(".")
        if attribute == _COUNTER and f"{owner}{dot}{_STATISTIC}" in state_dict:
            state_dict.setdefault(name, tensor)
