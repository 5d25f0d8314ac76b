"""Palettes with quantized tables in half precision: Core AI's ops give the simulators' weights to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("coreai_torch")

from bitwright.inspection import artifact_of

from .models import PALETTES, Mlp, built, palettized


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8 tables", "uint8 tables", "fp8 tables", "channel scale", "all together"])
def test_weights_are_those_of_the_prepared_model(name, dtype):
    """A scale is float32 in the simulation, and table entries are rounded once before channels are scaled."""
    model, x = built(Mlp, dtype)
    palettizer, ready = palettized(model, x, **PALETTES[name])
    artifact = artifact_of(ready)
    final = palettizer.finalize(copy.deepcopy(ready), backend="coreai")
    for layer in ("up", "down"):
        assert torch.equal(final.get_submodule(layer).weight, artifact.decode(f"{layer}.weight"))
    assert torch.equal(final(x), ready(x))
