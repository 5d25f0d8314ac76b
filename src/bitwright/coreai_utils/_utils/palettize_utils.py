"""Clustering of one weight, under the name that code written for coreai-opt's internals imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitwright.coreai_utils._palettize import palettize

__all__ = ["_get_kmeans_lookup_table_and_weight"]


def _get_kmeans_lookup_table_and_weight(
    n_bits: int, weight: np.ndarray[Any, Any], cluster_dim: int = 1, vector_axis: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Cluster a weight into one table; return it as ``(2 ** n_bits, cluster_dim)``, and the indices, flat."""
    values = torch.from_numpy(np.asarray(weight, dtype=np.float32))
    palette = palettize(values, vector_axis, n_bits, values.shape[vector_axis], cluster_dim, fast=False)
    return palette.lut[0].numpy(), palette.indices.reshape(-1).numpy()
