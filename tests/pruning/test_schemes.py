"""Schemes: which entries go, against definitions by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.pruning.spec import BlockStructured, ChannelStructured, NMStructured, PruningScheme, Unstructured
from bitwright.pruning.spec.errors import _BlockSizeMismatchError
from bitwright.pruning.spec.scheme import keep_largest


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    sparsity=st.floats(0, 1),
)
def test_keep_largest_removes_exactly_the_smallest(values, sparsity):
    """floor(n·s) entries go, none of them larger than one that stays, and ties stay in order of position."""
    scores = torch.tensor(values, dtype=torch.float32)
    kept = keep_largest(scores, sparsity)
    removed = math.floor(len(values) * sparsity + 1e-9)
    assert int((~kept).sum()) == removed
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert set(kept.nonzero().flatten().tolist()) == set(order[: len(values) - removed])


def test_keep_largest_by_rows_ranks_each_row_on_its_own():
    """A row of small values loses as many entries as a row of large ones."""
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [100.0, 300.0, 200.0, 400.0]])
    expected = torch.tensor([[False, False, True, True], [False, True, False, True]])
    assert torch.equal(keep_largest(scores, 0.5, rows=2), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mask_has_the_dtype_of_the_weight(dtype):
    """``compute_mask`` returns ones and zeros that multiply the weight without promotion."""
    mask = Unstructured().compute_mask(torch.randn(4, 4).to(dtype), 0.25)
    assert mask.dtype == dtype
    assert int(mask.sum()) == 12


def test_channels_are_ranked_by_their_l1_norm():
    """Along either axis, and with a negative axis too."""
    weight = torch.tensor([[9.0, 1.0, 1.0], [2.0, -8.0, 2.0], [1.0, 1.0, 1.5]])
    by_rows = ChannelStructured(axis=0).compute_mask(weight, 1 / 3)
    assert by_rows.eq(0).all(1).tolist() == [False, False, True]
    by_columns = ChannelStructured(axis=-1).compute_mask(weight, 1 / 3)
    assert by_columns.eq(0).all(0).tolist() == [False, False, True]


@pytest.mark.parametrize(("axis", "shape"), [(2, (4, 4)), (-3, (4, 4))])
def test_axis_out_of_range_names_shape_and_range(axis, shape):
    """The message says what would be valid."""
    with pytest.raises(ValueError, match=r"Invalid axis .*\(4, 4\).*\[-2, 2\)"):
        ChannelStructured(axis=axis).compute_mask(torch.ones(shape), 0.5)


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0.0, [1, 1, 1, 1]), (0.5, [0, 1, 0, 1]), (0.75, [0, 0, 0, 1]), (1.0, [0, 0, 0, 0])]
)
def test_each_entry_of_a_vector_is_a_channel(sparsity, kept):
    """As of a bias next to the weight of a convolution."""
    vector = torch.tensor([1.0, -3.0, 0.5, 4.0])
    assert ChannelStructured().compute_mask(vector, sparsity).tolist() == kept
    assert ChannelStructured(axis=-1).compute_mask(vector, sparsity).tolist() == kept


@pytest.mark.parametrize(("axis", "shape"), [(1, (4,)), (0, ())])
def test_a_vector_has_one_axis_and_a_number_none(axis, shape):
    """Refused also where nothing would be removed."""
    with pytest.raises(ValueError, match="Invalid axis"):
        ChannelStructured(axis=axis).compute_mask(torch.ones(shape), 0.0)


def test_blocks_are_ranked_by_their_l2_norm():
    """A block with one large entry beats one with many middling ones of the same sum."""
    weight = torch.tensor([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 0.0, 0.5]])
    mask = BlockStructured(axis=1, block_size=2).compute_mask(weight, 0.5)
    assert mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]
    mask = BlockStructured(axis=1, block_size=2).compute_mask(weight, 0.75)
    assert mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_square_blocks():
    """A tuple gives the block's length in every dimension."""
    weight = torch.ones(4, 4)
    weight[2:, :2] = 0.1
    mask = BlockStructured(block_size=(2, 2)).compute_mask(weight, 0.25)
    assert mask[2:, :2].eq(0).all()
    assert int(mask.sum()) == 12


@pytest.mark.parametrize("scheme", [BlockStructured(axis=0, block_size=2), NMStructured(axis=0, n=1, m=2)])
def test_sizes_that_do_not_divide(scheme: PruningScheme):
    """A mismatch is its own error, which planning turns into a warning."""
    with pytest.raises(_BlockSizeMismatchError, match="dimension 0"):
        scheme.compute_mask(torch.ones(5, 4), 0.5)


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (3, 8)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_n_of_every_m_neighbours_go(n, m, axis):
    """In each group along the axis the n smallest magnitudes are removed; checked group by group."""
    weight = torch.randn(8, 16, 2, generator=torch.Generator().manual_seed(0))
    if weight.shape[axis] % m:
        weight = weight.repeat_interleave(m, axis)
        weight = weight + torch.randn(weight.shape) * 0.1
    mask = NMStructured(axis=axis, n=n, m=m).compute_mask(weight, 1.0).movedim(axis, -1)
    groups = weight.abs().movedim(axis, -1).reshape(-1, m)
    for kept, group in zip(mask.reshape(-1, m), groups, strict=True):
        assert set((kept == 0).nonzero().flatten().tolist()) == set(group.argsort()[:n].tolist())


def test_patterns_grow_with_the_sparsity():
    """A schedule on its way to n / m removes floor(m·s) of a group."""
    scheme = NMStructured(axis=1, n=3, m=4)
    weight = torch.randn(2, 8)
    removed = [int((scheme.compute_mask(weight, s) == 0).sum()) // 4 for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert removed == [0, 1, 2, 3, 3]
    assert scheme.final_sparsity(0.1) == 0.75


@pytest.mark.parametrize("shape", [(4, 8, 1, 1), (8, 4, 1), (4, 8)])
def test_masks_are_laid_out_like_new_tensors(shape):
    """Strides of dimensions of size one too: a convolution's kernel, hence its rounding, depends on them."""
    mask = NMStructured(n=2, m=4, axis=1).compute_mask(torch.randn(shape), 0.5)
    assert mask.stride() == torch.empty(shape).stride()


def test_an_axis_left_open_is_the_input_axis():
    """Dimension 1, or 0 where there is no other."""
    assert torch.equal(
        NMStructured().compute_mask(torch.arange(1.0, 9).view(2, 4), 0.5), torch.tensor([[0.0, 0, 1, 1]] * 2)
    )
    assert NMStructured().compute_mask(torch.arange(1.0, 5), 0.5).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "n_m_structured", "n": 4, "m": 4}, "must be less than"),
        ({"type": "n_m_structured", "n": 5, "m": 4}, "must be less than"),
        ({"type": "block_structured", "block_size": 0}, "greater than 0"),
        ({"type": "channel_structured", "axes": 1}, "axes"),
        ({"type": "round"}, "Available keys"),
        ({"axis": 1}, "needs a 'type'"),
    ],
)
def test_bad_schemes_are_refused(fields, message):
    """At construction, before any model is there."""
    with pytest.raises(ValueError, match=message):
        PruningScheme.maybe_build_from_dict(fields)


@pytest.mark.parametrize("scheme", [Unstructured(), ChannelStructured(axis=1), NMStructured(n=8, m=16, axis=1)])
def test_doubles_are_ranked_as_doubles(scheme):
    """Magnitudes that differ by less than float32 can tell."""
    weight = (1 + 1e-9 * torch.arange(16, dtype=torch.float64)).expand(2, 16)
    expected = torch.tensor([[0.0] * 8 + [1.0] * 8] * 2, dtype=torch.float64)
    assert torch.equal(scheme.compute_mask(weight, 0.5), expected)
    assert torch.equal(scheme.compute_mask(weight.flip(1), 0.5), expected.flip(1))


@pytest.mark.parametrize(("unit", "dtype"), [(1e-24, torch.float32), (1e20, torch.bfloat16), (1e-30, torch.float64)])
def test_blocks_are_ranked_whatever_their_squares_are(unit, dtype):
    """The squares of these are beyond float32, the weights are not."""
    weight = (unit * torch.arange(1, 17, dtype=torch.float64)).to(dtype).view(1, 16)
    mask = BlockStructured(axis=1, block_size=4).compute_mask(weight, 0.5)
    assert mask.tolist() == [[0.0] * 8 + [1.0] * 8]
