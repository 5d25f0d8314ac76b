"""Graphs inside of graphs, and programs that hold bfloat16 already."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule

from bitwright.casting import cast_fp32_to_fp16, cast_to_16_bit_precision

from .programs import check_metadata, dtype, export, find, node_dtypes, run, sqnr

ATEN = torch.ops.aten


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: self.fc(a).relu(), lambda a: torch.log(torch.exp(a * 2.0)), (x,)) + 1


class Scanned(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(lambda c, row: (c * 0.5 + row, torch.tanh(c)), torch.zeros(4), x)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, self.fc(v)), (torch.tensor(0), x))


class Mapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return map_over(lambda row, s: torch.sin(row) * s, x, x[0] + 1)


def _inner_graphs(program: torch.export.ExportedProgram) -> list[torch.fx.Graph]:
    return [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)][1:]


@pytest.mark.parametrize(
    ("model", "target"),
    [
        (Branches, torch.float16),
        (Branches, torch.bfloat16),
        (Scanned, torch.float16),
        (Looped, torch.bfloat16),
        (Mapped, torch.float16),
    ],
)
def test_called_graphs_are_cast_with_their_callers(model: type[nn.Module], target: torch.dtype) -> None:
    """No float32 is left inside or outside, metadata is true, results are close on both branches."""
    torch.manual_seed(0)
    for x in (torch.rand(3, 4), -torch.rand(3, 4))[: 2 if model is Branches else 1]:
        program = export(model(), x)
        reference = run(program, x)
        assert _inner_graphs(program)
        cast_to_16_bit_precision(program, dtype=target)
        assert node_dtypes(program)[torch.float32] == 0
        check_metadata(program, x.to(target))
        for exact, result in zip(reference, run(program, x.to(target)), strict=True):
            assert result.dtype == (target if exact.is_floating_point() else exact.dtype)
            assert sqnr(exact, result) > (55 if target is torch.float16 else 38)


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize(
    ("target", "end", "step"), [(torch.bfloat16, 10.0, 0.01), (torch.float16, 3000.0, 1.0), (torch.float16, 1.0, 3e-4)]
)
def test_loops_over_floats_make_the_same_steps(target: torch.dtype, end: float, step: float, decompose: bool) -> None:
    """2 + 0.01 is 2 in bfloat16, and 2048 + 1 is 2048 in float16: such loops would not end."""

    class Timed(nn.Module):
        def forward(self, x: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return while_loop(
                # The second condition ends a loop that the cast has broken.
                lambda t, n, v: (t < limit.clone()) & (n < 9999),
                lambda t, n, v: (t + step, n + 1, v * 0.999),
                (torch.zeros(()), torch.tensor(0), x * 2),
            )

    x, limit = torch.ones(2), torch.tensor(end)
    program = export(Timed(), x, limit, decompose=decompose)
    exact = run(program, x, limit)
    assert exact[1] < 9999
    cast_fp32_to_fp16(program, dtype=target)
    check_metadata(program, x.to(target), limit.to(target))
    result = run(program, x.to(target), limit.to(target))
    assert [r.dtype for r in result] == [target, torch.int64, target]
    assert result[1] == exact[1]
    assert torch.allclose(result[2].float(), exact[2], rtol=1e-2)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("decompose", [False, True])
def test_loops_over_a_flag_made_of_floats_make_the_same_steps(decompose: bool, written: bool) -> None:
    """The condition reads no float; the body computes the flag of the next step from two."""

    def step(flag: torch.Tensor, n: torch.Tensor, t: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (torch.zeros(1) if written else t[None] + 0.0005) * 1
        if written:
            total[0].add_(t + 0.0005)  # through a view
        return (total.sum() < 2) & (n < 4999), n + 1, total[0].clone(), v * 0.999

    class Flagged(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            start = (torch.tensor(True), torch.tensor(0), x.sum() * 0, x)
            return while_loop(lambda flag, n, t, v: flag.clone(), step, start)

    x = torch.ones(2)
    program = export(Flagged(), x, decompose=decompose)
    exact = run(program, x)
    assert exact[1] < 4900
    cast_fp32_to_fp16(program)
    check_metadata(program, x.half())
    result = run(program, x.half())
    assert [r.dtype for r in result] == [torch.bool, torch.int64, torch.float16, torch.float16]
    assert result[1] == exact[1]


def test_ignored_operator_inside_a_branch() -> None:
    program = export(Branches(), torch.rand(3, 4))
    cast_fp32_to_fp16(program, ATEN.exp)
    dtypes = {
        node.target: dtype(node)
        for graph in _inner_graphs(program)
        for node in graph.nodes
        if node.op == "call_function"
    }
    assert dtypes[ATEN.exp.default] == torch.float32
    assert dtypes[ATEN.relu.default] == torch.float16
    assert dtype(find(program, ATEN.add.Tensor)) == torch.float16


def test_overflow_inside_a_branch_is_found() -> None:
    x = torch.full((3, 4), -7.0)
    model = Branches()
    model.forward = lambda x: torch.cond(  # type: ignore[method-assign]
        x.sum() > 0, lambda a: a * 2, lambda a: torch.log(torch.exp(-a * 2.0)), (x,)
    )
    program = export(model, x)
    reference = run(program, x)[0]
    assert run(cast_fp32_to_fp16(export(model, x)), x.half())[0].isinf().any()
    cast_fp32_to_fp16(program, example_inputs=(x,))
    assert sqnr(reference, run(program, x.half())[0]) > 60


def test_branch_whose_result_overflows_keeps_the_whole_call() -> None:
    """Both branches have to yield one dtype, so the call stays float32 and what follows it is narrowed."""

    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(torch.cond(x.sum() > 0, lambda a: torch.exp(a), lambda a: a * 2, (x,)))

    x = torch.full((2,), 12.0)
    program = cast_fp32_to_fp16(export(Large(), x), example_inputs=(x,))
    assert {dtype(n) for g in _inner_graphs(program) for n in g.nodes if n.op == "call_function"} == {torch.float32}
    assert torch.allclose(run(program, x.half())[0].float(), x)


def test_constant_inside_a_branch_is_cast() -> None:
    """In the training IR a branch holds its tensor constants itself."""

    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a: a + torch.tensor([1.0, 2.5]), lambda a: a * 2, (x,))

    program = cast_fp32_to_fp16(export(Constant(), torch.ones(2), decompose=False))
    result = run(program, torch.ones(2).half())[0]
    assert result.dtype == torch.float16
    assert result.tolist() == [2.0, 3.5]


class Mixed(nn.Module):
    """A bfloat16 model with a normalisation in float32, as language models have it, and a float32 head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).bfloat16()
        self.gain = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.fc(x)
        wide = torch.cat([half * 1 for half in h.float().chunk(2, -1)], -1)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return wide.bfloat16(), self.head(y)


def test_graph_that_is_called_twice_is_cast_once_or_not_at_all() -> None:
    """One call of the shared graph overflows with these inputs, so both stay float32."""

    @torch.compiler.nested_compile_region
    def grow(a: torch.Tensor) -> torch.Tensor:
        return torch.exp(a) + 1

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.log(grow(x)), grow(y) * 2

    x, y = torch.full((3,), 12.0), torch.zeros(3)
    program = torch.export.export(Twice(), (x, y), strict=True)
    if len(_inner_graphs(program)) != 1:
        pytest.skip("this version of torch does not share the graph")
    cast_fp32_to_fp16(program)
    assert node_dtypes(program)[torch.float32] == 0
    check_metadata(program, x.half(), y.half())
    program = cast_fp32_to_fp16(torch.export.export(Twice(), (x, y), strict=True), example_inputs=(x, y))
    assert {dtype(n) for n in _inner_graphs(program)[0].nodes if n.op == "call_function"} == {torch.float32}
    first, second = run(program, x.half(), y.half())
    assert torch.allclose(first.float(), x, atol=1e-2)
    assert second.tolist() == [4.0] * 3


def test_effect_tokens_are_no_numbers() -> None:
    """The token that orders a check of ``linalg.inv`` is a float32 tensor only in name."""

    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) * 2

    x = torch.eye(3) * 4
    program = cast_fp32_to_fp16(export(Inverse(), x), example_inputs=(x,))
    tokens = [node for node in program.graph.nodes if node.op == "placeholder" and node.name == "token"]
    assert all(dtype(token) == torch.float32 and len(token.users) == 1 for token in tokens)
    assert run(program, x.half())[-1].tolist() == (torch.eye(3) / 2).tolist()


def test_bfloat16_values_never_pass_through_float16() -> None:
    """1e5 is a bfloat16 number and no float16 number: what bfloat16 feeds stays float32, the rest is cast."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 4).bfloat16() * 1e5, torch.randn(3, 4)
    program = export(Mixed(), x, y)
    reference = run(program, x, y)
    cast_fp32_to_fp16(program)
    assert program.state_dict["fc.weight"].dtype == torch.bfloat16
    assert program.state_dict["head.weight"].dtype == torch.float16
    check_metadata(program, x, y.half())
    normalised, head = run(program, x, y.half())
    assert normalised.dtype == torch.bfloat16
    assert sqnr(reference[0], normalised) > 50
    assert head.dtype == torch.float16


def test_pure_bfloat16_program_is_left_as_it_is() -> None:
    x = torch.randn(3, 4).bfloat16()
    program = export(nn.Linear(4, 4).bfloat16(), x)
    code = program.graph_module.code
    cast_to_16_bit_precision(program)
    assert program.graph_module.code == code
    check_metadata(program, x)


def test_mixed_program_becomes_all_bfloat16() -> None:
    x, y = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    program = export(Mixed(), x, y)
    reference = run(program, x, y)
    cast_fp32_to_fp16(program, dtype=torch.bfloat16)
    assert node_dtypes(program) == {torch.bfloat16: node_dtypes(program).total()}
    for exact, result in zip(reference, run(program, x, y.bfloat16()), strict=True):
        assert sqnr(exact, result) > 38


def test_float64_and_integers_are_left_alone() -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor, d: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.double() + d, i + 1, x * i

    inputs = (torch.randn(3), torch.randn(3, dtype=torch.float64), torch.arange(3))
    program = export(Double(), *inputs)
    cast_fp32_to_fp16(program)
    assert [r.dtype for r in run(program, inputs[0].half(), *inputs[1:])] == [torch.float64, torch.int64, torch.float16]
