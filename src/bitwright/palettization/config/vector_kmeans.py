"""Settings of the clustering of vectors."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeFloat, PositiveInt

from bitwright.config._strict import StrictModel

__all__ = ["VectorKMeansConfig"]


class VectorKMeansConfig(StrictModel):
    """How thoroughly palettes of vectors (``cluster_dim > 1``) are sought; of coreai-opt 0.4.

    Attributes:
        n_init: how many seedings are tried for each palette; the best one is followed to its end. Time grows with it.
        n_local_trials: accepted for code written for coreai-opt, without effect, like the next two: seeds are compared
            on subsamples, and Lloyd's algorithm ends when the error falls by less than 1e-4 of itself.
        max_iter: likewise.
        tol: likewise.
    """

    model_config = ConfigDict(frozen=True)

    n_local_trials: PositiveInt | None = None
    n_init: PositiveInt = 5
    max_iter: PositiveInt = 300
    tol: NonNegativeFloat = 1e-4
