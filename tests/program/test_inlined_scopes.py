"""Layers inside ``torch.autocast``, ``torch.enable_grad`` and ``torch.cond`` in graph mode: seen, or told of."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigMatchWarning, PlanError
from bitwright.program.graph import capture_graph
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig

SCOPES: dict[str, Callable[[], Any]] = {
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "gradients": torch.enable_grad,
}


class Scoped(nn.Module):
    """Two results leave the scope, and its input, as it is."""

    def __init__(self, scope: Callable[[], Any]) -> None:
        super().__init__()
        self.scope = scope
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.scope():
            y = self.norm(self.first(x)).relu()
            z, same = y + 1, x
        return self.last(y) + z.mean() + same.sum()


class Nested(nn.Module):
    """A scope of each kind in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.first(x)
            with torch.enable_grad():
                y = self.last(y)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    z = y @ y.T
        return y + z.float().sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, lambda y: self.first(y), lambda y: self.first(y) * 2, (x,))
        return self.last(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [*(lambda s=scope: Scoped(s) for scope in SCOPES.values()), Nested])
def test_graphs_compute_what_the_model_does(make: Callable[[], nn.Module], training: bool) -> None:
    """Numbers, statistics and gradients, also of a copy and after pickling."""
    torch.manual_seed(0)
    model, x = make().train(training), torch.randn(5, 8)
    graph, program = capture_graph(model, (x,))
    assert {"first", "last"} <= {op.module_path for op in program.ops if op.type == "linear"}
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        reference = copy.deepcopy(model)
        found, expected = twin(x), reference(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        parameters = dict(twin.named_parameters())
        for name, parameter in reference.named_parameters():
            assert parameters[name].grad is not None
            torch.testing.assert_close(parameters[name].grad, parameter.grad)
        for name, buffer in reference.named_buffers():
            assert torch.equal(twin.get_buffer(name), buffer)


def test_names_are_those_without_the_scope() -> None:
    """op_name_config matches the same."""
    x = torch.randn(5, 8)
    _, plain = capture_graph(Scoped(contextlib.nullcontext).eval(), (x,))
    for scope in SCOPES.values():
        graph, program = capture_graph(Scoped(scope).eval(), (x,))
        assert [(op.name, op.module_path) for op in program.ops] == [(op.name, op.module_path) for op in plain.ops]
        assert set(dict(graph.named_modules())) == {"", "first", "norm", "last"}


def test_scopes_without_weights_stay() -> None:
    """They keep their precision where the whole model runs under autocast."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                table = x @ x.T
            return self.layer(x) + table.sum()

    torch.manual_seed(0)
    model, x = Rotary().eval(), torch.randn(5, 8)
    graph, _ = capture_graph(model, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(graph(x), model(x))


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_layers_inside_are_quantized(scope: Callable[[], Any]) -> None:
    """As they are without the scope."""
    torch.manual_seed(0)
    x, model = torch.randn(5, 8), Scoped(scope).eval()
    plain = Scoped(contextlib.nullcontext).eval()
    plain.load_state_dict(model.state_dict())
    expected = Quantizer(plain, QuantizerConfig()).prepare((x,), strict=True)
    prepared = Quantizer(model, QuantizerConfig()).prepare((x,), strict=True)
    assert torch.equal(prepared(x), expected(x))
    assert not torch.equal(prepared(x), model(x))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Scoped(lambda: torch.autocast("cpu", dtype=torch.bfloat16)), "wrap_with_autocast"),
        (Branches, "cond"),
    ],
)
def test_layers_that_stay_inside_are_told(make: Callable[[], nn.Module], place: str) -> None:
    """One warning, or an error with strict=True; none where the configuration says to leave the layer alone."""
    x, config = torch.randn(5, 8), QuantizerConfig.presets.w8()
    with pytest.warns(ConfigMatchWarning, match=rf"enclosed-weight.*1 weight.*first\.weight \({place}\)"):
        Quantizer(make().eval(), config).prepare((x,))
    with pytest.raises(PlanError, match=r"module_state_spec"):
        Quantizer(make().eval(), config).prepare((x,), strict=True)
    Quantizer(make().eval(), config.set_module_name("first", None)).prepare((x,), strict=True)


def test_they_can_be_named() -> None:
    """What the warning says: module_state_spec reaches them."""
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.rand(5, 8)
    off = dict.fromkeys(("op_input_spec", "op_output_spec", "op_state_spec"))
    named = ModuleQuantizerConfig(**off, module_state_spec={"weight": QuantizationSpec(dtype="int4")})
    config = QuantizerConfig(global_config=None, module_name_configs={"first": named})
    prepared = Quantizer(model, config).prepare((x,), strict=True)
    assert not torch.equal(prepared(x), model(x))
