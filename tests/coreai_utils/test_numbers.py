"""Codes, masks and palettes, against formulas in float64 and enumeration; no Core AI needed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.coreai_utils import DType, QScheme
from bitwright.coreai_utils._grids import quantize_tensor
from bitwright.coreai_utils._palettize import palettize
from bitwright.coreai_utils._sparsify import _magnitude_mask, _n_m_mask
from bitwright.coreai_utils._weights import Skipped, Weight, _roles_before_reshape

BITS = {DType.INT2: 2, DType.UINT2: 2, DType.INT4: 4, DType.UINT4: 4, DType.INT8: 8, DType.UINT8: 8}


def _weight(values: torch.Tensor, out_axis: int = 0, in_axis: int = 1) -> Weight:
    return Weight(None, values, out_axis, in_axis)  # type: ignore[arg-type]


def _decode(quantized: Any, block_size: tuple[int, ...]) -> np.ndarray[Any, Any]:
    def spread(values: torch.Tensor) -> np.ndarray[Any, Any]:
        array = values.double().numpy()
        for axis, size in enumerate(block_size):
            array = array.repeat(size, axis)
        return array

    return spread(quantized.scale) * (quantized.codes.double().numpy() - spread(quantized.zero_point))


@pytest.mark.parametrize(
    ("shape", "result", "roles", "expected"),
    [
        ((32, 64, 3), (32, 64, 1, 3), "oi..", "oi."),
        ((64, 1, 5), (64, 1, 1, 5), "oi..", "oi."),
        ((64, 4, 32, 1), (1, 64, 128), "bio", "ioo."),
        ((64, 32), (1, 64, 32), "bio", "io"),
        ((1, 64, 32), (64, 32), "io", ".io"),
        ((4, 16, 32), (64, 32), "io", "iio"),
        ((64, 32), (4, 16, 32), "bio", None),
        ((64, 32), (8, 8, 32), "iio", "io"),
        ((6, 4), (4, 6), "io", None),
        ((2048,), (1, 2048), "io", None),
        ((2048, 1), (1, 2048), "io", "oi"),
    ],
)
def test_axes_behind_a_reshape_are_those_of_the_factors(
    shape: tuple[int, ...], result: tuple[int, ...], roles: str, expected: str | None
) -> None:
    """Output, input, batch; a merged axis hands its role on, a split one has none unless its parts agree."""
    names = {"o": "output", "i": "input", "b": "batch", ".": ""}
    before = _roles_before_reshape(shape, result, tuple(names[role] for role in roles))
    assert before == (None if expected is None else tuple(names[role] for role in expected))


@pytest.mark.parametrize("magnitude", [1.0, 1e-9, 1e20])
@pytest.mark.parametrize("qscheme", list(QScheme))
@pytest.mark.parametrize("dtype", BITS)
def test_integers_follow_the_formula(dtype: DType, qscheme: QScheme, magnitude: float) -> None:
    """Range and step in float64, for weights of any size: no value is further than half a step away."""
    torch.manual_seed(0)
    values = (torch.randn(6, 8) + 0.3) * magnitude * torch.logspace(-4, 4, 6)[:, None]
    quantized = quantize_tensor(values, (1, 4), dtype, "f32", qscheme)
    low, high = (
        (-(2 ** (BITS[dtype] - 1)), 2 ** (BITS[dtype] - 1) - 1) if dtype.value[0] == "i" else (0, 2 ** BITS[dtype] - 1)
    )
    if qscheme is QScheme.SYMMETRIC:
        low, high = (low + 1, high) if dtype.value[0] == "i" else (low, high - 1)
    assert low <= quantized.codes.min()
    assert quantized.codes.max() <= high
    blocks = values.double().reshape(6, 2, 4)
    if qscheme is QScheme.SYMMETRIC:
        span = 2 * blocks.abs().amax(-1)
        assert quantized.zero_point.unique().tolist() == [(low + high) / 2]
    else:
        span = blocks.amax(-1).clamp(min=0) - blocks.amin(-1).clamp(max=0)
    np.testing.assert_allclose(quantized.scale.numpy(), span.numpy() / (high - low), rtol=1e-6)
    error = np.abs(_decode(quantized, (1, 4)) - values.double().numpy())
    limit = quantized.scale.double().numpy().repeat(4, 1) * (0.5 if qscheme is QScheme.SYMMETRIC else 1.0)
    assert (error <= limit * (1 + 1e-5)).all()


@pytest.mark.parametrize(("dtype", "largest"), [(DType.FP8_E4M3FN, 448.0), (DType.FP8_E5M2, 57344.0)])
def test_float8_uses_its_whole_range(dtype: DType, largest: float) -> None:
    values = torch.randn(5, 32)
    quantized = quantize_tensor(values, (1, 32), dtype, "f32")
    assert quantized.codes.abs().amax(1).tolist() == [largest] * 5
    torch_dtype = torch.float8_e4m3fn if dtype is DType.FP8_E4M3FN else torch.float8_e5m2
    assert torch.equal(quantized.codes.to(torch_dtype).float(), quantized.codes)


@pytest.mark.parametrize(
    ("dtype", "exponent", "largest", "grid"),
    [
        (DType.FP8_E4M3FN, 8, 448.0, None),
        (DType.FP8_E5M2, 15, 57344.0, None),
        (DType.FP4_E2M1FN, 2, 6.0, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    ],
)
def test_powers_of_two_are_chosen_before_values_are_divided(
    dtype: DType, exponent: int, largest: float, grid: list[float] | None
) -> None:
    """OCP MX floor rule in float64; codes are the nearest ones for exactly the scale that is stored."""
    torch.manual_seed(0)
    values = torch.randn(7, 64) * torch.logspace(-6, 6, 7)[:, None]
    quantized = quantize_tensor(values, (1, 32), dtype, "f32", scale_dtype=DType.FP8_E8M0FNU)
    peaks = values.double().reshape(7, 2, 32).abs().amax(-1)
    expected = torch.exp2(torch.floor(torch.log2(peaks)) - exponent)
    assert torch.equal(quantized.scale.double(), expected)
    exact = (values.double() / expected.repeat_interleave(32, 1)).clamp(-largest, largest)
    if grid is not None:
        codes = np.array([*grid, *(-g for g in grid)])
        distance = np.abs(exact.numpy()[..., None] - codes).min(-1)
        np.testing.assert_allclose(np.abs(exact.numpy() - quantized.codes.double().numpy()), distance, atol=1e-6)
    else:
        torch_dtype = torch.float8_e4m3fn if dtype is DType.FP8_E4M3FN else torch.float8_e5m2
        assert torch.equal(quantized.codes, exact.float().to(torch_dtype).float())


def test_half_precision_scales_are_held_by_the_weights_own_dtype_and_clip_nothing() -> None:
    values = (torch.randn(64, 32) * torch.logspace(-4, 2, 64)[:, None]).half().float()
    for element_type, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        quantized = quantize_tensor(values, (1, 32), DType.INT8, element_type)
        assert torch.equal(quantized.scale.to(dtype).float(), quantized.scale)
        assert bool((quantized.scale * 127 >= values.abs().amax(1, keepdim=True)).all())
        error = np.abs(_decode(quantized, (1, 32)) - values.double().numpy())
        assert (error <= 0.5 * quantized.scale.double().numpy() * (1 + 1e-6)).all()


def test_zero_weights_stay_zero() -> None:
    quantized = quantize_tensor(torch.zeros(4, 8), (1, 8), DType.UINT4, "f32", QScheme.SYMMETRIC)
    assert np.abs(_decode(quantized, (1, 8))).max() == 0


@given(
    sparsity=st.floats(0, 1),
    rows=st.integers(1, 6),
    columns=st.integers(1, 7),
    out_axis=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_exactly_the_smallest_elements_are_pruned(
    sparsity: float, rows: int, columns: int, out_axis: int, seed: int
) -> None:
    torch.manual_seed(seed)
    values = torch.randn(rows, columns)
    mask = _magnitude_mask(_weight(values, out_axis, 1 - out_axis), sparsity, 1)
    pruned = int((~mask).sum())
    assert pruned == math.floor(values.numel() * sparsity)
    if 0 < pruned < values.numel():
        assert values[~mask].abs().max() <= values[mask].abs().min()


def test_equal_magnitudes_do_not_change_the_count() -> None:
    mask = _magnitude_mask(_weight(torch.ones(4, 4)), 0.5, 1)
    assert int(mask.sum()) == 8


@pytest.mark.parametrize("out_axis", [0, 1])
def test_blocks_of_output_channels_are_pruned_by_norm(out_axis: int) -> None:
    """Every block stands or falls as one; enumerated."""
    torch.manual_seed(0)
    values = torch.randn(8, 6)
    rows = values.movedim(out_axis, 0)
    mask = _magnitude_mask(_weight(values, out_axis, 1 - out_axis), 0.5, 2).movedim(out_axis, 0)
    norms = {
        (block, column): float((rows[2 * block : 2 * block + 2, column].double() ** 2).sum())
        for block, column in itertools.product(range(rows.shape[0] // 2), range(rows.shape[1]))
    }
    gone = sorted(norms, key=norms.__getitem__)[: len(norms) // 2]
    for block, column in norms:
        assert mask[2 * block : 2 * block + 2, column].tolist() == [(block, column) not in gone] * 2


def test_last_block_may_be_shorter() -> None:
    values = torch.tensor([[5.0], [4.0], [0.1], [0.2], [3.0]])
    assert _magnitude_mask(_weight(values), 0.4, 2)[:, 0].tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("shape", [(5, 8), (3, 8, 2, 2)])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (0, 2), (3, 3), (4, 4)])
def test_n_of_m_input_channels_are_pruned(shape: tuple[int, ...], n: int, m: int) -> None:
    """Every group of m loses its n smallest; enumerated."""
    torch.manual_seed(0)
    values = torch.randn(shape)
    mask = _n_m_mask(_weight(values), n, m)
    columns, kept = values.movedim(1, -1).reshape(-1, 8), mask.movedim(1, -1).reshape(-1, 8)
    for row, keep in zip(columns, kept, strict=True):
        for start in range(0, 8 - 8 % m, m):
            group, left = row[start : start + m].abs(), keep[start : start + m]
            assert int((~left).sum()) == n
            if 0 < n < m:
                assert group[~left].max() <= group[left].min()
        tail = keep[8 - 8 % m :]
        assert int((~tail).sum()) == n * len(tail) // m


def test_weights_that_are_too_narrow_for_a_pattern_are_skipped() -> None:
    with pytest.raises(Skipped, match=r"3 output channels make fewer than two blocks of 2"):
        _magnitude_mask(_weight(torch.ones(3, 9)), 0.5, 2)
    with pytest.raises(Skipped, match=r"9 input channels make fewer than two groups of 8"):
        _n_m_mask(_weight(torch.ones(3, 9)), 2, 8)


@settings(max_examples=8, deadline=None)
@given(
    axis=st.integers(0, 2),
    n_bits=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    cluster_dim=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_every_element_gets_the_nearest_entry_of_its_groups_table(
    axis: int, n_bits: int, group: int, cluster_dim: int, seed: int
) -> None:
    """Brute force over all entries, with the layout that ``lut_to_dense`` documents."""
    torch.manual_seed(seed)
    values = torch.randn(4, 4, 4)
    if group % cluster_dim:
        with pytest.raises(Skipped, match="do not divide into vectors of 2"):
            palettize(values, axis, n_bits, group, cluster_dim)
        return
    palette = palettize(values, axis, n_bits, group, cluster_dim)
    rows, indices = values.movedim(axis, 0).double(), palette.indices.movedim(axis, 0)
    assert palette.lut.shape == (4 // group, 2**n_bits, cluster_dim)
    for place in itertools.product(range(4 // cluster_dim), range(4), range(4)):
        channel = place[0] * cluster_dim
        vector = rows[channel : channel + cluster_dim, place[1], place[2]]
        table = palette.lut[channel // group].double()
        distances = ((table - vector) ** 2).sum(-1)
        assert distances[int(indices[place])] <= distances.min() * (1 + 1e-5) + 1e-12


def test_groups_that_do_not_divide_are_skipped() -> None:
    with pytest.raises(Skipped, match="its 6 output channels do not divide into groups of 4"):
        palettize(torch.randn(6, 3), 0, 4, 4)


def test_fewer_vectors_than_entries_are_exact() -> None:
    from bitwright.coreai_utils._utils.palettize_utils import _get_kmeans_lookup_table_and_weight

    weight = np.arange(16, dtype=np.float32)
    lut, indices = _get_kmeans_lookup_table_and_weight(4, weight, cluster_dim=4, vector_axis=0)
    assert (lut.shape, indices.shape) == ((16, 4), (4,))
    np.testing.assert_allclose(lut[indices], weight.reshape(-1, 4))
