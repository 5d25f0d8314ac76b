"""Dynamic sizes that a model takes and its captured program does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.export.asked_sizes import sizes_left_out
from bitwright.export.conversion import ConversionError, captured
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig

ANY = torch.export.Dim.DYNAMIC(min=2, max=16)
EXAMPLE = torch.randn(2, 6, 8)
CONDITIONS = {
    "branch": lambda y: y * 2 if y.shape[1] % 2 == 0 else y * 3,
    "one size": lambda y: y * 3 if y.shape[1] == 5 else y * 2,
    "parts": lambda y: y.tensor_split(2, 1),
}
"""What torch.export assumes and says nothing of for ``Dim.DYNAMIC``."""
OTHERS = {
    "a view that the model has for even sizes only": lambda y: y.unflatten(1, (-1, 2)).mean(2),
    "a pool whose last window begins in the padding": lambda y: nn.functional.max_pool2d(y, 2, 3, 1, ceil_mode=True),
    "a third, which is one row of five": lambda y: y[:, : y.shape[1] // 3] * 2,
    "a remainder": lambda y: y[:, : y.shape[1] % 4] * 2,
    "a bound": lambda y: y * 2 if y.shape[1] > 3 else y * 3,
}
"""What holds for all sizes that the model takes, or for a range of them."""


class Conditional(nn.Module):
    """A layer, and what depends on a length."""

    def __init__(self, condition):
        super().__init__()
        self.layer, self.condition = nn.Linear(8, 8), condition

    def forward(self, x):
        return self.condition(self.layer(x))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_sizes_between_others_are_refused(condition):
    """The error names the input, its dimension, and a size that the model takes."""
    model = Conditional(CONDITIONS[condition]).eval()
    before = model.layer.weight.clone()
    with pytest.raises(ConversionError, match=r"dimension 1 of the input 'x' \(6 in the example, but not [57]: .*2 \*"):
        captured(model, (EXAMPLE,), None, ({1: ANY},))
    assert torch.equal(model.layer.weight, before)
    captured(model, (EXAMPLE,))


@pytest.mark.parametrize("condition", OTHERS)
def test_other_conditions_are_not_refused(condition):
    model = Conditional(OTHERS[condition]).eval()
    program = captured(model, (), {"x": EXAMPLE}, {"x": {1: ANY}})
    assert sizes_left_out(program, model, (), {"x": EXAMPLE}) == []


def test_parts_in_onnx(tmp_path):
    """torch.onnx captures by itself. Refused for all sizes, right for those that the error suggests."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model = Conditional(CONDITIONS["parts"]).eval()
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((EXAMPLE,)).eval()
    path = tmp_path / "m.onnx"
    with pytest.raises(ConversionError, match=r"6 in the example, but not [57]"):
        TARGETS["onnx"].write(ready, (EXAMPLE,), path, {}, ({1: ANY},))
    TARGETS["onnx"].write(ready, (EXAMPLE,), path, {}, ({1: 2 * torch.export.Dim("n", max=8)},))
    x = torch.randn(2, 10, 8)
    for expected, found in zip(ready(x), TARGETS["onnx"].run(path, (x,)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["onnx", "coreai", "torch"])
def test_graphs_that_check_their_sizes(target, tmp_path):
    """A model prepared in graph mode has no branch any more; it checks what its branch was for, and files do not."""
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    config = QuantizerConfig.presets.w8(execution_mode="graph")
    model = Conditional(CONDITIONS["branch"]).eval()
    ready = Quantizer(model, config).prepare((EXAMPLE,), dynamic_shapes=({1: ANY},)).eval()
    with pytest.raises(ConversionError, match=r"(?s)dimension 1 of the input 'x' \(6 in the example, but not [57]"):
        TARGETS[target].write(ready, (EXAMPLE,), tmp_path / "m", {}, ({1: ANY},))
