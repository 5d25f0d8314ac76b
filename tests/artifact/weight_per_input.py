"""Packed layers whose weight has a row for each input, and specs of their blocks."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.export.torch_program import packed_copy
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

TILED = {
    "blocks": QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32)),
    "zero points": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)),
    "minvals": QuantizationSpec(
        dtype="int8", qformulation="minval", granularity=PerBlockGranularity(block_size=(8, 64))
    ),
    "one scale": QuantizationSpec(dtype="int2"),
    "columns": QuantizationSpec(dtype="uint4", qscheme="asymmetric", granularity=PerChannelGranularity(axis=1)),
    "blocks of columns": QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=0, block_size=8)),
    "tall blocks": QuantizationSpec(dtype="int8", granularity=PerBlockGranularity(block_size=(500, 128))),
}


class RowPerInput(nn.Module):
    """A layer as GPT-2 has it: the weight has a row for each input."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        y = torch.mm(flat, self.weight) if self.bias is None else torch.addmm(self.bias, flat, self.weight)
        return y.view(*x.shape[:-1], -1)


def row_per_input(spec, bias=False):
    """A prepared layer, and the same packed."""
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=None, module_type_configs={RowPerInput: module}, execution_mode="eager")
    prepared = Quantizer(RowPerInput(1000, 256, bias).eval(), config).prepare((torch.randn(1, 1000),))
    return prepared, packed_copy(prepared)
