"""Random models and configs in eager mode, here and in coreai-opt: names, states, outputs, gradients are equal."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from _peer import PeerError, both, call_peer, requires_peer

from bitwright.quantization.spec import RunningRangeMixin

_DTYPES = ("int8", "uint8", "int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2")


def run_eager(package: str, payload: Any) -> Any:
    """Build the model from its seed, prepare it, observe once more, and return all that can be compared."""
    import importlib
    import warnings

    import torch
    from torch import nn
    from torch.nn import functional as F

    quantization = importlib.import_module(f"{package}.quantization")
    torch.set_num_threads(1)
    torch.manual_seed(payload["seed"])

    class Residual(nn.Module):
        def __init__(self, width: int, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.first = nn.Linear(width, width)
            self.second = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.second(F.relu(self.first(x)))
            if self.kind == "add":
                return x + h
            if self.kind == "mul":
                h = torch.mul(h, 0.5)
                h += 1
                return h * x
            return torch.matmul(x, h.transpose(0, 1)) @ h - x

    class Convs(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, width, 3, padding=1)
            self.norm = nn.BatchNorm2d(width)
            self.back = nn.ConvTranspose2d(width, width, 2, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.norm(self.conv(torch.reshape(x, (-1, 1, 2, 4)))))
            return torch.flatten(F.max_pool2d(self.back(y), 2).mean(1), 1)

    class Model(nn.Module):
        def __init__(self, plan: Any) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                Convs(4) if kind == "conv" else nn.Linear(8, 8) if kind == "linear" else Residual(8, kind)
                for kind in plan["layers"]
            )
            if plan["shared"]:
                self.layers.append(self.layers[0])
            if plan["tied"]:
                self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
                self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.two(self.one(x)) if hasattr(self, "one") else x

    model = Model(payload["model"])
    x = torch.randn(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantizer = quantization.Quantizer(
            model, quantization.QuantizerConfig.from_dict({"quantization_config": payload["config"]})
        )
        prepared = quantizer.prepare((x,))
    quantizer.enable_observer()
    prepared.train()
    output = prepared(2 * x)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in prepared.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "state": dict(prepared.state_dict()), "gradients": gradients}


def _spec(rng: random.Random, weight: bool) -> dict[str, Any] | None:
    dtype = rng.choice(_DTYPES)
    spec: dict[str, Any] = {"dtype": dtype}
    if not dtype.startswith("float"):
        spec["qscheme"] = rng.choice(["symmetric", "asymmetric", "symmetric_with_clipping"])
        spec["qformulation"] = rng.choice(["zp", "minval"])
    if weight:
        spec["granularity"] = rng.choice(
            [
                {"type": "per_tensor"},
                {"type": "per_channel", "axis": 0},
                {"type": "per_block", "axis": 0, "block_size": 2},
            ]
        )
    else:
        spec["qparam_calculator_cls"] = rng.choice(["static", "moving_average", "global_minmax"])
    return rng.choice([spec, spec, None])


def _op_config(rng: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key in ("op_input_spec", "op_output_spec"):
        if rng.random() < 0.7:
            config[key] = rng.choice(
                [{"*": _spec(rng, False)}, {0: _spec(rng, False), "*": _spec(rng, False)}, None, {}]
            )
    if rng.random() < 0.7:
        config["op_state_spec"] = rng.choice([{"weight": _spec(rng, True)}, {"*": _spec(rng, True)}, None])
    return config


def _module_config(rng: random.Random, boundary: bool) -> dict[str, Any]:
    config = _op_config(rng)
    if rng.random() < 0.4:
        types = rng.sample(["linear", "add", "matmul", "conv2d", "mul"], 2)
        config["op_type_config"] = {name: rng.choice([_op_config(rng), None]) for name in types}
    if boundary and rng.random() < 0.5:
        config["module_input_spec"] = {0: _spec(rng, False)}
        config["module_output_spec"] = {"*": _spec(rng, False)}
    if boundary and rng.random() < 0.3:
        config["module_state_spec"] = {"weight": _spec(rng, True), "bias": None}
    return config


def _payload(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    layers = [rng.choice(["linear", "add", "mul", "matmul", "conv"]) for _ in range(rng.randint(1, 4))]
    config: dict[str, Any] = {"execution_mode": "eager"}
    if rng.random() < 0.7:
        config["global_config"] = rng.choice([_module_config(rng, False), None])
    if rng.random() < 0.5:
        # Where a boundary tensor has consumers outside the module, coreai-opt drops theirs: docs/differences.md.
        alone = set(layers) <= {"linear", "conv"}
        config["module_type_configs"] = {"torch.nn.modules.linear.Linear": _module_config(rng, alone)}
    if rng.random() < 0.6:
        config["module_name_configs"] = {
            name: rng.choice([_module_config(rng, True), None])
            for name in rng.sample([r"layers\.0", r"layers\..*", ""], 2)
        }
    model = {"layers": layers, "shared": rng.random() < 0.3, "tied": rng.random() < 0.3}
    return {"seed": seed, "model": model, "config": config}


@requires_peer
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_random_models_and_configs_are_equal(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty random cases each; a case that the peer refuses is refused here too, or listed as a difference."""
    # The peer moves a range at every call of a shared module: docs/differences.md.
    monkeypatch.setattr(RunningRangeMixin, "tensors_per_step", property(lambda self: 1, lambda self, number: None))
    for seed in range(start, start + 20):
        payload = _payload(seed)
        ours, theirs = both(run_eager, payload)
        # The peer also puts a simulator on the tensor that `x.dim()` is asked of, where a module has boundary specs.
        theirs["state"] = {name: value for name, value in theirs["state"].items() if ".dim_quantize_" not in name}
        assert ours["state"].keys() == theirs["state"].keys(), seed
        for name, value in theirs["state"].items():
            assert torch.equal(ours["state"][name], value), (seed, name)
        assert torch.equal(ours["output"], theirs["output"]), seed
        assert ours["gradients"].keys() == theirs["gradients"].keys(), seed
        for name, value in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][name], value), (seed, name)


def prepare_without_axis(package: str, payload: Any) -> Any:
    """Prepare a model whose granularities name no axis; return the shape of the one scale."""
    import importlib
    import warnings

    import torch
    from torch import nn

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.layer(x), self.factor)

    quantization = importlib.import_module(f"{package}.quantization")
    states = {payload["state"]: {"dtype": "int8", "granularity": payload["granularity"]}}
    entry = {"op_input_spec": None, "op_output_spec": None, "op_state_spec": states}
    config = {"global_config": entry, "execution_mode": payload["mode"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantizer = quantization.Quantizer(
            Product(), quantization.QuantizerConfig.from_dict({"quantization_config": config})
        )
        prepared = quantizer.prepare((torch.randn(2, 4),))
    (scale,) = (value for name, value in prepared.state_dict().items() if name.endswith("qparams_calculator.scale"))
    return list(scale.shape)


@requires_peer
@pytest.mark.parametrize(
    ("state", "granularity", "mode", "shape"),
    [
        ("bias", {"type": "per_channel"}, "eager", [8]),
        ("factor", {"type": "per_channel"}, "eager", [1, 6]),
        ("factor", {"type": "per_block", "block_size": 2}, "eager", [4, 6]),
        ("factor", {"type": "per_channel"}, "graph", [1, 6]),
    ],
)
def test_only_here_the_op_decides_on_the_axis(state: str, granularity: Any, mode: str, shape: list[int]) -> None:
    """Of a bias, and of a parameter that a function reads: docs/differences.md."""
    payload = {"state": state, "granularity": granularity, "mode": mode}
    assert prepare_without_axis("bitwright", payload) == shape
    with pytest.raises(PeerError) as refused:
        call_peer(prepare_without_axis, payload)
    assert refused.value.kind == "ValueError"
