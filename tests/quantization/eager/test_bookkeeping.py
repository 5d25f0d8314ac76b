"""What a model keeps count of while it trains, without gradients, is nothing that planning had to see."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.errors import UnplannedCallWarning
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase


class Codebook(nn.Module):
    """A quantized bottleneck whose codebook follows its inputs, as in VQ-VAE (appendix A.1 of arXiv:1711.00937)."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.fc, self.checkpointed = nn.Linear(4, 4), checkpointed
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("shifted", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("book", torch.randn(8, 4))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("sums", torch.randn(8, 4))

    def forward(self, x):
        y = self.fc(x)
        nearest = (y.detach()[:, None] - self.book).square().sum(-1).argmin(-1)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.shifted = torch.add(self.mean, 1.0)
                self.steps += 1
                chosen = F.one_hot(nearest, 8).to(y.dtype)
                self.counts.mul_(0.9).add_(chosen.sum(0) * 0.1)
                self.sums.copy_(torch.add(self.sums * 0.9, torch.matmul(chosen.t(), y) * 0.1))
            self.follow()
        if self.checkpointed is not None and self.training:
            return checkpoint(self.rest, x, y, nearest, use_reentrant=self.checkpointed)
        return self.rest(x, y, nearest)

    @torch.no_grad()
    def follow(self):
        self.book.copy_(self.sums / (self.counts + 1e-5)[:, None])

    def rest(self, x, y, nearest):
        z = y + (self.book[nearest] - y).detach()
        return torch.add(z * 2, x) - self.shifted


def prepared(model, x):
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    result = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        result(x)
    return quantizer, result


def calls_of_simulators(model, run):
    """Return the names of the simulators that ``run`` calls, in order."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizeImplBase) and "parametrizations" not in name
    ]
    run()
    for hook in hooks:
        hook.remove()
    return called


@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.filterwarnings("error::bitwright.errors.UnplannedCallWarning")
def test_statistics_are_kept_without_warnings_and_simulators(checkpointed):
    """Training calls the simulators that evaluation does, and every statistic is that of its formula."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    quantizer, model = prepared(Codebook(checkpointed), x)
    kept: list[torch.Tensor] = []
    model.fc.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    before = {name: getattr(model, name).double() for name in ("mean", "counts", "sums", "book")}
    evaluated = calls_of_simulators(model.eval(), lambda: model(x))
    kept.clear()
    with quantizer.training_mode():
        trained = calls_of_simulators(model, lambda: model(x).sum())
        model.zero_grad()
    (y,) = kept
    chosen = F.one_hot((y[:, None] - before["book"]).square().sum(-1).argmin(-1), 8).double()
    mean = 0.9 * before["mean"] + 0.1 * y.double().mean(0)
    counts = 0.9 * before["counts"] + 0.1 * chosen.sum(0)
    sums = 0.9 * before["sums"] + 0.1 * chosen.t() @ y.double()
    assert trained == evaluated
    for name, truth in {"mean": mean, "shifted": mean + 1, "counts": counts, "sums": sums}.items():
        torch.testing.assert_close(getattr(model, name).double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.book.double(), sums / (counts + 1e-5)[:, None], rtol=1e-5, atol=1e-6)
    assert model.steps == 1


def test_statistics_under_a_checkpoint_of_the_model():
    """The pass that is repeated, with gradients, does not take them for anything else."""
    torch.manual_seed(0)
    x = torch.randn(16, 4, requires_grad=True)
    quantizer, model = prepared(Codebook(), x)
    with quantizer.training_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCallWarning)
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert model.steps == 2


class Detached(nn.Module):
    """Computes something without gradients in training, and goes on with it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.fc, self.inner = way, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        self.register_buffer("state", torch.zeros(16, 4))

    def forward(self, x):
        y = self.fc(x) * 2
        z = y
        if self.training:
            with torch.no_grad():
                noise = torch.add(y, 0.5)
                if self.way == "written to":
                    y.sub_(0.5)
                if self.way == "view":
                    noise = noise.t().reshape(4, 16).t()
                if self.way == "by a statistic":
                    self.state.copy_(noise)
                    self.state.mul_(0.5)
        if self.training and self.way in ("call", "view"):
            z = y * noise
        z = self.inner(noise if self.training and self.way == "module" else z)
        if self.training and self.way == "result":
            return {"z": z, "noise": [noise]}
        if self.training and self.way == "asked":
            assert noise.shape == z.shape
            assert noise.sum().item() != 0 if noise.dim() == 0 else noise.size(0) == 16
        return z


WAYS = {"call": "add", "view": "add", "module": "add", "result": "add", "written to": "sub_"}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_model_goes_on_with_is_told_once(way):
    """A result without gradients that reaches a call, a module or the output was computed unquantized."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    quantizer, model = prepared(Detached(way), x)
    with quantizer.training_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x)
    told = [str(entry.message) for entry in caught if entry.category is UnplannedCallWarning]
    assert len([message for message in told if f"'{WAYS[way]}' was not seen" in message]) == 1


@pytest.mark.parametrize("way", ["by a statistic", "asked", "none"])
@pytest.mark.filterwarnings("error::bitwright.errors.UnplannedCallWarning")
def test_what_ends_in_a_statistic_or_a_question_is_not_told(way):
    """Nor what nobody reads."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    quantizer, model = prepared(Detached(way), x)
    with quantizer.training_mode():
        result = model(x)
    assert result.shape == (16, 4)


class Frozen(nn.Module):
    """A part of the model that is computed without gradients always."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            y = torch.add(x, x) * 3
        return self.fc(y)


@pytest.mark.filterwarnings("error::bitwright.errors.UnplannedCallWarning")
def test_planned_calls_without_gradients_keep_their_simulators():
    """They are known by their places in the code."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    quantizer, model = prepared(Frozen(), x)
    evaluated = calls_of_simulators(model.eval(), lambda: model(x))
    with quantizer.training_mode():
        assert calls_of_simulators(model, lambda: model(x)) == evaluated
    assert sum(name.startswith(("add", "mul")) for name in evaluated) >= 3
