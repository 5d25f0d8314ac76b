"""Tensors of zeros at the start, as new adapters put them out: a range begins with the first tensor that has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import QuantizationSpec, Quantizer
from bitwright.quantization.qat import parameter_groups
from bitwright.quantization.spec import PerChannelGranularity, PerTensorGranularity, QuantizationComponentFactory

from .networks import MODES, make_config


def noise(seed=0, shape=(4, 6)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("granularity", [PerTensorGranularity(), PerChannelGranularity(axis=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through", ["simulator", "calculator"])
def test_an_average_of_zeros_takes_the_next_range(granularity, dtype, through):
    """Blocks that were zero so far take over the first range, others average; by kernel and by calculator."""
    spec = QuantizationSpec(qscheme="asymmetric", granularity=granularity, averaging_constant=0.25)
    fq = QuantizationComponentFactory.create_fake_quantizer(spec, "activation")
    see = fq if through == "simulator" else fq.qparams_calculator
    tensors = [torch.zeros(4, 6), torch.zeros(4, 6), noise(1), noise(2) * 3]
    tensors[0][:, 2] = 1.0
    dims = (0, 1) if isinstance(granularity, PerTensorGranularity) else (0,)
    low = high = torch.zeros(()).to(dtype)
    for i, x in enumerate(tensors):
        see(x.to(dtype))
        new = x.to(dtype).amin(dims, keepdim=True).clamp(max=0), x.to(dtype).amax(dims, keepdim=True).clamp(min=0)
        blank = (low == 0) & (high == 0) if i else torch.ones_like(new[0], dtype=torch.bool)
        low, high = (
            torch.where(blank, n, (0.25 * n + 0.75 * old).to(dtype)) for n, old in zip(new, (low, high), strict=True)
        )
        for kept, wanted in ((fq.qparams_calculator.running_min, low), (fq.qparams_calculator.running_max, high)):
            torch.testing.assert_close(kept, wanted.reshape(kept.shape))


class Adapted(nn.Module):
    """A frozen layer and a low-rank update that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_adapters_that_begin_at_zero_train(mode, kind):
    """With simulators on the adapter too, training wins a good part of what it wins in float.

    A moving average lags behind outputs that grow from nothing; a learned step does not.
    """

    def run(prepared) -> float:
        optimizer = torch.optim.Adam(parameter_groups(prepared, 2e-2))
        x = noise(3, (64, 16))
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(prepared(x), x.flip(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0] - losses[-1]

    torch.manual_seed(0)
    won = run(Adapted())
    torch.manual_seed(0)
    quantizer = Quantizer(Adapted(), make_config(mode, kind, dtype="int8"))
    prepared = quantizer.prepare((noise(3, (64, 16)),))
    with quantizer.training_mode():
        assert run(prepared) > (0.6 if kind == "lsq" else 0.2) * won
