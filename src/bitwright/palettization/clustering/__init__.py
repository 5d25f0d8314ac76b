"""Clustering of weights into palettes: pure functions on tensors, no modules.

Scalar palettes are optimal or proved to be close to it; vector palettes come from k-means++ and Lloyd's
algorithm. All groups of a tensor are clustered by one call, results do not depend on the number of threads, and
no global random state is read or changed. The README beside this file explains the method.
"""

from bitwright.palettization.clustering.assignment import assign, cluster_moments, clustering_error
from bitwright.palettization.clustering.grid import cluster_on_grid
from bitwright.palettization.clustering.refit import RefitResult, refit_to_quantized
from bitwright.palettization.clustering.result import ClusterResult
from bitwright.palettization.clustering.scalar import cluster_scalar
from bitwright.palettization.clustering.vectors import cluster_vectors

__all__ = [
    "ClusterResult",
    "RefitResult",
    "assign",
    "cluster_moments",
    "cluster_on_grid",
    "cluster_scalar",
    "cluster_vectors",
    "clustering_error",
    "refit_to_quantized",
]
