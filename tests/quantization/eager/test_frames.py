"""Modules that are called from a module that calls functions run without a function mode, and it comes back after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright._utils.call_frames import thread_frames
from bitwright.errors import ConfigMatchWarning
from bitwright.quantization import Quantizer, QuantizerConfig

_modes = torch._C._len_torch_function_stack


class Watched(nn.Module):
    """Notes how many modes are in force, and raises on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[int] = []
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(_modes())
        if self.broken:
            raise RuntimeError("broken")
        return self.inner(x)


class Residual(nn.Module):
    """Calls functions before and after a module."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = nn.Sequential(Watched())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x + 1.0)
        return torch.add(x, self.watched(x)) + x


class Counting(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def prepared() -> tuple[nn.Module, Watched, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = nn.Sequential(Residual(), Residual())
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    quantizer.prepare((x,))
    with quantizer.calibration_mode():
        model(x)
    watched: Watched = model[0].watched[0]
    watched.seen.clear()
    return model.eval(), watched, x


def test_modes_are_off_inside_and_on_again() -> None:
    """Every call of the frame is still quantized, the one after the module too."""
    model, watched, x = prepared()
    seen: list[str] = []
    for name, module in model.named_modules():
        if name.count(".") == 1 and "_quantize_" in name:
            module.register_forward_hook(lambda m, i, o, name=name: seen.append(name))
    model(x)
    assert watched.seen == [0]
    assert _modes() == 0
    assert {name for name in seen if "add" in name or "relu" in name}
    assert len(seen) == len(
        [name for name, _ in model.named_modules() if name.count(".") == 1 and "_quantize_" in name]
    )


def test_an_error_inside_leaves_no_mode_behind() -> None:
    """The frames and the mode are taken off, and the next call works."""
    model, watched, x = prepared()
    expected = model(x)
    watched.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        model(x)
    assert (_modes(), thread_frames.stack, thread_frames.mode) == (0, [], None)
    watched.broken = False
    assert torch.equal(model(x), expected)


def test_a_mode_of_the_user_stays_in_force() -> None:
    """It sees the calls of every module, and the result is the same."""
    model, watched, x = prepared()
    expected = model(x)
    with Counting() as mode:
        assert torch.equal(model(x), expected)
    assert mode.calls > 0
    assert watched.seen[-1] == 1


class Branching(nn.Module):
    """Calls layers and functions inside of ``torch.cond``, one layer before and after it too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.body, self.both = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) + self.both(x)

    def other_branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.both(x) + 1.0
        return torch.cond(x.sum() > 0, self.branch, self.other_branch, (y,)) + self.both(y)


def test_branches_run_as_they_are() -> None:
    """No frame is entered where ``torch.cond`` has a branch captured, and the calls around it are simulated."""
    torch.manual_seed(0)
    model, x = Branching().eval(), torch.rand(3, 4)
    y = model.both(x) + 1.0
    expected = model.branch(y) + model.both(y)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    with pytest.warns(ConfigMatchWarning, match=r"enclosed-weight.*inside\.weight \(cond\)"):
        prepared = quantizer.prepare((x,))
    error = (prepared(x) - expected).abs().max()
    assert 0 < error < 0.1
    assert (_modes(), thread_frames.stack, thread_frames.mode) == (0, [], None)
    with quantizer.training_mode():  # in which the calls around the branch measure the weight that the branch reads
        prepared(x).sum().backward()
    assert all(parameter.grad is not None for parameter in (prepared.inside.weight, prepared.both.bias))
