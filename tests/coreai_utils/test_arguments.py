"""Arguments are checked before anything else, with or without Core AI installed."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

import bitwright.coreai_utils as coreai_utils
from bitwright.coreai_utils import (
    CompressionGranularity,
    DType,
    QScheme,
    palettize_weights,
    quantize_weights,
    sparsify_weights,
)
from bitwright.coreai_utils import _ir as ir
from bitwright.export.extras import MissingExtraError

G = CompressionGranularity


def test_public_names() -> None:
    from bitwright.coreai_utils import common

    assert {"CompressionGranularity", "DType", "palettize_weights", "quantize_weights", "sparsify_weights"} <= set(
        coreai_utils.__all__
    )
    assert common.QScheme is coreai_utils.QScheme
    assert [dtype.name for dtype in DType if not dtype.is_int()] == [
        "FP4_E2M1FN",
        "FP8_E4M3FN",
        "FP8_E5M2",
        "FP8_E8M0FNU",
    ]


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (
            quantize_weights,
            {"qscheme": QScheme.SYMMETRIC, "granularity": G.PER_CHANNEL, "block_size": 32, "scale_dtype": None}
            | {"weight_num_threshold": 1024, "in_place": False},
        ),
        (
            palettize_weights,
            {"n_bits": 4, "granularity": G.PER_TENSOR, "group_size": 32, "cluster_dim": 1, "in_place": False}
            | {"enable_per_channel_scale": False, "weight_num_threshold": 1024, "num_kmeans_workers": 4}
            | {"enable_fast_kmeans_mode": True, "rounding_precision": 4},
        ),
        (
            sparsify_weights,
            {"target_sparsity": 0.5, "block_size": None, "n_m_ratio": None, "quantize_dtype": None, "in_place": False}
            | {"palettize_nbits": None, "weight_num_threshold": 1024},
        ),
    ],
)
def test_defaults(function: Any, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (quantize_weights, {"dtype": "int3"}, r"Invalid dtype 'int3': it must be one of DType\.INT2"),
        (
            quantize_weights,
            {"dtype": DType.FP8_E8M0FNU},
            r"Unsupported weight dtype DType\.FP8_E8M0FNU: it is a format for scales",
        ),
        (
            quantize_weights,
            {"dtype": "int8", "granularity": G.PER_GROUPED_CHANNEL},
            r"Invalid granularity .*for palettize_weights",
        ),
        (quantize_weights, {"dtype": "int8", "block_size": 0}, r"block_size must be an integer of at least 1; got 0"),
        (quantize_weights, {"dtype": "int8", "block_size": 2.5}, r"block_size must be an integer"),
        (
            quantize_weights,
            {"dtype": "int8", "scale_dtype": "fp8_e8m0fnu"},
            r"scale_dtype must be None for integer dtype DType\.INT8",
        ),
        (
            quantize_weights,
            {"dtype": "fp8_e5m2", "scale_dtype": "int8"},
            r"Invalid scale_dtype .*one of DType\.FP8_E8M0",
        ),
        (
            quantize_weights,
            {"dtype": "fp8_e5m2", "qscheme": "asymmetric"},
            r"Asymmetric quantization to DType\.FP8_E5M2 is not supported",
        ),
        (quantize_weights, {"dtype": "fp4_e2m1fn"}, r"FP4_E2M1FN requires granularity PER_BLOCK and block_size 32"),
        (quantize_weights, {"dtype": "fp4_e2m1fn", "granularity": "per_block", "block_size": 16}, r"block_size 32"),
        (
            quantize_weights,
            {"dtype": "fp4_e2m1fn", "granularity": "per_block", "scale_dtype": "fp8_e8m0fnu"},
            r"for FP4 dtype",
        ),
        (quantize_weights, {"dtype": "int8", "weight_num_threshold": -1}, r"weight_num_threshold must be"),
        (palettize_weights, {"n_bits": 5}, r"Invalid n_bits 5: it must be one of 1, 2, 3, 4, 6, 8"),
        (palettize_weights, {"lut_dtype": "int4"}, r"Invalid lut_dtype .*one of DType\.INT8"),
        (palettize_weights, {"granularity": "per_block"}, r"blocks are for quantize_weights"),
        (palettize_weights, {"cluster_dim": 0}, r"cluster_dim must be"),
        (palettize_weights, {"cluster_dim": 2, "enable_per_channel_scale": True}, r"scalar palettes only"),
        (palettize_weights, {"cluster_dim": 2, "granularity": "per_channel"}, r"cluster_dim=2 channels do not fit"),
        (palettize_weights, {"group_size": -1}, r"group_size must be"),
        (sparsify_weights, {"target_sparsity": 1.5}, r"target_sparsity must be a number from 0 to 1; got 1\.5"),
        (sparsify_weights, {"target_sparsity": -0.1}, r"from 0 to 1; got -0\.1"),
        (sparsify_weights, {"target_sparsity": float("nan")}, r"from 0 to 1; got nan"),
        (sparsify_weights, {"target_sparsity": "half"}, r"from 0 to 1; got 'half'"),
        (sparsify_weights, {"target_sparsity": None}, r"One of `target_sparsity` or `n_m_ratio` must be set"),
        (sparsify_weights, {"n_m_ratio": (1, 2)}, r"`target_sparsity` and `n_m_ratio` cannot both be set; .*None"),
        (sparsify_weights, {"target_sparsity": None, "n_m_ratio": (3, 2)}, r"0 <= n <= m"),
        (sparsify_weights, {"target_sparsity": None, "n_m_ratio": (1.0, 2)}, r"two integers"),
        (sparsify_weights, {"target_sparsity": None, "n_m_ratio": (1, 2), "block_size": 2}, r"block_size goes with"),
        (sparsify_weights, {"block_size": 1}, r"`block_size` must be greater than 1"),
        (sparsify_weights, {"quantize_dtype": "int4"}, r"Invalid quantize_dtype DType\.INT4"),
        (sparsify_weights, {"palettize_nbits": 7}, r"Invalid palettize_nbits 7"),
        (
            sparsify_weights,
            {"palettize_nbits": 4, "quantize_dtype": "int8"},
            r"`quantize_dtype` and `palettize_nbits` cannot both be set",
        ),
    ],
)
def test_what_does_not_go_is_refused_up_front(function: Any, arguments: dict[str, Any], message: str) -> None:
    """The program is never looked at: None stands for it."""
    with pytest.raises(ValueError, match=message):
        function(None, **arguments)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(quantize_weights, {"dtype": "int8"}), (palettize_weights, {}), (sparsify_weights, {})],
)
def test_missing_extra_is_named(function: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("coreai", "coreai.authoring"):
        monkeypatch.setitem(sys.modules, name, None)
    ir._bindings.cache_clear()
    with pytest.raises(MissingExtraError, match=r'Compressing a Core AI program needs coreai.*"bitwright\[coreai\]"'):
        function(None, **arguments)
    ir._bindings.cache_clear()


def test_importing_the_package_needs_no_extra() -> None:
    """It is imported above; the library is loaded by the first call."""
    assert issubclass(MissingExtraError, ImportError)
