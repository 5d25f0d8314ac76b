"""Artifacts of whole models: saved, loaded, decoded, put back into models."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from torch import nn

from bitwright._utils.parametrization import parametrize_tensor
from bitwright.artifact import Artifact, ArtifactError, DenseTensor, compress_tensor, dense_tensor, pack_model
from bitwright.artifact.layouts import _DTYPES
from bitwright.artifact.storage import file_sizes
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity

from .strategies import observed


class Net(nn.Module):
    """A convolution, a norm with buffers, an embedding, tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.arange(8.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        x = self.norm(self.conv(x)).transpose(1, 2)
        return self.head(self.fc(torch.relu(x)) + self.offset)


TOKENS = torch.arange(20).reshape(2, 10) % 16


def prepared_net(spec=None, activations=False, seed=0):
    """A prepared network, with the float network it came from."""
    torch.manual_seed(seed)
    net = Net().eval()
    net.norm.running_mean.normal_()
    spec = spec or QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=4))
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec={"weight": spec},
            **({} if activations else {"op_input_spec": None, "op_output_spec": None}),
        ),
        execution_mode="eager",
    )
    original = copy.deepcopy(net)
    quantizer = Quantizer(net, config)
    prepared = quantizer.prepare((TOKENS,))
    return prepared, original, quantizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    prepared, original, quantizer = prepared_net(activations=True)
    folder = tmp_path_factory.mktemp("artifact") / "net"
    artifact = Artifact.from_model(prepared, config=quantizer._config, plan=quantizer._plan)
    artifact.save(folder)
    return folder, artifact, prepared, original


def test_decodes_to_the_weights_of_the_prepared_model(saved):
    """Every compressed weight, also through its other names."""
    _, artifact, prepared, _ = saved
    assert set(artifact.compressed) == {"embed.weight", "conv.weight", "fc.weight"}
    assert artifact.aliases == {"head.weight": "embed.weight"}
    for name in (*artifact.compressed, *artifact.aliases):
        assert torch.equal(artifact.decode(name), prepared.get_submodule(name[: -len(".weight")]).weight)


def test_what_is_not_compressed_is_there_as_it_is(saved):
    _, artifact, _, original = saved
    dense = {name: tensor for name, tensor in original.state_dict().items() if not name.endswith("weight")}
    assert {"norm.running_mean", "norm.num_batches_tracked", "offset", "conv.bias"} <= dense.keys()
    for name, tensor in dense.items():
        assert isinstance(artifact[name], DenseTensor)
        assert torch.equal(artifact.decode(name), tensor)
    assert "scratch" not in artifact


def test_comes_back_from_disk_unchanged(saved):
    folder, artifact, _, _ = saved
    loaded = Artifact.load(folder)
    assert list(loaded) == list(artifact)
    assert loaded.aliases == artifact.aliases
    assert loaded.config == artifact.config
    assert loaded.plan == artifact.plan
    assert loaded.nbytes == artifact.nbytes
    for name in artifact:
        assert loaded[name].layout == artifact[name].layout
        assert loaded.decode(name).dtype == artifact.decode(name).dtype
        assert torch.equal(loaded.decode(name), artifact.decode(name))
    assert loaded.activations.keys() == artifact.activations.keys()
    for name, activation in artifact.activations.items():
        assert loaded.activations[name].layout == activation.layout
        for part in activation.parts:
            assert torch.equal(loaded.activations[name].parts[part], activation.parts[part])


def test_the_config_on_disk_builds_the_same_config(saved):
    """A model can be prepared again with what the artifact says."""
    folder, _, _, _ = saved
    again = QuantizerConfig.from_dict({"quantization_config": Artifact.load(folder).config})
    spec = again.global_config.op_state_spec["weight"]
    assert (spec.dtype, spec.granularity) == (torch.int4, PerBlockGranularity(axis=1, block_size=4))


def test_size_on_disk_is_the_size_that_the_plan_predicts(saved):
    """Tensor bytes in the files are those of the plan plus the dense rest, without padding."""
    folder, artifact, _, _ = saved
    data = 0
    for path in folder.glob("*.safetensors"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        data += path.stat().st_size - 8 - header
    activations = sum(p.nbytes for a in artifact.activations.values() for p in a.parts.values())
    assert data == artifact.nbytes + activations
    compressed = sum(
        row["compressed_bytes"] for row in artifact.plan["rows"] if row["kind"] == "weight" and row["spec"]
    )
    assert artifact.compressed_nbytes == compressed


@pytest.mark.parametrize("dtype", ["int3", "uint5", "int1", "float4_e2m1fn_x2", "float8_e5m2"])
def test_plan_predicts_the_size_for_odd_formats(dtype):
    scale = "float8_e8m0fnu" if dtype.startswith("float4") else None
    spec = QuantizationSpec(dtype=dtype, granularity=PerBlockGranularity(axis=1, block_size=4), scale_dtype=scale)
    prepared, _, quantizer = prepared_net(spec)
    assert Artifact.from_model(prepared).compressed_nbytes == quantizer._plan.compressed_bytes


def test_load_into_gives_the_prepared_model_without_simulators(saved):
    folder, _, _, original = saved
    model = Artifact.load(folder).load_into(copy.deepcopy(original))
    reference, _, _ = prepared_net()
    assert torch.equal(model(TOKENS), reference(TOKENS))
    assert model.head.weight is model.embed.weight


@torch.no_grad()  # with a gradient, torch multiplies in another order
def test_packed_model_keeps_weights_packed_and_computes_the_same(saved):
    folder, artifact, _, original = saved
    model = Artifact.load(folder).packed_model(copy.deepcopy(original))
    reference, _, _ = prepared_net()
    assert torch.equal(model(TOKENS), reference(TOKENS))
    held = sum(t.nbytes for t in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    assert held == artifact.nbytes
    assert model.head.parametrizations.weight[0] is model.embed.parametrizations.weight[0]


@torch.no_grad()  # with a gradient, torch multiplies in another order
def test_packed_model_on_the_meta_device():
    """A model too large for memory is built without storage, then given its packed weights."""
    prepared, _, _ = prepared_net()
    artifact = Artifact.from_model(prepared)
    with torch.device("meta"):
        empty = Net()
    model = artifact.packed_model(empty)
    model.scratch = torch.zeros(3)
    assert torch.equal(model(TOKENS), prepared(TOKENS))


class Recurrent(nn.Module):
    """An LSTM, whose weights PyTorch lists once more, beside what ``Net`` has."""

    def __init__(self):
        super().__init__()
        self.net, self.lstm = Net(), nn.LSTM(16, 5)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, tokens):
        return self.lstm(self.net(tokens))[0] + self.counts.sum()


@pytest.mark.parametrize("method", ["load_into", "packed_model"])
@pytest.mark.parametrize("compressed", [True, False])
@torch.no_grad()
def test_a_model_on_the_meta_device_is_filled(method, compressed):
    """Every parameter has numbers then, in the dtype and with the ties that it had; so do buffers."""
    torch.manual_seed(0)
    net = Recurrent().eval()
    net.lstm.weight_hh_l0.requires_grad_(False)
    config = QuantizerConfig.presets.w4(execution_mode="eager")
    prepared = Quantizer(copy.deepcopy(net), config).prepare((TOKENS,)) if compressed else net
    artifact = Artifact.from_model(prepared)
    with torch.device("meta"):
        empty = Recurrent().eval()
    empty.lstm.weight_hh_l0.requires_grad_(False)
    model = getattr(artifact, method)(empty)
    model.net.scratch = torch.zeros(3)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert torch.equal(model(TOKENS), getattr(artifact, method)(copy.deepcopy(net))(TOKENS))
    if method == "load_into" or not compressed:
        assert model.net.head.weight is model.net.embed.weight
        grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        assert grads == {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    half = getattr(artifact, method)(Recurrent().half().to("meta"))
    assert half.lstm.bias_ih_l0.dtype == half.net.fc.weight.dtype == torch.float16
    assert half.counts.dtype == torch.int64


def test_the_artifact_stays_when_the_model_goes_on():
    """Neither training nor what is done to a model that it was loaded into changes it."""
    prepared, original, _ = prepared_net()
    artifact = Artifact.from_model(prepared)
    expected = {name: artifact.decode(name).clone() for name in artifact}
    with torch.no_grad():
        for tensor in (*prepared.parameters(), *prepared.buffers()):
            tensor.zero_()
        for tensor in artifact.load_into(original).parameters():
            tensor.zero_()
    assert all(torch.equal(artifact.decode(name), value) for name, value in expected.items())


def test_names_that_no_file_can_hold_are_refused(tmp_path):
    """A lone surrogate, which file names of another encoding become; nothing is written."""
    net = nn.Sequential()
    net.add_module("fc\udcff", nn.Linear(2, 2))
    artifact = Artifact.from_model(net)
    with pytest.raises(ArtifactError, match=r"lone surrogates: 'fc\\udcff\.weight', .*[Rr]ename"):
        artifact.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_pack_model_keeps_activation_simulators():
    """A prepared W4A8 model computes the same after its weights were packed."""
    prepared, _, _ = prepared_net(activations=True)
    expected = prepared(TOKENS)
    assert torch.equal(pack_model(prepared)(TOKENS), expected)


def test_a_w4_model_takes_at_most_a_fifth_of_float32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    dense = sum(p.nbytes for p in net.parameters())
    quantizer = Quantizer(net, QuantizerConfig.presets.w4_per_block(execution_mode="eager"))
    model = pack_model(quantizer.prepare((torch.randn(1, 256),)))
    held = sum(t.nbytes for t in model.state_dict().values())
    assert held <= 0.2 * dense


def test_half_precision_and_back():
    """``.to`` moves what is decoded to, not the packed numbers."""
    prepared, _, _ = prepared_net()
    model = pack_model(prepared)
    expected = model.fc.weight.clone()
    model.half()
    assert model.fc.weight.dtype == torch.float16
    assert model.fc.parametrizations.weight[0].scale.dtype == torch.float32
    model.float()
    assert torch.equal(model.fc.weight, expected)


def test_saving_to_a_folder_that_is_not_empty_is_refused(saved, tmp_path):
    _, artifact, _, _ = saved
    (tmp_path / "something").write_text("here")
    with pytest.raises(FileExistsError):
        artifact.save(tmp_path)
    with pytest.raises(NotADirectoryError):
        artifact.save(tmp_path / "something")


def test_many_files_hold_the_same_as_one(saved, tmp_path):
    """The writer begins a new file at the limit; reading does not depend on it."""
    _, artifact, _, _ = saved
    artifact.save(tmp_path / "many", shard_bytes=64)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    loaded = Artifact.load(tmp_path / "many")
    for name in artifact:
        assert torch.equal(loaded.decode(name), artifact.decode(name))


def test_lazy_artifacts_hold_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Saving a lazy artifact never has more tensors alive than fit in one file."""
    prepared, _, _ = prepared_net()
    artifact = Artifact.from_model(prepared, lazy=True)
    compressed = []
    monkeypatch.setattr(
        "bitwright.artifact.artifact.compress_tensor",
        lambda *a: compressed.append(a[2]) or compress_tensor(*a),
    )
    artifact.save(tmp_path / "lazy", shard_bytes=1)
    assert compressed == ["embed.weight", "conv.weight", "fc.weight"]
    assert torch.equal(Artifact.load(tmp_path / "lazy").decode("fc.weight"), prepared.fc.weight)


def test_an_artifact_does_not_change_with_the_model():
    prepared, _, _ = prepared_net()
    artifact = Artifact.from_model(prepared)
    before = {name: artifact.decode(name).clone() for name in artifact}
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.add_(1)
    for name, value in before.items():
        assert torch.equal(artifact.decode(name), value)


def test_a_model_of_another_kind_is_refused_unchanged(saved):
    _, artifact, _, original = saved
    other = copy.deepcopy(original)
    other.fc = nn.Linear(8, 4)
    other.more = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    for method in (artifact.load_into, artifact.packed_model):
        with pytest.raises(ArtifactError, match=r"more\.bias.*fc\.weight \(4, 8\) instead of \(8, 8\)"):
            method(other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_from_model_leaves_the_model_alone(saved):
    _, _, prepared, _ = saved
    before = copy.deepcopy(prepared.state_dict())
    Artifact.from_model(prepared)
    after = prepared.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weight_norm_before_prepare_is_decoded_through():
    """A parametrization that was there before compression is part of what is stored."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    parametrize_tensor(net[0], "weight", observed(QuantizationSpec(dtype="int4"), net[0].weight))
    artifact = Artifact.from_model(net)
    assert artifact.compressed == ("0.weight",)
    assert torch.equal(artifact.decode("0.weight"), net[0].weight)


def test_weight_norm_without_compression_is_stored_as_it_is():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    artifact = Artifact.from_model(net)
    assert set(artifact) == set(net.state_dict())
    other = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    assert torch.equal(artifact.load_into(other)[0].weight, net[0].weight)


def test_weight_norm_after_prepare_is_refused_by_name():
    prepared, _, _ = prepared_net()
    nn.utils.parametrize.register_parametrization(prepared.fc, "weight", nn.Identity())
    with pytest.raises(ArtifactError, match=r"fc\.weight.*Identity was registered after"):
        Artifact.from_model(prepared)


def test_manifest_holds_versions_and_layouts_in_plain_json(saved):
    folder, _, _, _ = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "bitwright-artifact"
    assert manifest["versions"]["torch"] == torch.__version__
    layout = manifest["tensors"]["fc.weight"]["layout"]
    assert (layout["kind"], layout["format"], layout["block_size"]) == ("quantized", "int4", [1, 4])
    assert {"manifest.json"} | {entry["name"] for entry in manifest["files"]} == set(os.listdir(folder))


@pytest.mark.parametrize("name", ["weight", "gewichtä", 'a"b\\c', "tab\tüber"])
def test_the_size_of_the_files_is_known_before_they_are_written(name, tmp_path):
    """Headers included, for any names, dtypes and number of files."""
    for dtypes in [(torch.uint8, torch.int8, torch.float64), tuple(_DTYPES.values())]:
        tensors = {f"{name}{i}": dense_tensor(torch.zeros(3 * i + 1, 5).to(d)) for i, d in enumerate(dtypes)}
        artifact = Artifact(tensors)
        folder = tmp_path / f"{len(dtypes)}"
        artifact.save(folder)
        assert artifact.disk_nbytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    layouts = [(key, tensor.layout) for key, tensor in tensors.items()]
    artifact.save(tmp_path / "pieces", shard_bytes=100)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "pieces").glob("*.safetensors"))]
    assert file_sizes(layouts, 100) == sizes
    assert len(sizes) > 3


def test_the_size_of_the_files_of_a_prepared_model(saved):
    folder, artifact, _, _ = saved
    assert artifact.disk_nbytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert Artifact.load(folder).disk_nbytes == artifact.disk_nbytes


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.zeros(3, dtype=torch.complex128), "complex128 cannot be stored"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "meta device"),
    ],
)
def test_tensors_that_have_no_stored_form_are_named(buffer, words):
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].register_buffer("odd", buffer)
    with pytest.raises(ArtifactError, match=rf"'0\.odd'.*{words}"):
        Artifact.from_model(net)


@pytest.mark.parametrize("lazy", [True, False])
def test_artifacts_of_lazy_modules_that_were_never_called_are_refused(lazy):
    with pytest.raises(ArtifactError, match=r"'0\.weight' has no numbers yet; call the model once"):
        Artifact.from_model(nn.Sequential(nn.LazyLinear(3)), lazy=lazy)


@pytest.mark.parametrize("value", [float("nan"), torch.float32, {1, 2}])
@pytest.mark.parametrize("name", ["config", "plan"])
def test_what_json_does_not_hold_is_refused(name, value):
    """Whose it is, and before weights are packed."""
    with pytest.raises(ArtifactError, match=rf"^{name}= holds what JSON does not"):
        Artifact.from_model(nn.Linear(2, 2), **{name: {"a": value}})


@pytest.mark.parametrize("action", ["load_into", "packed_model"])
def test_lazy_modules_that_were_never_called_are_named(action):
    """Once the model was called, the artifact fits."""
    torch.manual_seed(0)
    artifact, x = Artifact.from_model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))), torch.randn(2, 4)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    with pytest.raises(ArtifactError, match=r"lazy modules.*'0\.weight', '0\.bias', '1\.weight'.*Call it once"):
        getattr(artifact, action)(lazy)
    lazy(x)
    assert torch.equal(getattr(artifact, action)(lazy)[1].bias, artifact["1.bias"].decode())


def _linear(inputs=64, outputs=64):
    return nn.Linear(inputs, outputs)


def _chain():
    layer = _linear()
    return nn.Sequential(layer, nn.ReLU(), layer, _linear(64, 16))


def _block_twice():
    block = nn.Sequential(_linear(), nn.ReLU())
    return nn.Sequential(block, nn.Sequential(block, _linear()), block)


@pytest.mark.parametrize("make", [_chain, _block_twice])
@pytest.mark.parametrize("compressor", ["quantizer", "palettizer"])
@torch.no_grad()
def test_a_module_at_several_paths_is_stored_once_and_loads_at_all(make, compressor, tmp_path):
    """Every path names its weight, as for tied weights; there is one packed copy, on disk and in the model."""
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(4, 64)
    if compressor == "quantizer":
        maker = Quantizer(copy.deepcopy(net), QuantizerConfig.presets.w4(execution_mode="eager"))
    else:
        config = KMeansPalettizerConfig.presets.w4()
        maker = KMeansPalettizer(copy.deepcopy(net), config)
    prepared = maker.prepare((x,))
    made = Artifact.from_model(prepared)
    made.save(tmp_path / "a")
    artifact = Artifact.load(tmp_path / "a")
    assert {*artifact, *artifact.aliases} == {*net.state_dict()}
    assert artifact.nbytes == sum(made[name].nbytes for name in made)
    assert len(artifact) == len(dict(net.named_parameters()))
    assert torch.equal(artifact.load_into(copy.deepcopy(net))(x), prepared(x))
    packed = artifact.packed_model(copy.deepcopy(net))
    assert torch.equal(packed(x), prepared(x))
    held = sum(t.nbytes for t in {t.data_ptr(): t for t in packed.state_dict().values() if t.numel()}.values())
    assert held == artifact.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@torch.no_grad()
def test_a_packed_model_keeps_its_own_dtype(dtype, device):
    """Weights are decoded to it, the same numbers as ``load_into`` copies, and the others are cast."""
    prepared, original, _ = prepared_net()
    artifact = Artifact.from_model(prepared)
    model = copy.deepcopy(original).to(device=device, dtype=dtype)
    packed = artifact.packed_model(model)
    loaded = artifact.load_into(copy.deepcopy(original).to(dtype))
    for name in ("embed.weight", "conv.weight", "fc.weight", "fc.bias", "head.weight", "offset"):
        path, _, attribute = name.rpartition(".")
        value = getattr(packed.get_submodule(path), attribute)
        assert value.dtype == dtype
        assert torch.equal(value, getattr(loaded.get_submodule(path), attribute))
    packed.scratch = torch.zeros(3)
    assert packed(TOKENS).dtype == dtype


class Buffer(nn.Module):
    """One buffer, which may be of any kind."""

    def __init__(self, buffer):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("last", buffer)


@pytest.mark.parametrize("method", ["load_into", "packed_model"])
@pytest.mark.parametrize(
    ("stored", "own", "words"),
    [
        (torch.ones(3, dtype=torch.complex64), torch.zeros(3), r"last has torch\.complex64 .* and torch\.float32"),
        (torch.full((3,), 0.5), torch.zeros(3, dtype=torch.int64), r"last has torch\.float32 .* and torch\.int64"),
        (torch.ones(3), torch.zeros(1).expand(3), r"\['last'\] share memory.*clone"),
    ],
)
def test_tensors_that_cannot_take_the_numbers_are_refused_unchanged(method, stored, own, words):
    artifact, model = Artifact.from_model(Buffer(stored)), Buffer(own)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArtifactError, match=words):
        getattr(artifact, method)(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_prepared_model_on_the_meta_device_is_refused():
    model = nn.Sequential(nn.Linear(64, 8, bias=False)).eval()
    prepared = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((torch.randn(1, 64),))
    with pytest.raises(ArtifactError, match=r"'0\.weight' is on the meta device"):
        Artifact.from_model(prepared.to("meta"))


@pytest.mark.parametrize("method", ["load_into", "packed_model"])
def test_a_file_that_is_gone_leaves_the_model_as_it_is(saved, tmp_path, method):
    """The last tensor is read before the first one is written."""
    _, made, _, original = saved
    made.save(tmp_path / "many", shard_bytes=64)
    artifact, model = Artifact.load(tmp_path / "many"), copy.deepcopy(original)
    (tmp_path / "many" / "tensors-00005.safetensors").unlink()
    with pytest.raises(ArtifactError, match="tensors-00005"):
        getattr(artifact, method)(model)
    assert model.state_dict().keys() == original.state_dict().keys()
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())


def test_each_file_is_opened_once(saved, tmp_path, monkeypatch):
    """Opening reads the whole header, so that a file for each tensor would cost the square of their number."""
    folder, _, _, original = saved
    opened = []

    def counted(path, **options):
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("bitwright.artifact.storage.safe_open", counted)
    artifact = Artifact.load(folder)
    artifact.load_into(copy.deepcopy(original))
    artifact.packed_model(copy.deepcopy(original))
    assert len(opened) == len(list(folder.glob("*.safetensors"))) == 1


def test_copies_and_pickles_of_a_loaded_artifact_read_the_files_anew(saved):
    folder, artifact, _, _ = saved
    loaded = Artifact.load(folder)
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert all(torch.equal(other.decode(name), artifact.decode(name)) for name in artifact)


def test_a_full_disk_leaves_no_folder_that_blocks_the_next_try(saved, tmp_path, monkeypatch):
    _, artifact, _, _ = saved

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("bitwright._utils.tensor_files.save_file", full)
        for name in ("new", "there"):
            with pytest.raises(OSError, match="No space"):
                artifact.save(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    for name in ("new", "there"):
        artifact.save(tmp_path / name)
        assert len(Artifact.load(tmp_path / name)) == len(artifact)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"aliases": {"tied": "gone"}}, "aliases.*tied"),
        ({"aliases": {"weight": "bias"}}, "aliases.*weight"),
        ({"config": {"seed": math.nan}}, "config="),
        ({"plan": object()}, "plan="),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(given, words, tmp_path):
    with pytest.raises(ArtifactError, match=words):
        Artifact(Artifact.from_model(nn.Linear(2, 3)), **given).save(tmp_path / "new")
    assert not any(tmp_path.iterdir())


def test_a_size_of_files_that_is_no_number(tmp_path):
    with pytest.raises(TypeError, match=r"shard_bytes is a number of bytes.*'1GB'"):
        Artifact.from_model(nn.Linear(2, 3)).save(tmp_path / "new", shard_bytes="1GB")
    assert not any(tmp_path.iterdir())
