"""Batch norms that graph mode folded into the weights of an artifact, seen from the float model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["FoldedNorms"]


@dataclass
class FoldedNorms:
    """What a float model has that an artifact of its folded form has not, and the other way round.

    Attributes:
        norms: paths of batch norms none of whose tensors is in the artifact: they are part of the weights there.
        biases: biases, by dotted name, that layers without one have in the artifact, with their shapes.
    """

    norms: list[str] = field(default_factory=list)
    biases: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, stored: Mapping[str, tuple[int, ...]]) -> FoldedNorms:
        """Find them by the names and shapes of the artifact's tensors."""
        modules = dict(model.named_modules())
        found = cls()
        for path, module in modules.items():
            names = [f"{path}.{name}" for name in module.state_dict()]
            if path and isinstance(module, _BatchNorm) and names and not any(name in stored for name in names):
                found.norms.append(path)
        for name, shape in stored.items():
            path, _, attribute = name.rpartition(".")
            owner = modules.get(path)
            if found.norms and attribute == "bias" and owner is not None and _takes_bias(owner):
                found.biases[name] = shape
        return found

    def states(self, targets: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return parameters and buffers as the model will have them once :meth:`apply` was called."""
        gone = tuple(f"{path}." for path in self.norms)
        kept = {name: tensor for name, tensor in targets if not (gone and name.startswith(gone))}
        return kept | {name: torch.empty(shape, device="meta") for name, shape in self.biases.items()}

    def apply(self, model: nn.Module) -> None:
        """Take the batch norms out of the model, and give layers their biases, filled with zeros."""
        for path in self.norms:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
        for name, shape in self.biases.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            weight = owner.weight
            assert isinstance(weight, torch.Tensor)
            owner.bias = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))


def _takes_bias(owner: nn.Module) -> bool:
    return "bias" in owner._parameters and owner._parameters["bias"] is None
