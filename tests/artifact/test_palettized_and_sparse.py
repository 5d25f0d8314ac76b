"""Look-up tables and masks decode as their definitions say, element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bitwright.artifact import ArtifactError, DenseTensor, PalettizedTensor, dense_tensor, palettized_tensor
from bitwright.artifact.compress import _MASKS, compress_tensor
from bitwright.artifact.layouts import DenseLayout, PalettizedLayout
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.quantization.spec import PerChannelGranularity, QuantizationSpec

from .strategies import observed, weights


@st.composite
def palettes(draw):
    """Indices, tables with random groups, vector size and channel scale."""
    n_bits = draw(st.integers(1, 8))
    vector_size = draw(st.sampled_from([1, 1, 2, 3]))
    index_shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    groups = tuple(draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0])) for n in index_shape)
    entries = draw(st.integers(1, 1 << n_bits))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    lut = torch.randn(*groups, entries, vector_size, generator=generator).to(dtype)
    indices = torch.randint(entries, index_shape, generator=generator)
    axis = draw(st.integers(0, len(index_shape) - 1))
    channel_axis = draw(st.integers(0, min(1, len(index_shape) - 1)))
    channels = index_shape[channel_axis] * (vector_size if axis == channel_axis else 1)
    scale = torch.rand(channels, generator=generator).to(dtype) if draw(st.booleans()) else None
    return n_bits, indices, lut, axis, scale, channel_axis


@settings(max_examples=80, deadline=None)
@given(palettes())
def test_palette_decodes_by_definition(case):
    """Each index looks up a vector in the table of its group; vectors run along their axis."""
    n_bits, indices, lut, axis, scale, channel_axis = case
    packed = palettized_tensor(
        indices,
        DenseTensor.from_tensor(lut),
        n_bits=n_bits,
        vector_axis=axis,
        channel_scale=scale,
        channel_axis=channel_axis,
    )
    decoded = packed.decode()
    size = lut.shape[-1]
    for position in itertools.product(*map(range, indices.shape)):
        group = tuple(p * g // n for p, g, n in zip(position, lut.shape, indices.shape, strict=False))
        vector = lut[group][indices[position]]
        for k in range(size):
            place = list(position)
            place[axis] = place[axis] * size + k
            expected = vector[k] if scale is None else vector[k] * scale[place[channel_axis]]
            assert decoded[tuple(place)] == expected
    assert packed.nbytes == sum(part.nbytes for part in packed.parts.values())
    packed.check_values()


def test_quantized_look_up_tables_decode_first():
    """An int8 table with a scale per group is looked up after it is decoded."""
    lut = torch.randn(4, 1, 16, 1)
    spec = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0))
    simulator = observed(spec, lut)
    table = compress_tensor(lut, [simulator], "lut")
    indices = torch.randint(16, (8, 6))
    packed = palettized_tensor(indices, table, n_bits=4)
    reference = palettized_tensor(indices, DenseTensor.from_tensor(simulator(lut)), n_bits=4)
    assert torch.equal(packed.decode(), reference.decode())
    assert packed.parts["lut.codes"].dtype == torch.int8


def test_indices_beyond_the_table_are_found():
    packed = palettized_tensor(torch.zeros(4, 4).long(), DenseTensor.from_tensor(torch.randn(1, 1, 3, 1)), n_bits=2)
    bad = PalettizedTensor(packed.layout, {**packed.parts, "indices": torch.full((4,), 0xFF, dtype=torch.uint8)})
    with pytest.raises(ArtifactError, match="index"):
        bad.check_values()


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (2, 1)},
        {"groups": (3, 1)},
        {"n_bits": 1},
        {"vector_size": 2},
        {"vector_axis": 5},
        {"lut": DenseLayout(shape=(1, 1, 4, 1), dtype="int8")},
        {"shape": (4,)},
    ],
)
def test_palette_layouts_that_contradict_themselves_are_refused(change):
    right = {"shape": (4, 6), "n_bits": 2, "groups": (1, 1), "lut": DenseLayout(shape=(1, 1, 4, 1), dtype="float32")}
    PalettizedLayout(**right)
    with pytest.raises((ValidationError, ValueError)):
        PalettizedLayout(**right | change)


class _Mask(CompressionSimulatorBase):
    """A pruner reduced to its mask."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, tensor):
        return tensor * self.mask


@pytest.fixture(autouse=True)
def _pruner(monkeypatch):
    monkeypatch.setitem(_MASKS, _Mask, lambda simulator: simulator.mask)


@settings(max_examples=50, deadline=None)
@given(weights(), st.floats(0, 1), st.integers(0, 1000))
def test_pruned_weights_keep_only_what_the_mask_keeps(weight, sparsity, seed):
    """Mask bits and kept values, or the dense tensor where that is smaller; equal either way."""
    mask = (torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) >= sparsity).to(weight.dtype)
    packed = compress_tensor(weight, [_Mask(mask)], "w")
    assert torch.equal(packed.decode(), weight * mask)
    sparse = -(-weight.numel() // 8) + int(mask.count_nonzero()) * weight.itemsize
    assert packed.nbytes == min(sparse, weight.nbytes)
    assert packed.is_sparse == (sparse < weight.nbytes)
    packed.check_values()


@pytest.mark.parametrize("order", ["prune first", "quantize first"])
@pytest.mark.parametrize("formulation", ["zp", "minval"])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_pruned_and_quantized_weights(order, formulation, scheme):
    """Both orders are exact; zeros are dropped wherever the model really computes zero."""
    weight = torch.randn(16, 32)
    mask = (torch.rand(16, 32) > 0.7).float()
    spec = QuantizationSpec(
        dtype="int8", qscheme=scheme, qformulation=formulation, granularity=PerChannelGranularity(axis=0)
    )
    pruner = _Mask(mask)
    quantizer = observed(spec, weight * mask if order == "prune first" else weight)
    stack = [pruner, quantizer] if order == "prune first" else [quantizer, pruner]
    expected = weight
    for simulator in stack:
        expected = simulator(expected)
    packed = compress_tensor(weight, stack, "w")
    assert torch.equal(packed.decode(), expected)
    assert packed.is_sparse == (not bool((expected[mask == 0] != 0).any()))
    packed.check_values()


def test_a_mask_that_counts_wrong_is_found():
    weight, mask = torch.randn(8, 8), torch.rand(8, 8) > 0.8
    packed = dense_tensor(weight * mask, mask)
    bad = DenseTensor(packed.layout, {**packed.parts, "mask": torch.full((8,), 0xFF, dtype=torch.uint8)})
    with pytest.raises(ArtifactError, match="mask keeps 64 entries"):
        bad.check_values()
