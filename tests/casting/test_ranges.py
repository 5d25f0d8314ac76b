"""Interval analysis: bounds hold for what the program computes, and are tight where they can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Interpreter, Node

from bitwright.casting._intervals import Interval, dtype_interval
from bitwright.casting._ranges import RangeAnalysis

from .programs import export
from .test_int_cast import INTEGER_OPS, RandomIntegers

#: Expressions of a float tensor x of shape (5, 7) and an unbounded integer tensor i, and their bounds. None: nothing is
#: known, or the arithmetic may wrap around.
EXPRESSIONS: list[tuple[Any, tuple[int, int] | None]] = [
    (lambda x, i: x.argmax(1), (0, 6)),
    (lambda x, i: x.argmax(), (0, 34)),
    (lambda x, i: x.sort(0).indices, (0, 4)),
    (lambda x, i: x.topk(2, 1).indices, (0, 6)),
    (lambda x, i: x.max(0).indices, (0, 4)),
    (lambda x, i: torch.arange(3, 40, 5), (3, 39)),
    (lambda x, i: torch.arange(10, 0, -3), (1, 10)),
    (lambda x, i: (x > 0).sum(), (0, 35)),
    (lambda x, i: (x > 0).sum(1), (0, 7)),
    (lambda x, i: torch.nonzero(x), (0, 6)),
    (lambda x, i: torch.bucketize(x, torch.tensor([0.0, 1.0, 2.0])), (0, 3)),
    (lambda x, i: i.clamp(-3, 9), (-3, 9)),
    (lambda x, i: i % 10, (0, 9)),
    (lambda x, i: torch.full((3,), 7) * 2, (14, 14)),
    (lambda x, i: torch.tensor([4, -9]) + 0 * x.argmax(), (-9, 4)),
    (lambda x, i: torch.where(x > 0, 5, -2), (-2, 5)),
    (lambda x, i: torch.ones(4, dtype=torch.int64).cumsum(0), (0, 4)),
    (lambda x, i: x.shape[0] * torch.ones(2, dtype=torch.int64), (5, 5)),
    (lambda x, i: x[0, :2].to(torch.uint8).long() + i.to(torch.int8), (-128, 255 + 127)),
    (lambda x, i: (x.argmax(1) + 1).bool().long(), (1, 1)),
    (lambda x, i: i.clamp(x.argmax(), x.argmin() - 40), (-40, -6)),
    (lambda x, i: (i.clamp(-3, 9) - 20).abs(), (11, 23)),
    (lambda x, i: -i.clamp(-3, 9), (-9, 3)),
    (lambda x, i: i.clamp(-3, 9).max(), (-3, 9)),
    (lambda x, i: torch.maximum(i.clamp(-3, 9), x.argmax()), (0, 34)),
    (lambda x, i: torch.minimum(i.clamp(-3, 9), x.argmax()), (-3, 9)),
    (lambda x, i: torch.maximum(i, x.argmax()), None),
    (lambda x, i: i.clamp(-3, 9).masked_fill(i > 2, 40), (-3, 40)),
    (lambda x, i: torch.nn.functional.pad(x.argmax(1), (1, 1), value=-2), (-2, 6)),
    (lambda x, i: torch.tril(torch.full((3, 3), 5)), (0, 5)),
    (lambda x, i: x.argmax(1).scatter(0, i * 1, 11), (0, 11)),
    (lambda x, i: x.argmax(1).scatter_add(0, i * 1, i), None),
    (lambda x, i: torch.slice_scatter(x.argmax(1), torch.tensor([8, 9]), 0, 0, 2), (0, 9)),
    (lambda x, i: x.argmax(1).index_put((i * 1,), torch.tensor(8)), (0, 8)),
    (lambda x, i: x.argmax(1).index_put((i * 1,), torch.tensor(8), accumulate=True), None),
    (lambda x, i: (i.clamp(-9, 9) - 1) // 4, (-3, 2)),
    (lambda x, i: torch.div(i.clamp(-9, 9), 4, rounding_mode="trunc"), (-2, 2)),
    (lambda x, i: i.clamp(-9, 9) // i, None),
    (lambda x, i: i % -10, None),
    (lambda x, i: torch.fmod(i, -10), (-9, 9)),
    (lambda x, i: torch.rsub(i.clamp(-3, 9), x.argmax(), alpha=2), (-18, 40)),
    (lambda x, i: torch.rsub(i.clamp(-3, 9), x.argmax()), (-9, 37)),
    (lambda x, i: torch.sub(x.argmax(), i.clamp(-3, 9), alpha=2), (-18, 40)),
    (lambda x, i: x.argmax(1) & 5, (0, 7)),
    (lambda x, i: i & 5, None),
    (lambda x, i: torch.count_nonzero(x, 1), (0, 7)),
    (lambda x, i: torch.randint(3, 10, (2,)), (3, 9)),
    (lambda x, i: torch.sign(i), (-1, 1)),
    (lambda x, i: torch.split(x.argmax(1), 2)[1], (0, 6)),
    (lambda x, i: torch.nn.functional.one_hot(x.argmax(1), 7), (0, 1)),
    (lambda x, i: torch.embedding(torch.tensor([[3], [-4], [9]]), i * 1), (-4, 9)),
    (lambda x, i: torch.empty(0, dtype=torch.int64) + 3, None),
    (lambda x, i: i + 1, None),
    (lambda x, i: x.long(), None),
    (lambda x, i: i.sum(), None),
    (lambda x, i: torch.tensor([2**62]) * (x.argmax() + 4), None),
    (lambda x, i: x.view(torch.int32), None),
]


class Expressions(nn.Module):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x, i) for function, _ in EXPRESSIONS)


@pytest.fixture(scope="module")
def bounds() -> list[Interval | None]:
    program = export(Expressions(), torch.rand(5, 7), torch.tensor([1, 2]))
    intervals = RangeAnalysis(program).intervals
    return [intervals.get(node) for node in program.graph.output_node().args[0]]


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_bounds_of_single_expressions(bounds: list[Interval | None], number: int) -> None:
    assert bounds[number] == EXPRESSIONS[number][1]


def test_interval_arithmetic() -> None:
    a, b = Interval(-3, 4), Interval(2, 9)
    assert (a.magnitude, a.hull(b), a.meet(b)) == (4, Interval(-3, 9), Interval(2, 4))
    assert Interval(1, 2).meet(Interval(5, 6)) == Interval(1, 2)
    assert b.within(Interval(2, 9))
    assert not b.within(a)
    assert dtype_interval(torch.int16) == Interval(-32768, 32767)
    assert dtype_interval(torch.bool) == Interval(0, 1)


class _Values(Interpreter):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(INTEGER_OPS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8
    )
)
def test_every_value_lies_inside_its_bounds(steps: list[tuple[int, int, int]]) -> None:
    inputs = (torch.tensor([-20, 30, 7, 0]), torch.tensor([20, -30, 5, 1]), torch.randn(4, 6))
    program = export(RandomIntegers(steps), *inputs)
    a, b, _ = [node for node in program.graph.nodes if node.op == "placeholder"][-3:]
    known = RangeAnalysis(program, {a: Interval(-20, 30), b: Interval(-30, 20)}).intervals
    interpreter = _Values(program.graph_module)
    interpreter.run(*program._graph_module_flat_inputs(inputs, {}))
    for node, value in interpreter.values.items():
        if node in known and isinstance(value, torch.Tensor):
            assert Interval(int(value.min()), int(value.max())).within(known[node]), node.format_node()
