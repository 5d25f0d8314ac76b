"""Palettized and pruned models as artifacts: what the real simulators compute, stored and decoded."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact, pack_model
from bitwright.errors import ConfigMatchWarning
from tests.export.models import JOINT, PALETTES, Deconv, built, palettized, pruned, pruned_and_compressed


def _check(ready, x, tmp_path):
    artifact = Artifact.from_model(ready)
    artifact.save(tmp_path / "artifact")
    loaded = Artifact.load(tmp_path / "artifact")
    for layer in ("conv", "up", "fc"):
        weight = ready.get_submodule(layer).weight.detach()
        assert torch.equal(artifact.decode(f"{layer}.weight"), weight)
        assert torch.equal(loaded.decode(f"{layer}.weight"), weight)
    expected = ready(x).detach()
    assert torch.equal(loaded.packed_model(Deconv().eval())(x), expected)
    assert torch.equal(pack_model(ready)(x), expected)
    return artifact


@pytest.mark.parametrize("name", PALETTES)
def test_palettes(name, tmp_path):
    model, x = built(Deconv)
    _, ready = palettized(model, x, **PALETTES[name])
    artifact = _check(ready, x, tmp_path)
    assert {artifact[f"{layer}.weight"].layout.kind for layer in ("conv", "up", "fc")} == {"palettized"}


class OneChannel(nn.Module):
    """Layers that make one channel, and layers that read one."""

    def __init__(self):
        super().__init__()
        self.conv, self.to_one = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 1, 1)
        self.up, self.up_to_one = nn.ConvTranspose2d(1, 16, 2), nn.ConvTranspose2d(16, 1, 2)
        self.fc, self.fc_to_one = nn.Linear(1, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.to_one(torch.relu(self.conv(x)))
        x = self.up_to_one(torch.relu(self.up(x)))
        return self.fc_to_one(torch.relu(self.fc(x.mean((2, 3)))))


@pytest.mark.parametrize("name", ["4 bits", "channel scale", "int8 tables"])
def test_palettes_of_layers_with_one_channel(name, tmp_path):
    """One channel is no sign of which dimension the scales belong to."""
    torch.manual_seed(0)
    model, x = OneChannel().eval(), torch.randn(2, 1, 6, 6)
    _, ready = palettized(model, x, **PALETTES[name])
    Artifact.from_model(ready).save(tmp_path / "artifact")
    loaded = Artifact.load(tmp_path / "artifact")
    for layer, _ in model.named_children():
        assert torch.equal(loaded.decode(f"{layer}.weight"), ready.get_submodule(layer).weight.detach())
    assert torch.equal(loaded.packed_model(OneChannel().eval())(x), ready(x).detach())


@pytest.mark.parametrize("sparsity", [0.0, 0.02, 0.5, 0.9, 1.0])
def test_pruning(sparsity, tmp_path):
    model, x = built(Deconv)
    emptied = {0.9: "empty-channels", 1.0: "empty-weight"}.get(sparsity)
    with contextlib.nullcontext() if emptied is None else pytest.warns(ConfigMatchWarning, match=emptied):
        _, ready = pruned(model, x, sparsity)
    artifact = _check(ready, x, tmp_path)
    kept = 512 - int(512 * sparsity)
    assert artifact["up.weight"].nbytes == min(64 + 4 * kept, 4 * 512)


@pytest.mark.parametrize("name", JOINT)
def test_pruned_and_compressed(name, tmp_path):
    """Zeros of the pruner stay zeros and cost one bit each where that pays."""
    model, x = built(Deconv)
    _, ready = pruned_and_compressed(model, x, JOINT[name])
    artifact = _check(ready, x, tmp_path)
    if name != "int8 minval":
        assert artifact["up.weight"].is_sparse
        assert bool((artifact.decode("up.weight") == 0).float().mean() >= 0.75)


def test_palettization_that_is_switched_off_is_stored_all_the_same():
    """Look-up tables beside a dense weight would be a wrong model; the palettized weight is what is stored."""
    model, x = built(Deconv)
    _, ready = palettized(model, x, n_bits=4)
    expected = ready.fc.weight.clone()
    for module in ready.modules():
        if hasattr(module, "disable_fake_palett"):
            module.disable_fake_palett()
    assert not torch.equal(ready.fc.weight, expected)
    assert torch.equal(Artifact.from_model(ready).decode("fc.weight"), expected)
    assert not torch.equal(ready.fc.weight, expected)
