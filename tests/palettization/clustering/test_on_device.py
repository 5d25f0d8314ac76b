"""What runs on a device does the same as on the CPU: its torch operations here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from bitwright.palettization.clustering import (
    _device,
    _scalar_device,
    _vectors_device,
    assign,
    cluster_moments,
    cluster_on_grid,
    cluster_scalar,
    cluster_vectors,
)

from .references import error_of, nearest
from .test_scalar_fast import PROMISED, drawn

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", ["normal", "student", "outlier", "few", "tiny", "two modes"])
def test_scalar_excess(name: str, weighted: bool) -> None:
    """Merged atoms keep the promised excess, or the exact mode takes over; error and labels belong together."""
    values = torch.cat([drawn(name, 20_000), drawn(name, 20_000).flip(1) * 0.5])
    weights = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)) if weighted else None
    for count in (2, 16, 256):
        found = _scalar_device.cluster_on_device(values, weights, count, "fast")
        exact = cluster_scalar(values, count, weights=weights, mode="exact")
        assert (found.error <= exact.error * (1 + PROMISED[count])).all(), count
        assert (found.error >= exact.error * (1 - 1e-9)).all(), count
        assert torch.equal(found.indices, assign(values, found.centroids)), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_scalar_dtypes(dtype: torch.dtype, mode: str) -> None:
    """Short rows are exact in either mode."""
    values = torch.randn((3, 900), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = _scalar_device.cluster_on_device(values, None, 16, mode)
    torch.testing.assert_close(found.error, cluster_scalar(values, 16, mode="exact").error, rtol=1e-9, atol=0)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_labels_and_moments(count: int) -> None:
    """The definition in float64, for palettes in any order with repetitions."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((2, 3000), generator=generator)
    palettes = torch.randn((2, count), generator=generator).double()
    palettes[:, -1] = palettes[:, 0]
    values[:, :count] = palettes.float()
    labels = _device.label_scalars(values, palettes)
    assert torch.equal(labels, nearest(values.unsqueeze(2), palettes.unsqueeze(2)))
    points, entries = values.view(2, 1500, 2), torch.randn((2, count, 2), generator=generator).double()
    labels = _device.label_vectors(points, entries)
    assert torch.equal(labels, nearest(points, entries))
    weights = torch.rand((2, 1500), generator=generator)
    for some in (None, weights):
        found = _device.moments_by_label(points, some, labels, entries)
        for mine, host in zip(found, cluster_moments(points, labels, entries, weights=some), strict=True):
            torch.testing.assert_close(mine, host, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [3000, pytest.param(34_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_vectors(length: int, weighted: bool) -> None:
    """Within a percent of the CPU, reproducible, with the error of its own labels."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((2, length, 2), generator=generator)
    weights = torch.rand((2, length), generator=generator) if weighted else None
    found, again = (_vectors_device.cluster_on_device(values, weights, 4, 0, 5) for _ in range(2))
    assert torch.equal(found.centroids, again.centroids)
    assert (found.error <= 1.01 * cluster_vectors(values, 4, weights=weights).error).all()
    torch.testing.assert_close(found.error, error_of(values, found.decode(), weights), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e35])
def test_vectors_of_any_size(scale: float) -> None:
    """Constant, tiny and huge vectors, of which some sample is taken."""
    values = torch.randn((1, 34_000, 2), generator=torch.Generator().manual_seed(0))
    found = _vectors_device.cluster_on_device(values * scale, None, 4, 0, 2)
    if scale == 0:
        assert found.error.item() == 0
    else:
        assert found.error.item() / scale**2 == pytest.approx(cluster_vectors(values, 4).error.item(), rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Every function takes tensors of a GPU, returns such, and agrees with the CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((4, 50_000), generator=generator).to(dtype)
    for mode in ("fast", "exact"):
        found, host = (cluster_scalar(v, 16, mode=mode) for v in (values.cuda(), values))
        assert found.indices.is_cuda
        torch.testing.assert_close(found.error.cpu(), host.error, rtol=2e-5, atol=0)
    points = values.view(4, 25_000, 2)
    found, host = (cluster_vectors(v, 16) for v in (points.cuda(), points))
    torch.testing.assert_close(found.error.cpu(), host.error, rtol=0.01, atol=0)
    assert torch.equal(assign(points.cuda(), host.centroids.cuda()).cpu(), host.indices)
    levels = torch.linspace(-4, 4, 255)
    on_grid = cluster_on_grid(values.cuda(), 16, levels)
    assert torch.equal(on_grid.centroids.cpu(), cluster_on_grid(values, 16, levels).centroids)
