"""Packed codes that are decoded, or multiplied, in one pass: the numbers of the reference kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.artifact.encode import quantized_tensor
from bitwright.kernels import Grid, block_counts, reference
from bitwright.kernels.packed import PackedMatrix
from tests.measures import sqnr

pytest.importorskip("numba")


@st.composite
def tensors(draw):
    """A quantized tensor whose blocks are vectors."""
    bits = draw(st.sampled_from([2, 4, 8]))
    step = 128 // bits
    block = (draw(st.integers(1, 3)), step * draw(st.integers(1, 3)))
    shape = (block[0] * draw(st.integers(1, 4)), block[1] * draw(st.integers(1, 3)))
    if draw(st.booleans()):
        shape, block = (*shape, 3), (*block, 3)
    return _quantized(draw, bits, shape, block)


@st.composite
def columns(draw, bits=(2, 4, 8)):
    """A quantized tensor with a block for each column and some rows, or for strips of columns."""
    bits = draw(st.sampled_from(bits))
    step = 128 // bits
    width = draw(st.sampled_from([0, 1, 2, 4]))
    length = step * max(width, 1) * draw(st.integers(1, 9))
    block = (draw(st.integers(1, 3)), width * step or 1)
    return _quantized(draw, bits, (block[0] * draw(st.integers(1, 5)), length), block)


def _quantized(draw, bits, shape, block):
    signed, minval = draw(st.booleans()), draw(st.booleans())
    low = -(1 << (bits - 1)) if signed else 0
    dtype = getattr(torch, f"{'' if signed else 'u'}int{bits}")
    grid = Grid(dtype, low, low + (1 << bits) - 1, "minval" if minval else "zp")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    counts = block_counts(shape, block)
    scale = torch.rand(counts, generator=generator) + 0.01
    points = origins = None
    if minval:
        origins = torch.randn(counts, generator=generator)
    elif draw(st.booleans()):
        points = torch.randint(low, low + (1 << bits), counts, generator=generator, dtype=torch.int32)
    codes = torch.randint(low, low + (1 << bits), shape, generator=generator).to(torch.int8 if signed else torch.uint8)
    parts = (codes, scale, points, origins)
    options = {"block_size": block, "grid": grid}
    return parts, options, quantized_tensor(*parts, **options, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.one_of(tensors(), columns()), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_decoded_numbers_are_those_of_the_reference(case, dtype):
    parts, options, packed = case
    matrix = packed.matrix()
    assert matrix.runs_to(dtype)
    assert torch.equal(matrix.decode(dtype), reference.dequantize(*parts, **options, output_dtype=dtype))


@settings(max_examples=60, deadline=None)
@given(tensors(), st.one_of(st.integers(1, 3), st.integers(4, 20)))
def test_products_are_those_of_float64(case, vectors):
    """Up to the rounding of float32 sums; vectors one by one, and in groups of eight that zeros fill up."""
    parts, options, packed = case
    weight = reference.dequantize(*parts, **options, output_dtype=torch.float32).flatten(1).double()
    x = torch.randn(vectors, weight.shape[1], generator=torch.Generator().manual_seed(0))
    found = packed.matrix().multiply(x)
    allowed = 1e-5 * (x.abs().double() @ weight.abs().T + 1)
    assert bool(((found - x.double() @ weight.T).abs() <= allowed).all())


@settings(max_examples=100, deadline=None)
@given(columns(bits=[4]), st.one_of(st.integers(1, 2), st.integers(3, 20)))
def test_products_with_a_row_for_each_input_are_those_of_float64(case, vectors):
    """Up to the rounding of float32 sums; a line of the cache that overlaps the one before it, and groups of strips."""
    parts, options, packed = case
    weight = reference.dequantize(*parts, **options, output_dtype=torch.float32).double()
    x = torch.randn(vectors, weight.shape[0], generator=torch.Generator().manual_seed(0))
    found = packed.matrix().multiply_columns(x)
    allowed = 1e-5 * (x.abs().double() @ weight.abs() + 1)
    assert bool(((found - x.double() @ weight).abs() <= allowed).all())


@settings(max_examples=30, deadline=None)
@given(st.one_of(tensors(), columns()), st.data())
def test_rows_are_those_of_the_whole(case, data):
    _, _, packed = case
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, packed.shape[0] - 1), min_size=1, max_size=9)))
    found = packed.matrix().rows(numbers).decode(torch.float32)
    assert torch.equal(found, packed.decode()[numbers])


def test_an_odd_number_of_rows_in_groups():
    """The last row is computed beside itself, and nothing is written behind it."""
    torch.manual_seed(0)
    codes, scale = torch.randint(0, 4, (7, 64), dtype=torch.uint8), torch.rand(7, 1) + 0.1
    grid = Grid(torch.uint2, 0, 3, "minval")
    packed = quantized_tensor(codes, scale, None, -scale, block_size=(1, 64), grid=grid, dtype=torch.float32)
    x = torch.randn(8, 64)
    found = packed.matrix()._multiply_groups(x)
    assert torch.allclose(found, x @ packed.decode().T, atol=1e-5)


def test_several_threads_give_the_numbers_of_one():
    """More rows than one thread is given."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-8, 8, (1024, 512), dtype=torch.int8), torch.rand(1024, 16) + 0.1
    grid = Grid(torch.int4, -8, 7, "zp")
    packed = quantized_tensor(codes, scale, None, None, block_size=(1, 32), grid=grid, dtype=torch.float32)
    expected = (codes.float().view(1024, 16, 32) * scale[..., None]).view(1024, 512)
    x, many = torch.randn(2, 512), torch.randn(9, 512)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(packed.decode(), expected)
            matrix = packed.matrix()
            ways = [matrix.multiply(x), matrix.multiply(many)]
            ways += [matrix.multiply_columns(given.repeat(1, 2)) for given in (x, many)]
            found.append(torch.cat([way.flatten() for way in ways]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows_in_block", [1, 3, 100, 128, 387, 3000])
@pytest.mark.parametrize("vectors", [1, 9])
def test_sums_of_many_rows_are_precise(rows_in_block, vectors):
    """Blocks of rows that fit into runs and that do not; one long sum in float32 would be 120 dB from the exact one."""
    torch.manual_seed(0)
    rows = 3096 // rows_in_block * rows_in_block
    codes, scale = torch.randint(0, 16, (rows, 128), dtype=torch.uint8), torch.rand(rows // rows_in_block, 128) + 0.1
    grid, points = Grid(torch.uint4, 0, 15, "zp"), torch.randint(0, 16, scale.shape, dtype=torch.int32)
    packed = quantized_tensor(codes, scale, points, None, block_size=(rows_in_block, 1), grid=grid, dtype=torch.float32)
    x = torch.randn(vectors, rows)
    assert sqnr(x.double() @ packed.decode().double(), packed.matrix().multiply_columns(x).double()) > 127


def test_strips_do_not_depend_on_what_is_computed_beside_them():
    """A vector alone and in groups, fewer columns and all: the same bits for a strip."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-8, 8, (288, 480), dtype=torch.int8), torch.rand(3, 480) + 0.1
    grid = Grid(torch.int4, -8, 7, "zp")
    x = torch.randn(19, 288)
    found = []
    for first, end in ((0, 480), (352, 480)):
        parts = (codes[:, first:end].contiguous(), scale[:, first:end].contiguous(), None, None)
        matrix = quantized_tensor(*parts, block_size=(96, 1), grid=grid, dtype=torch.float32).matrix()
        found += [matrix.multiply_columns(x)[:, -128:], matrix.multiply_columns(x[:1])[:, -128:]]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0][:1], found[1])


def test_processors_without_wide_registers_multiply_by_rows_alone(monkeypatch):
    """Groups are not taken, and the same kernels give right numbers where they are not taken for speed."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-8, 8, (128, 128), dtype=torch.int8), torch.rand(128, 4) + 0.1
    grid = Grid(torch.int4, -8, 7, "zp")
    packed = quantized_tensor(codes, scale, None, None, block_size=(1, 32), grid=grid, dtype=torch.float32)
    matrix, weight, x = packed.matrix(), packed.decode(), torch.randn(9, 128)
    monkeypatch.setattr("bitwright.kernels.cpu.compiling.has_feature", lambda name: False)
    assert not matrix.multiplies_many()
    assert not matrix.multiplies_columns()
    assert torch.allclose(matrix.multiply(x), x @ weight.T, rtol=1e-5, atol=1e-4)
    assert torch.allclose(matrix.multiply_columns(x), x @ weight, rtol=1e-5, atol=1e-4)


def test_other_default_types_change_nothing():
    """Results have the dtype of the vectors."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-8, 8, (128, 128), dtype=torch.int8), torch.rand(128, 4) + 0.1
    grid = Grid(torch.int4, -8, 7, "zp")
    matrix = quantized_tensor(codes, scale, None, None, block_size=(1, 32), grid=grid, dtype=torch.float32).matrix()
    x = torch.randn(9, 128)
    expected, before = _products(matrix, x), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = _products(matrix, x)
    finally:
        torch.set_default_dtype(before)
    assert all(y.dtype == x.dtype for y in found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def _products(matrix, x):
    """In every way, with a vector and with several."""
    few = [way(given) for way in (matrix.multiply, matrix.multiply_columns) for given in (x, x[:1])]
    return [*few, matrix.linear(x, None), matrix.times(x, None)]


@pytest.mark.parametrize(
    ("shape", "block", "bits"),
    [
        ((4, 24), (1, 24), 4),
        ((4, 64), (1, 16), 4),
        ((4, 48), (4, 1), 4),
        ((64,), (64,), 4),
        ((4, 128), (1, 128), 3),
        ((4, 32, 3), (1, 32, 1), 8),
    ],
)
def test_blocks_that_do_not_fit_are_left_to_other_kernels(shape, block, bits):
    assert PackedMatrix.blocks_of(shape, block, bits) is None
