"""Bits per weight equal the bytes of the packed artifact, for every compressor and every form of a model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.artifact import Artifact
from bitwright.export.torch_program import packed_copy
from bitwright.inspection import bits_per_weight
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerTensorGranularity

INPUTS = (torch.randn(2, 64),)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)).eval()


def test_float_model_counts_every_tensor_at_its_dtype() -> None:
    """Float32 parameters and one int64 counter: (64*32 + 32*5 + 32*8 + 8) * 32 + 64 bits."""
    result = bits_per_weight(make())
    elements = 64 * 32 + 32 + 4 * 32 + 32 * 8 + 8
    assert result.total_weights == elements + 1
    assert result.total_bits == elements * 32 + 64


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
@pytest.mark.parametrize(
    ("layout", "index_bytes"),
    [
        (torch.sparse_coo, 2 * 8 * 16),  # row and column of each number
        (torch.sparse_csr, 8 * 16 + 8 * 17),  # column of each number, and where each row begins
        (torch.sparse_csc, 8 * 16 + 8 * 17),
    ],
)
def test_sparse_tensors_count_their_values_and_indices(layout: torch.layout, index_bytes: int) -> None:
    """They are 16 numbers of 4 bytes on a diagonal, with indices of 8 bytes each, and stand for 16x16 elements."""
    model = nn.Module()
    model.register_buffer("adjacency", torch.eye(16).to_sparse(layout=layout))
    result = bits_per_weight(model)
    assert result.total_weights == 256
    assert result.total_bits == 8 * (16 * 4 + index_bytes)


def test_quantized_model_by_hand() -> None:
    """4 bits per weight and a float32 scale per channel; the formula is also what coreai-opt counts."""
    prepared = Quantizer(make(), QuantizerConfig.presets.w4(execution_mode="eager")).prepare(INPUTS)
    result = bits_per_weight(prepared)
    assert result.total_bits == 15936
    assert result.total_weights == 2473
    assert result.per_module_map == pytest.approx({"0": 4.923076923, "1": 32.248062016, "2": 5.818181818})


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("uint2", 2), ("int3", 3)])
def test_zero_points_of_less_than_a_byte_count_their_bits(dtype: str, bits: int) -> None:
    """One zero point takes the bits of a code, not the byte that a file pads it to."""
    spec = QuantizationSpec(dtype=dtype, qscheme="asymmetric", granularity=PerTensorGranularity())
    weights = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    config = QuantizerConfig(global_config=weights, execution_mode="eager")
    prepared = Quantizer(nn.Linear(64, 32, bias=False), config).prepare(INPUTS)
    assert bits_per_weight(prepared).total_bits == 64 * 32 * bits + 32 + bits
    assert -(-bits_per_weight(prepared).total_bits // 8) <= Artifact.from_model(prepared).nbytes


def test_masks_and_tables_count_their_bits() -> None:
    """27 entries: 27 bits of mask and 14 kept float32; 9 vectors of 3 entries with 2-bit indices and one table."""
    pruned = MagnitudePruner(nn.Linear(9, 3, bias=False)).prepare((torch.randn(1, 9),))
    kept = int(torch.count_nonzero(pruned.weight))
    assert bits_per_weight(pruned).total_bits == 27 + kept * 32
    spec = PalettizationSpec(n_bits=2, cluster_dim=3)
    weights = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}, enable_fast_kmeans_mode=False)
    palettizer = KMeansPalettizer(nn.Linear(9, 3, bias=False), KMeansPalettizerConfig(global_config=weights))
    assert bits_per_weight(palettizer.prepare((torch.randn(1, 9),))).total_bits == 9 * 2 + 4 * 3 * 32


@pytest.mark.parametrize("prepare", [False, True])
def test_buffers_that_are_not_persistent_count(prepare: bool) -> None:
    """A table of positions, say, is part of the model; the mark of a prepared model is not."""
    model = make()
    plain = bits_per_weight(model)
    model.register_buffer("positions", torch.zeros(100), persistent=False)
    expected = plain.total_weights + 100
    if prepare:
        model = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(INPUTS)
    assert bits_per_weight(model).total_weights == expected


def test_buffers_that_no_artifact_holds_count() -> None:
    model = make()
    model.register_buffer("positions", torch.zeros(100), persistent=False)
    assert bits_per_weight(model).total_bits == 8 * Artifact.from_model(model).nbytes + 100 * 32


def _quantized() -> nn.Module:
    return Quantizer(make(), QuantizerConfig.presets.w4(execution_mode="eager")).prepare(INPUTS)


def _palettized() -> nn.Module:
    return KMeansPalettizer(make(), KMeansPalettizerConfig()).prepare(INPUTS)


def _pruned() -> nn.Module:
    pruner = MagnitudePruner(make(), MagnitudePrunerConfig())
    return pruner.prepare(INPUTS)


@pytest.mark.parametrize("build", [make, _quantized, _palettized, _pruned])
def test_bits_are_the_bytes_of_the_artifact(build: object, tmp_path: Path) -> None:
    """Prepared, packed and loaded models count what the files hold."""
    model = build()  # type: ignore[operator]
    artifact = Artifact.from_model(model)
    assert bits_per_weight(model).total_bits == 8 * artifact.nbytes
    artifact.save(tmp_path / "artifact")
    loaded = Artifact.load(tmp_path / "artifact").packed_model(make())
    assert bits_per_weight(loaded).total_bits == 8 * artifact.nbytes
    assert bits_per_weight(loaded).total_weights == bits_per_weight(make()).total_weights


def test_graph_model_counts_folded_weights_and_no_batch_norm() -> None:
    """Prepared and finalized graphs count the same: packed weights, folded biases, nothing of the batch norm."""
    quantizer = Quantizer(make(), QuantizerConfig.presets.w4())
    prepared = quantizer.prepare(INPUTS)
    result = bits_per_weight(prepared)
    weights = (64 * 32 + 32 * 8) * 4 + (32 + 8) * 32
    biases = (32 + 8) * 32
    assert result.total_bits == weights + biases
    assert bits_per_weight(quantizer.finalize(backend=ExportBackend._TORCH)).total_bits == result.total_bits


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("backend", ["coreml", "coreai"])
def test_finalizing_does_not_change_the_count(mode: str, backend: str) -> None:
    """Buffers that a backend reads are not counted beside the weights they stand for."""
    if backend == "coreai":
        pytest.importorskip("coreai_torch")
    preset = QuantizerConfig.presets.w8(execution_mode=mode)
    quantizer = Quantizer(make(), preset)
    prepared = quantizer.prepare(INPUTS)
    before = bits_per_weight(prepared)
    finalized = quantizer.finalize(backend=ExportBackend(backend))
    assert bits_per_weight(finalized).total_bits == before.total_bits
    assert bits_per_weight(copy.deepcopy(finalized)).total_weights == before.total_weights


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_activations_do_not_count(mode: str) -> None:
    """Activation quantizers have no weights; finalized for Core ML, neither do the modules in their places."""
    quantizer = Quantizer(make(), QuantizerConfig.presets.w8a8(execution_mode=mode))
    prepared = quantizer.prepare(INPUTS)
    with quantizer.calibration_mode():
        prepared(*INPUTS)
    before = bits_per_weight(prepared).total_bits
    weights_only = Quantizer(make(), QuantizerConfig.presets.w8(execution_mode=mode)).prepare(INPUTS)
    assert before == bits_per_weight(weights_only).total_bits
    assert bits_per_weight(quantizer.finalize(backend="coreml")).total_bits == before


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("backend", ["coreml", "coreai"])
def test_activations_do_not_count_without_weights(mode: str, backend: str) -> None:
    """No weight is compressed: the parameters of activations that finalizing leaves are none either."""
    if backend == "coreai":
        pytest.importorskip("coreai_torch")
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_state_spec=None), execution_mode=mode)
    quantizer = Quantizer(make(), config)
    prepared = quantizer.prepare(INPUTS)
    with quantizer.calibration_mode():
        prepared(*INPUTS)
    before = bits_per_weight(prepared).total_bits
    assert bits_per_weight(quantizer.finalize(backend=backend)).total_bits == before


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_packed_copies_count_what_they_hold(mode: str) -> None:
    """Packed weights once, and nothing of what stands for the activations' simulators."""
    quantizer = Quantizer(make(), QuantizerConfig.presets.w8a8(execution_mode=mode))
    prepared = quantizer.prepare(INPUTS)
    with quantizer.calibration_mode():
        prepared(*INPUTS)
    assert bits_per_weight(packed_copy(prepared)) == bits_per_weight(prepared)


def test_tied_weights_count_once() -> None:
    """A weight of two modules is one tensor, plain and compressed."""
    model = make()
    tied = nn.Sequential(model[2], nn.Linear(8, 32), nn.Linear(32, 8))
    tied[2].weight = tied[0].weight
    plain = bits_per_weight(tied)
    assert plain.total_weights == 32 * 8 + 8 + 8 * 32 + 32 + 8
    prepared = Quantizer(tied, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((torch.randn(1, 32),))
    assert bits_per_weight(prepared).total_weights == plain.total_weights
    assert bits_per_weight(prepared).total_bits == 8 * Artifact.from_model(prepared).nbytes


def test_other_objects_are_refused() -> None:
    """The error names the type."""
    with pytest.raises(TypeError, match="got dict"):
        bits_per_weight({})  # type: ignore[arg-type]
