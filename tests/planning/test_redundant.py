"""Simulators that would change nothing are left out; those in front of integer kernels stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import OpQuantizerConfig
from tests.lambda_module import Lambda

X = torch.randn(2, 6, 8)


def sites(function: Callable[..., Any], config: QuantizerConfig | None = None, **modules: Any) -> list[str]:
    """Where activations are simulated."""
    plan = Quantizer(Lambda(function, **modules).eval(), config or QuantizerConfig()).plan((X,))
    return [row.tensor for row in plan if row.kind == "activation"]


def attention(s: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (piece.view(2, 6, 2, 4).transpose(1, 2) for piece in s.qkv(x).chunk(3, -1))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 8))


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}


def test_attention_has_one_simulator_on_each_tensor() -> None:
    """Pieces and views of a simulated result are on its grid; that of attention is simulated in front of its reader."""
    found = sites(attention, **modules())
    assert found == ["linear[input]", "linear[output 0]", "linear_1[input]", "linear_1[output 0]"]


def test_the_plan_says_whose_simulator_serves() -> None:
    """The row that stays names the place that needs none."""
    plan = Quantizer(Lambda(attention, **modules()).eval(), QuantizerConfig()).plan((X,))
    notes = {row.tensor: row.note for row in plan}
    assert "scaled_dot_product_attention" in notes["linear_1[input]"] + notes["linear[output 0]"]
    assert "also for" in notes["linear_1[input]"]


def test_the_numbers_are_those_of_every_simulator() -> None:
    """Fake quantization is idempotent: a second one of the same scale behind the first changes nothing."""
    torch.manual_seed(0)
    model = Lambda(attention, **modules()).eval()
    quantizer = Quantizer(model, QuantizerConfig())
    prepared = quantizer.prepare((X,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(X)
    simulator = prepared.get_submodule("activation_post_process_2")
    with torch.no_grad():
        y = simulator(torch.randn(4, 6, 24))
        for piece in y.chunk(3, -1):
            assert torch.equal(
                simulator(piece.view(4, 6, 2, 4).transpose(1, 2)), piece.view(4, 6, 2, 4).transpose(1, 2)
            )


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.out(s.qkv(x).chunk(3, -1)[0]),
        lambda s, x: s.qkv(x).chunk(3, -1)[0].transpose(1, 2) @ x,
        lambda s, x: s.qkv(x).chunk(3, -1)[0],
    ],
    ids=["layer", "product", "output"],
)
def test_integer_kernels_keep_a_scale_at_their_inputs(function: Callable[..., Any]) -> None:
    """A piece that a layer or a product reads, or that the model returns, has its simulator."""
    assert any(name.startswith(("chunk", "getitem", "transpose")) for name in sites(function, **modules()))


def test_another_spec_is_not_redundant() -> None:
    """An op that asks for other parameters than those of the grid in front of it gets them."""
    int4 = OpQuantizerConfig(op_input_spec={"*": QuantizationSpec(dtype="int4")}, op_output_spec=None)
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_type_config={"scaled_dot_product_attention": int4}))
    plan = Quantizer(Lambda(attention, **modules()).eval(), config).plan((X,))
    in_four_bits = {
        row.tensor for row in plan if row.kind == "activation" and row.spec is not None and row.spec.n_bits == 4
    }
    assert {"transpose[output 0]", "transpose_1[output 0]", "transpose_2[output 0]"} <= in_four_bits


def test_a_result_that_is_read_without_a_simulator_keeps_its_own() -> None:
    """Attention whose result is returned, too, is simulated where it is made."""

    def both(s: Any, x: torch.Tensor) -> Any:
        y = F.scaled_dot_product_attention(x, x, x)
        return s.out(y.reshape(2, 6, 8)), y

    assert "scaled_dot_product_attention[output 0]" in sites(both, **modules())
