"""How closely to cluster, from the promises of ``cluster_scalar``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Effort:
    """Limits of one clustering.

    Attributes:
        limit: atoms that long rows are merged to. The excess error is about 0.2 · (k / limit)².
        tolerance: of the partition, relative to the optimum on those atoms.
        slack: largest part of the error that may lie inside the atoms; the excess is a quarter to a third of it.
    """

    limit: int
    tolerance: float
    slack: float

    def is_too_coarse(self, error: float, outside: float) -> bool:
        """Whether the error of a row lies too much inside of merged atoms, given what lies between them."""
        return error - outside > self.slack * error

    def is_surely_fine(self, outside: float, inside: float) -> bool:
        """Whether no more than ``inside`` of error within merged atoms is little beside what lies between them."""
        return inside <= self.slack * outside

    def too_coarse(self, errors: npt.NDArray[np.float64], outside: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Rows whose error lies too much inside of merged atoms, given what lies between them."""
        if math.isinf(self.slack):
            return np.empty(0, np.intp)
        return np.flatnonzero(errors - outside > self.slack * errors)


EXACT = Effort(1 << 60, 1e-12, math.inf)


def effort_for(n_clusters: int, mode: str) -> Effort:
    """The effort for a mode, ``"fast"`` or ``"exact"``."""
    if mode == "exact":
        return EXACT
    if n_clusters <= 16:
        return Effort(4096, 1e-6, 2.5e-5)
    if n_clusters <= 64:
        return Effort(8192, 1e-5, 2e-4)
    return Effort(16384, 3e-5, 1e-3)
