"""Training steps of compiled prepared models are those of the uncompiled ones, whole graphs in graph mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.quantization import Quantizer
from tests.matrix import each_value
from tests.quantization.qat.networks import MODES, make_config


class Tagger(nn.Module):
    """A recurrent layer over embedded tokens, and a label for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, 8), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self.embed(tokens))[0]))


def make_opt() -> nn.Module:
    """One layer, with embeddings tied to the head, dropout off."""
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=20, hidden_size=8, ffn_dim=12, word_embed_proj_dim=8, max_position_embeddings=8,
        num_hidden_layers=1, num_attention_heads=2, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


MODELS = {"gru": Tagger, "opt": make_opt}


def train(name: str, mode: str, kind: str, compiled: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """Outputs and gradients of two steps, and what the model then holds."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (2, 3))
    quantizer = Quantizer(MODELS[name]().eval(), make_config(mode, kind, dtype="int8"))
    prepared = quantizer.prepare((tokens,))
    torch.compiler.reset()
    model: Any = torch.compile(prepared, backend="aot_eager", fullgraph=mode == "graph") if compiled else prepared
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    found: dict[str, torch.Tensor] = {}
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(tokens)
    with quantizer.training_mode():
        for step in range(2):
            optimizer.zero_grad()
            result = model(tokens)
            output = result if isinstance(result, torch.Tensor) else result["logits"]
            output.square().mean().backward()
            found[f"output {step}"] = output.detach().clone()
            for key, parameter in prepared.named_parameters():
                # what no output depends on has no gradient, or one of zeros when compiled
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[f"{key} {step}"] = gradient.clone()
            optimizer.step()
    return found, {k: v.detach().clone() for k, v in prepared.state_dict().items() if torch.is_tensor(v)}


@pytest.mark.parametrize("name", ["gru", pytest.param("opt", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "mode"), each_value(["plain", "lsq"], MODES))
def test_compiled_steps_are_those_without(name: str, mode: str, kind: str) -> None:
    """Outputs, gradients, weights and ranges agree, in eager mode and in graph mode."""
    for expected, found in zip(train(name, mode, kind, False), train(name, mode, kind, True), strict=True):
        assert expected.keys() == found.keys()
        assert any(value.any() for value in expected.values())
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
