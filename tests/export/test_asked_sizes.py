"""Dynamic sizes that a model takes and its captured program does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightWarning
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
    "a bound with the same on both sides": lambda y: y * 2 if y.shape[1] > 3 else y + y,
    "fours, in which a pad of 0 is none": lambda y: _in_fours(y).mean(2),
}
"""What holds for all sizes that the model takes."""


def _in_fours(y: torch.Tensor) -> torch.Tensor:
    missing = (4 - y.shape[1] % 4) % 4
    return (nn.functional.pad(y, (0, 0, 0, missing)) if missing > 0 else y).unflatten(1, (-1, 4))


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


def test_a_narrower_range_is_told():
    """Files do not refuse a size of 3, for which the model has another branch; what it fails for is left alone."""
    model = Conditional(lambda y: y * 2 if y.shape[1] > 3 else y * 3).eval()
    said = r"narrower range.*dimension 1 of the input 'x' \(not 3: it assumes n > 3 in test_asked_sizes.py, line \d+\)"
    with pytest.warns(BitwrightWarning, match=said):
        captured(model, (EXAMPLE,), None, ({1: ANY},))
    captured(model, (), {"x": EXAMPLE}, {"x": {1: torch.export.Dim.DYNAMIC(min=4)}})
    captured(Conditional(lambda y: y * 2 if y.shape[1] > 3 else 1 / 0), (EXAMPLE,), None, ({1: ANY},))
    for asked in (lambda n: n // 2 > 1, lambda n: n % 16 != 0):
        other = Conditional(lambda y, asked=asked: y * 2 if asked(y.shape[1]) else y * 3).eval()
        with pytest.warns(BitwrightWarning, match=r"narrower range.*\(not (3|16): it assumes"):
            captured(other, (EXAMPLE,), None, ({1: ANY},))
    config = QuantizerConfig.presets.w8(execution_mode="graph")
    ready = Quantizer(model, config).prepare((EXAMPLE,), dynamic_shapes=({1: ANY},)).eval()
    with pytest.warns(BitwrightWarning, match=r"(?s)\(not 3: it assumes n > 3 in\n.*y \* 2 if y.shape\[1\] > 3"):
        captured(ready, (EXAMPLE,), None, ({1: ANY},))


@pytest.mark.parametrize(
    ("asks", "said"),
    [(lambda n: n > 3, "not 3: it assumes n >= 4"), (lambda n: n < 10, "not 10: it assumes n <= 9")],
)
def test_a_narrower_range_in_onnx(asks, said, tmp_path):
    """Of the condition torch.onnx leaves the range alone."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model = Conditional(lambda y: y * 2 if asks(y.shape[1]) else y * 3).eval()
    with pytest.warns(BitwrightWarning, match=rf"dimension 1 of the input 'x' \({said}\)"):
        TARGETS["onnx"].write(model, (EXAMPLE,), tmp_path / "m.onnx", {}, ({1: ANY},))


def test_what_zeros_do_not_tell():
    """Examples that are all the same leave branches alike."""
    model = Conditional(CONDITIONS["branch"]).eval()
    nn.init.zeros_(model.layer.bias)
    with pytest.raises(ConversionError, match=r"6 in the example, but not [57]"):
        captured(model, (torch.zeros(2, 6, 8),), None, ({1: ANY},))


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


def test_another_branch_in_a_program_of_torch(tmp_path):
    """The file has no checks of the sizes that its branch was taken for, where the other one computes the same."""
    model = Conditional(lambda y: y * 2 if y.shape[1] % 2 == 0 else y + y).eval()
    path = TARGETS["torch"].write(model, (EXAMPLE,), tmp_path / "m.pt2", {}, ({1: ANY},))
    x = torch.randn(2, 5, 8)
    assert torch.equal(TARGETS["torch"].run(path, (x,))[0], model(x))
