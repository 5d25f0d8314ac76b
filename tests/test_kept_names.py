"""Small functions that coreai-opt keeps in private modules, for code that imports them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import allow_exported_model_train_eval

from bitwright._utils.fx_utils import normalize_module_fqn
from bitwright._utils.torch_utils import move_model_to_eval, move_model_to_train, normalize_axis
from bitwright.quantization import ExecutionMode, Quantizer, QuantizerConfig


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("", ""),
        ("a.0.b", "a.0.b"),
        ("L['self'].a", "a"),
        ("L['fn']._modules['a']._modules['0'].b[12]", "a.0.b.12"),
        ("L['args'][3].a[0]", "a.0"),
        ("L['self']", ""),
    ],
)
def test_paths_that_torch_export_writes(written: str, path: str) -> None:
    """Steps of all kinds become names between dots."""
    assert normalize_module_fqn(written) == path


@pytest.mark.parametrize(("axis", "found"), [(2, 2), (-1, 2), (-3, 0), (5, 5), (-4, -1)])
def test_axes(axis: int, found: int) -> None:
    """Negative ones count from the end; nothing is checked."""
    assert normalize_axis(axis, 3) == found


@pytest.mark.parametrize("before", [True, False])
def test_modes_of_a_block(before: bool) -> None:
    """The mode is that of the function's name inside, and the old one or the given one behind, after errors too."""
    model = nn.Dropout().train(before)
    with move_model_to_eval(model):
        assert not model.training
    with pytest.raises(KeyError), move_model_to_train(model):
        raise KeyError(model.training)
    assert model.training == before
    with move_model_to_train(model, original_state=not before):
        pass
    assert model.training != before


def test_modes_of_a_captured_module() -> None:
    """It knows its mode once that was set; before, the caller must say."""
    x = torch.ones(1000)
    captured = torch.export.export(nn.Dropout().train(), (x,)).module()
    allow_exported_model_train_eval(captured)
    with pytest.raises(RuntimeError, match="original_state"), move_model_to_eval(captured):
        pass
    with move_model_to_eval(captured, original_state=True):
        assert torch.equal(captured(x), x)
    assert not torch.equal(captured(x), x)
    with move_model_to_eval(captured):
        assert torch.equal(captured(x), x)
    assert not torch.equal(captured(x), x)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_mode_of_a_quantizer(mode: str) -> None:
    """Exporters pass ``mmap_dir`` in one mode only."""
    quantizer = Quantizer(nn.Linear(4, 4), QuantizerConfig(execution_mode=mode))
    assert quantizer._execution_mode is ExecutionMode(mode)
