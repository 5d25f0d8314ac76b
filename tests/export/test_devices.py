"""Copies of models on another device, which exporters make of models on an accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.export.devices import all_on_cpu, copy_to
from bitwright.quantization import Quantizer, QuantizerConfig


class Tied(nn.Module):
    """A weight under two names, a buffer, a tensor that is neither, and one that is made when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.ones(8))
        self.plain = [torch.ones(8)]

    def forward(self, x):
        return self.head(self.embed(x) + self.shift + self.plain[0] + torch.ones(8, device=x.device))


@pytest.mark.parametrize("mode", ["float", "eager", "graph"])
def test_everything_moves_and_the_model_stays(mode):
    """Tied weights stay tied, and captured graphs make their tensors on the new device."""
    model, x = Tied().eval(), torch.arange(4)[None]
    if mode != "float":
        model = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode=mode)).prepare((x,)).eval()
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()
               if isinstance(tensor, torch.Tensor)}  # fmt: skip
    moved = copy_to(model, torch.device("meta"))
    for name, tensor in moved.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            assert tensor.is_meta, name
            assert isinstance(tensor, nn.Parameter) == isinstance(tensors[name][0], nn.Parameter)
    assert len(list(moved.parameters())) == len(list(model.parameters()))
    for name, (tensor, before) in tensors.items():
        assert torch.equal(model.state_dict(keep_vars=True)[name], before)
        assert model.state_dict(keep_vars=True)[name] is tensor or not isinstance(tensor, nn.Parameter)
    if isinstance(moved, torch.fx.GraphModule):
        named = [node.kwargs["device"] for node in moved.graph.nodes if "device" in node.kwargs]
        assert named == [torch.device("meta")] * len(named)
        assert len(named) > 0
    if mode == "float":
        assert moved.plain[0].is_meta
        assert moved(x.to("meta")).is_meta
    back = copy_to(model, torch.device("cpu"))
    assert torch.equal(back(x), model(x))


def test_what_is_on_the_cpu_is_not_copied():
    """Nor its inputs; keyword inputs come as a dictionary."""
    model, x = Tied(), torch.arange(4)[None]
    same, args, kwargs = all_on_cpu(model, (x, {"mask": [x, 3]}))
    assert same is model
    assert args[0] is x
    assert args[1]["mask"][1] == 3
    assert kwargs == {}
