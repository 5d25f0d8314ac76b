"""torchao's PT2E helpers act on our simulators, in whichever order the two libraries are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from .spec_strategies import fake_quantizer

CODE = """
import sys
{imports}
from torchao.quantization.pt2e import FakeQuantizeBase
assert issubclass(FakeQuantizeImplBase, FakeQuantizeBase)
assert not any(type(finder).__name__ == "_PostImportFinder" for finder in sys.meta_path)
import torchao.quantization.pt2e.fake_quantize as module
assert module.__spec__.loader is module.__loader__
assert type(module.__loader__).__name__ == "SourceFileLoader"
"""


@pytest.mark.parametrize(
    "imports",
    [
        "from bitwright.quantization.spec import FakeQuantizeImplBase\nassert 'torchao' not in sys.modules",
        "import torchao.quantization.pt2e\nfrom bitwright.quantization.spec import FakeQuantizeImplBase",
    ],
)
def test_registered_in_either_order(imports: str) -> None:
    """And torchao is not imported by us, nor its module changed by the hook that waited for it."""
    ran = subprocess.run([sys.executable, "-c", CODE.format(imports=imports)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_helpers_switch_our_simulators() -> None:
    from torchao.quantization.pt2e import (
        FakeQuantizeBase,
        disable_fake_quant,
        disable_observer,
        enable_fake_quant,
        enable_observer,
    )

    model = torch.nn.Sequential(fake_quantizer(), torch.nn.Sequential(fake_quantizer()))
    first, second = model[0], model[1][0]
    assert isinstance(first, FakeQuantizeBase)
    x = torch.randn(4)
    model(x)
    model.apply(disable_observer)
    model.apply(disable_fake_quant)
    assert model(x) is x
    assert (int(first.observer_enabled), int(second.fake_quant_enabled)) == (0, 0)
    model.apply(enable_fake_quant)
    model.apply(enable_observer)
    assert not torch.equal(model(x), x)
    assert (int(first.observer_enabled), int(second.fake_quant_enabled)) == (1, 1)


def test_torchao_takes_our_partial_constructors() -> None:
    """PT2E builds simulators by ``with_args`` with arguments of its own."""
    from torchao.quantization.pt2e.quantizer import QuantizationSpec as PT2ESpec

    from bitwright.config.spec import CompressionTargetTensor
    from bitwright.quantization.spec import QuantizationComponentFactory, QuantizationSpec

    partial = QuantizationComponentFactory.create_fake_quantizer_partial(
        QuantizationSpec(), CompressionTargetTensor.ACTIVATION
    )
    pt2e = PT2ESpec(
        dtype=torch.int8, observer_or_fake_quant_ctr=partial, quant_min=-128, quant_max=127, is_dynamic=False
    )
    built = pt2e.observer_or_fake_quant_ctr.with_args(
        dtype=torch.int8, quant_min=-128, is_dynamic=False, ch_axis=None
    )()
    x = torch.randn(3)
    assert built(x).shape == x.shape
    assert built.convert(torch.fx.symbolic_trace(torch.nn.ReLU()), None) is None
