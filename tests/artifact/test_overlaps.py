"""Models whose parameters share memory without being one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact, ArtifactError
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig


class Separate(nn.Module):
    """Two layers with a parameter each, both in one memory."""

    def __init__(self, own=False):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        if not own:
            self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x):
        return self.b(self.a(x))


def _separate_artifact(*layers):
    """Of a model of which some layers are quantized."""
    torch.manual_seed(0)
    module = ModuleQuantizerConfig(
        op_input_spec=None, op_output_spec=None, op_state_spec={"weight": QuantizationSpec(dtype="int4")}
    )
    config = QuantizerConfig(global_config=None, execution_mode="eager")
    for layer in layers:
        config.set_module_name(layer, module)
    return Artifact.from_model(Quantizer(Separate().eval(), config).prepare((torch.randn(1, 64),)))


def test_tensors_that_share_memory_are_not_overwritten():
    """They are refused where they have different numbers in the artifact, and the model is unchanged then."""
    artifact, model, x = _separate_artifact("a"), Separate().eval(), torch.randn(2, 64)
    before = model.a.weight.clone()
    with pytest.raises(ArtifactError, match=r"b\.weight with a\.weight.*clone\(\)"):
        artifact.load_into(model)
    assert torch.equal(model.a.weight, before)
    expected = artifact.load_into(Separate(own=True).eval())(x)
    assert torch.equal(artifact.packed_model(model)(x), expected)
    for layers in ((), ("a", "b")):
        same = _separate_artifact(*layers)
        assert torch.equal(same.load_into(Separate())(x), same.load_into(Separate(own=True))(x))


def test_views_of_one_memory_are_filled_where_they_share_no_element():
    """Columns of one matrix; a row that is a part of another view is refused."""
    artifact, model = _separate_artifact("a"), Separate(own=True).eval()
    both = torch.zeros(64, 128)
    model.a.weight, model.b.weight = (nn.Parameter(part) for part in both.chunk(2, 1))
    artifact.load_into(model)
    assert torch.equal(both, torch.cat([artifact.decode("a.weight"), artifact.decode("b.weight")], 1))
    model.a.weight, model.b.weight = nn.Parameter(both[:, :64]), nn.Parameter(both[:, 63:127])
    with pytest.raises(ArtifactError, match="share memory"):
        artifact.load_into(model)
