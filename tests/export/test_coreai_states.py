"""What a model writes to when it is called: buffers are states of the file, parameters are the same at every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


class Counting(nn.Module):
    """Adds how often it was called."""

    def __init__(self, start=0.0, kind="buffer"):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        values = torch.full((8,), start)
        if kind == "buffer":
            self.register_buffer("calls", values)
        else:
            self.calls = nn.Parameter(values)

    def forward(self, x):
        with torch.no_grad():
            self.calls.add_(1)
        return self.layer(x) + self.calls


def prepared(mode, **options):
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    with torch.no_grad():
        quantizer = Quantizer(Counting(**options).eval(), QuantizerConfig.presets.w8(execution_mode=mode))
        ready = quantizer.prepare((x,))
    calls = next(value for name, value in ready.state_dict(keep_vars=True).items() if name.endswith("calls"))
    return ready, x, calls


@both_modes
def test_states_go_on_from_call_to_call(mode, tmp_path):
    ready, x, calls = prepared(mode)
    calls.data.zero_()
    path = export_coreai(ready, (x,), tmp_path / "model.aimodel")
    states = {}
    for _ in range(3):
        (actual,) = run_coreai(path, (x,), states)
        with torch.no_grad():
            assert sqnr(ready(x), actual) > 100
    (values,) = states.values()
    assert torch.equal(values, calls.detach())
    (begun_anew,) = run_coreai(path, (x,))
    assert sqnr(actual - 2, begun_anew) > 100


@both_modes
def test_states_that_do_not_begin_with_zeros(mode, tmp_path):
    """The file does not have their values, so it takes them with the first call."""
    ready, x, calls = prepared(mode, start=5.0)
    with pytest.warns(UserWarning, match="do not begin with zeros"):
        path = export_coreai(ready, (x,), tmp_path / "model.aimodel")
    states = {}
    run_coreai(path, (x,), states)
    (name,) = states
    states = {name: calls.detach().clone()}
    (actual,) = run_coreai(path, (x,), states)
    with torch.no_grad():
        assert sqnr(ready(x), actual) > 100
    for wrong in ({"others": calls.detach()}, {name: torch.zeros(3)}):
        with pytest.raises(ValueError, match=rf"{name}.*\(8,\).*given"):
            run_coreai(path, (x,), wrong)


@both_modes
def test_a_parameter_that_is_written_to(mode, tmp_path):
    """As some models scale their weights; it is no output of the file."""
    ready, x, _ = prepared(mode, start=3.0, kind="parameter")
    with torch.no_grad(), pytest.warns(UserWarning, match="writes to its parameters"):
        path = export_coreai(ready, (x,), tmp_path / "model.aimodel")
    found = [run_coreai(path, (x,)) for _ in range(2)]
    with torch.no_grad():
        expected = ready(x)
    for (actual,) in found:
        assert sqnr(expected, actual) > 100
