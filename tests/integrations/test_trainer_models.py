"""Prepared models in the Trainer of transformers: what they hold twice, and what graphs cannot do."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import Quantizer
from tests.quantization.qat.networks import make_config

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="the Trainer needs transformers and accelerate",
)


class Joined(nn.Module):
    """Two layers whose outputs are joined, and so share their range; the head's weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 3)
        self.again = nn.Linear(8, 3)
        self.again.weight = self.head.weight

    def forward(self, x, labels):
        joined = torch.cat([self.left(x), self.right(x)], -1)
        logits = self.head(joined) + self.again(joined.relu())
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def trainer(folder, steps, resume=None, **options):
    from transformers import Trainer, TrainingArguments

    from bitwright.integrations.transformers import QATCallback

    torch.manual_seed(0)
    quantizer = Quantizer(Joined(), make_config("graph", "lsq"))
    example = {"x": torch.randn(2, 4), "labels": torch.zeros(2, dtype=torch.long)}
    shapes = {key: {0: torch.export.Dim.AUTO} for key in example}
    prepared = quantizer.prepare(example_kwargs=example, dynamic_shapes=shapes)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    return Trainer(prepared, arguments, train_dataset=rows(), callbacks=[QATCallback(quantizer, resume)])


def test_what_stands_under_several_names_is_saved_and_resumed(tmp_path):
    """Safetensors take no tensor twice; a resumed run is the uninterrupted one, and ties stay ties."""
    whole = trainer(tmp_path / "whole", 4)
    names: dict[int, int] = {}
    for _, module in whole.model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    assert max(names.values()) > 1
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = trainer(tmp_path / "resumed", 4, checkpoint)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert len(list(whole.model.parameters())) == len(list(resumed.model.parameters()))


def test_tied_weights_of_a_transformer_with_simulators_on_them(tmp_path):
    """save_pretrained knows ties by the names that weights have without simulators."""
    from safetensors.torch import load_file
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    from bitwright.integrations.transformers import QATCallback

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 8}
    model = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, use_cache=False))
    tokens = torch.randint(3, 20, (4, 5))
    quantizer = Quantizer(model, make_config("eager", dtype="int8"))
    prepared = quantizer.prepare(example_kwargs={"input_ids": tokens, "labels": tokens})
    weight = prepared.lm_head.parametrizations.weight.original
    assert weight is prepared.model.decoder.embed_tokens.parametrizations.weight.original
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(prepared, arguments, train_dataset=data, callbacks=[QATCallback(quantizer)]).train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    for name, value in prepared.named_parameters(remove_duplicate=False):
        assert torch.equal(saved[name], value), name
    assert prepared.lm_head.parametrizations.weight.original is weight
    assert prepared.model.decoder.embed_tokens.parametrizations.weight.original is weight


def test_graphs_have_no_layers_to_recompute(tmp_path):
    """The Trainer is told when it is made, not by an AttributeError in its first step."""
    from transformers import TrainingArguments

    names = ("activation_checkpointing", "gradient_checkpointing")
    asked = next(name for name in names if name in TrainingArguments.__dataclass_fields__)
    with pytest.raises(ValueError, match="execution_mode='eager'"):
        trainer(tmp_path, 2, **{asked: True})
