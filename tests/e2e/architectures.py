"""Real architectures in tiny sizes with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Architecture:
    """A model in eval mode with inputs.

    Attributes:
        model: the model.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _tokens(batch: int = 2, length: int = 8, vocabulary: int = 99) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _image(size: int = 32, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def _resnet() -> Architecture:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1], layer_type="bottleneck", num_labels=5)
    return Architecture(ResNetForImageClassification(config), (_image(),), {})


def _mobilenet() -> Architecture:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, depth_multiplier=0.25, min_depth=4, num_labels=5, tf_padding=False)
    return Architecture(MobileNetV2ForImageClassification(config), (_image(),), {})


def _efficientnet() -> Architecture:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.4,
        hidden_dim=320,
        kernel_sizes=[3, 3, 5],
        in_channels=[16, 16, 24],
        out_channels=[16, 24, 24],
        strides=[1, 2, 2],
        num_block_repeats=[1, 2, 1],
        expand_ratios=[1, 4, 4],
        num_labels=5,
    )
    return Architecture(EfficientNetForImageClassification(config), (_image(),), {})


def _regnet() -> Architecture:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=5)
    return Architecture(RegNetForImageClassification(config), (_image(),), {})


_TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def _vit() -> Architecture:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=16, patch_size=8, num_labels=5, **_TRANSFORMER)
    return Architecture(ViTForImageClassification(config), (_image(16),), {})


def _swin() -> Architecture:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=5
    )
    return Architecture(SwinForImageClassification(config), (_image(),), {})


def _convnext() -> Architecture:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    return Architecture(ConvNextForImageClassification(config), (_image(),), {})


def _segformer() -> Architecture:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    )
    return Architecture(SegformerForSemanticSegmentation(config), (_image(),), {})


def _bert() -> Architecture:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=99, max_position_embeddings=32, num_labels=5, **_TRANSFORMER)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return Architecture(BertForSequenceClassification(config), (_tokens(),), {"attention_mask": mask})


def _gpt2() -> Architecture:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=99, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return Architecture(GPT2LMHeadModel(config), (_tokens(),), {})


def _llama() -> Architecture:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, num_key_value_heads=1, use_cache=False, tie_word_embeddings=True, **_TRANSFORMER
    )
    return Architecture(LlamaForCausalLM(config), (_tokens(),), {})


def _mixtral() -> Architecture:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=99,
        num_key_value_heads=1,
        use_cache=False,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_TRANSFORMER,
    )
    return Architecture(MixtralForCausalLM(config), (_tokens(),), {})


def _whisper() -> Architecture:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=99,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config)
    return Architecture(model, (torch.randn(2, 8, 20),), {"decoder_input_ids": _tokens(2, 6)})


def _t5() -> Architecture:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False)
    return Architecture(T5ForConditionalGeneration(config), (_tokens(),), {"decoder_input_ids": _tokens(2, 6)})


class UNet(nn.Module):
    """Convolutions down, transposed convolutions up, and concatenated skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _double(3, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), _double(4 * width, 2 * width)
        self.up1, self.merge1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), _double(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        bottom = self.bottom(nn.functional.max_pool2d(second, 2))
        y = self.merge2(torch.cat([self.up2(bottom), second], 1))
        y = self.merge1(torch.cat([self.up1(y), first], 1))
        return self.head(nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear"))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding="same"), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _unet() -> Architecture:
    return Architecture(UNet(), (_image(16),), {})


def _distilbert() -> Architecture:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=99, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
    return Architecture(DistilBertForSequenceClassification(config), (_tokens(),), {})


def _deberta_v2() -> Architecture:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=99, relative_attention=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=32,
        position_buckets=8, **_TRANSFORMER,
    )  # fmt: skip
    return Architecture(DebertaV2ForSequenceClassification(config), (_tokens(),), {})


def _gpt_neo() -> Architecture:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=99, hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2,
        intermediate_size=24, window_size=4, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return Architecture(GPTNeoForCausalLM(config), (_tokens(),), {})


def _gemma2() -> Architecture:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=99, num_key_value_heads=1, head_dim=8, use_cache=False, sliding_window=4, **_TRANSFORMER
    )
    return Architecture(Gemma2ForCausalLM(config), (_tokens(),), {})


def _qwen3_moe() -> Architecture:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=99, num_key_value_heads=1, head_dim=8, use_cache=False, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, **_TRANSFORMER,
    )  # fmt: skip
    return Architecture(Qwen3MoeForCausalLM(config), (_tokens(),), {})


def _falcon() -> Architecture:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False)
    return Architecture(FalconForCausalLM(config), (_tokens(),), {})


def _mamba() -> Architecture:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)
    return Architecture(MambaForCausalLM(config), (_tokens(),), {})


def _bart() -> Architecture:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return Architecture(BartForConditionalGeneration(config), (_tokens(),), {})


def _siglip() -> Architecture:
    from transformers import SiglipConfig, SiglipModel

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**tower, "vocab_size": 99, "max_position_embeddings": 8, "projection_size": 16},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
    )
    return Architecture(SiglipModel(config), (_tokens(),), {"pixel_values": _image(16)})


def _convnext_v2() -> Architecture:
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    config = ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    return Architecture(ConvNextV2ForImageClassification(config), (_image(),), {})


def _fnet() -> Architecture:
    from transformers import FNetConfig, FNetForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 32}
    return Architecture(FNetForSequenceClassification(FNetConfig(vocab_size=99, **sizes)), (_tokens(),), {})


def _squeezebert() -> Architecture:
    from transformers import SqueezeBertConfig, SqueezeBertForSequenceClassification

    sizes = {"hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SqueezeBertForSequenceClassification(SqueezeBertConfig(vocab_size=99, intermediate_size=24, **sizes))
    return Architecture(model, (_tokens(),), {})


def _xlnet() -> Architecture:
    from transformers import XLNetConfig, XLNetForSequenceClassification

    config = XLNetConfig(vocab_size=99, d_model=16, n_layer=2, n_head=2, d_inner=24)
    return Architecture(XLNetForSequenceClassification(config), (_tokens(),), {})


def _focalnet() -> Architecture:
    from transformers import FocalNetConfig, FocalNetForImageClassification

    config = FocalNetConfig(image_size=32, embed_dim=8, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3])
    return Architecture(FocalNetForImageClassification(config), (_image(),), {})


def _patchtst() -> Architecture:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(d_model=16, num_hidden_layers=2, num_attention_heads=2, patch_length=8, patch_stride=8)
    return Architecture(PatchTSTForPrediction(config), (torch.randn(2, 32, 1),), {})


def _patchtsmixer() -> Architecture:
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    model = PatchTSMixerForPrediction(PatchTSMixerConfig(d_model=16, num_layers=2))
    return Architecture(model, (torch.randn(2, 32, 1),), {})


_BUILDERS: dict[str, Callable[[], Architecture]] = {
    "resnet": _resnet,
    "mobilenet_v2": _mobilenet,
    "efficientnet": _efficientnet,
    "regnet": _regnet,
    "vit": _vit,
    "swin": _swin,
    "convnext": _convnext,
    "segformer": _segformer,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "whisper": _whisper,
    "t5": _t5,
    "unet": _unet,
    "distilbert": _distilbert,
    "deberta_v2": _deberta_v2,
    "gpt_neo": _gpt_neo,
    "gemma2": _gemma2,
    "qwen3_moe": _qwen3_moe,
    "falcon": _falcon,
    "mamba": _mamba,
    "bart": _bart,
    "siglip": _siglip,
    "convnext_v2": _convnext_v2,
    "fnet": _fnet,
    "squeezebert": _squeezebert,
    "xlnet": _xlnet,
    "focalnet": _focalnet,
    "patchtst": _patchtst,
    "patchtsmixer": _patchtsmixer,
}

NAMES = tuple(_BUILDERS)


def build(name: str, seed: int = 0) -> Architecture:
    """Build an architecture; batch norms get statistics as if they had been trained."""
    torch.manual_seed(seed)
    built = _BUILDERS[name]()
    for module in built.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    built.model.eval()
    return built
