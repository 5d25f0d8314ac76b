"""Programs that put tables and indices of their own in the place of the clustering, by the peer's internal names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.coreai_utils import CompressionGranularity, DType
from bitwright.coreai_utils._utils.palettize_utils import LutParams
from bitwright.coreai_utils.passes import weight_palettization as passes
from bitwright.coreai_utils.passes.weight_quantization import quantize_weights
from bitwright.coreai_utils.passes.weight_sparsification import sparsify_weights
from bitwright.errors import ConfigMatchWarning

from .runtime import convert, coreai_export, run

CHANNELS = 64


def _tables(dimension: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table of 16 vectors, indices for vectors of output channels, and the weight that they decode to."""
    random = np.random.default_rng(dimension)
    lut = random.standard_normal((16, dimension)).astype(np.float16)
    indices = random.integers(0, 16, (CHANNELS // dimension, CHANNELS), dtype=np.uint8)
    return lut, indices, lut[indices].transpose(0, 2, 1).reshape(CHANNELS, CHANNELS)


def _model(weight: np.ndarray) -> nn.Module:
    model = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False).half()
    model.weight = nn.Parameter(torch.from_numpy(weight).view(CHANNELS, CHANNELS, 1, 1), requires_grad=False)
    return model.eval()


X = torch.randn(1, CHANNELS, 1, 8, generator=torch.Generator().manual_seed(0)).half()


def _error(model: nn.Module, program: Any) -> float:
    expected = model(X).float()
    return float((torch.from_numpy(run(program, X)[0]).float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_given_tables_are_taken(dimension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lut, indices, weight = _tables(dimension)
    asked = []

    def compress(original_data: np.ndarray, mode: str, *args: Any, **kwargs: Any) -> LutParams:
        asked.append((original_data.dtype, mode, kwargs["nbits"], kwargs["cluster_dim"], kwargs["channel_axis"]))
        assert np.array_equal(original_data.reshape(weight.shape), weight)
        ones = (1,) * (original_data.ndim - 2)
        table = lut.reshape(*(1,) * original_data.ndim, *lut.shape)
        return LutParams(indices.reshape(*indices.shape, *ones), table, 0 if dimension > 1 else None)

    monkeypatch.setattr(passes, "_blockwise_compress", compress)
    model = _model(weight)
    program = convert(coreai_export(model, X))
    palettized = passes.palettize_weights(program, n_bits=4, cluster_dim=dimension, enable_fast_kmeans_mode=False)
    assert asked == [(np.float16, "KMEANS", 4, dimension, 0)]
    assert _error(model, palettized) < 2e-3
    quantized = passes.palettize_weights(program, DType.INT8, n_bits=4, cluster_dim=dimension)
    assert 2e-3 < _error(model, quantized) < 2e-2


@pytest.mark.parametrize("group_size", [CHANNELS, 16])
@pytest.mark.parametrize("dimension", [1, 2])
def test_a_table_of_the_values_loses_nothing(dimension: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(_tables(dimension)[2])
    clustered = passes._blockwise_compress

    def unique(original_data: np.ndarray, mode: str, *args: Any, **kwargs: Any) -> Any:
        return clustered(original_data, "UNIQUE", *args, **kwargs)

    monkeypatch.setattr(passes, "_blockwise_compress", unique)
    palettized = passes.palettize_weights(
        convert(coreai_export(model, X)),
        n_bits=4,
        granularity=CompressionGranularity.PER_GROUPED_CHANNEL,
        group_size=group_size,
        cluster_dim=dimension,
    )
    assert _error(model, palettized) < 2e-3


def test_what_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(_tables(1)[2])
    program = convert(coreai_export(model, X))
    clustered = passes._blockwise_compress
    monkeypatch.setattr(passes, "_blockwise_compress", lambda *args, **kwargs: None)
    with pytest.warns(ConfigMatchWarning, match="its tables are not given"):
        passes.palettize_weights(program, n_bits=4)
    monkeypatch.setattr(passes, "_blockwise_compress", lambda x, mode, **kwargs: clustered(x, "UNIQUE", **kwargs))
    with pytest.warns(ConfigMatchWarning, match="has 16 values, more than a table of 2 bits"):
        passes.palettize_weights(program, n_bits=2)
    monkeypatch.setattr(passes, "_is_cluster_dim_valid", lambda op, cluster_dim, channel_axis: False)
    with pytest.warns(ConfigMatchWarning, match="do not divide into vectors of 2"):
        passes.palettize_weights(program, n_bits=4, cluster_dim=2)
    wrong = LutParams(np.zeros((3, 3), np.uint8), np.zeros((1, 1, 1, 1, 16, 1), np.float16), None)
    monkeypatch.setattr(passes, "_blockwise_compress", lambda *args, **kwargs: wrong)
    with pytest.raises(ValueError, match=r"indices of shape \(3, 3\)"):
        passes.palettize_weights(program, n_bits=4)


@pytest.mark.parametrize("bits", [2, 4])
def test_clustering_by_the_internal_name(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    found = passes._blockwise_compress(weight, "KMEANS", bits, [8, 0])
    assert found.lut.shape == (4, 1, 2**bits, 1)
    assert found.vector_axis is None
    decoded = np.stack([found.lut[row // 8, 0, found.indices[row], 0] for row in range(32)])
    assert np.abs(decoded - weight).mean() < (0.4 if bits == 2 else 0.1)


def test_the_modules_hold_the_public_functions() -> None:
    import bitwright.coreai_utils as public

    assert quantize_weights is public.quantize_weights
    assert sparsify_weights is public.sparsify_weights
    assert passes.palettize_weights is public.palettize_weights
