"""Overflows found by running example inputs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from bitwright.casting import cast_fp32_to_bf16, cast_fp32_to_fp16, cast_to_16_bit_precision

from .programs import Overflowing, dtype, export, find, run, sqnr

ATEN = torch.ops.aten
X = torch.tensor([[12.0, 3.0]])


def test_without_example_inputs_the_overflow_happens() -> None:
    """The tests below would show nothing if it did not."""
    program = cast_fp32_to_fp16(export(Overflowing(), X))
    assert run(program, X.half())[0].isinf().any()


@pytest.mark.parametrize(
    "given",
    [
        {"example_inputs": (X,)},
        {"example_inputs": X},
        {"example_inputs": {"x": X}},
        {"example_inputs": ((X,), {})},
        {"example_inputs": [(X * 0,), (X,)]},
        {"calibration_data": torch.utils.data.DataLoader([X[0], X[0]], batch_size=1)},
    ],
    ids=["tuple", "tensor", "mapping", "pair", "calls", "loader"],
)
def test_overflowing_nodes_stay_float32(given: dict[str, object]) -> None:
    """exp and the product that read it stay; logarithm fits again, and the rest is float16."""
    program = export(Overflowing(), X)
    reference = run(program, X)[0]
    cast_to_16_bit_precision(program, **given)
    for op in (ATEN.exp.default, ATEN.mul.Tensor, ATEN.log.default):
        assert dtype(find(program, op)) == torch.float32
    assert dtype(find(program, ATEN.add.Tensor)) == torch.float16
    assert sqnr(reference, run(program, X.half())[0]) > 60


def test_overflowing_nodes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bitwright.casting"):
        cast_fp32_to_fp16(export(Overflowing(), X), example_inputs=(X,))
    assert "2 values overflow torch.float16" in caplog.text
    assert "exp, mul" in caplog.text


def test_bfloat16_has_the_range() -> None:
    program = cast_fp32_to_bf16(export(Overflowing(), X), example_inputs=(X,))
    assert dtype(find(program, ATEN.exp.default)) == torch.bfloat16
    assert run(program, X.bfloat16())[0].isfinite().all()


def test_result_that_overflows_stays_float32() -> None:
    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.exp(x), x + 1

    program = cast_fp32_to_fp16(export(Exp(), X), example_inputs=(X,))
    large, small = run(program, X.half())
    assert (large.dtype, small.dtype) == (torch.float32, torch.float16)
    assert torch.allclose(large, X.exp())


def test_input_that_overflows_stays_float32() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    x = torch.tensor([1e6, 2.0])
    program = cast_fp32_to_fp16(export(Log(), x), example_inputs=(x,))
    assert program.example_inputs[0][0].dtype == torch.float32
    assert sqnr(x.log(), run(program, x)[0]) > 60


def test_one_of_several_outputs_overflows() -> None:
    """Parts of a split are judged one by one."""

    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = torch.split(torch.exp(x), 1, -1)
            return torch.log(a), b * 3

    program = cast_fp32_to_fp16(export(Split(), X), example_inputs=(X,))
    first, second = run(program, X.half())
    assert torch.allclose(first.float(), X[:, :1])
    assert torch.allclose(second.float(), X[:, 1:].exp() * 3, rtol=2e-3)
    assert dtype(find(program, ATEN.mul.Tensor)) == torch.float16


def test_buffer_that_grows_beyond_float16_stays_float32() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.full((2,), 6e4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return x * 2

    x = torch.full((2,), 1e4)
    program = cast_fp32_to_fp16(export(Total(), x), example_inputs=(x,))
    assert program.state_dict["total"].dtype == torch.float32
    module = program.module()
    module(x.half())
    assert module.get_buffer("total").tolist() == [7e4, 7e4]


def test_infinities_of_a_mask_are_no_overflow() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x > 5, float("-inf")).softmax(-1)

    program = cast_fp32_to_fp16(export(Masked(), X), example_inputs=(X,))
    assert dtype(find(program, ATEN._softmax.default)) == torch.float16


def test_two_inputs_and_keywords() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
            return torch.log(torch.exp(a) + b)

    for inputs in ({"a": X, "b": X}, ((X,), {"b": X})):
        program = torch.export.export(Two(), (X,), {"b": X}).run_decompositions()
        cast_fp32_to_fp16(program, example_inputs=inputs)
        assert run(program, X.half(), b=X.half())[0].isfinite().all()


@pytest.mark.parametrize("wrong", [(X, X), {"y": X}, 3, "x", [(X,), (X, X)]])
def test_inputs_that_do_not_fit_are_refused(wrong: object) -> None:
    program = export(Overflowing(), X)
    code = program.graph_module.code
    with pytest.raises(ValueError, match=r"do not fit the program, whose arguments are x"):
        cast_fp32_to_fp16(program, example_inputs=wrong)
    assert program.graph_module.code == code


def test_no_call_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no call"):
        cast_fp32_to_fp16(export(Overflowing(), X), calibration_data=[])
