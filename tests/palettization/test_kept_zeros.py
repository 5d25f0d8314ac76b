"""``sparsity_detection_threshold``: the zeros of a sparse weight stay zeros under palettes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact
from bitwright.errors import PlanError
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.palettization.spec import PalettizationSpec

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def sparse(share: float = 0.6) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight.view(-1)[torch.randperm(2048)[: int(share * 2048)]] = 0.0
    return layer


def palettizer(layer: nn.Module, threshold: float | None = 0.5, **fields: Any) -> KMeansPalettizer:
    spec = PalettizationSpec(n_bits=2, sparsity_detection_threshold=threshold, **fields)
    return KMeansPalettizer(layer, KMeansPalettizerConfig(global_config={"op_state_spec": {"weight": spec}}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"granularity": {"type": "per_grouped_channel", "axis": 0, "group_size": 8}},
        {"enable_per_channel_scale": True},
        {"lut_qspec": {"dtype": "int8"}},
    ],
)
def test_palettes_are_for_the_other_entries(fields: dict[str, Any]) -> None:
    layer = sparse()
    zeros = layer.weight == 0
    tool = palettizer(layer, **fields)
    prepared: Any = tool.prepare((X,)).eval()
    assert torch.equal(prepared.weight == 0, zeros)
    if not fields:
        assert len(prepared.weight[~zeros].unique()) == 4
    artifact = Artifact.from_model(prepared)
    assert torch.equal(artifact["weight"].decode(), prepared.weight)
    (row,) = (row for row in tool._plan if row.tensor == "weight")
    assert artifact["weight"].nbytes == row.compressed_bytes


def test_they_fit_better_than_palettes_of_all_entries() -> None:
    weight = sparse().weight.detach()

    def error(threshold: float | None) -> float:
        prepared: Any = palettizer(sparse(), threshold).prepare((X,))
        return float((prepared.weight - weight).square().sum())

    assert error(0.5) < 0.9 * error(None)


@pytest.mark.parametrize(("share", "threshold"), [(0.4, 0.5), (0.0, 0.0)])
def test_too_few_zeros_are_palettized_like_all_entries(share: float, threshold: float) -> None:
    ordinary: Any = palettizer(sparse(share), None).prepare((X,))
    prepared: Any = palettizer(sparse(share), threshold).prepare((X,))
    assert torch.equal(prepared.weight, ordinary.weight)


@pytest.mark.parametrize("strategy", ["ste", "dkm"])
def test_training_does_not_fill_them(strategy: str) -> None:
    layer = sparse()
    zeros = layer.weight == 0
    tool = palettizer(layer, training_strategy_spec={"type": strategy})
    prepared: Any = tool.prepare((X,))
    with torch.no_grad():
        layer.parametrizations.weight.original += 0.25  # as an optimizer with momentum, or an average, may do
    with tool.training_mode():
        prepared(X).square().sum().backward()
        assert bool((prepared.weight[zeros] == 0).all())
    assert bool((prepared.weight[zeros] == 0).all())
    assert bool((prepared.weight[~zeros] != 0).all())
    assert bool((layer.parametrizations.weight.original.grad[zeros] == 0).all())


def test_copies_and_states_keep_them() -> None:
    tool = palettizer(sparse())
    prepared: Any = tool.prepare((X,)).eval()
    assert torch.equal(copy.deepcopy(prepared)(X), prepared(X))
    again: Any = palettizer(sparse()).prepare((X,), state_dict=prepared.state_dict()).eval()
    assert torch.equal(again(X), prepared(X))
    finalized: Any = tool.finalize(backend="torch")
    assert torch.equal(finalized.weight, again.weight)


def test_vectors_cannot_keep_them() -> None:
    spec = PalettizationSpec(n_bits=2, cluster_dim=2, sparsity_detection_threshold=0.5)
    whole = {"op_state_spec": {"weight": spec}, "enable_fast_kmeans_mode": False}
    config = KMeansPalettizerConfig(global_config=whole)
    with pytest.raises(PlanError, match="keeps its zeros"):
        KMeansPalettizer(sparse(), config).prepare((X,))
    KMeansPalettizer(sparse(0.1), config).prepare((X,))


def test_bad_thresholds_are_refused() -> None:
    for threshold in (-0.1, 1.5, "some"):
        with pytest.raises(ValueError, match="sparsity_detection_threshold"):
            PalettizationSpec(sparsity_detection_threshold=threshold)  # type: ignore[arg-type]
