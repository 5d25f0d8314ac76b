"""How weights are cut into groups and vectors, against loops over all elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.palettization.spec import PerGroupedChannelGranularity, PerTensorGranularity
from bitwright.palettization.spec._vector_layout import VectorLayout
from bitwright.palettization.spec.errors import _IncompatibleClusterDimError

SHAPES = st.sampled_from([(8,), (4, 6), (8, 4), (8, 4, 3), (4, 8, 2, 3)])


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, axis=st.sampled_from([None, 0, 1]), size=st.sampled_from([1, 2, 4]), dim=st.sampled_from([1, 2]))
def test_split_and_join(shape, axis, size, dim):
    """Each vector holds neighbours along dimension 0 of one group, every element once; join undoes split."""
    if axis is not None and (axis >= len(shape) or shape[axis] % size):
        return
    group_rows = size if axis == 0 else shape[0]
    if group_rows % dim:
        return
    granularity = PerTensorGranularity() if axis is None else PerGroupedChannelGranularity(axis=axis, group_size=size)
    layout = VectorLayout.of(shape, granularity, dim)
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    vectors = layout.split(places)
    assert vectors.shape == (layout.groups, places.numel() // layout.groups // dim, dim)
    assert torch.equal(layout.join(vectors), places)
    coordinates = {int(places[index]): index for index in itertools.product(*map(range, shape))}
    for group, rows in enumerate(vectors.tolist()):
        for row in rows:
            first = coordinates[row[0]]
            assert first[0] % dim == 0
            for offset, entry in enumerate(row):
                assert coordinates[entry] == (first[0] + offset, *first[1:])
            if axis is not None:
                assert first[axis] // size == group


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, axis=st.sampled_from([None, 0, 1]), dim=st.sampled_from([1, 2]))
def test_indices_have_the_shape_of_the_weight(shape, axis, dim):
    """Index [r, c, ...] names the entry that decodes to rows r·D to r·D + D - 1 of the weight."""
    if axis is not None and axis >= len(shape):
        return
    granularity = PerTensorGranularity() if axis is None else PerGroupedChannelGranularity(axis=axis, group_size=2)
    layout = VectorLayout.of(shape, granularity, dim)
    assert layout.index_shape == (shape[0] // dim, *shape[1:])
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    firsts = layout.split(places)[..., 0]
    assert torch.equal(layout.join_indices(firsts), places[::dim])
    assert torch.equal(layout.split_indices(layout.join_indices(firsts)), firsts)


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((3, 8), PerTensorGranularity()),
        ((12, 8), PerGroupedChannelGranularity(axis=0, group_size=3)),
        ((3, 12), PerGroupedChannelGranularity(axis=1, group_size=3)),
    ],
)
def test_vectors_that_do_not_divide(shape, granularity):
    """Along dimension 0 of the weight, or of a group of rows."""
    with pytest.raises(_IncompatibleClusterDimError, match="cluster_dim 2"):
        VectorLayout.of(shape, granularity, 2)
