"""Granularities: the blocks of a tensor, against their definition by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationGranularity,
    resolve_block_sizes,
)
from bitwright.quantization.spec.errors import _BlockSizeMismatchError

from .spec_strategies import ACTIVATION, WEIGHT

shapes = st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4).map(tuple)


def groups(block_size: tuple[int, ...], shape: tuple[int, ...]) -> set[frozenset[tuple[int, ...]]]:
    """The sets of positions that share parameters."""
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for position in itertools.product(*map(range, shape)):
        found.setdefault(tuple(p // b for p, b in zip(position, block_size, strict=True)), set()).add(position)
    return {frozenset(group) for group in found.values()}


def grouped_by(key: Any, shape: tuple[int, ...]) -> set[frozenset[tuple[int, ...]]]:
    found: dict[Any, set[tuple[int, ...]]] = {}
    for position in itertools.product(*map(range, shape)):
        found.setdefault(key(position), set()).add(position)
    return {frozenset(group) for group in found.values()}


@settings(deadline=None)
@given(shapes)
def test_per_tensor_is_one_group(shape: tuple[int, ...]) -> None:
    assert groups(PerTensorGranularity().get_block_size(shape), shape) == grouped_by(lambda p: 0, shape)


@settings(deadline=None)
@given(shapes, st.data())
def test_per_channel_groups_by_the_index_along_the_axis(shape: tuple[int, ...], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert groups(PerChannelGranularity(axis=axis).get_block_size(shape), shape) == grouped_by(lambda p: p[axis], shape)


@settings(deadline=None)
@given(shapes)
def test_per_token_groups_by_all_indices_but_the_last(shape: tuple[int, ...]) -> None:
    assert groups(PerTokenGranularity().get_block_size(shape), shape) == grouped_by(lambda p: p[:-1], shape)


@settings(deadline=None)
@given(shapes, st.data(), st.sampled_from((WEIGHT, ACTIVATION)))
def test_per_block_along_an_axis(shape: tuple[int, ...], data: st.DataObject, target: Any) -> None:
    """Beside the block's axis: every index of an activation, only the two leading ones of a weight."""
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = data.draw(st.sampled_from([d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]))
    kept = range(len(shape)) if target is ACTIVATION else range(min(2, len(shape)))

    def key(p: tuple[int, ...]) -> tuple[Any, ...]:
        return p[axis] // size, tuple(p[d] for d in kept if d != axis % len(shape))

    block_size = PerBlockGranularity(axis=axis, block_size=size).get_block_size(shape, target)
    assert groups(block_size, shape) == grouped_by(key, shape)


@settings(deadline=None)
@given(shapes, st.data())
def test_per_block_by_tuple(shape: tuple[int, ...], data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.sampled_from([-1, *(d for d in range(1, size + 1) if size % d == 0)])) for size in shape)
    expected = tuple(size if block == -1 else block for size, block in zip(shape, sizes, strict=True))
    assert PerBlockGranularity(block_size=sizes).get_block_size(shape) == expected
    assert resolve_block_sizes(shape, sizes) == list(expected)


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_blocks_that_do_not_divide_are_a_mismatch(shape: list[int], blocks: list[int]) -> None:
    assume(len(shape) == len(blocks))
    if all(size % block == 0 for size, block in zip(shape, blocks, strict=True)):
        assert resolve_block_sizes(shape, blocks) == blocks
    else:
        with pytest.raises(_BlockSizeMismatchError, match="not divisible by block size"):
            resolve_block_sizes(shape, blocks)


@pytest.mark.parametrize(
    ("granularity", "shape", "message"),
    [
        (PerChannelGranularity(), (2, 3), "axis=None.*give the axis"),
        (PerChannelGranularity(axis=2), (2, 3), r"axis 2 is out of bounds .*rank 2.*\[-2, 2\)"),
        (PerChannelGranularity(axis=-1), (), "axis -1 is out of bounds for a tensor of rank 0"),
        (PerBlockGranularity(block_size=2), (2, 3), "axis=None with the int block_size 2"),
        (PerBlockGranularity(axis=-3, block_size=2), (2, 3), "axis -3 is out of bounds"),
        (PerBlockGranularity(axis=0, block_size=(1, 3)), (2, 3), "leave axis out"),
        (PerBlockGranularity(block_size=(1, 3)), (2, 3, 4), "one entry per dimension"),
    ],
)
def test_granularities_that_do_not_fit_say_why(
    granularity: QuantizationGranularity, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        granularity.get_block_size(torch.Size(shape))
    assert not isinstance(raised.value, _BlockSizeMismatchError)


@pytest.mark.parametrize(
    "build",
    [
        lambda: PerTensorGranularity(axis=1),
        lambda: PerTokenGranularity(axis=1),
        lambda: PerBlockGranularity(axis=1),
        lambda: PerBlockGranularity(axis=1, block_size=-1),
        lambda: PerBlockGranularity(block_size=(0, 2)),
        lambda: PerChannelGranularity(axis=1, block_size=3),
    ],
)
def test_invalid_fields_are_refused(build: Any) -> None:
    with pytest.raises(ValidationError):
        build()


def test_zero_is_no_block_length() -> None:
    with pytest.raises(ValueError, match=r"block_size\[0\] must be positive"):
        resolve_block_sizes((4,), (0,))


@pytest.mark.parametrize(
    "granularity",
    [
        PerTensorGranularity(),
        PerTokenGranularity(),
        PerChannelGranularity(axis=-1),
        PerBlockGranularity(axis=1, block_size=32),
        PerBlockGranularity(block_size=(32, -1)),
    ],
)
def test_granularities_are_values_with_a_type_key(granularity: QuantizationGranularity) -> None:
    dumped = granularity.model_dump()
    assert QuantizationGranularity.REGISTRY[dumped["type"]] is type(granularity)
    again = QuantizationGranularity.maybe_build_from_dict(dumped)
    assert again == granularity
    assert type(granularity).model_validate(dumped) == granularity
    assert hash(again) == hash(granularity)
    with pytest.raises(ValidationError):
        granularity.axis = 3


def test_only_per_channel_has_a_channel_axis() -> None:
    assert QuantizationGranularity._resolve_axis(PerChannelGranularity(axis=-1), 3) == 2
    assert QuantizationGranularity._resolve_axis(PerBlockGranularity(axis=1, block_size=2), 3) is None
    assert QuantizationGranularity._resolve_axis(PerTensorGranularity(), 3) is None


def test_zero_dimensional_tensors_have_one_group() -> None:
    assert PerTensorGranularity().get_block_size(torch.Size(())) == ()
    assert PerTokenGranularity().get_block_size(torch.Size(())) == ()


def test_granularities_are_found_by_key() -> None:
    """As calculators are, under the base class."""
    assert QuantizationGranularity.get_class("per_tensor") is PerTensorGranularity
    assert QuantizationGranularity.resolve("per_tensor") is PerTensorGranularity
    with pytest.raises(KeyError, match="did you mean 'per_tensor'"):
        QuantizationGranularity.get_class("per_tenser")
