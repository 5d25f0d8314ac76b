"""Batch norms that graph mode folded into the weights of an artifact, seen from the float model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .errors import ArtifactError

__all__ = ["FoldedNorms"]

# How `_graph/finalize.py` names what it folds: as the layer does, or with a number where that name is taken.
_FOLDED = re.compile(r"bias|.+_folded_\d+")


@dataclass
class FoldedNorms:
    """What a float model has that an artifact of its folded form has not, and the other way round.

    Attributes:
        norms: paths of batch norms none of whose tensors is in the artifact: they are part of the weights there.
        biases: biases, by dotted name, that layers without one have in the artifact, with their shapes.
        unplaced: folded tensors, by dotted name, for which the model has no place.
    """

    norms: list[str] = field(default_factory=list)
    biases: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: nn.Module, stored: Mapping[str, tuple[int, ...]], folded: Collection[str] | None = None
    ) -> FoldedNorms:
        """Find them by the names and shapes of the artifact's tensors.

        Args:
            model: the float model.
            stored: shapes of the artifact's tensors by name.
            folded: paths of the batch norms that were folded; None where that was not recorded: any may have been.

        Raises:
            ArtifactError: a batch norm was folded where it follows one layer, and is needed elsewhere.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        recorded = None if folded is None else {id(modules[path]) for path in folded if path in modules}
        found, both = cls(), []
        for path, module in modules.items():
            names = [f"{path}.{name}" for name in module.state_dict()]
            if not (path and isinstance(module, _BatchNorm) and names):
                continue
            absent = not any(name in stored for name in names)
            if absent and (recorded is None or id(module) in recorded):
                found.norms.append(path)
            elif not absent and folded is not None and path in folded:
                both.append(path)
        if both:
            raise ArtifactError(
                f"The batch norms {both[:10]} are part of the weights of the layers before them and stand elsewhere "
                "too, which a float model cannot hold: it would apply them twice. Give each place a batch norm of its "
                "own before preparing."
            )
        for name, shape in stored.items():
            path, _, attribute = name.rpartition(".")
            owner = modules.get(path)
            if not found.norms or owner is None:
                continue
            if attribute == "bias" and _takes_bias(owner):
                found.biases[name] = shape
            elif _FOLDED.fullmatch(attribute) and not hasattr(owner, attribute):
                found.unplaced.append(name)
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
