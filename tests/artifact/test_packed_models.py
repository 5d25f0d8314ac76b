"""A model whose weights are packed: taken like the prepared one, never written to in vain."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from bitwright._utils.packed_weights import PackedWeightError
from bitwright.artifact import Artifact, ArtifactError, pack_model
from bitwright.artifact.lazy import LazyWeight
from bitwright.export.checkpoints import export_compressed_tensors, export_gguf
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.export.torch_program import packed_copy
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
COMPRESSORS: dict[str, Any] = {
    "quantizer": lambda model: Quantizer(model, QuantizerConfig.presets.w4_per_block(execution_mode="eager")),
    "palettizer": lambda model: KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4()),
    "pruner": lambda model: MagnitudePruner(model, MagnitudePrunerConfig()),
}
PACKED: dict[str, Any] = {
    "packed_model": lambda prepared, model: Artifact.from_model(prepared).packed_model(copy.deepcopy(model)),
    "pack_model": lambda prepared, model: pack_model(copy.deepcopy(prepared)),
    "packed_copy": lambda prepared, model: packed_copy(prepared),
}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)
every_way = pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())


def network():
    """Two layers that are tied, and a third one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    net[2].weight = net[0].weight
    return net


def prepared_by(compressor, net=None):
    return COMPRESSORS[compressor](copy.deepcopy(net or network())).prepare((X,)).eval()


def loaded(compressor="quantizer"):
    """A packed model."""
    return PACKED["packed_model"](prepared_by(compressor), network())


@every_compressor
@every_way
def test_its_artifact_is_that_of_the_prepared_model(compressor, pack, tmp_path):
    """The same layouts, names and numbers, saved too; and nothing of the model is shared."""
    prepared = prepared_by(compressor)
    expected = Artifact.from_model(prepared)
    model = pack(prepared, network())
    found = Artifact.from_model(model)
    assert (found.compressed, found.aliases, found.nbytes) == (expected.compressed, expected.aliases, expected.nbytes)
    assert "0.weight" in found.compressed
    assert found.aliases == {"2.weight": "0.weight"}
    for tensor in model.buffers():
        if tensor.is_floating_point():
            tensor.zero_()
    found.save(tmp_path / "a")
    for artifact in (found, Artifact.load(tmp_path / "a")):
        assert artifact.keys() == expected.keys()
        for name in expected:
            assert artifact[name].layout == expected[name].layout
            assert torch.equal(artifact.decode(name), expected.decode(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_compressor
def test_the_artifact_of_a_cast_model_decodes_to_what_it_computes(compressor, dtype):
    model = loaded(compressor).to(dtype)
    artifact = Artifact.from_model(model)
    for name in ("0.weight", "4.weight", "4.bias"):
        assert artifact.decode(name).dtype == dtype
        assert torch.equal(artifact.decode(name), getattr(model[int(name[0])], name[2:]).clone())


def test_one_that_rounds_otherwise_when_it_is_cast_is_refused():
    """A product of a table's value and a factor that is rounded once, as a product of rounded ones is not."""
    spec = PalettizationSpec(n_bits=4, enable_per_channel_scale=True)
    module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec})
    config = KMeansPalettizerConfig(global_config=module)
    prepared = KMeansPalettizer(network(), config).prepare((X,)).eval()
    model = Artifact.from_model(prepared).packed_model(network()).half()
    with pytest.raises(ArtifactError, match=r"'0\.weight'.*was packed and then cast to torch\.float16: cast.* back"):
        Artifact.from_model(model)
    assert torch.equal(Artifact.from_model(model.float()).decode("0.weight"), model[0].weight.clone())


def test_checkpoints_are_those_of_the_prepared_model(tmp_path):
    prepared, model = prepared_by("quantizer"), loaded()
    for name, written in (("prepared", prepared), ("packed", model)):
        export_gguf(written, tmp_path / f"{name}.gguf", round_scales=True)
        export_compressed_tensors(written, tmp_path / name)
    assert (tmp_path / "packed.gguf").read_bytes() == (tmp_path / "prepared.gguf").read_bytes()
    for file in (tmp_path / "prepared").iterdir():
        assert (tmp_path / "packed" / file.name).read_bytes() == file.read_bytes()


@every_compressor
@torch.no_grad()
def test_onnx_files_hold_its_codes(compressor, tmp_path):
    """No larger than the file of the prepared model, and ONNX Runtime computes the same."""
    prepared = prepared_by(compressor)
    for name, written in (("prepared", prepared), ("packed", loaded(compressor))):
        export_onnx(written, (X,), tmp_path / f"{name}.onnx")
    assert (tmp_path / "packed.onnx").stat().st_size <= (tmp_path / "prepared.onnx").stat().st_size
    (output,) = run_onnx(tmp_path / "packed.onnx", (X,))
    torch.testing.assert_close(output, prepared(X))


def test_a_graph_whose_weights_were_packed_is_refused():
    graph = Quantizer(network(), QuantizerConfig.presets.w4_per_block()).prepare((X,)).eval()
    with pytest.raises(ArtifactError, match=r"bitwright_weight_0.*prepared graph"):
        Artifact.from_model(packed_copy(graph))


def assign_parameter(layer):
    layer.weight = nn.Parameter(torch.zeros(64, 64))


def assign_tensor(layer):
    layer.weight = torch.zeros(64, 64)


def prune_layer(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


def prune_randomly(layer):
    prune.random_unstructured(layer, "weight", 0.5)


@torch.no_grad()
def multiply(layer):
    layer.weight.mul_(2)


@torch.no_grad()
def assign_row(layer):
    layer.weight[0] = 0.0


def copy_into_data(layer):
    layer.weight.data.copy_(torch.zeros(64, 64))


def assign_data(layer):
    layer.weight.data = torch.zeros(64, 64)


ON_THE_LAYER = [assign_parameter, assign_tensor, prune_layer, prune_randomly]
ON_THE_LAYER += [multiply, assign_row, copy_into_data, assign_data]


@pytest.mark.parametrize("write", ON_THE_LAYER)
@every_compressor
@pytest.mark.filterwarnings("ignore:.*which is lost:bitwright.errors.BitwrightWarning")
def test_writes_to_the_weight_of_a_layer_are_refused(compressor, write):
    """Each time, with the name and what to do, also in code that a prepared model met before; nothing changes."""
    model = loaded(compressor)
    if write in (multiply, assign_row, copy_into_data, assign_data):
        write(prepared_by(compressor)[0])
    before, states = model(X), list(model.state_dict())
    for _ in range(2):
        with pytest.raises(
            PackedWeightError, match=r"'weight' of the Linear cannot be written.*load_into\(float_model"
        ):
            write(model[0])
    assert torch.equal(model(X), before)
    assert list(model.state_dict()) == states


WRITES: dict[str, Any] = {
    "method": lambda weight: weight.mul_(2),
    "sum": lambda weight: weight.__iadd__(1),
    "item": lambda weight: weight.__setitem__(0, 0.0),
    "data": lambda weight: setattr(weight, "data", torch.zeros(64, 64)),
    "zeros": nn.init.zeros_,
    "normal": nn.init.normal_,
    "out": lambda weight: torch.add(X[:1], X[:1], out=weight),
    "outs": lambda weight: torch.max(X, 0, out=(weight, torch.empty(64, dtype=torch.int64))),
    "function": lambda weight: torch.relu_(weight),
    "operator": lambda weight: torch.ops.aten.mul_.Tensor(weight, 2),
    "operator with out": lambda weight: torch.ops.aten.add.out(X, X, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2),
}


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_writes_to_a_weight_that_was_read_are_refused(name):
    pytest.importorskip("numba")
    weight = loaded()[0].weight
    assert type(weight) is LazyWeight
    before = weight.clone()
    with pytest.raises(PackedWeightError, match=r"cannot be written to.*load_into\(float_model"):
        WRITES[name](weight)
    assert torch.equal(weight, before)


@torch.no_grad()
def test_what_only_reads_a_weight_works():
    """Among it what is named like a write, and writes of the weight into another tensor."""
    weight = loaded()[0].weight
    plain = weight.clone()
    other = torch.zeros(64, 64)
    assert torch.equal(other.copy_(weight), plain)
    assert torch.equal(torch.mul(weight, 2, out=other), plain * 2)
    other.data = weight.data
    assert torch.equal(other, plain)
    assert torch.equal(weight.requires_grad_(False), plain)
    assert torch.equal(weight.data, plain)
    assert torch.equal(~(weight > 0), plain <= 0)


@every_compressor
@pytest.mark.parametrize("saved", [False, True])
def test_models_of_one_artifact_have_codes_of_their_own(compressor, saved, tmp_path):
    """A state that is loaded into one is neither in the others nor in the artifact."""
    artifact = Artifact.from_model(prepared_by(compressor))
    if saved:
        artifact.save(tmp_path / "a")
        artifact = Artifact.load(tmp_path / "a")
    first, second = artifact.packed_model(network()), artifact.packed_model(network())
    before, expected = artifact.decode("0.weight").clone(), second(X)
    torch.manual_seed(1)
    different = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    different[2].weight = different[0].weight
    other = PACKED["packed_model"](prepared_by(compressor, different), different)
    first.load_state_dict(other.state_dict())
    assert torch.equal(first(X), other(X))
    assert torch.equal(artifact.decode("0.weight"), before)
    assert torch.equal(second(X), expected)
    assert torch.equal(artifact.packed_model(network())(X), expected)


@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("way", ["loaded", "in memory", "packed_copy", "cast", "assigned"])
def test_buffers_that_are_made_in_inference_mode(way, size, tmp_path):
    """The model runs there and outside, and sees what is written to them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(size, size)).eval(), torch.randn(2, size)
    prepared = COMPRESSORS["quantizer"](copy.deepcopy(model)).prepare((x,)).eval()
    Artifact.from_model(prepared).save(tmp_path / "a")
    expected = prepared(x)
    with torch.inference_mode():
        if way == "loaded":
            packed = Artifact.load(tmp_path / "a").packed_model(model)
        elif way == "in memory":
            packed = Artifact.from_model(prepared).packed_model(model)
        else:
            packed = packed_copy(prepared)
        if way == "cast":
            packed = packed.double().float()
        if way == "assigned":
            packed.load_state_dict({name: value.clone() for name, value in packed.state_dict().items()}, assign=True)
        torch.testing.assert_close(packed(x), expected)
        for name, buffer in packed.named_buffers():
            if name.endswith("scale"):
                buffer.mul_(2)
        torch.testing.assert_close(packed(x) - model[0].bias, 2 * (expected - model[0].bias))
    given = x.clone().requires_grad_()
    packed(given).sum().backward()
    assert given.grad is not None


@pytest.mark.parametrize("assign", [False, True])
def test_its_own_state_is_loaded(assign):
    """Also that of another packed model of the kind."""
    torch.manual_seed(1)
    other = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    first = COMPRESSORS["quantizer"](copy.deepcopy(other)).prepare((X,))
    expected = PACKED["packed_model"](first, other)
    nn.init.normal_(other[0].weight)
    model = PACKED["packed_model"](COMPRESSORS["quantizer"](copy.deepcopy(other)).prepare((X,)), other)
    assert not torch.equal(model(X), expected(X))
    model.load_state_dict({name: value.clone() for name, value in expected.state_dict().items()}, assign=assign)
    assert torch.equal(model(X), expected(X))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_pickles_of_eight_bit_floats(dtype, mode):
    """torch cannot read those that pickle writes, as joblib does."""
    spec = {"dtype": dtype, "qscheme": "symmetric"}
    config = {"global_config": {"op_state_spec": {"weight": spec}}, "execution_mode": mode}
    prepared = Quantizer(network(), QuantizerConfig.from_dict({"quantization_config": config})).prepare((X,)).eval()
    model = packed_copy(prepared)
    state, artifact = model.state_dict(), Artifact.from_model(prepared)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(X), model(X))
        assert {name: part.dtype for name, part in twin.state_dict().items()} == {
            name: part.dtype for name, part in state.items()
        }
    assert getattr(torch, dtype) in {part.dtype for part in state.values()}
    again = pickle.loads(pickle.dumps(artifact))
    assert all(torch.equal(again.decode(name), artifact.decode(name)) for name in artifact)
    assert again.compressed == artifact.compressed
