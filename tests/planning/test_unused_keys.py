"""Keys of input and output specs: said where nothing can use them that they are meant for, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import OpQuantizerConfig

OFF: dict[str, Any] = dict.fromkeys(("op_input_spec", "op_output_spec", "op_state_spec"))
SPEC = QuantizationSpec()
BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])


class Masked(nn.Module):
    """A layer, a sum with a number, and an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x) + 2
        return y if mask is None else y * mask


def said(mode: str, module: nn.Module | None = None, **config: Any) -> list[str]:
    """Return where the plan's problems are, and what they say."""
    model = nn.Sequential(nn.Linear(4, 4)) if module is None else module
    given = {"global_config": None, **config}
    plan = Quantizer(model.eval(), QuantizerConfig(execution_mode=mode, **given)).plan((torch.randn(2, 4),))
    assert all(problem.code == "unmatched-key" for problem in plan.problems)
    return [f"{problem.where}: {problem.message}" for problem in plan.problems]


def layer(**specs: Any) -> dict[str, Any]:
    """Return a configuration of the model's first module alone."""
    return {"module_name_configs": {"0": ModuleQuantizerConfig(**{**OFF, **specs})}}


@BOTH
@pytest.mark.parametrize("key", ["hidden_states", 7, -1])
def test_inputs_of_a_module(mode: str, key: str | int) -> None:
    """nn.Linear has one input, called "input"."""
    (message,) = said(mode, **layer(module_input_spec={key: SPEC}))
    assert message.startswith(f"module_name_configs['0'].module_input_spec[{key!r}]: matches nothing")
    assert "0 ('input')" in message


@BOTH
@pytest.mark.parametrize("key", [3, "out"])
def test_outputs_of_a_module(mode: str, key: str | int) -> None:
    """Outputs have positions only."""
    (message,) = said(mode, **layer(module_output_spec={key: SPEC}))
    assert f"module_output_spec[{key!r}]" in message


@BOTH
@pytest.mark.parametrize("key", [-1, 7])
def test_inputs_of_an_op(mode: str, key: int) -> None:
    """Wherever the dictionary stands."""
    (message,) = said(mode, **layer(op_input_spec={key: SPEC}))
    assert f"op_input_spec[{key}]" in message
    entry = OpQuantizerConfig(op_input_spec={key: SPEC}, op_output_spec=None, op_state_spec=None)
    (message,) = said(mode, **layer(op_type_config={"linear": entry}))
    assert f"op_type_config['linear'].op_input_spec[{key}]" in message


def test_outputs_of_an_op() -> None:
    """Graph mode refuses all keys but one as it is."""
    (message,) = said("eager", **layer(op_output_spec={1: SPEC}))
    assert "op_output_spec[1]" in message


def test_weights_are_no_inputs() -> None:
    """Graph mode has an error of its own for that."""
    (message,) = said("eager", **layer(op_input_spec={1: SPEC, 0: SPEC}))
    assert "op_input_spec[1]" in message
    assert "'0.weight' is read there, and op_state_spec" in message


@BOTH
def test_strict_makes_it_an_error(mode: str) -> None:
    """Like any key that matches nothing."""
    config = QuantizerConfig(execution_mode=mode, global_config=None, **layer(module_input_spec={7: SPEC}))
    with pytest.raises(PlanError, match=r"module_input_spec\[7\]"):
        Quantizer(nn.Sequential(nn.Linear(4, 4)).eval(), config).prepare((torch.randn(1, 4),), strict=True)


@BOTH
@pytest.mark.parametrize(
    "specs",
    [
        {"module_input_spec": {"mask": SPEC, 1: SPEC}},  # not given this time
        {"module_input_spec": {"x": SPEC, 0: SPEC, "*": SPEC}},
        {"module_input_spec": {"mask_3": SPEC}},  # a tuple, another time
        {"module_output_spec": {0: SPEC, "*": None}},
        {"op_input_spec": {7: None, 0: SPEC}},  # says "leave it alone"
        {"op_input_spec": {"*": SPEC}},
        {
            "op_type_config": {
                "add": OpQuantizerConfig(op_input_spec={0: SPEC, 1: SPEC}, op_output_spec={0: SPEC}, op_state_spec=None)
            }
        },  # the second is a number
    ],
    ids=str,
)
def test_what_may_be_there_another_time(mode: str, specs: dict[str, Any]) -> None:
    """Nothing is said."""
    assert said(mode, Masked(), module_name_configs={"": ModuleQuantizerConfig(**{**OFF, **specs})}) == []


@BOTH
def test_one_of_many_is_enough(mode: str) -> None:
    """A part of the configuration for several modules and ops may name what only some of them have."""
    model = nn.Sequential(nn.Linear(4, 4), Masked())
    specs: dict[str, Any] = {**OFF, "module_input_spec": {"x": SPEC, "input": SPEC}}
    assert said(mode, model, module_name_configs={"0|1": ModuleQuantizerConfig(**specs)}) == []
    adds = ModuleQuantizerConfig(**{**OFF, "op_input_spec": {1: SPEC}})
    if mode == "eager":  # graph mode refuses it for the layer
        assert said(mode, Masked(), global_config=adds) == []
