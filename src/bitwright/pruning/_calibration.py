"""From statistics of a layer's inputs to its mask, and for SparseGPT to its adjusted weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bitwright._utils.weight_simulators import SimulatorPlace
from bitwright.pruning.spec import NMStructured, PruneImplBase, Unstructured

from ._matrix_form import MatrixForm
from ._sparsegpt import InverseFactor, MaskRule, compensate, group_rule, sparsity_rule
from ._statistics import GramStatistics, NormStatistics

__all__ = ["calibrate", "is_adjusted"]

_BLOCK = 128


Calibrated = tuple[SimulatorPlace[PruneImplBase], NormStatistics]
"""A weight, and what was seen of the inputs of its layer."""


def calibrate(
    places: Sequence[SimulatorPlace[PruneImplBase]], seen: Sequence[Calibrated], make_masks: Callable[[], None]
) -> None:
    """Hand what the statistics say to the simulators, and adjust weights. When that raises, all is as before.

    Args:
        places: all weights whose masks ``make_masks`` may make.
        seen: those among them with statistics; layers that were not called stay as they are.
        make_masks: makes all masks that are out of date.
    """
    called = [(place, statistics) for place, statistics in seen if statistics.count]
    with _undone_on_error(places):
        for place, statistics in called:
            if not is_adjusted(place) or place.simulator.scope == "global":
                place.simulator.set_input_scale(_scale(place, statistics, _factors(statistics)))
        make_masks()  # of weights that are ranked together, before any of them is adjusted
        for place, statistics in called:
            if is_adjusted(place):
                _compensate(place, statistics)


def is_adjusted(place: SimulatorPlace[PruneImplBase]) -> bool:
    """Whether calibration writes the dense weight, which another simulator must not change on its way to this one."""
    return place.simulator.input_statistics == "gram" and not place.below


@contextmanager
def _undone_on_error(places: Sequence[SimulatorPlace[PruneImplBase]]) -> Iterator[None]:
    """Bring back dense weights, masks and scales when the block raises."""
    states = [place.simulator.remember() for place in places]
    weights = [(place.original, place.original.detach().clone()) for place in places if is_adjusted(place)]
    try:
        yield
    except BaseException:
        for bring_back in states:
            bring_back()
        with torch.no_grad():
            for original, weight in weights:
                original.copy_(weight)
        raise


def _factors(statistics: NormStatistics) -> list[InverseFactor]:
    return [InverseFactor(gram) for gram in statistics.gram] if isinstance(statistics, GramStatistics) else []


def _scale(
    place: SimulatorPlace[PruneImplBase], statistics: NormStatistics, factors: Sequence[InverseFactor]
) -> torch.Tensor:
    """Return how strongly each input moves an output, in a shape that broadcasts against the weight."""
    assert statistics.form is not None
    columns = torch.stack([f.diagonal for f in factors]).rsqrt() if factors else statistics.scale
    return statistics.form.spread(columns, place.original.shape)


def _compensate(place: SimulatorPlace[PruneImplBase], statistics: NormStatistics) -> None:
    """Choose what goes, where no common ranking has done so, and let the other entries make up for it."""
    # Made once more for a common ranking, not kept for all weights: together they are larger than the model.
    form, impl, factors = statistics.form, place.simulator, _factors(statistics)
    assert form is not None
    dense = place.original.detach()
    impl.set_input_scale(_scale(place, statistics, factors))
    rule = _adaptive_rule(impl, form)
    masks: list[MaskRule | torch.Tensor] = [rule] * len(factors) if rule is not None else []
    if rule is None:
        together = impl.scope == "global"
        fixed = impl.mask if together else impl.build_mask(dense).bool()
        masks = list(form.matrices(fixed))
    results = [
        compensate(matrix, factor, mask, _block(impl))
        for matrix, factor, mask in zip(form.matrices(dense.float()), factors, masks, strict=True)
    ]
    with torch.no_grad():
        place.original.copy_(form.weight(torch.stack([w for w, _ in results]), dense.shape))
    impl.set_mask(form.weight(torch.stack([m for _, m in results]), dense.shape), dense)


def _adaptive_rule(impl: PruneImplBase, form: MatrixForm) -> MaskRule | None:
    """Return the rule that chooses while columns are adjusted; None where the mask is fixed beforehand."""
    scheme = impl.pruning_scheme
    if not impl.ranks_scores:
        return None
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
