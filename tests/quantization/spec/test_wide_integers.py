"""Programs that widen ``QuantizationSpec.SUPPORTED_DTYPES`` by integers of 16 and 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.artifact import Artifact, ArtifactError
from bitwright.kernels import set_form
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig

WIDE = [torch.int16, torch.int32]


@pytest.fixture(autouse=True)
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take wide integers while a test runs."""
    monkeypatch.setattr(QuantizationSpec, "SUPPORTED_DTYPES", {*QuantizationSpec.SUPPORTED_DTYPES, *WIDE})


def prepared(dtype: torch.dtype, target: str, mode: str, scheme: str) -> tuple[Quantizer, nn.Module, nn.Module]:
    """A quantizer, its prepared model, and the float model, of which only weights or inputs are simulated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    spec = QuantizationSpec(dtype=dtype, qscheme=scheme)
    where = ModuleQuantizerConfig(
        op_state_spec={"weight": spec} if target == "weight" else None,
        op_input_spec={"*": spec} if target == "input" else None,
        op_output_spec=None,
    )
    quantizer = Quantizer(model, QuantizerConfig(global_config=where, execution_mode=mode))
    torch.manual_seed(0)
    same = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    return quantizer, quantizer.prepare((inputs(),)), same


def inputs() -> torch.Tensor:
    """A batch."""
    return torch.linspace(-3, 3, 8 * 24).reshape(8, 24)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("target", ["weight", "input"])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric", "symmetric_with_clipping"])
@pytest.mark.parametrize("dtype", WIDE)
def test_they_are_simulated(dtype: torch.dtype, target: str, mode: str, scheme: str) -> None:
    """The output is that of the float model but for 16 bits of noise, the same in both forms of the kernels."""
    quantizer, model, same = prepared(dtype, target, mode, scheme)
    with quantizer.training_mode():
        model(inputs()).sum().backward()
    output = model(inputs())
    torch.testing.assert_close(output, same(inputs()), rtol=0, atol=1e-3)
    before = set_form("reference")
    try:
        assert torch.equal(model(inputs()), output)
    finally:
        set_form(before)


@pytest.mark.parametrize("target", ["weight", "input"])
def test_they_are_not_exported(target: str) -> None:
    """The error says so."""
    quantizer, model, _ = prepared(torch.int16, target, "graph", "symmetric")
    with pytest.raises(ArtifactError, match="int16 are simulated only"):
        Artifact.from_model(model)
    with pytest.raises(ValueError, match="int16"):
        quantizer.finalize(backend=ExportBackend.CoreAI)


def test_a_plan_counts_their_bytes() -> None:
    """Two for each code of 16 bits, and four for a scale."""
    spec = QuantizationSpec(dtype=torch.int16, granularity={"type": "per_tensor"})
    where = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    plan = Quantizer(nn.Linear(24, 16, bias=False), QuantizerConfig(global_config=where)).plan((inputs(),))
    assert plan.compressed_bytes == 2 * 24 * 16 + 4
