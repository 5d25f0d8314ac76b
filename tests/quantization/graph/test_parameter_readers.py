"""Parameters that something else than a layer reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from tests.lambda_module import Lambda

from .networks import calibrated


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_every_reader_of_a_quantized_weight_reads_the_quantized_one(mode: str) -> None:
    """A penalty or a tied product sees the weight that the layer computes with."""

    def forward(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return s.layer(x), s.layer.weight * 1.0, s.layer.weight.abs().sum(1)

    torch.manual_seed(0)
    model, x = Lambda(forward, layer=nn.Linear(8, 6)).eval(), torch.randn(4, 8)
    config = QuantizerConfig.presets.w4(execution_mode=mode)
    result, weight, norm = Quantizer(copy.deepcopy(model), config).prepare((x,))(x)
    assert not torch.equal(weight, model.layer.weight)
    assert all(len(row.unique()) <= 16 for row in weight)
    torch.testing.assert_close(result, x @ weight.T + model.layer.bias)
    torch.testing.assert_close(norm, weight.abs().sum(1))


def test_a_parameter_behind_flatten_has_a_simulator_of_its_own() -> None:
    """Its range is its own, a hundred times that of the activation that it is added to."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return s.layer(x) + torch.flatten(s.offset)

    torch.manual_seed(0)
    model = Lambda(forward, layer=nn.Linear(8, 8)).eval()
    model.offset = nn.Parameter(100 * torch.randn(2, 4))
    x = torch.randn(4, 8)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8())
    groups = {row.tensor: row.group for row in quantizer.plan((x,)).rows}
    assert groups["flatten[output 0]"] != groups["linear[output 0]"]
    prepared = calibrated(quantizer, (x,))
    assert (prepared(x) - model(x)).abs().max() < 0.02 * model.offset.abs().max()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": torch.flatten,
    "view": lambda w: w.view(8),
    "reshape of a transposition": lambda w: w.T.reshape(8),
    "cut": lambda w: w.split([1, 1])[1].expand(2, 4).reshape(8),
}


@pytest.mark.parametrize(("view", "key"), [*((view, "module") for view in VIEWS), ("flatten", "op"), ("cut", "op")])
def test_a_parameter_with_a_spec_of_its_own_is_quantized_once(view: str, key: str) -> None:
    """Behind a view its numbers lie on the grid of its own spec; a second, other grid would round them again."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return x + VIEWS[view](s.offset)

    torch.manual_seed(0)
    model = Lambda(forward).eval()
    model.offset = nn.Parameter(torch.randn(2, 4))
    spec = {"offset": QuantizationSpec(dtype="int4")}
    sections = {"op_state_spec": spec} if key == "op" else {"op_state_spec": None, "module_state_spec": spec}
    rules = ModuleQuantizerConfig(op_output_spec=None, **sections)
    config = QuantizerConfig(global_config=None, module_name_configs={"": rules})
    x = torch.zeros(3, 8)
    quantizer = Quantizer(model, config)
    simulated = [row.tensor for row in quantizer.plan((x,)) if row.spec is not None]
    assert simulated == ["offset", "add[input]"]
    scale = model.offset.abs().max() / 7.5
    grid = (model.offset / scale).round().clamp(-8, 7) * scale
    torch.testing.assert_close(quantizer.prepare((x,))(x), x + VIEWS[view](grid))
