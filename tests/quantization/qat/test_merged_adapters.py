"""Adapters of PEFT that are merged into quantized, palettized or pruned layers: the update reaches the weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright._utils.packed_weights import PackedWeightError
from bitwright.artifact import Artifact
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import Quantizer, QuantizerConfig

peft = pytest.importorskip("peft")

ADAPTERS = {
    "lora": lambda: peft.LoraConfig(target_modules=["conv", "hidden"], r=4),
    "dora": lambda: peft.LoraConfig(target_modules=["conv", "hidden"], r=4, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["conv", "hidden"], feedforward_modules=[]),
    "loha": lambda: peft.LoHaConfig(target_modules=["conv", "hidden"], r=4),
    "oft": lambda: peft.OFTConfig(target_modules=["hidden"], oft_block_size=8),
    "vera": lambda: peft.VeraConfig(target_modules=["hidden"], r=4),
    "lokr": lambda: peft.LoKrConfig(target_modules=["hidden"], r=4),
}
CLOSE = 0.05  # of eight bits, for a base and an update that are quantized together and not apart
all_adapters = pytest.mark.parametrize("kind", ADAPTERS)


class Net(nn.Module):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(128, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.conv(x).relu().flatten(1)).relu())


def images() -> torch.Tensor:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def adapted(model, kind):
    """The model with adapters that do something."""
    with_adapters = peft.get_peft_model(model, ADAPTERS[kind]())
    for parameter in with_adapters.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return with_adapters.eval()


def quantized(model):
    torch.manual_seed(0)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    return quantizer, quantizer.prepare((images(),))


def error(result, expected):
    return float((result - expected).norm() / expected.norm())


@all_adapters
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_what_is_merged_stays(kind, training):
    """It survives another mode, a calibration and finalize, as part of the float weight."""
    quantizer, prepared = quantized(Net())
    original = prepared.hidden.parametrizations.weight.original
    before = original.clone()
    model = adapted(prepared, kind).train(training)
    expected = model(images())
    merged = model.merge_and_unload()
    assert merged.hidden.parametrizations.weight.original is original
    assert not torch.equal(original, before)
    for mode in (True, False):
        assert error(merged.train(mode)(images()), expected) < CLOSE
    with quantizer.calibration_mode(merged):
        merged(images())
    assert error(merged(images()), expected) < CLOSE
    assert error(quantizer.finalize(merged, backend="_torch")(images()), expected) < CLOSE


@all_adapters
@pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate:UserWarning")
@torch.no_grad()
def test_merging_is_taken_back(kind):
    """After ``unmerge`` the base is what it was, but for rounding."""
    _, prepared = quantized(Net())
    model = adapted(prepared, kind)
    expected = model(images())
    model.merge_adapter()
    assert error(model(images()), expected) < CLOSE
    model.unmerge_adapter()
    assert error(model(images()), expected) < CLOSE / 5  # OFT turns by an inverse, so that some codes differ


@pytest.mark.parametrize("kind", ["lora", "dora"])
@torch.no_grad()
def test_adapters_that_were_there_before_prepare(kind):
    """Quantized together with the layers, adapters merge as quantized."""
    model = adapted(Net(), kind)
    _, prepared = quantized(model)
    expected = prepared.eval()(images())
    merged = prepared.merge_and_unload()
    assert parametrize.is_parametrized(merged.hidden)
    assert error(merged(images()), expected) < CLOSE


def test_a_range_of_four_bits_grows_with_the_update():
    """The range is that of the merged weight: that of the base would clip it."""
    quantizer = Quantizer(Net(), QuantizerConfig.presets.w4(execution_mode="eager"))
    prepared = quantizer.prepare((images(),)).eval()
    model = peft.get_peft_model(prepared, ADAPTERS["lora"]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.fill_(1.0)
    merged = model.merge_and_unload()
    largest = merged.hidden.parametrizations.weight.original.abs().max()
    assert merged.hidden.weight.abs().max() > 0.8 * largest


@torch.no_grad()
def test_palettes_are_made_of_the_merged_weight():
    """The palettes of the base have no entries for the update."""
    palettizer = KMeansPalettizer(Net(), KMeansPalettizerConfig.presets.w8())
    model = adapted(palettizer.prepare((images(),)), "lora")
    expected = model(images())
    assert error(model.merge_and_unload()(images()), expected) < CLOSE


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_compiled_adapters(kind):
    """PEFT makes a convolution of the class of the layer that it adapts, which has a simulated weight; that one not."""
    _, prepared = quantized(Net())
    model = adapted(prepared, kind)
    expected = model(images())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(images()), expected)


def test_others_may_not_assign_a_simulated_weight():
    """As with any parametrization: what to write into the float weight is not known."""
    _, prepared = quantized(Net())
    with pytest.raises(RuntimeError, match="right_inverse"):
        prepared.hidden.weight = torch.zeros(32, 128)


@all_adapters
def test_on_packed_weights_adapters_train_and_are_not_merged(kind):
    """Merging is refused each time with what to do; the adapters are as they were, and come off again."""
    torch.manual_seed(0)
    net = Net().eval()
    quantizer = Quantizer(copy.deepcopy(net), QuantizerConfig.presets.w8(execution_mode="eager"))
    packed = Artifact.from_model(quantizer.prepare((images(),))).packed_model(copy.deepcopy(net))
    bare = packed(images()).detach()
    model = adapted(packed, kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(images()).square().mean().backward()
    assert any(parameter.grad.abs().max() > 0 for parameter in trained)
    torch.optim.SGD(trained, lr=0.01).step()
    expected = model(images()).detach()
    for merge in (model.merge_adapter, lambda: model.merge_adapter(safe_merge=True), model.merge_and_unload):
        with pytest.raises(PackedWeightError, match=r"cannot be merged into packed weights.*load_into\(float_model"):
            merge()
    assert torch.equal(model(images()), expected)
    torch.testing.assert_close(model.unload()(images()), bare)
