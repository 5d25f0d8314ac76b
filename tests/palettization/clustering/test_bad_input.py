"""What cannot be clustered is refused with a message that says what and where."""

from __future__ import annotations

import pytest
import torch

from bitwright.palettization.clustering import (
    assign,
    cluster_moments,
    cluster_on_grid,
    cluster_scalar,
    cluster_vectors,
    refit_to_quantized,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("length", [200, 40_000])
def test_scalar_values_that_are_not_finite(dtype: torch.dtype, mode: str, length: int) -> None:
    """The message counts them, in whichever way the row is clustered."""
    values = torch.randn((2, length)).to(dtype)
    values[1, 3], values[1, 5], values[0, 7] = torch.nan, torch.nan, -torch.inf
    with pytest.raises(ValueError, match=rf"\[2, {length}\] contains 2 NaN and 1 infinite elements"):
        cluster_scalar(values, 16, mode=mode)


def test_few_values_that_are_not_finite() -> None:
    """Also where so few differ that nothing needs clustering, and where they weigh nothing."""
    values = torch.zeros((1, 40_000))
    values[0, -1] = torch.inf
    with pytest.raises(ValueError, match="0 NaN and 1 infinite"):
        cluster_scalar(values, 16)
    weights = torch.ones_like(values)
    weights[0, -1] = 0
    with pytest.raises(ValueError, match="0 NaN and 1 infinite"):
        cluster_scalar(torch.randn((1, 40_000)) + values, 16, weights=weights)


@pytest.mark.parametrize(
    "call", [assign, lambda x, c: cluster_vectors(x, 4), lambda x, c: cluster_on_grid(x[..., 0], 2, c[0, :, 0])]
)
def test_other_functions_refuse_nan(call) -> None:
    """Everything that takes values counts what is not finite."""
    values = torch.ones((1, 9, 2))
    values[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 NaN and 0 infinite"):
        call(values, torch.ones((1, 4, 2)))


def test_shapes() -> None:
    """Shapes are named as they should be and as they are."""
    with pytest.raises(ValueError, match=r"shape \[P, N\], got \[7\]"):
        cluster_scalar(torch.ones(7), 4)
    with pytest.raises(ValueError, match=r"shape \[P, N, D\], got \[7, 3\]"):
        cluster_vectors(torch.ones((7, 3)), 4)
    with pytest.raises(ValueError, match=r"shape \[0, 3\] has no elements"):
        cluster_scalar(torch.ones((0, 3)), 4)
    with pytest.raises(ValueError, match=r"one entry per point, shape \[2, 3\], got \[3\]"):
        cluster_scalar(torch.ones((2, 3)), 4, weights=torch.ones(3))
    with pytest.raises(ValueError, match=r"do not fit values of shape \[2, 5\]: expected \[2, K, 1\]"):
        assign(torch.ones((2, 5)), torch.ones((3, 4)))
    with pytest.raises(ValueError, match=r"levels must have shape \[G\] or \[2, G\].*got \[3, 4\]"):
        cluster_on_grid(torch.ones((2, 5)), 4, torch.ones((3, 4)))


@pytest.mark.parametrize("count", [0, -1, 257, 2.0, True])
def test_number_of_clusters(count: object) -> None:
    """8 bits at most, and one at least."""
    with pytest.raises(ValueError, match=f"n_clusters must be a whole number from 1 to 256 .*got {count!r}"):
        cluster_scalar(torch.ones((1, 5)), count)


def test_dtypes() -> None:
    """Floats only."""
    with pytest.raises(TypeError, match=r"values must be float16.*got torch\.int8"):
        cluster_scalar(torch.ones((1, 5), dtype=torch.int8), 4)
    with pytest.raises(TypeError, match=r"values must be a tensor .*got list"):
        cluster_scalar([[1.0]], 4)
    with pytest.raises(TypeError, match=r"weights must be a floating-point tensor, got torch\.int64"):
        cluster_scalar(torch.ones((1, 5)), 4, weights=torch.ones((1, 5), dtype=torch.int64))


@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_weights(bad: float) -> None:
    """Weights are finite and not negative."""
    weights = torch.ones((1, 5))
    weights[0, 2] = bad
    with pytest.raises(ValueError, match="finite and not negative; 1 of 5 are not"):
        cluster_scalar(torch.rand((1, 5)), 4, weights=weights)


def test_options() -> None:
    """Unknown modes, seeds and restarts are quoted."""
    with pytest.raises(ValueError, match="got 'quick'"):
        cluster_scalar(torch.ones((1, 5)), 4, mode="quick")
    with pytest.raises(TypeError, match=r"seed must be .* got 1\.5"):
        cluster_vectors(torch.ones((1, 5, 2)), 4, seed=1.5)
    with pytest.raises(ValueError, match=r"restarts must be .* got 0"):
        cluster_vectors(torch.ones((1, 5, 2)), 4, restarts=0)


def test_indices() -> None:
    """Indices are uint8 and lie inside of the palette."""
    values, palette = torch.ones((1, 5)), torch.ones((1, 3, 1))
    with pytest.raises(TypeError, match=r"uint8 tensor, got torch\.int64"):
        cluster_moments(values, torch.zeros((1, 5), dtype=torch.int64), palette)
    with pytest.raises(ValueError, match="indices reach 3, but there are 3"):
        cluster_moments(values, torch.full((1, 5), 3, dtype=torch.uint8), palette)
    with pytest.raises(ValueError, match=r"indices must have shape \[1, 5\]"):
        cluster_moments(values, torch.zeros((1, 4), dtype=torch.uint8), palette)


def test_quantize() -> None:
    """A quantizer must keep the shape of the palettes, and there must be one."""
    values = torch.rand((1, 50))
    found = cluster_scalar(values, 4)
    with pytest.raises(ValueError, match=r"of the shape it got, \[1, 4, 1\], got \[1, 2, 1\]"):
        refit_to_quantized(values, found, lambda lut: lut[:, :2])
    with pytest.raises(ValueError, match="non-empty sequence"):
        refit_to_quantized(values, found, [])
