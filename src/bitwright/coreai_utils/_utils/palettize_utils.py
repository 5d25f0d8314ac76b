"""Clustering of one weight, under the names that code written for coreai-opt's internals imports."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from bitwright.coreai_utils._palettize import N_BITS, palettize

__all__ = ["LutParams", "_blockwise_compress", "_get_kmeans_lookup_table_and_weight", "_is_cluster_dim_valid"]

_Array = np.ndarray[Any, Any]


class LutParams(NamedTuple):
    """A palettized weight.

    Attributes:
        indices: uint8, the shape of the weight with the size of the channel axis divided by the vector length.
        lut: the tables; a dimension for each of the weight, of the number of tables along the channel axis and 1
            elsewhere, and then ``2 ** n_bits`` and the vector length.
        vector_axis: the channel axis, None for scalars.
    """

    indices: _Array
    lut: _Array
    vector_axis: int | None


def _get_kmeans_lookup_table_and_weight(
    n_bits: int, weight: _Array, cluster_dim: int = 1, vector_axis: int = 0
) -> tuple[_Array, _Array]:
    """Cluster a weight into one table; return it as ``(2 ** n_bits, cluster_dim)``, and the indices, flat."""
    values = torch.from_numpy(np.asarray(weight, dtype=np.float32))
    palette = palettize(values, vector_axis, n_bits, values.shape[vector_axis], cluster_dim, fast=False)
    return palette.lut[0].numpy(), palette.indices.reshape(-1).numpy()


def _blockwise_compress(
    original_data: _Array,
    mode: str,
    nbits: int | None,
    block_sizes: list[int],
    lut_function: Any = None,
    cluster_dim: int = 1,
    channel_axis: int | None = None,
    num_kmeans_workers: int = 1,
) -> LutParams:
    """Palettize a weight.

    Args:
        original_data: the weight.
        mode: ``KMEANS``, or ``UNIQUE`` for a table of the values that the weight has, which loses nothing.
        nbits: bits of an index; None with ``UNIQUE`` for the least that suffice.
        block_sizes: for each axis, 0 or the size of the weight; along one axis, the channels, those of a table.
        lut_function: is not taken.
        cluster_dim: length of a vector.
        channel_axis: where ``block_sizes`` do not say it.
        num_kmeans_workers: has no effect.

    Raises:
        ValueError: another mode; blocks along several axes, or that do not divide; more values than a table has.
    """
    blocked = [axis for axis, size in enumerate(block_sizes) if size not in (0, original_data.shape[axis])]
    if len(blocked) > 1 or (blocked and channel_axis not in (None, blocked[0])):
        raise ValueError(f"Tables are for groups of channels; got blocks of {block_sizes}.")
    axis = blocked[0] if blocked else channel_axis or 0
    group = block_sizes[axis] if blocked else original_data.shape[axis]
    if original_data.shape[axis] % group or group % cluster_dim:
        raise ValueError(f"Groups of {group} channels, in vectors of {cluster_dim}, do not divide the weight.")
    if mode.upper() == "KMEANS" and nbits is not None:
        values = torch.from_numpy(np.asarray(original_data, dtype=np.float32))
        palette = palettize(values, axis, nbits, group, cluster_dim, fast=False)
        lut, indices = palette.lut.numpy(), palette.indices.numpy()
    elif mode.upper() == "UNIQUE":
        lut, indices = _of_its_values(original_data, nbits, axis, group, cluster_dim)
    else:
        raise ValueError(f"The mode is KMEANS, with a number of bits, or UNIQUE; got {mode!r}, {nbits} bits.")
    shape = [1] * original_data.ndim
    shape[axis] = len(lut)
    tables = lut.reshape(*shape, *lut.shape[1:]).astype(original_data.dtype)
    return LutParams(indices, tables, None if cluster_dim == 1 else axis)


def _of_its_values(data: _Array, n_bits: int | None, axis: int, group: int, cluster_dim: int) -> tuple[_Array, _Array]:
    """The values of each group of channels in a table, shape ``[groups, 2 ** n_bits, cluster_dim]``, and indices."""
    rows = np.moveaxis(data, axis, 0)
    vectors = rows.reshape(rows.shape[0] // group, group // cluster_dim, cluster_dim, -1).swapaxes(2, 3)
    found = [np.unique(part.reshape(-1, cluster_dim), axis=0, return_inverse=True) for part in vectors]
    most = max(len(values) for values, _ in found)
    n_bits = n_bits or next((bits for bits in N_BITS if most <= 2**bits), None)
    if n_bits is None or most > 2**n_bits:
        raise ValueError(f"The weight has {most} values, more than a table of {n_bits or N_BITS[-1]} bits.")
    lut = np.zeros((len(found), 2**n_bits, cluster_dim), data.dtype)
    for table, (values, _) in zip(lut, found, strict=True):
        table[: len(values)] = values
    indices = np.stack([places.reshape(-1) for _, places in found]).astype(np.uint8)
    return lut, np.moveaxis(indices.reshape(rows.shape[0] // cluster_dim, *rows.shape[1:]), 0, axis)


def _is_cluster_dim_valid(op: Any, cluster_dim: int, channel_axis: int) -> bool:
    """Return whether vectors of ``cluster_dim`` channels divide a weight, a ``coreai.constant``."""
    return bool(list(op.result.type.shape)[channel_axis] % cluster_dim == 0)
