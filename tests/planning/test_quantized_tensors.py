"""Weights that other tensors stand for, as torchao's, are refused by name before anything is traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from bitwright.artifact import Artifact, ArtifactError
from bitwright.export.torch_program import packed_copy
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig

EXAMPLE = (torch.randn(2, 32, generator=torch.Generator().manual_seed(0)),)
COMPRESSORS = {
    "w8-eager": (Quantizer, lambda: QuantizerConfig.presets.w8(execution_mode="eager")),
    "w8a8-eager": (Quantizer, lambda: QuantizerConfig(execution_mode="eager")),
    "w8-graph": (Quantizer, QuantizerConfig.presets.w8),
    "w8a8-graph": (Quantizer, QuantizerConfig),
    "palettizer": (KMeansPalettizer, KMeansPalettizerConfig),
    "pruner": (MagnitudePruner, MagnitudePrunerConfig),
}
every_compressor = pytest.mark.parametrize(("compressor", "config"), COMPRESSORS.values(), ids=COMPRESSORS.keys())


class Codes(torch.Tensor):
    """A matrix that int8 codes and a scale stand for; it knows how to be multiplied, and little else."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Codes = make(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> Codes:
        return Codes(inner["codes"], inner["scale"])

    def dequantize(self) -> torch.Tensor:
        """The matrix in float32."""
        return self.codes * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].dequantize(), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Codes(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Codes have no {func}.")


def own(layer: nn.Linear) -> None:
    """Let ``Codes`` stand for a layer's weight."""
    scale = layer.weight.detach().abs().amax() / 127
    codes = Codes((layer.weight.detach() / scale).round().to(torch.int8), scale)
    layer.weight = nn.Parameter(codes, requires_grad=False)


def torchaos(layer: nn.Linear) -> None:
    """Let torchao quantize a layer's weight."""
    quantize_(layer, Int8WeightOnlyConfig())


def three_layers(quantize: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    quantize(model[0])
    quantize(model[2])
    return model


@pytest.mark.parametrize("quantize", [own, torchaos])
@every_compressor
def test_they_are_refused_by_name(compressor: Any, config: Any, quantize: Any) -> None:
    """All of them are named with their classes, by ``plan`` and by ``prepare``, and the model stays as it is."""
    model = three_layers(quantize)
    before = model(*EXAMPLE)
    match = r"{0}.*already quantized: '0\.weight' \({1}\), '2\.weight' \({1}\)\. .*dequantize\(\)"
    match = match.format(compressor.__name__, type(model[0].weight).__name__)
    for action in ("plan", "prepare"):
        with pytest.raises(ValueError, match=match):
            getattr(compressor(model, config()), action)(EXAMPLE)
    assert not any(hasattr(module, "parametrizations") for module in model.modules())
    assert torch.equal(model(*EXAMPLE), before)


@every_compressor
def test_packed_weights_are_refused_by_name(compressor: Any, config: Any) -> None:
    """By ``plan`` and ``prepare``; what the message says helps, and packed modules that are left out stay packed."""
    float_model = three_layers(lambda layer: None)
    w4 = QuantizerConfig.presets.w4(execution_mode="eager").set_module_name("4", None)
    model = Artifact.from_model(Quantizer(copy.deepcopy(float_model), w4).prepare(EXAMPLE)).packed_model(float_model)
    before, packed = model(*EXAMPLE), {*model.state_dict()}
    match = rf"{compressor.__name__}.*are packed: '0\.weight', '2\.weight'\. .*load_into\(float_model\)"
    for action in ("plan", "prepare"):
        with pytest.raises(ValueError, match=match):
            getattr(compressor(model, config()), action)(EXAMPLE)
    assert {*model.state_dict()} == packed
    assert torch.equal(model(*EXAMPLE), before)
    filled = Artifact.from_model(model).load_into(three_layers(lambda layer: None))
    assert "0.weight" in {row.tensor for row in compressor(filled, config()).plan(EXAMPLE).rows}
    prepared = compressor(model, config().set_module_name("[02]", None)).prepare(EXAMPLE)
    assert prepared(*EXAMPLE).isfinite().all()


def test_a_graph_whose_weights_were_packed_is_refused() -> None:
    graph = Quantizer(three_layers(lambda layer: None), QuantizerConfig.presets.w8()).prepare(EXAMPLE).eval()
    with pytest.raises(ValueError, match="are packed: 'bitwright_weight_0'"):
        Quantizer(packed_copy(graph), QuantizerConfig.presets.w4(execution_mode="eager")).plan(EXAMPLE)


@every_compressor
def test_what_the_message_says_helps(compressor: Any, config: Any) -> None:
    """One is replaced by what it stands for, the other's module is left out."""
    model = three_layers(own)
    model[0].weight = nn.Parameter(model[0].weight.dequantize())
    prepared = compressor(model, config().set_module_name("2", None)).prepare(EXAMPLE)
    assert prepared(*EXAMPLE).isfinite().all()


@pytest.mark.parametrize("quantize", [own, torchaos])
def test_one_that_was_left_out_is_no_part_of_an_artifact(quantize: Any) -> None:
    model = three_layers(quantize)
    config = QuantizerConfig.presets.w8(execution_mode="eager").set_module_name("[02]", None)
    prepared = Quantizer(model, config).prepare(EXAMPLE)
    with pytest.raises(ArtifactError, match=rf"'0\.weight' is a {type(model[0].weight).__name__}, .*dequantize\(\)"):
        Artifact.from_model(prepared)
