"""Specs for what cache-update ops write into a key-value cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import PlanError
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import KVCacheQuantConfig, OpQuantizerConfig


@torch.library.custom_op("bitwright_test_graph::key_update", mutates_args=["cache"])
def _key_update(cache: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    cache[:, :, :length].copy_(new)
    return cache[:, :, :length].clone()


@_key_update.register_fake
def _(cache: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    return torch.empty_like(new)


class Attention(nn.Module):
    """Attention over keys that are written into a cache first."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, cache: torch.Tensor, query: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        keys = torch.ops.bitwright_test_graph.key_update(cache, self.project(new), 4)
        return F.scaled_dot_product_attention(query, keys, keys)


INPUTS = (torch.zeros(1, 2, 6, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))


def config(name: str = "key_update", index: int = 1, **spec: Any) -> QuantizerConfig:
    """Int8 weights, and a spec for one input of a cache-update op."""
    inner = OpQuantizerConfig(op_input_spec={index: QuantizationSpec(**spec)}, op_output_spec=None, op_state_spec=None)
    return QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None),
        kv_cache_quant_configs={name: KVCacheQuantConfig(op_quantizer_config=inner)},
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_the_chosen_input_is_simulated_and_the_cache_is_not(dtype: str) -> None:
    """Only the new keys pass a simulator, with the dtype asked for; the write still reaches the cache."""
    scheme = "asymmetric" if dtype == "uint8" else "symmetric"
    prepared: Any = Quantizer(Attention().eval(), config(dtype=dtype, qscheme=scheme)).prepare(INPUTS)
    (update,) = [n for n in prepared.graph.nodes if "key_update" in str(n.target)]
    cache, new = update.all_input_nodes
    assert cache.op == "placeholder"
    assert prepared.get_submodule(str(new.target)).dtype == getattr(torch, dtype)
    written = torch.zeros(1, 2, 6, 8)
    prepared(written, *INPUTS[1:])
    assert written[:, :, :4].abs().sum() > 0
    assert not written[:, :, 4:].any()


def test_the_cache_spec_beats_every_other_one() -> None:
    """A wildcard of the module around does not shadow it."""
    chosen = config(dtype="int8")
    wildcard = {"*": QuantizationSpec(dtype="float8_e4m3fn")}
    chosen.set_global(ModuleQuantizerConfig(op_input_spec=wildcard, op_output_spec=wildcard))
    prepared: Any = Quantizer(Attention().eval(), chosen).prepare(INPUTS)
    (update,) = [n for n in prepared.graph.nodes if "key_update" in str(n.target)]
    assert prepared.get_submodule(str(update.args[1].target)).dtype == torch.int8
    assert update.args[0].op == "placeholder"


@pytest.mark.parametrize(
    ("chosen", "pattern"),
    [
        (config(name="key_updat"), r"kv_cache_quant_configs\['key_updat'\].*Did you mean 'key_update'"),
        (config(index=7), r"(?s)kv_cache_quant_configs.*op_input_spec.*7"),
    ],
)
def test_what_cannot_be_applied(chosen: QuantizerConfig, pattern: str) -> None:
    """Unknown ops and positions out of range are errors that name the key."""
    with pytest.raises(PlanError, match=pattern):
        Quantizer(Attention().eval(), chosen).prepare(INPUTS)


def test_the_exported_cache_holds_codes() -> None:
    """In Core AI's form the op reads codes, its result is dequantized, and the cache has the codes' dtype."""
    pytest.importorskip("coreai_torch", reason="needs pip install bitwright[coreai]")
    quantizer = Quantizer(Attention().eval(), config(dtype="int8"))
    quantizer.prepare(INPUTS)
    finalized: Any = quantizer.finalize(backend="coreai")
    (update,) = [n for n in finalized.graph.nodes if "key_update" in str(n.target)]
    cache, new = update.all_input_nodes
    assert "coreai.quantize" in str(new.target)
    assert ["coreai.dequantize" in str(user.target) for user in update.users] == [True]
    assert cache.meta["val"].dtype == torch.int8
