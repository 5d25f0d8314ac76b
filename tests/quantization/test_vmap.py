"""Models that compute inside ``torch.vmap``: what is inside stays as it is, what is around it is quantized."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigMatchWarning, UnplannedCallWarning
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.measures import sqnr


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
def test_gradients_of_learned_ranges_for_each_sample(kind: str) -> None:
    """``vmap`` of ``grad`` over a model is the gradient of each sample, of the learned ranges too."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(5, 6)
    weight, output = (QuantizationSpec(fake_quantize_cls=name) for name in (kind if kind != "pact" else "lsq", kind))
    where = ModuleQuantizerConfig(op_state_spec={"weight": weight}, op_input_spec=None, op_output_spec={"*": output})
    quantizer = Quantizer(model, QuantizerConfig(global_config=where, execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    prepared.eval()
    parameters = {name: parameter.detach() for name, parameter in prepared.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(prepared, parameters, (sample[None],)).square().sum()

    gradient = torch.func.grad(loss)
    found = torch.func.vmap(gradient, (None, 0))(parameters, x)
    each = [gradient(parameters, sample) for sample in x]
    for name, several in found.items():
        torch.testing.assert_close(several, torch.stack([one[name] for one in each]))
    assert any(name.endswith(("scale", "alpha")) and bool(several.any()) for name, several in found.items())


class Mapped(nn.Module):
    """A product for each element of a batch, and a mask made the way transformers makes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        mapped = torch.vmap(lambda one: nn.functional.gelu(one @ hidden[0].t()) @ hidden[0])(hidden)
        rows = torch.arange(x.shape[1])
        causal = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(rows, rows)
        weights = torch.where(causal, hidden @ hidden.transpose(1, 2), 0.0)
        return self.last(weights @ torch.vmap(self.inner)(mapped))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_models_with_vmap_are_quantized_around_it(mode: str) -> None:
    """They could not be prepared: eager mode looked at numbers, graphs had lost where the mapping begins."""
    torch.manual_seed(0)
    model, x = Mapped().eval(), torch.randn(3, 4, 8)
    expected = model(x)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnplannedCallWarning)
        with pytest.warns(ConfigMatchWarning, match=r"enclosed-weight.*1 weight.*inner\.weight \(.*torch\.vmap"):
            prepared = quantizer.prepare((x,))
        with quantizer.calibration_mode():
            prepared(x)
        found = prepared(x)
        assert 20 < sqnr(expected, found) < 60
        with quantizer.training_mode():
            prepared(x).sum().backward()
    names = {child.tensor_fqn for child in prepared.modules() if isinstance(child, FakeQuantizeImplBase)}
    assert {"first.weight", "last.weight"} < names
    assert "inner.weight" not in names
