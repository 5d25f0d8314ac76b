"""From statistics of a layer's inputs to its mask, and for SparseGPT to its adjusted weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bitwright._utils.weight_simulators import SimulatorPlace
from bitwright.pruning.spec import NMStructured, PruneImplBase, Unstructured

from ._matrix_form import MatrixForm
from ._sparsegpt import InverseFactor, MaskRule, compensate, group_rule, sparsity_rule
from ._statistics import GramStatistics, NormStatistics

__all__ = ["CalibratedWeight", "calibrate"]

_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedWeight:
    """What calibration found for one weight; nothing is changed before ``apply``.

    Attributes:
        place: the weight.
        scale: how strongly each input moves an output, in a shape that broadcasts against the weight.
        weight: the adjusted dense weight; None to keep it.
        mask: the mask that goes with it; None to make it from the scores.
    """

    place: SimulatorPlace[PruneImplBase]
    scale: torch.Tensor
    weight: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def apply(self) -> None:
        """Hand everything to the simulator, and write the weight."""
        self.place.simulator.set_input_scale(self.scale)
        if self.weight is not None:
            with torch.no_grad():
                self.place.original.copy_(self.weight)
        if self.mask is not None:
            self.place.simulator.set_mask(self.mask)


def calibrate(place: SimulatorPlace[PruneImplBase], statistics: NormStatistics) -> CalibratedWeight | None:
    """Return what follows from the statistics; None if the layer was not called."""
    form = statistics.form
    if form is None:
        return None
    if not isinstance(statistics, GramStatistics):
        return CalibratedWeight(place, form.spread(statistics.scale, place.original.shape))
    factors = [InverseFactor(gram) for gram in statistics.gram]
    scale = form.spread(torch.stack([f.diagonal for f in factors]).rsqrt(), place.original.shape)
    if place.below:  # what enters is not the weight itself, so there is nothing to adjust
        return CalibratedWeight(place, scale)
    return _compensated(place, form, factors, scale)


def _compensated(
    place: SimulatorPlace[PruneImplBase], form: MatrixForm, factors: list[InverseFactor], scale: torch.Tensor
) -> CalibratedWeight:
    dense = place.original.detach()
    matrices = form.matrices(dense.float())
    rule = _adaptive_rule(place.simulator, form)
    masks: list[MaskRule | torch.Tensor]
    if rule is None:
        fixed = place.simulator.pruning_scheme.mask_from_scores(dense.abs().float() * scale, place.simulator.sparsity)
        masks = list(form.matrices(fixed))
    else:
        masks = [rule] * len(factors)
    results = [
        compensate(matrix, factor, mask, _block(place.simulator))
        for matrix, factor, mask in zip(matrices, factors, masks, strict=True)
    ]
    weight = form.weight(torch.stack([w for w, _ in results]), dense.shape).to(dense.dtype)
    mask = form.weight(torch.stack([m for _, m in results]), dense.shape)
    return CalibratedWeight(place, scale, weight, mask)


def _adaptive_rule(impl: PruneImplBase, form: MatrixForm) -> MaskRule | None:
    """Return the rule that chooses while columns are adjusted; None where the mask is fixed beforehand."""
    scheme = impl.pruning_scheme
    if isinstance(scheme, Unstructured) and impl.scope != "global":
        return sparsity_rule(impl.sparsity, impl.scope == "row")
    flat = isinstance(scheme, NMStructured) and form == MatrixForm() and scheme.axis in (1, -1)
    if flat and impl.mask.ndim == 2:
        assert isinstance(scheme, NMStructured)
        return group_rule(min(scheme.n, math.floor(scheme.m * impl.sparsity + 1e-9)), scheme.m)
    return None


def _block(impl: PruneImplBase) -> int:
    """Return a number of columns that whole N:M groups fill."""
    scheme = impl.pruning_scheme
    if not isinstance(scheme, NMStructured):
        return _BLOCK
    return scheme.m * max(1, _BLOCK // scheme.m)
