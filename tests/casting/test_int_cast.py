"""int16 only with a proof."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bitwright.casting import CastingWarning, cast_int32_to_int16, cast_to_16_bit_precision

from .programs import check_metadata, dtype, export, find, node_dtypes, run

ATEN = torch.ops.aten


class Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).reshape(-1)


class TopIndex(nn.Module):
    """argmax over 10 classes, plus a constant: bounds follow from the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 10)
        self.register_buffer("offset", torch.tensor([3]))

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.embedding(i))
        return scores, scores.argmax(-1) + self.offset


A, B = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_unbounded_inputs_are_left_alone_with_a_warning_that_names_the_node(integer: torch.dtype) -> None:
    """40000 + 1 stays 40001."""
    a, b = torch.tensor([40000], dtype=integer), torch.tensor([1], dtype=integer)
    program = export(Sum(), a, b)
    with pytest.warns(
        CastingWarning, match=r"add \(add has no bounds, a has no bounds, b has no bounds\).*value_ranges"
    ):
        assert cast_int32_to_int16(program) is program
    assert run(program, a, b)[0].tolist() == [40001]
    assert torch.int16 not in node_dtypes(program)
    assert program.example_inputs[0][0].dtype == integer


def test_declared_ranges_are_a_proof(tmp_path: Path) -> None:
    """Inputs become int16, the result keeps its dtype, and the program saves, loads and exports."""
    program = export(Sum(), A, B)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast_int32_to_int16(program, value_ranges={"a": (0, 20000), "b": (-5, 12767)})
    assert dtype(find(program, ATEN.add.Tensor)) == torch.int16
    assert [x.dtype for x in program.example_inputs[0]] == [torch.int16, torch.int16]
    check_metadata(program, A.short(), B.short())
    torch.export.save(program, tmp_path / "p.pt2")
    for version in (program, torch.export.load(tmp_path / "p.pt2")):
        result = run(version, A.short(), B.short())[0]
        assert (result.dtype, result.tolist()) == (torch.int64, [5, 7, 9])
    torch.export.export(program.module(), (A.short(), B.short()))


def test_declared_ranges_whose_sum_does_not_fit_are_no_proof() -> None:
    program = export(Sum(), A, B)
    with pytest.warns(CastingWarning, match=r"add \(add lies in 0\.\.32768\)"):
        cast_int32_to_int16(program, value_ranges={"a": (0, 32767), "b": (0, 1)})
    assert torch.int16 not in node_dtypes(program)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"c": (0, 1)}, r"names 'c', which is no integer value.*\['a', 'b'\]"),
        ({"a": (2, 1)}, r"value_ranges\['a'\] must be \(smallest, largest\)"),
        ({"a": (0.5, 1)}, r"in integers, got \(0\.5, 1\)"),
    ],
)
def test_wrong_declarations_are_refused(ranges: dict[str, tuple[int, int]], message: str) -> None:
    for function in (cast_int32_to_int16, cast_to_16_bit_precision):
        with pytest.raises(ValueError, match=message):
            function(export(Sum(), A, B), value_ranges=ranges)


def test_bounds_from_shapes_and_constants() -> None:
    """argmax + offset runs in int16, the embedding keeps its int64 indices, results keep their dtypes."""
    i = torch.randint(0, 100, (1, 5))
    program = export(TopIndex(), i)
    reference = run(program, i)
    cast_int32_to_int16(program)
    assert dtype(find(program, ATEN.add.Tensor)) == torch.int16
    assert dtype(find(program, ATEN.embedding.default).args[1]) == torch.int64
    assert program.state_dict["offset"].dtype == torch.int64
    assert all(torch.equal(a, b) for a, b in zip(reference, run(program, i), strict=True))


def test_valid_indices_bound_what_they_are_made_of() -> None:
    """Who indexes a table of 100 rows lies in 0..99, elsewhere too."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 4)

        def forward(self, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.table(i.unsqueeze(0)), i * i + (j > i)

    i, j = torch.tensor([5, 99]), torch.tensor([10**9, 0])
    program = export(Shifted(), i, j)
    cast_int32_to_int16(program)
    assert dtype(find(program, ATEN.mul.Tensor)) == torch.int16
    assert run(program, i, j)[1].tolist() == [26, 9801]


@pytest.mark.parametrize("move", ["gather", "index_select", "scatter", "take_along_dim", "index"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_values_are_moved_in_int16_by_indices_that_stay_as_they_are(move: str, decomposed: bool) -> None:
    class Moved(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            c, row = a * b, i[0]
            if move == "gather":
                return torch.gather(c, 1, i) + a
            if move == "index_select":
                return torch.index_select(c, 1, row) + a
            if move == "scatter":
                return torch.scatter(c, 1, i, a) + a
            return (torch.take_along_dim(c, i, 1) if move == "take_along_dim" else c[:, row]) + a

    a, b, i = torch.tensor([[7, -3, 9]]), torch.tensor([[100, 50, -90]]), torch.tensor([[2, 0, 1]])
    program = export(Moved(), a, b, i)
    if decomposed:
        program = program.run_decompositions()
    expected = Moved()(a, b, i)
    cast_int32_to_int16(program, value_ranges={"a": (-10, 10), "b": (-100, 100), "i": (0, 2)})
    assert torch.int16 in node_dtypes(program)
    assert torch.equal(run(program, a.short(), b.short(), i)[0], expected)


def test_dynamic_sizes_bound_positions() -> None:
    """arange up to a dimension of at most 1000 fits; without the maximum it does not."""

    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.topk(x, 2, dim=0).indices * torch.arange(2)

    x = torch.randn(9)
    program = export(Positions(), x, dynamic_shapes={"x": {0: torch.export.Dim("n", min=3, max=1000)}})
    cast_int32_to_int16(program)
    assert dtype(find(program, ATEN.mul.Tensor)) == torch.int16
    program = export(Positions(), x, dynamic_shapes={"x": {0: torch.export.Dim("n", min=3)}})
    with pytest.warns(CastingWarning, match="mul"):
        cast_int32_to_int16(program)


def test_what_a_compiler_folds_or_never_computes_is_left_alone() -> None:
    """Constant arithmetic, inputs that only pass through, arithmetic with Python numbers."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.tensor([1, 2, 3]))

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2, torch.arange(3) + self.offset, n, n.reshape(-1) + 7

    program = export(Idle(), torch.randn(2), torch.tensor([[42]]))
    code = program.graph_module.code
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast_int32_to_int16(program, value_ranges={"n": (0, 50)})
    assert program.graph_module.code == code


def test_arithmetic_inside_a_branch() -> None:
    """Operands of ``cond`` bring their bounds along; the border of the branch keeps its dtype."""

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            top = x.argmax(-1)
            return torch.cond(p.sum() > 0, lambda t: t + t, lambda t: t * t, (top,))

    x = torch.randn(4, 7)
    program = export(Branch(), x, torch.ones(1))
    cast_int32_to_int16(program)
    assert node_dtypes(program)[torch.int16] >= 2
    for p in (torch.ones(1), -torch.ones(1)):
        top = x.argmax(-1)
        assert torch.equal(run(program, x, p)[0], top + top if p > 0 else top * top)


def test_counters_that_are_written_in_place_have_no_bounds() -> None:
    """In the training IR a counter holds 0 today and anything tomorrow."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(40000)
            return self.steps + x.argmax(-1, keepdim=True)

    for decompose in (False, True):
        program = export(Counter(), torch.randn(3), decompose=decompose)
        with pytest.warns(CastingWarning, match="add"):
            cast_int32_to_int16(program)
        module = program.module()
        assert module(torch.tensor([0.0, 1.0, 0.0])).tolist() == [40001]


def test_index_that_is_written_in_place_later_has_no_bounds() -> None:
    """The table of 100 rows bounds it before the write, not after."""

    class Rewritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 2)

        def forward(self, i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            index = i.clone()
            row = self.table(index)
            index.view(-1).add_(100000)
            return row, index + x.argmax(-1)

    i, x = torch.tensor([5, 7]), torch.eye(2)
    program = export(Rewritten(), i, x, decompose=False)
    with pytest.warns(CastingWarning, match="clone has no bounds"):
        cast_int32_to_int16(program)
    assert run(program, i, x)[1].tolist() == [100005, 100008]


class Overwriting(nn.Module):
    """Write to an input, and to a buffer, after both were added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.tensor([3, 200]))

    def forward(self, a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        total = a + b + self.held
        a.mul_(factor)
        self.held.add_(a)
        return total + a


@pytest.mark.parametrize("decompose", [True, False])
@pytest.mark.parametrize("factor", [1000, 2])
def test_input_that_is_written_to_is_cast_only_when_the_result_fits(decompose: bool, factor: int) -> None:
    """100000 is written back whole; what is proven to be at most 600 may be written to an int16 input."""
    a, b, f = torch.tensor([100, 200]), torch.tensor([300, 0]), torch.tensor([factor, factor])
    expected, inputs, buffer = Overwriting(), a.clone(), torch.tensor([3, 200]) + a * factor
    result = expected(inputs, b, f)
    program = export(Overwriting(), a.clone(), b, f, decompose=decompose)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CastingWarning)
        cast_int32_to_int16(program, value_ranges={"a": (0, 300), "b": (0, 300), "factor": (0, factor)})
    fed = [x.to(node.dtype) for x, node in zip((a, b, f), program.example_inputs[0], strict=True)]
    assert fed[0].dtype == (torch.int16 if decompose and factor == 2 else torch.int64)
    module = program.module()
    assert torch.equal(module(*fed), result)
    assert fed[0].tolist() == inputs.tolist()
    assert torch.equal(module.get_buffer("held"), buffer)


class RandomIntegers(nn.Module):
    """Integer operators on values picked from what has been computed so far."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [a, b, x.argmax(-1)]
        for op, first, second in self.steps:
            values.append(INTEGER_OPS[op](values[first % len(values)], values[second % len(values)]))
        return tuple(values[3:]) or (a,)


INTEGER_OPS = (
    torch.add,
    torch.sub,
    torch.mul,
    lambda u, v: torch.sub(u, v, alpha=3),
    lambda u, v: torch.rsub(u, v),
    lambda u, v: torch.where(u > v, u, v.flip(0)),
    lambda u, v: u.clamp(-7, 40),
    lambda u, v: torch.maximum(u, v),
    lambda u, v: torch.minimum(u, v.abs()),
    lambda u, v: torch.cat([u, v])[:4],
    lambda u, v: u // 3,
    lambda u, v: torch.div(u, 4, rounding_mode="trunc"),
    lambda u, v: u % 5,
    lambda u, v: torch.fmod(u, 6),
    lambda u, v: (u == v).long() + v,
    lambda u, v: u.sum() + v,
    lambda u, v: torch.cumsum(u, 0),
    lambda u, v: -u,
    lambda u, v: torch.sort(u).values + torch.sort(v).indices,
    lambda u, v: torch.amax(u, 0, keepdim=True) * v,
    lambda u, v: u.masked_fill(u > v, 11),
    lambda u, v: (u & 15) + v,
    lambda u, v: torch.nn.functional.pad(u, (1, 0), value=9)[:4] - v,
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(INTEGER_OPS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=7
    ),
    seed=st.integers(0, 2**16),
)
def test_random_integer_programs_give_equal_results(steps: list[tuple[int, int, int]], seed: int) -> None:
    """At the corners of the declared ranges too: a bound that is wrong shows as a wrapped number."""
    torch.manual_seed(seed)
    corners = torch.tensor([-20, 30])
    a = torch.cat([corners, torch.randint(-20, 31, (2,))])[torch.randperm(4)]
    b = torch.cat([-corners, torch.randint(-30, 21, (2,))])[torch.randperm(4)]
    x = torch.randn(4, 6)
    program = export(RandomIntegers(steps), a, b, x)
    reference = run(program, a, b, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CastingWarning)
        cast_int32_to_int16(program, value_ranges={"a": (-20, 30), "b": (-30, 20)})
    inputs = [value.to(node.dtype) for value, node in zip((a, b, x), program.example_inputs[0], strict=True)]
    check_metadata(program, *inputs)
    for exact, result in zip(reference, run(program, *inputs), strict=True):
        assert exact.dtype == result.dtype
        assert torch.equal(exact, result)


def test_indices_of_index_fill_may_be_negative() -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
            return x.index_fill(0, i, 1.0).sum() * 0 + (i - o)

    inputs = torch.zeros(10), torch.tensor([-5, -1]), torch.tensor([32767, 3])
    program = export(Filled(), *inputs, decompose=False)
    with pytest.warns(CastingWarning, match="sub"):
        cast_int32_to_int16(program, value_ranges={"o": (0, 32767)})
    assert run(program, *inputs)[0].tolist() == [-32772.0, -4.0]


@pytest.mark.parametrize("bounds", [5, None, "ab", {0, 5}, (0, 5, 6), (5, 0), (0.0, 5)])
def test_bounds_that_are_no_pair_are_refused(bounds: object) -> None:
    with pytest.raises(ValueError, match=r"value_ranges\['a'\] must be \(smallest, largest\)"):
        cast_int32_to_int16(export(Sum(), A, B), value_ranges={"a": bounds})  # type: ignore[dict-item]


def test_ranges_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(TypeError, match="value_ranges must map names"):
        cast_int32_to_int16(export(Sum(), A, B), value_ranges=["a"])  # type: ignore[arg-type]


def _called(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    def branch(v: torch.Tensor) -> torch.Tensor:
        return v * v

    return (
        torch.cond(x.sum() > 0, branch, lambda v: v + 1, (a,)),
        torch.cond(x.sum() > 0, branch, lambda v: v + 1, (b,)),
    )


@pytest.mark.parametrize("wide", ["a", "b"])
def test_a_graph_that_two_calls_share_is_proven_for_both(wide: str) -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _called(x, a, b)

    x, small, large = torch.ones(1), torch.tensor([3, 5]), torch.tensor([30000, 5])
    given = (x, large, small) if wide == "a" else (x, small, large)
    for ranges in ({"a": (-99, 99), "b": (-99, 99)}, {"a": (-99, 99), "b": (-99, 99), wide: (0, 40000)}):
        inputs = (x, small, small) if len(set(ranges.values())) == 1 else given
        program = export(Shared(), *inputs, decompose=False)
        first, second = (node for node in program.graph.nodes if str(node.target) == "cond")
        for position in (1, 2):
            second.args[position].target = first.args[position].target
        exact = run(program, *inputs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cast_int32_to_int16(program, value_ranges=ranges)
        assert len(caught) == (inputs is given)
        assert all(str(entry.message).count("mul lies in") <= 2 for entry in caught)
        dtypes = [dtype(node) for node in program.graph.nodes if node.op == "placeholder"]
        cast = [tensor.to(wanted) for tensor, wanted in zip(inputs, dtypes, strict=True)]
        assert [r.tolist() for r in run(program, *cast)] == [r.tolist() for r in exact]


def test_writes_through_views_inside_a_branch_have_no_bounds() -> None:
    """The zeros are none any more."""

    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def branch(x: torch.Tensor) -> torch.Tensor:
                zeros = torch.zeros_like(x)
                zeros[0:2].add_(x[0:2])
                return zeros * x * x

            return torch.cond(x.sum() > 0, branch, lambda x: x.clone(), (x,))

    x = torch.tensor([100, 90, 3, 4])
    program = export(Written(), x, decompose=False)
    exact = run(program, x)[0]
    with pytest.warns(CastingWarning, match="no bounds"):
        cast_int32_to_int16(program, value_ranges={"x": (-100, 100)})
    assert torch.equal(run(program, x)[0], exact)


def test_what_as_strided_reads_beside_a_view_has_no_bounds_and_stays_in_memory() -> None:
    """A valid index bounds the view, not what lies beside it; a cast of the view would not have it at all."""

    class Beside(nn.Module):
        def forward(self, table: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = (i * 1)[:2]
            beside = torch.as_strided(rows, (2,), (1,), 2)
            return table[rows], beside + beside

    class Moved(nn.Module):
        def forward(self, table: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            view = (i + i)[:2]
            beside = torch.as_strided(view, (2,), (1,), 2)
            return view + view, beside + beside

    table, i = torch.rand(5), torch.tensor([1, 2, 30000, 30000], dtype=torch.int32)
    program = export(Beside(), table, i, decompose=False)
    with pytest.warns(CastingWarning, match="no bounds"):
        cast_int32_to_int16(program)
    assert run(program, table, i)[1].tolist() == [60000, 60000]
    i = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    program = export(Moved(), table, i, decompose=False)
    with pytest.warns(CastingWarning, match="add_2 has no bounds"):
        cast_int32_to_int16(program, value_ranges={"i": (0, 9)})
    assert node_dtypes(program)[torch.int16] > 0
    assert [r.tolist() for r in run(program, table, i.short())] == [[4, 8], [12, 16]]
