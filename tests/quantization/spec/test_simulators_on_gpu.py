"""Simulators on a GPU: no synchronisation on the hot path, the numbers of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

from .spec_strategies import ACTIVATION, WEIGHT, bits_equal, fake_quantizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [
    (ACTIVATION, {}),
    (ACTIVATION, {"qparam_calculator_cls": "global_minmax", "qscheme": "asymmetric"}),
    (ACTIVATION, {"qparam_calculator_cls": "dynamic", "granularity": {"type": "per_token"}}),
    (WEIGHT, {"granularity": PerChannelGranularity(axis=0)}),
    (WEIGHT, {"dtype": "float4_e2m1fn", "granularity": PerBlockGranularity(axis=1, block_size=32)}),
]


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_synchronisation")
@pytest.mark.parametrize(("target", "fields"), CASES)
def test_forward_does_not_wait_for_the_gpu(target: object, fields: dict[str, object]) -> None:
    quantizer = fake_quantizer(target, **fields).cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    quantizer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    quantizer(x).sum().backward()
    quantizer.disable_observer()
    quantizer(x).sum().backward()
    quantizer.disable_fake_quant()
    quantizer(x)


@pytest.mark.parametrize(("target", "fields"), CASES)
def test_numbers_equal_those_of_the_cpu(target: object, fields: dict[str, object]) -> None:
    here = fake_quantizer(target, **fields)
    there = copy.deepcopy(here).cuda()
    for size in (1.0, 3.0, 2.0):
        x = torch.randn(16, 64) * size
        assert torch.equal(here(x), there(x.cuda()).cpu())
    assert all(bits_equal(value.cpu(), here.state_dict()[key]) for key, value in there.state_dict().items())


@torch.no_grad()
def test_a_frozen_weight_is_kept_on_the_gpu_too() -> None:
    quantizer = fake_quantizer(WEIGHT, granularity=PerChannelGranularity(axis=0)).cuda()
    weight = torch.nn.Parameter(torch.randn(16, 64, device="cuda"))
    quantizer(weight)
    quantizer.disable_observer()
    quantizer.eval()
    kept = quantizer(weight)
    assert quantizer(weight) is kept
    weight.mul_(0.5)
    assert not torch.equal(quantizer(weight), kept)
