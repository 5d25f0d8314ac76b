"""Transformers models with tied weights: saved, loaded and packed again, with the same outputs bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from bitwright.artifact import Artifact
from bitwright.export.torch_program import packed_copy
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

transformers = pytest.importorskip("transformers")

TOKENS = {"vocab_size": 64, "max_position_embeddings": 32}


def _gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), torch.randint(0, 64, (2, 9))


def _bert():
    config = transformers.BertConfig(
        **TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    return transformers.BertForMaskedLM(config), torch.randint(0, 64, (2, 9))


def _llama():
    config = transformers.LlamaConfig(
        **TOKENS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(0, 64, (2, 9))


def _vit():
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config), torch.randn(2, 3, 16, 16)


MODELS = {"GPT-2": _gpt2, "BERT": _bert, "Llama": _llama, "ViT": _vit}
SPECS = {
    "int4 blocks": QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=-1, block_size=32)),
    "int8 asymmetric": QuantizationSpec(qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)),
}


def _logits(model, x):
    with torch.no_grad():
        return model(x).logits


@pytest.mark.filterwarnings("ignore:.block-size.")  # the patches of a ViT have no dimension of 32
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MODELS)
def test_saved_loaded_and_packed(name, spec, tmp_path):
    """The prepared model, its artifact in a float model, in a packed one, and a packed copy: one output."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model.eval()
    activation = None if spec == "int4 blocks" else {"*": QuantizationSpec(qscheme="asymmetric")}
    module = ModuleQuantizerConfig(
        op_input_spec=activation, op_output_spec=activation, op_state_spec={"weight": SPECS[spec]}
    )
    twin = copy.deepcopy(model)
    quantizer = Quantizer(twin, QuantizerConfig(global_config=module, execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    expected = _logits(ready, x)
    assert torch.equal(_logits(packed_copy(ready), x), expected)
    artifact = Artifact.from_model(ready)
    artifact.save(tmp_path / "artifact")
    loaded = Artifact.load(tmp_path / "artifact")
    tied = name in ("GPT-2", "BERT", "Llama")
    assert bool(loaded.aliases) == tied
    assert len(loaded.activations) == len(artifact.activations)
    if activation is None:
        assert torch.equal(_logits(loaded.load_into(copy.deepcopy(model)), x), expected)
        assert torch.equal(_logits(loaded.packed_model(copy.deepcopy(model)), x), expected)
        files = sum(file.stat().st_size for file in (tmp_path / "artifact").glob("*.safetensors"))
        assert loaded.nbytes < files < loaded.nbytes + 40_000
    planned = {row.tensor: row.compressed_bytes for row in quantizer.applied_plan if row.kind == "weight" and row.spec}
    assert planned == {name: loaded[name].nbytes for name in planned}
    assert {loaded.aliases.get(name, name) for name in planned} == set(loaded.compressed)
