"""Graphs whose weights have masks or palettes and nothing else: what a quantizer leaves alone keeps its zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.artifact.packed import PackedTensor
from bitwright.export.torch_program import packed_copy
from bitwright.inspection import bits_per_weight
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity

BLOCKS = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=16))
INT8 = QuantizationSpec(dtype="int8")


class Tied(nn.Module):
    """An embedding whose width no block of 16 divides, tied to the head or read once more as it is."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(20, 24), nn.Linear(24, 32), nn.Linear(32, 24)
        self.head = nn.Linear(24, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.embedding(x)
        return self.head(values + self.down(torch.relu(self.up(values)))) + self.embedding.weight.mean()


def prepared(below: str, sparsity: float, tied: bool, activations: bool):
    torch.manual_seed(0)
    model, x = Tied(tied).eval(), torch.arange(20).reshape(4, 5)
    if below == "mask":
        pruning = {"weight": PruningSpec(target_sparsity=sparsity)}
        config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec=pruning))
        model = MagnitudePruner(model, config).prepare((x,))
    else:
        palette = ModuleKMeansPalettizerConfig(op_state_spec={"weight": PalettizationSpec(n_bits=4)})
        model = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=palette)).prepare((x,))
    specs = {"*": INT8} if activations else None
    module = ModuleQuantizerConfig(
        op_state_spec={"weight": BLOCKS} if below == "mask" else None, op_input_spec=specs, op_output_spec=specs
    )
    quantizer = Quantizer(model, QuantizerConfig(global_config=module, execution_mode="graph"))
    ready = quantizer.prepare((x,))
    if activations:
        with quantizer.calibration_mode(), torch.no_grad():
            ready(x)
    return quantizer, ready, x


CASES = [("mask", 0.5), ("mask", 0.02), ("palette", 0.0)]


@pytest.mark.filterwarnings("ignore:.block-size.")
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("below", "sparsity"), CASES)
def test_masks_and_palettes_stay(below, sparsity, tied, activations):
    """Where entries are few enough to be stored by themselves, and where the weight is stored whole, with zeros."""
    quantizer, ready, x = prepared(below, sparsity, tied, activations)
    weights, state = bits_per_weight(ready).total_bits, copy.deepcopy(ready.state_dict())
    with torch.no_grad():
        expected = ready(x)
        packed = packed_copy(ready)
        assert torch.equal(packed(x), expected)
        assert any(isinstance(module, PackedTensor) for module in packed.modules())
        pytest.importorskip("coreai_torch")
        assert torch.equal(quantizer.finalize()(x), expected)
        assert torch.equal(ready(x), expected)
    assert bits_per_weight(ready).total_bits == weights
    assert all(torch.equal(value, state[name]) for name, value in ready.state_dict().items())


@pytest.mark.filterwarnings("ignore:.block-size.")
@pytest.mark.parametrize(("below", "sparsity"), CASES)
def test_onnx_reads_the_zeros(below, sparsity, tmp_path):
    pytest.importorskip("onnxruntime")
    from bitwright.export.onnx import export_onnx, run_onnx

    _, ready, x = prepared(below, sparsity, tied=False, activations=False)
    (found,) = run_onnx(export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))
    with torch.no_grad():
        torch.testing.assert_close(found, ready(x), rtol=1e-5, atol=1e-5)


def test_core_ml_packs_palettes_of_graphs_without_a_quantized_tensor(tmp_path):
    coremltools = pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import export_coreml

    _, ready, x = prepared("palette", 0.0, tied=False, activations=False)
    path = export_coreml(ready, (x,), tmp_path / "model.mlpackage")
    program = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec().mlProgram
    (block,) = program.functions["main"].block_specializations.values()
    assert sum(op.type == "constexpr_lut_to_dense" for op in block.operations) >= 4
