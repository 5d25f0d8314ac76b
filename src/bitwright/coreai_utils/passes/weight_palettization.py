"""Palettization of the weights of a converted program, with tables of one's own where they are known.

``palettize_weights`` asks the functions that stand here. Who has the tables and indices of a weight puts a function in
the place of ``_blockwise_compress``, which is then called, with the weight in float16, in place of the clustering, and
returns ``LutParams``, or None to leave the weight as it is.
"""

from __future__ import annotations

from bitwright.coreai_utils._palettize import palettize_weights
from bitwright.coreai_utils._utils.palettize_utils import LutParams, _blockwise_compress, _is_cluster_dim_valid

__all__ = ["LutParams", "_blockwise_compress", "_is_cluster_dim_valid", "palettize_weights"]
