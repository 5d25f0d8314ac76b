"""What a training step keeps of fake-quantized tensors is codes: with the same bits, and only where it is worth it."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.kernels import saved
from bitwright.quantization import Quantizer, QuantizerConfig, _less_memory
from bitwright.quantization._less_memory import SavedAsCodes

pytest.importorskip("bitwright.kernels.cpu.fused")
both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Watched(nn.Module):
    """Hands on its input, and notes whether what operations save here is kept as codes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hooks = top_hooks(True)
        self.seen.append(hooks is not None and hooks[0] is saved.pack)
        return x


class Network(nn.Module):
    """Linear layers and an activation, of which one may be checkpointed."""

    def __init__(self, repeated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.repeated = repeated
        self.watched = Watched()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.watched(self.norm(x))
        y = checkpoint(self._body, x, use_reentrant=False) if self.repeated else self._body(x)
        return x + y


def batch(rows: int = 128) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def prepared(model: nn.Module, mode: str) -> tuple[Quantizer, nn.Module]:
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    model = quantizer.prepare((batch(),))
    with quantizer.calibration_mode():
        model(batch())
    return quantizer, model


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever codes free is worth it."""
    monkeypatch.setattr(_less_memory, "_WORTHWHILE", 0)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[saved.Freed]:
    """What each forward pass under ``saved_as_codes`` has freed."""
    found = []

    @contextlib.contextmanager
    def noting():
        with saved.saved_as_codes() as here:
            found.append(here)
            yield here

    monkeypatch.setattr(_less_memory, "saved_as_codes", noting)
    return found


@pytest.mark.parametrize(("mode", "repeated"), [("eager", False), ("eager", True), ("graph", False)])
@pytest.mark.usefixtures("always")
def test_gradients_are_the_same_bits(mode: str, repeated: bool, freed: list[saved.Freed]) -> None:
    """Over a few steps, with and without; a checkpoint within the model sees to its own tensors."""
    results = []
    for as_codes in (True, False):
        quantizer, model = prepared(Network(repeated), mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quantizer.training_mode(save_as_codes=as_codes):
            for _ in range(3):
                optimizer.zero_grad()
                x = batch().requires_grad_()
                model(x).square().mean().backward()
                optimizer.step()
        results.append([x.grad, *model.parameters()])
    assert len(freed) == 3
    # At least the input and the result of GELU, or of the norm beside a checkpoint.
    assert all(here.bytes >= 3 * 128 * (64 if repeated else 2 * 256) for here in freed)
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


@both_modes
@pytest.mark.usefixtures("always")
def test_second_derivatives(mode: str) -> None:
    """A penalty on a gradient."""
    results = []
    for as_codes in (True, False):
        quantizer, model = prepared(Network(), mode)
        with quantizer.training_mode(save_as_codes=as_codes):
            x = batch().requires_grad_()
            (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            first.square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


def test_only_where_it_frees_much(freed: list[saved.Freed]) -> None:
    """A pass that frees little is the last for a while; one that frees much goes on."""
    quantizer, model = prepared(Network(), "eager")
    with quantizer.training_mode():
        for _ in range(2 + _less_memory._TRIED_AGAIN_AFTER):
            model(batch())
        assert len(freed) == 2
        assert model.watched.seen[-1]
        assert not any(model.watched.seen[-_less_memory._TRIED_AGAIN_AFTER - 1 : -1])
    with quantizer.training_mode():
        for _ in range(3):
            model(batch(1 << 14))
    assert [here.bytes >= 8 << 20 for here in freed] == [False, False, True, True, True]


@pytest.mark.usefixtures("always")
def test_only_in_training_with_gradients() -> None:
    """Nothing is saved in evaluation, without gradients, outside of the mode, or if it is not wanted."""
    quantizer, model = prepared(Network(), "eager")
    seen = model.watched.seen
    model(batch())
    with quantizer.training_mode(save_as_codes=False):
        model(batch())
    with quantizer.training_mode():
        with torch.no_grad():
            model(batch())
        with quantizer.evaluating():
            model(batch())
        assert not any(seen)
        model(batch())
        assert seen[-1]
    model(batch())
    assert not seen[-1]
    assert not isinstance(vars(model).get("forward"), SavedAsCodes)


@both_modes
@pytest.mark.usefixtures("always")
def test_hooks_of_others_stay(mode: str, freed: list[saved.Freed]) -> None:
    """Who has hooks of his own gets every tensor as it is; who forbids hooks, as torch.func does, is heard."""
    quantizer, model = prepared(Network(), mode)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with quantizer.training_mode():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(batch().requires_grad_()).sum().backward()
        assert kept
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        parameters = dict(model.named_parameters())

        quantizer.disable_observer()  # a function of parameters may not widen a range

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, values, (batch(),)).sum()

        found = torch.func.grad(loss)(parameters)
    assert not freed
    assert len(found) == len(expected)


@both_modes
@pytest.mark.usefixtures("always")
def test_an_error_in_the_forward_pass_leaves_no_hooks(mode: str) -> None:
    """Also an interrupt, as it comes from a keyboard."""
    quantizer, model = prepared(Network(), mode)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    simulator = next(module for module in model.modules() if hasattr(module, "qparams_calculator"))
    handle = simulator.register_forward_pre_hook(stop)
    with quantizer.training_mode():
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        assert top_hooks(True) is None
        handle.remove()
        model(batch()).sum().backward()


@both_modes
@pytest.mark.usefixtures("always")
def test_copies_made_in_training(mode: str, freed: list[saved.Freed]) -> None:
    """A copy and a pickle train and evaluate, in full; the model itself is as it was when training ends."""
    quantizer, model = prepared(Network(), mode)
    before = dict(vars(model))
    with quantizer.training_mode():
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        expected = model(batch())
        for other in (twin, loaded):
            result = other(batch())
            assert torch.equal(result, expected)
            result.sum().backward()
            assert len(freed) == 1  # by the model itself
    assert vars(model).get("forward") is before.get("forward")
    assert quantizer.finalize(twin, backend="_torch")(batch()).shape == expected.shape


@pytest.mark.usefixtures("always")
def test_a_forward_of_somebody_else_stays() -> None:
    """What is put around the forward in training is there afterwards, and what is inside does nothing any more."""
    quantizer, model = prepared(Network(), "eager")
    with quantizer.training_mode():
        inner = model.forward
        mine = model.forward = lambda x: inner(x) * 2
        model(batch())
        assert model.watched.seen[-1]
    assert model.forward is mine
    model.train()
    model(batch())
    assert not model.watched.seen[-1]


@both_modes
@pytest.mark.usefixtures("always")
def test_under_torch_compile(mode: str) -> None:
    """The compiled model is whole, and keeps what the compiler has chosen."""
    quantizer, model = prepared(Network(), mode)
    if mode == "eager":
        model.watched = nn.Identity()
    with quantizer.training_mode():
        expected = model(batch())
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(batch()).sum().backward()
        assert expected.shape == compiled(batch()).shape
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
