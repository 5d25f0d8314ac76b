"""``torch.compile`` takes prepared models whole, and computes what they compute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.quantization import ModuleQuantizerConfig, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


class Scaled(nn.Module):
    """A norm that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Nested(nn.Module):
    """Calls functions, and modules that do so too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = Scaled(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(x)
        z = torch.matmul(self.one(y).softmax(-1), self.two(y).transpose(-1, -2))
        z += y[..., : z.shape[-1]]
        return torch.cat([self.norm(x - 1), 1 - z / 2], -1)


class Convolutions(nn.Module):
    """Norms that are folded, also one with a bias behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        y = self.norm(self.body(x))
        return (y + y.relu()).mean((2, 3))


MODELS = {
    "nested": (Nested, (2, 5, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
    "convolutions": (Convolutions, (4, 3, 8, 8)),
}


def prepared_pair(name, mode):
    """The same prepared model twice, with the quantizers, and an input."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    pair = []
    for _ in range(2):
        quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode=mode))
        prepared = quantizer.prepare((x,))
        with quantizer.calibration_mode(), torch.no_grad():
            prepared(x)
        pair.append((quantizer, prepared.eval()))
    return pair, x


@both_modes
@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name, mode):
    """In one graph, with the same bits."""
    ((_, model), _), x = prepared_pair(name, mode)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("nested", "eager"),
        ("convolutions", "graph"),
        *(
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name in MODELS
            for mode in ("eager", "graph")
            if (name, mode) not in (("nested", "eager"), ("convolutions", "graph"))
        ),
    ],
)
def test_training(name, mode):
    """Steps with observers on: the same ranges, gradients and weights."""
    pair, x = prepared_pair(name, mode)
    torch._dynamo.reset()
    found = []
    for compiled, (quantizer, model) in zip((False, True), pair, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with quantizer.training_mode():
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            for _ in range(3):
                optimizer.zero_grad()
                run(x).square().mean().backward()
                optimizer.step()
        found.append(model.state_dict())
    expected, actual = found
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("stacked", [False, True])
def test_encoder_layers_call_the_modules_in_them(stacked):
    """With simulators in its linear layers only, torch would compute an encoder layer by a kernel that leaves them out:
    calibration would see nothing."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = (nn.TransformerEncoder(layer, 2) if stacked else layer).eval()
    layers = list(model.layers) if stacked else [model]
    config = QuantizerConfig(global_config=None, execution_mode="eager")
    config.set_module_type("torch.nn.modules.linear.Linear", ModuleQuantizerConfig.presets.w8a8())
    x = torch.randn(2, 5, 16)
    plan = Quantizer(model, config).plan((x,))
    assert [one.activation_relu_or_gelu for one in layers] == [1] * len(layers)  # a plan changes nothing
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    prepared.eval()
    seen = []
    for simulator in (m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)):
        simulator.register_forward_hook(lambda module, *_: seen.append(module.tensor_fqn))
    expected = prepared(x)
    with torch.no_grad():
        seen.clear()
        assert torch.allclose(prepared(x), expected, atol=1e-5)
    assert len(plan.placements) == 6 * len(layers)
    assert len({name for name in seen if "linear" in name}) == 6 * len(layers)


class Holder(nn.Module):
    """Calls functions around a container, which calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.Sequential(Nested(), nn.Identity())

    def forward(self, x):
        return self.list(x + 1) * 2


@pytest.mark.parametrize(("part", "backend"), [("", "aot_eager"), ("list", "eager"), ("list.0", "aot_eager")])
def test_parts(part, backend):
    """Also where a module that is not compiled calls functions around one that is, or around a container of it."""
    torch.manual_seed(0)
    model, x = Holder().eval(), torch.randn(2, 5, 16)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
        prepared.eval()
        expected = prepared(x)
        torch._dynamo.reset()
        prepared.get_submodule(part).compile(fullgraph=True, backend=backend)
        assert torch.equal(prepared(x), expected)
