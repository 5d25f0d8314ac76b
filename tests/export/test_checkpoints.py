"""Checkpoints are read back by the libraries that own the formats, and decode to what the prepared model computes."""

from __future__ import annotations

import errno
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bitwright.artifact import Artifact
from bitwright.export.checkpoints import export_compressed_tensors, export_gguf, read_compressed_tensors, read_gguf
from bitwright.export.checkpoints.rounding import lost_by_rounding
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

from .models import W8, ConvNet, Deconv, Mlp, blocks, built, palettized, prepared, spec_of

PACKED = {
    "int4 groups": spec_of("int4", blocks(32)),
    "int4 groups asymmetric": spec_of("int4", blocks(32), qscheme="asymmetric"),
    "int6 groups, some as wide as a layer": spec_of("int6", blocks(64)),
    "int4 groups asymmetric, some as wide as a layer": spec_of("int4", blocks(64), qscheme="asymmetric"),
    "int8": W8,
    "int8 asymmetric": spec_of("int8", qscheme="asymmetric"),
    "uint8": spec_of("uint8"),
    "int3": spec_of("int3"),
    "int5 per tensor": QuantizationSpec(dtype="int5"),
    "int8 per tensor asymmetric": QuantizationSpec(dtype="int8", qscheme="asymmetric"),
    "fp8": spec_of("float8_e4m3fn"),
    "fp8 per tensor": QuantizationSpec(dtype="float8_e4m3fn"),
    "fp8 square blocks": spec_of("float8_e4m3fn", PerBlockGranularity(block_size=(32, 32))),
    "fp8 blocks of whole rows": spec_of("float8_e4m3fn", PerBlockGranularity(block_size=(16, -1))),
    "fp4": spec_of("float4_e2m1fn_x2", blocks(32)),
}


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers, config, torch.arange(10)[None]


def _prepared_llama(llama, spec):
    transformers, config, tokens = llama
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    module = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    quantizer = Quantizer(
        model,
        QuantizerConfig(global_config=None, module_type_configs={nn.Linear: module}, execution_mode="eager"),
    )
    return quantizer.prepare((tokens,))


@pytest.mark.parametrize("name", PACKED)
def test_transformers_loads_what_the_model_computes(name, llama, tmp_path):
    """Every weight bit for bit, and so the logits."""
    pytest.importorskip("compressed_tensors")
    transformers, _, tokens = llama
    ready = _prepared_llama(llama, PACKED[name])
    expected = ready(tokens).logits
    folder = export_compressed_tensors(ready, tmp_path / "checkpoint")
    options = transformers.utils.quantization_config.CompressedTensorsConfig(run_compressed=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=options).eval()
    for path, module in ready.named_modules():
        if hasattr(module, "parametrizations"):
            assert torch.equal(loaded.get_submodule(path).weight, module.weight)
    assert torch.equal(loaded(tokens).logits, expected)


def test_packed_checkpoints_are_as_small_as_they_should_be(llama, tmp_path):
    ready = _prepared_llama(llama, PACKED["int4 groups"])
    folder = export_compressed_tensors(ready, tmp_path / "checkpoint")
    size = (folder / "model.safetensors").stat().st_size
    assert size < Artifact.from_model(ready).nbytes + 8000
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert config["ignore"] == []


def test_checkpoints_of_several_schemes_say_how_they_load(llama, tmp_path, caplog):
    """One scheme is nothing to speak of; of two, transformers decompresses by one."""
    pytest.importorskip("compressed_tensors")
    transformers, config, tokens = llama
    export_compressed_tensors(_prepared_llama(llama, PACKED["int6 groups, some as wide as a layer"]), tmp_path / "one")
    assert not caplog.records
    two, one = (
        ModuleQuantizerConfig(op_state_spec={"weight": PACKED[name]}, op_input_spec=None, op_output_spec=None)
        for name in ("int8", "int4 groups")
    )
    both = QuantizerConfig(global_config=None, module_type_configs={nn.Linear: one}, execution_mode="eager")
    both.set_module_name("lm_head", two)
    torch.manual_seed(0)
    ready = Quantizer(transformers.LlamaForCausalLM(config).eval(), both).prepare((tokens,))
    folder = export_compressed_tensors(ready, tmp_path / "two")
    assert "2 schemes" in caplog.text
    state = read_compressed_tensors(folder)
    assert torch.equal(state["lm_head.weight"], ready.lm_head.weight)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.utils.quantization_config.CompressedTensorsConfig(run_compressed=True)
    )
    assert torch.equal(loaded.eval()(tokens).logits, ready(tokens).logits)


REFUSED = {
    "minval": (Mlp, spec_of("int4", qformulation="minval"), "minval"),
    "fp8 wide": (Mlp, spec_of("float8_e5m2"), "e4m3"),
    "fp4 in blocks of 16": (Mlp, spec_of("float4_e2m1fn_x2", blocks(16)), "blocks of 32"),
    "integer blocks of whole rows": (Mlp, spec_of("int8", PerBlockGranularity(block_size=(2, -1))), "one row"),
    "integer square blocks": (Mlp, spec_of("int8", PerBlockGranularity(block_size=(32, 32))), "one row"),
    "convolution": (ConvNet, W8, "only weights of linear layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_compressed_tensors_lacks_is_refused_or_stored_dense(name, tmp_path):
    kind, spec, words = REFUSED[name]
    model, x = built(kind)
    _, ready = prepared(model, x, spec)
    with pytest.raises(ValueError, match=words):
        export_compressed_tensors(ready, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    folder = export_compressed_tensors(ready, tmp_path / "dense", allow_dense=True)
    stored, artifact = load_file(folder / "model.safetensors"), Artifact.from_model(ready)
    dense = [name for name in artifact.compressed if name in stored]
    assert dense
    assert all(torch.equal(stored[name], artifact.decode(name)) for name in dense)


class Named(nn.Module):
    """Linear ops on parameters whose names no linear layer has."""

    def __init__(self):
        super().__init__()
        self.project = nn.Parameter(torch.randn(32, 32) / 6)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x):
        x = nn.functional.linear(x, self.project)
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_of_other_names_are_refused_or_stored_dense(mode, tmp_path):
    """What is packed belongs to a layer's ``weight``: no loader looks for parts of anything else."""
    torch.manual_seed(0)
    every = ModuleQuantizerConfig(op_state_spec={"*": W8}, op_input_spec=None, op_output_spec=None)
    quantizer = Quantizer(Named().eval(), QuantizerConfig(global_config=every, execution_mode=mode))
    x = (torch.randn(2, 3, 32),)
    refused = {problem.where for problem in quantizer.plan(x, target="compressed-tensors").problems}
    assert refused >= {"project", "attention.in_proj_weight"}
    assert "attention.out_proj.weight" not in refused
    ready = quantizer.prepare(x)
    artifact = Artifact.from_model(ready)
    assert {"project", "attention.in_proj_weight", "attention.out_proj.weight"} <= set(artifact.compressed)
    with pytest.raises(ValueError, match="only weights of linear layers") as error:
        export_compressed_tensors(ready, tmp_path / "no")
    assert all(f"  {name}: only" in str(error.value) for name in ("project", "attention.in_proj_weight"))
    assert "out_proj.weight" not in str(error.value)
    folder = export_compressed_tensors(ready, tmp_path / "dense", allow_dense=True)
    stored, state = load_file(folder / "model.safetensors"), read_compressed_tensors(folder)
    assert torch.equal(stored["project"], artifact.decode("project"))
    assert "attention.out_proj.weight_packed" in stored
    assert all(torch.equal(state[name], artifact.decode(name)) for name in artifact.compressed)


class TwoNames(nn.Module):
    """Two linear layers, the second one with the weight of the first, or the first one itself."""

    def __init__(self, shared=False):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = self.a if shared else nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.c = nn.Linear(32, 32)
        self.c.bias = self.a.bias

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_layers_with_a_tied_weight_are_all_targets(mode, shared, tmp_path):
    """Loaders look every layer up in the targets, and give those that they do not find new weights."""
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    model, x = TwoNames(shared).eval(), torch.randn(2, 32)
    _, ready = prepared(model, x, spec_of("int4", blocks(16)), mode=mode)
    folder = export_compressed_tensors(ready, tmp_path / "c")
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = described["config_groups"].values()
    assert sorted(group["targets"]) == ["a", "b", "c"]
    assert described["ignore"] == []
    loaded = TwoNames().eval()
    loaded.load_state_dict(read_compressed_tensors(folder))
    assert torch.equal(loaded(x), ready(x))


class Kernel(nn.Module):
    """A parameter that no linear layer has."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return x @ self.kernel.T


class KernelHead(nn.Module):
    """A head that multiplies with the embedding under a name of its own, and a layer whose weight is packed."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = Kernel(self.embed.weight)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


@pytest.mark.parametrize("spec", [W8, spec_of("float8_e4m3fn")])
def test_tied_tensors_keep_their_further_names(spec, tmp_path):
    """Also where one of the names is that of a layer's weight and the other is not."""
    module = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    config = QuantizerConfig(global_config=None, module_type_configs={nn.Linear: module}, execution_mode="eager")
    ready = Quantizer(KernelHead().eval(), config).prepare((torch.arange(8)[None],))
    stored = load_file(export_compressed_tensors(ready, tmp_path / "c") / "model.safetensors")
    assert {name for name in stored if not name.startswith("layer.")} == {"embed.weight", "head.kernel"}
    assert torch.equal(stored["head.kernel"], ready.embed.weight)


def _pruned_linear(spec, first):
    """A pruned and quantized layer; pruned before it is quantized, or behind that."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), torch.randn(1, 64)

    def prune(model):
        return MagnitudePruner(model, MagnitudePrunerConfig()).prepare((x,)).eval()

    _, ready = prepared(prune(model) if first else model, x, spec, mode="eager")
    return ready if first else prune(ready)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["fp4", "int4 groups asymmetric", "int8", "fp8"])
def test_compressed_tensors_of_pruned_weights(name, first, tmp_path):
    """Entries that a mask drops have the code of zero."""
    pytest.importorskip("compressed_tensors")
    ready = _pruned_linear(PACKED[name], first)
    state = read_compressed_tensors(export_compressed_tensors(ready, tmp_path / "c"))
    assert torch.equal(state["0.weight"], ready[0].weight)
    assert int((ready[0].weight == 0).sum()) >= 1024


@pytest.mark.parametrize("name", ["fp4", "int4 groups asymmetric"])
@pytest.mark.parametrize("first", [True, False])
def test_gguf_of_pruned_weights(name, first, tmp_path):
    pytest.importorskip("gguf")
    ready = _pruned_linear(PACKED[name], first)
    state = read_gguf(export_gguf(ready, tmp_path / "m.gguf", round_scales=True))
    assert torch.allclose(state["0.weight"], ready[0].weight, atol=1e-3)
    assert torch.equal(state["0.weight"] == 0, ready[0].weight == 0)


def test_gguf_refuses_masks_that_its_type_has_no_zeros_for(tmp_path):
    """The codes of the minval formulation start at a minimum, which need not be a multiple of the scale."""
    pytest.importorskip("gguf")
    spec = spec_of("uint4", blocks(32), qscheme="asymmetric", qformulation="minval")
    ready = _pruned_linear(spec, first=False)
    with pytest.raises(ValueError, match=r"0\.weight: the 'minval' formulation has no code for the zeros of a mask"):
        export_gguf(ready, tmp_path / "no.gguf", round_scales=True)
    state = read_gguf(export_gguf(ready, tmp_path / "m.gguf", round_scales=True, allow_dense=True))
    assert torch.equal(state["0.weight"], ready[0].weight)


class TiedHead(nn.Module):
    """A head that is the embedding, registered first or last."""

    def __init__(self, first):
        super().__init__()
        for name in ("head", "embed") if first else ("embed", "head"):
            self.add_module(name, nn.Linear(32, 64, bias=False) if name == "head" else nn.Embedding(64, 32))
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_that_are_embeddings_too_are_refused_or_stored_dense(mode, first, tmp_path):
    """No loader reads packed embeddings, whichever name comes first."""
    torch.manual_seed(0)
    _, ready = prepared(TiedHead(first).eval(), torch.arange(8)[None], spec_of("int4", blocks(16)), mode=mode)
    with pytest.raises(ValueError, match="only weights of linear layers"):
        export_compressed_tensors(ready, tmp_path / "no")
    stored = load_file(export_compressed_tensors(ready, tmp_path / "c", allow_dense=True) / "model.safetensors")
    assert stored.keys() == {"head.weight", "embed.weight"}
    assert torch.equal(stored["head.weight"], stored["embed.weight"])


@pytest.mark.parametrize("outputs", [1, 3, 8, 9])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int3", "int8"])
@pytest.mark.parametrize("granularity", [blocks(16), PerChannelGranularity(axis=1), PerChannelGranularity(axis=0)])
def test_what_is_written_can_be_read(outputs, dtype, granularity, tmp_path):
    """Zero points of 4 bits that fill no more than one word in several groups are refused: their reader fails."""
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    layer = nn.Linear(32, outputs).eval()
    layer.weight.data.abs_()  # so that zero points are no zeros
    x = torch.randn(2, 32)
    quantizer, ready = prepared(layer, x, spec_of(dtype, granularity, qscheme="asymmetric"))
    grouped = granularity.axis == 1
    if grouped and not isinstance(granularity, PerBlockGranularity) and outputs > 1:
        words = "blocks of"
    else:
        words = "of 4 bits for several groups" if grouped and outputs <= 8 and dtype in ("int4", "uint4") else None
    problems = Quantizer(layer, quantizer._config).plan((x,), target="compressed-tensors").problems
    assert [words in problem.message for problem in problems] == ([] if words is None else [True])
    if words is None:
        state = read_compressed_tensors(export_compressed_tensors(ready, tmp_path / "c"))
        assert torch.equal(state["weight"], ready.weight)
        return
    with pytest.raises(ValueError, match=words):
        export_compressed_tensors(ready, tmp_path / "c")
    stored = load_file(export_compressed_tensors(ready, tmp_path / "d", allow_dense=True) / "model.safetensors")
    assert torch.equal(stored["weight"], ready.weight)


def _full(tensors, path, *_):
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_a_failed_checkpoint_leaves_nothing(tmp_path, monkeypatch):
    """Neither a full disk nor a config that JSON does not hold; the next try finds a free place."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    with monkeypatch.context() as patched:
        patched.setattr("bitwright._utils.tensor_files.save_file", _full)
        with pytest.raises(OSError, match="No space"):
            export_compressed_tensors(ready, tmp_path / "c")
    with pytest.raises(TypeError, match=r"config\['dtype'\] is torch\.float32"):
        export_compressed_tensors(ready, tmp_path / "c", config={"model_type": "x", "dtype": torch.float32})
    assert not list(tmp_path.iterdir())
    export_compressed_tensors(ready, tmp_path / "c", config={"dtype": "float32"})


def test_a_failed_gguf_leaves_the_old_file(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_ti_data_to_file", full)
    with pytest.raises(OSError, match="No space"):
        export_gguf(ready, path, round_scales=True, allow_dense=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("export", [export_compressed_tensors, export_gguf])
def test_quantized_activations_are_refused(export, tmp_path):
    if export is export_gguf:
        pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    with pytest.raises(ValueError, match=r"weights only.*up\.linear_quantize_input"):
        export(ready, tmp_path / "out")


GGUF_TYPES = {
    "int4": (spec_of("int4", blocks(32)), "Q4_0"),
    "int3 per tensor": (QuantizationSpec(dtype="int3"), "Q4_0"),
    "int4 asymmetric": (spec_of("int4", blocks(32), qscheme="asymmetric"), "Q5_0"),
    "int5 in long blocks": (spec_of("int5", blocks(64)), "Q5_0"),
    "int8 per channel": (W8, "Q8_0"),
    "uint8": (spec_of("uint8"), "Q8_0"),
    "uint4 minval": (spec_of("uint4", blocks(32), qformulation="minval"), "Q4_1"),
    "int5 minval": (spec_of("int5", blocks(32), qformulation="minval"), "Q5_1"),
    "fp4": (spec_of("float4_e2m1fn_x2", blocks(32)), "MXFP4"),
}


def _read(path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    return {
        t.name: (t.tensor_type.name, torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()))
        for t in reader.tensors
    }, reader


class Wide(nn.Module):
    """One layer whose sizes are multiples of 64."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(128, 64)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_decodes_to_what_the_model_computes(name, tmp_path):
    """The type that was chosen, and the values by ggml's own formulas: those of the model, exactly."""
    pytest.importorskip("gguf")
    spec, kind = GGUF_TYPES[name]
    torch.manual_seed(0)
    _, ready = prepared(Wide().eval().half(), torch.randn(2, 128).half(), spec)
    found, reader = _read(export_gguf(ready, tmp_path / "m.gguf", metadata={"general.name": "wide", "x.n": 3}))
    assert found["fc.weight"][0] == kind
    assert torch.equal(found["fc.weight"][1].half(), ready.fc.weight)
    assert torch.equal(found["fc.bias"][1].half(), ready.fc.bias)
    assert reader.get_field("x.n").contents() == 3


def test_gguf_refuses_what_it_cannot_hold_exactly(tmp_path):
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    for spec, words in (
        (spec_of("int4", blocks(32)), "no half-precision numbers"),
        (spec_of("float8_e4m3fn"), "no type for float8_e4m3fn"),
        (spec_of("int4", blocks(16)), "not multiples of 32"),
        (spec_of("int8", qformulation="minval"), "half-precision|4 and 5 bits"),
    ):
        _, ready = prepared(model, x, spec)
        with pytest.raises(ValueError, match=words):
            export_gguf(ready, tmp_path / "no.gguf")
    found, _ = _read(export_gguf(prepared(model, x, spec_of("int4", blocks(16)))[1], tmp_path / "a", allow_dense=True))
    assert found["up.weight"][0] == "F32"


class Volumes(nn.Module):
    """A convolution in three dimensions, a layer behind it, and a buffer of five dimensions."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv3d(1, 2, 2, bias=False), nn.Linear(32, 8)
        self.register_buffer("table", torch.zeros(1, 1, 1, 1, 32))

    def forward(self, x):
        return self.fc(self.conv(x) + self.table)


@pytest.mark.parametrize("formulation", ["zp", "minval"])
def test_gguf_refuses_scales_beyond_half_precision(formulation, tmp_path):
    """Rounded to half precision they would be infinite, and the weight no number."""
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 4)).eval(), torch.randn(2, 32)
    model[0].weight.data *= 1e8
    scheme = "symmetric" if formulation == "zp" else "asymmetric"
    spec = spec_of("int4" if formulation == "zp" else "uint4", blocks(32), qscheme=scheme, qformulation=formulation)
    _, ready = prepared(model, x, spec)
    with pytest.raises(ValueError, match=r"0\.weight: its scales or minvals lie beyond 65504"):
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True)
    state = read_gguf(export_gguf(ready, tmp_path / "m.gguf", round_scales=True, allow_dense=True))
    assert torch.equal(state["0.weight"], ready[0].weight)


def test_gguf_refuses_what_llama_cpp_cannot_open(tmp_path):
    """ggml.h: GGML_MAX_DIMS is 4, GGML_MAX_NAME 64 with the zero; the plan foresees the weight."""
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    model, x = Volumes().eval(), torch.randn(1, 1, 3, 3, 33)
    quantizer, ready = prepared(model, x, W8)
    with pytest.raises(ValueError, match=r"llama\.cpp could not open") as raised:
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True, allow_dense=True)
    lines = str(raised.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["conv.weight", "table"]
    assert all("it has 5 dimensions, and ggml takes 4" in line for line in lines)
    assert not list(tmp_path.iterdir())
    problems = Quantizer(model, quantizer._config).plan((x,), target="gguf").problems
    assert any(problem.where == "conv.weight" and "5 dimensions" in problem.message for problem in problems)


def test_gguf_takes_names_of_63_bytes(tmp_path):
    """In UTF-8, and after they were renamed."""
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    names = {"up.weight": "ü" * 31 + "x", "up.bias": "b" * 63}
    path = export_gguf(ready, tmp_path / "m.gguf", round_scales=True, rename=lambda name: names.get(name, name))
    assert set(names.values()) <= set(_read(path)[0])
    names = {"up.weight": "ü" * 32, "up.bias": "b" * 64}
    with pytest.raises(ValueError, match=r"up\.weight: its name .* 64 bytes(.|\n)*up\.bias: its name .*rename="):
        export_gguf(ready, tmp_path / "n.gguf", round_scales=True, rename=lambda name: names.get(name, name))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_gguf_names_and_metadata_are_checked(tmp_path):
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    with pytest.raises(ValueError, match=r"up\.weight: rename= gave it the name None, which is no text"):
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True, rename=lambda name: None)
    with pytest.raises(ValueError, match=r"up\.bias: rename= gave it the name 'same', which up\.weight has too"):
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True, rename=lambda name: "same")
    for name in ("", "\ud800"):
        with pytest.raises(ValueError, match=r"up\.weight: its name .* is empty, or has no form in UTF-8"):
            export_gguf(ready, tmp_path / "m.gguf", round_scales=True, rename=lambda _, name=name: name)
    assert not list(tmp_path.iterdir())


def _contents(path):
    """Type and value of every key of a GGUF file."""
    fields = _read(path)[1].fields.values()
    return {field.name: (field.types[0].name, field.contents()) for field in fields}


def test_gguf_metadata_has_the_types_that_llama_cpp_reads(tmp_path):
    """Its loader compares types, and refuses ``llama.block_count`` of 64 bits."""
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    metadata = {
        "general.architecture": "llama", "general.name": "tiny ü", "general.description": "", "x.flag": True,
        "llama.block_count": 2, "llama.rope.freq_base": 10000.0, "x.low": -1, "x.long": 1 << 32, "x.longest": 2**64 - 1,
        "x.lowest": -(2**63), "x.small": 1e-300, "x.large": 1e300, "x.zero": 0.0, "x.numpy": np.int64(3),
        "x.half": np.float16(0.5), "general.alignment": 256,
    }  # fmt: skip
    types = "STRING STRING STRING BOOL UINT32 FLOAT32 INT32 UINT64 UINT64 INT64 FLOAT64 FLOAT64 FLOAT32 UINT32 FLOAT32"
    path = export_gguf(ready, tmp_path / "m.gguf", round_scales=True, metadata=metadata)
    found = _contents(path)
    for (key, value), kind in zip(metadata.items(), [*types.split(), "UINT32"], strict=True):
        assert found[key] == (kind, value), key
    reader = _read(path)[1]
    assert all(tensor.data_offset % 256 == 0 for tensor in reader.tensors)
    assert {name: tuple(value.shape) for name, value in read_gguf(path).items()} == {
        name: tuple(tensor.shape) for name, tensor in Artifact.from_model(ready).items()
    }


def test_gguf_metadata_that_cannot_be_stored_is_named(tmp_path):
    """All of it at once, before weights are packed."""
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    wrong = {
        1: 2, "": 1, "a\ud800": 1, "b": "\ud800", "c": [1], "d": 2**64, "e": -(2**63) - 1,
        "general.alignment": 24, "general.architecture": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="GGUF cannot hold this metadata") as raised:
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True, metadata={"fine": 1, **wrong})
    assert len(str(raised.value).splitlines()) == 1 + len(wrong)
    assert "18446744073709551616; write it as text" in str(raised.value)
    for architecture in ("", None, 3, "\ud800"):
        with pytest.raises(ValueError, match=r"'general\.architecture': "):
            export_gguf(ready, tmp_path / "m.gguf", round_scales=True, architecture=architecture)
    for alignment in (0, -32, 2**32, True, 32.0, "32"):
        with pytest.raises(ValueError, match=r"'general\.alignment': .* power of two"):
            export_gguf(ready, tmp_path / "m.gguf", round_scales=True, metadata={"general.alignment": alignment})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files there")
def test_gguf_says_why_a_file_could_not_be_written(tmp_path):
    """Of arrays that do not fit, NumPy says how many were written, and nothing else."""
    resource = pytest.importorskip("resource")
    pytest.importorskip("gguf")
    _, ready = prepared(Wide().eval().half(), torch.randn(2, 128).half(), W8)
    path = tmp_path / "m.gguf"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            export_gguf(ready, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert not list(tmp_path.iterdir())


def test_gguf_with_rounded_scales(tmp_path):
    """Scales in half precision cost at most their own rounding."""
    pytest.importorskip("gguf")
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec_of("int4", blocks(32)))
    found, _ = _read(export_gguf(ready, tmp_path / "m.gguf", round_scales=True, rename=lambda name: f"blk.{name}"))
    error = (found["blk.up.weight"][1] - ready.up.weight).abs()
    assert float((error / ready.up.weight.abs().clamp(min=1e-9)).max()) <= 2**-11


SMALL = {
    "int8": (W8, 1e-3),
    "int4 groups": (spec_of("int4", blocks(32)), 1e-5),
    "minval": (spec_of("uint4", blocks(32), qscheme="asymmetric", qformulation="minval"), 1e-5),
}


def _weights_of(factor, spec, dead):
    """A prepared layer with weights of about ``factor``, or of about one in the first of its channels only."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 8, bias=False)).eval(), torch.randn(2, 64)
    with torch.no_grad():
        model[0].weight[1:] *= 0 if dead else factor
        model[0].weight[0] *= 1 if dead else factor
    return prepared(model, x, spec)[1]


@pytest.mark.parametrize("case", ["small", "dead", "ordinary"])
@pytest.mark.parametrize("name", SMALL)
def test_weights_that_lose_digits_with_their_scales_are_told(name, case, tmp_path, caplog):
    """Tiny scales lose more by half precision than quantization costs. Those of dead channels have no meaning."""
    pytest.importorskip("gguf")
    spec, factor = SMALL[name]
    ready = _weights_of(factor if case == "small" else 1.0, spec, case == "dead")
    state = read_gguf(export_gguf(ready, tmp_path / "m.gguf", round_scales=True))
    weight = ready[0].weight.detach()
    off = float((state["0.weight"] - weight).abs().max() / weight.abs().max())
    assert (off > 1 / 256) is (case == "small")
    assert ("'0.weight'" in caplog.text and "half a step" in caplog.text) is (case == "small")
    if name != "minval":
        caplog.clear()
        export_compressed_tensors(ready.half(), tmp_path / "c")
        assert ("'0.weight'" in caplog.text and "half a step" in caplog.text) is (case == "small")


@pytest.mark.parametrize("name", SMALL)
def test_weights_that_become_zero_with_their_scales_are_counted(name):
    """Ranges that are learned, or loaded, have no least scale; entries that are zero anyway lose nothing."""
    tensor = Artifact.from_model(_weights_of(1.0, SMALL[name][0], dead=True))["0.weight"]
    tensor.parts["scale"].mul_(1e-7)
    if name == "minval":
        tensor.parts["minval"].mul_(1e-7)
    held = int((tensor.decode() != 0).sum())
    assert 0 < held <= 64
    words = lost_by_rounding(tensor, torch.float16)
    assert f"of 512 weights move by more than half a step, {held} become 0" in str(words)
    assert lost_by_rounding(tensor, torch.float32) is None
    assert lost_by_rounding(tensor, torch.bfloat16) is None


def test_palettes_are_refused_by_both(tmp_path):
    model, x = built(Deconv)
    _, ready = palettized(model, x, n_bits=4)
    with pytest.raises(ValueError, match="look-up tables"):
        export_compressed_tensors(ready, tmp_path / "a")
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="look-up tables"):
        export_gguf(ready, tmp_path / "b")


@pytest.mark.parametrize("early", [True, False])
def test_scales_that_the_type_does_not_hold_are_told(early, tmp_path, caplog):
    """A model that is cast before it is prepared has scales of its type; later they have to be rounded."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), torch.randn(2, 64)
    if early:
        model, x = model.half(), x.half()
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).half()
    export_compressed_tensors(ready, tmp_path / "c")
    assert ("rounded to the type of the model" in caplog.text) is not early


BUFFERS = {
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int16": torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
    "int32": torch.tensor([-(2**31), 2**24 + 1], dtype=torch.int32),
    "int64": torch.tensor([2**40 + 1, -(2**63)]),
    "float16": torch.tensor([0.1, -6e-8], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
    "float32": torch.tensor([0.1, 3e38]),
    "float64": torch.tensor([1 / 3, 1e300], dtype=torch.float64),
}


class Buffers(nn.Module):
    """A layer and buffers."""

    def __init__(self, buffers):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        for name, value in buffers.items():
            self.register_buffer(f"of_{name}", value)

    def forward(self, x):
        return self.fc(x)


def test_gguf_keeps_the_numbers_of_buffers(tmp_path):
    """Each dtype in a type that holds all of its numbers."""
    pytest.importorskip("gguf")
    _, ready = prepared(Buffers(BUFFERS).eval(), torch.randn(2, 32), W8)
    found = read_gguf(export_gguf(ready, tmp_path / "m.gguf", round_scales=True))
    for name, value in BUFFERS.items():
        stored = found[f"of_{name}"]
        assert torch.can_cast(value.dtype, stored.dtype)
        assert torch.equal(stored.to(value.dtype), value), name
    assert found["of_int64"].dtype == torch.int64
    assert found["of_float64"].dtype == torch.float64


@pytest.mark.parametrize("dtype", ["complex64", "uint64"])
def test_gguf_refuses_numbers_that_it_has_no_type_for(dtype, tmp_path):
    pytest.importorskip("gguf")
    buffers = {"odd": torch.ones(2).to(getattr(torch, dtype))}
    _, ready = prepared(Buffers(buffers).eval(), torch.randn(2, 32), W8)
    with pytest.raises(ValueError, match=f"of_odd: {dtype}"):
        export_gguf(ready, tmp_path / "m.gguf", round_scales=True, allow_dense=True)
    assert not list(tmp_path.iterdir())
