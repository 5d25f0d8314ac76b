"""Core AI models of weights whose power-of-two scales the runtime does not decode: outside 2**-24 to 2**15."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity
from tests.matrix import each_pair
from tests.measures import sqnr

FORMATS = {
    "float8_e4m3fn": PerChannelGranularity(axis=0),
    "float8_e5m2": PerBlockGranularity(axis=-1, block_size=32),
    "float4_e2m1fn": PerBlockGranularity(axis=-1, block_size=32),
}


def _prepared(name, factor, dtype, mode, sparse=False):
    """A linear layer, one of whose rows is multiplied by a factor."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 8, bias=False)).eval(), torch.randn(4, 64)
    with torch.no_grad():
        model[0].weight[3] *= factor
    model, x = model.to(dtype), x.to(dtype)
    if sparse:
        half = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(target_sparsity=0.5)})
        pruner = MagnitudePruner(model, MagnitudePrunerConfig(global_config=half))
        pruner.prepare((x,))
        model = pruner.finalize(backend="_torch")
    spec = QuantizationSpec(dtype=name, granularity=FORMATS[name], scale_dtype="float8_e8m0fnu")
    module = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    config = QuantizerConfig(global_config=module, execution_mode=mode)
    return Quantizer(model, config).prepare((x,)).eval(), x


def _check(ready, x, path):
    """Each column for itself, so that none hides behind larger ones."""
    with torch.no_grad():
        expected = ready(x).float()
    found = run_coreai(export_coreai(ready, (x,), path), (x,))[0].float()
    assert found.isfinite().all()
    for one, other in zip(expected.unbind(1), found.unbind(1), strict=True):
        assert torch.equal(one, other) or sqnr(one, other) > (110 if x.dtype == torch.float32 else 35)


@pytest.mark.parametrize(
    ("name", "dtype", "mode"), each_pair(list(FORMATS), [torch.float32, torch.float16], ["eager", "graph"])
)
def test_rows_of_zeros(name, dtype, mode, tmp_path):
    """Rows of padding, and pruned ones, have the smallest scale there is; the runtime made NaN of it."""
    _check(*_prepared(name, 0.0, dtype, mode), tmp_path / "m.aimodel")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("factor", [1e-9, 1e9])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_small_and_large_weights(name, factor, sparse, tmp_path):
    """Their scales are written in the weight's type."""
    _check(*_prepared(name, factor, torch.float32, "eager", sparse), tmp_path / "m.aimodel")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_small_weights_in_bfloat16(mode, tmp_path):
    _check(*_prepared("float8_e4m3fn", 1e-9, torch.bfloat16, mode), tmp_path / "m.aimodel")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_four_bits_are_refused(mode, tmp_path):
    """FP4 weights have power-of-two scales only."""
    ready, x = _prepared("float4_e2m1fn", 1e-9, torch.float32, mode)
    with pytest.raises(ValueError, match=r"from 2\*\*-24 to 2\*\*15, and this weight has others"):
        export_coreai(ready, (x,), tmp_path / "m.aimodel")
