"""Overflows found by running example inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitwright.casting import cast_fp32_to_bf16, cast_fp32_to_fp16, cast_to_16_bit_precision

from .programs import Overflowing, dtype, export, find, node_dtypes, run, sqnr

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


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).min, -1e38])
def test_finite_numbers_of_a_mask_are_no_overflow(largest: float) -> None:
    """Given as a scalar, made by an operator, held by a buffer or fed by the caller."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.tensor([0.0, largest]))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = torch.where(x > 5, torch.full((), largest), 0.0)
            scores = (x.masked_fill(x > 5, largest), x + made, x + self.held, x + mask)
            return tuple(score.softmax(-1) for score in scores)

    mask = torch.tensor([[largest, 0.0]])
    program = export(Masked(), X, mask)
    reference = run(program, X, mask)
    cast_fp32_to_fp16(program, example_inputs=(X, mask))
    assert [node for node in program.graph.nodes if node.op != "output" and dtype(node) == torch.float32] == []
    for expected, actual in zip(reference, run(program, X.half(), torch.tensor([[-65504.0, 0.0]]).half()), strict=True):
        assert torch.allclose(expected, actual.float(), atol=1e-3)


def test_computed_numbers_are_an_overflow_however_large() -> None:
    """exp(88) is beyond what stands for infinity; nobody gave it as a mask."""
    program = export(Overflowing(), X)
    large = torch.tensor([[88.0, 3.0]])
    cast_fp32_to_fp16(program, example_inputs=(large,))
    for op in (ATEN.exp.default, ATEN.mul.Tensor, ATEN.log.default):
        assert dtype(find(program, op)) == torch.float32


class Promoting(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.function(i, self.w)


@pytest.mark.parametrize(
    "function",
    [
        lambda i, w: i * w,
        lambda i, w: (w * 1e4) / i,
        lambda i, w: torch.cat([i, w]) * 0.5,
        lambda i, w: i.sum(0, dtype=torch.float32) * w * 0.2,
    ],
    ids=["product", "quotient", "join", "sum"],
)
def test_integer_operand_that_overflows_is_promoted_in_float32(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The integers exceed float16 although neither the other operand nor what the program returns does."""
    i = torch.tensor([86400, 5, -70000])
    program = export(Promoting(function), i)
    reference = run(program, i)[0]
    cast_fp32_to_fp16(program, example_inputs=(i,))
    assert program.state_dict["w"].dtype == torch.float16
    assert torch.allclose(reference, run(program, i)[0].float(), rtol=2e-3)


def test_integer_operand_that_is_proven_to_overflow_needs_no_example() -> None:
    program = export(Promoting(lambda i, w: torch.arange(70000, 70003) * w + i), torch.tensor(0))
    reference = run(program, torch.tensor(0))[0]
    cast_fp32_to_fp16(program)
    assert sqnr(reference, run(program, torch.tensor(0))[0]) > 60


def test_large_indices_are_no_overflow(caplog: pytest.LogCaptureFixture) -> None:
    """Only numbers that become floats count: not an index, a place that was found, or integer arithmetic."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(70001, 2)

        def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values, places = self.table.weight[:, 0].topk(2)
            return self.table(i) * 2, values, places + 69999, self.table.weight.argmax(0) + i, self.table.weight[i]

    i = torch.tensor([70000, 69999])
    model = Looked()
    with torch.no_grad():
        model.table.weight[-1] = 9.0
    program = export(model, i)
    with caplog.at_level(logging.WARNING, logger="bitwright.casting"):
        cast_fp32_to_fp16(program, example_inputs=(i,))
    assert node_dtypes(program)[torch.float32] == 0
    assert "overflow" not in caplog.text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.ones(1, 3), r"torch\.float32 tensor of shape \(1, 3\)"),
        (torch.ones(2), r"torch\.float32 tensor of shape \(2,\)"),
        (X.half(), r"torch\.float16 tensor of shape \(1, 2\)"),
    ],
)
def test_example_inputs_of_another_kind_are_refused(given: torch.Tensor, found: str) -> None:
    program = export(Overflowing(), X)
    with pytest.raises(ValueError, match=rf"example input for 'x' is a {found}.*torch\.float32 of shape \(1, 2\)"):
        cast_fp32_to_fp16(program, example_inputs=(given,))
    assert dtype(find(program, ATEN.exp.default)) == torch.float32


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
