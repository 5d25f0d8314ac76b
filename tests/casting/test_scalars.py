"""Numbers that guard against poles, and numbers that values are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.casting import cast_fp32_to_fp16
from bitwright.casting._comparisons import comparison_of, constant_threshold
from bitwright.casting._numbers import narrow_tensor
from tests.matrix import each_pair

from .programs import check_metadata, dtype, export, find, node_dtypes, run

ATEN = torch.ops.aten
TARGETS = [torch.float16, torch.bfloat16]


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def _cross_entropy(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = p.clamp(1e-7, 1 - 1e-7)
    return -(t * torch.log(p) + (1 - t) * torch.log(1 - p))


GUARDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda u: _cross_entropy(u, u.round()),
    "atanh": lambda u: torch.atanh((2 * u - 1).clamp(-1 + 1e-6, 1 - 1e-6)),
    "gumbel": lambda u: -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6))),
    "logit": lambda u: torch.logit(u, eps=1e-6),
    "clamp_max": lambda u: torch.log(1 - u.clamp_max(1 - 1e-6)),
    "hardtanh": lambda u: torch.log(1 - F.hardtanh(u, 0.0, 1 - 1e-6)),
    "where": lambda u: torch.log(1 - torch.where(u > 1 - 1e-6, 1 - 1e-6, u)),
    "masked_fill": lambda u: torch.log(1 - u.masked_fill(u >= 1 - 1e-6, 1 - 1e-6)),
    "minimum": lambda u: torch.log(1 - torch.minimum(u, torch.tensor(1 - 1e-6))),
    "maximum": lambda u: torch.log(1 + torch.maximum(-u, torch.full((3,), -1 + 1e-6))),
    "minimum by column": lambda u: torch.log(1 - torch.minimum(u, torch.tensor([1 - 1e-6, 0.5, 0.75]))),
    "maximum by column": lambda u: torch.log(1 + torch.maximum(-u, torch.tensor([-1 + 1e-6, -0.5, -0.75]))),
    "add by column": lambda u: torch.log(-u + torch.tensor([1.0000001, 1.0, 1.0])),
    "rsub": lambda u: torch.log(1.0000001 - u),
    "sub": lambda u: 1 / (u - 1.0000001),
    "add": lambda u: torch.log(-u + 1.0000001),
}


@pytest.mark.parametrize(("name", "decompose", "target"), each_pair(list(GUARDED), [False, True], TARGETS))
def test_bounds_near_one_keep_guarding_poles(name: str, decompose: bool, target: torch.dtype) -> None:
    """At the poles results are finite and have their sign; between them they are close."""
    u = torch.tensor([1.0, 0.0, 0.25])
    program = export(Wrapped(GUARDED[name]), u, decompose=decompose)
    exact = run(program, u)[0]
    cast_fp32_to_fp16(program, dtype=target)
    check_metadata(program, u.to(target))
    result = run(program, u.to(target))[0].float()
    assert result.isfinite().all()
    large = exact.abs() > 1e-3
    assert torch.equal(result[large].sign(), exact[large].sign())
    assert torch.allclose(result[2], exact[2], rtol=0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_factors_near_one_are_rounded(target: torch.dtype) -> None:
    program = cast_fp32_to_fp16(export(Wrapped(lambda x: x * 0.99999), torch.ones(2)), dtype=target)
    assert run(program, torch.ones(2, dtype=target))[0].tolist() == [1.0, 1.0]


def test_logit_stays_float32_where_its_bound_would_be_one() -> None:
    x = torch.rand(4)
    tight, loose = (
        cast_fp32_to_fp16(export(Wrapped(lambda x, e=eps: torch.logit(x, eps=e)), x, decompose=False))
        for eps in (1e-6, 1e-2)
    )
    assert dtype(find(tight, ATEN.logit.default)) == torch.float32
    assert dtype(find(loose, ATEN.logit.default)) == torch.float16


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("threshold", [1 - 1e-6, 1 + 1e-6, -1 + 1e-6, 0.3, 2049.5])
@pytest.mark.parametrize("compare", [torch.lt, torch.le, torch.gt, torch.ge])
def test_comparisons_answer_as_with_the_exact_threshold(
    compare: Callable[..., torch.Tensor], threshold: float, target: torch.dtype
) -> None:
    """For the 16-bit numbers around the threshold."""
    near = torch.tensor(threshold).to(target)
    infinity = torch.tensor(float("inf"), dtype=target)
    x = torch.stack([torch.nextafter(near, -infinity), near, torch.nextafter(near, infinity)])
    program = export(Wrapped(lambda x: compare(x, threshold)), x.float())
    exact = run(program, x.float())[0]
    assert exact.any()
    assert not exact.all()
    assert torch.equal(run(cast_fp32_to_fp16(program, dtype=target), x)[0], exact)


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "lowest": [LOWEST, 0.0, -3.0, LOWEST],
    "infinite": [-math.inf, 0.0, -3.0, LOWEST],
    "two": [-3e38, -2e38, 0.0, 5.0],
    "highest": [-LOWEST, 0.0, 7.0, math.inf],
    "close": [0.3 + 1e-6, 0.3 - 1e-6, 0.3 + 1e-4, 0.0],
    "subnormal": [1e-9, 0.0, -1e-9, 1.0],
}
NUMBERS = [-1e39, LOWEST, -2.5e38, -1.5e38, -1e38, -1e30, -1e9, -65504.0, -1e4, 0, 0.3, 1e30, 1e38, 3e38, -LOWEST]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compare", [ATEN.lt.Scalar, ATEN.le.Scalar, ATEN.gt.Scalar, ATEN.ge.Scalar])
def test_thresholds_lie_between_the_narrowed_values(compare: Any, target: torch.dtype) -> None:
    """There is none only where values that the number separates have become one."""
    for values in map(torch.tensor, MASKS.values()):
        narrowed = narrow_tensor(values, target)
        for number in NUMBERS:
            graph = torch.fx.Graph()
            node = graph.call_function(compare, (graph.placeholder("mask"), number))
            comparison, exact = comparison_of(node, {}), compare(values, number)
            assert comparison is not None
            threshold = constant_threshold(comparison, values, narrowed)
            if threshold is None:
                assert set(narrowed[exact].tolist()) & set(narrowed[~exact].tolist())
            else:
                assert torch.equal(compare(narrowed, threshold), exact)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("decompose", [False, True])
def test_comparisons_of_constants_answer_as_in_float32(target: torch.dtype, decompose: bool) -> None:
    """Of a constant every value is known; where no 16-bit number lies between two, it stays as it is."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, values in MASKS.items():
                self.register_buffer(name, torch.tensor(values))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            held = [self.get_buffer(name)[None] for name in ("lowest", "two", "close")]
            numbers = (-2.5e38, -1.5e38, -1e30, 0.3)
            return [torch.where(test(m, n), 1.0, x) for test in (torch.lt, torch.ge) for m in held for n in numbers]

    x = torch.zeros(1)
    program = export(Masks(), x, decompose=decompose)
    expected = run(program, x)
    cast_fp32_to_fp16(program, dtype=target)
    check_metadata(program, x.to(target))
    assert [r.tolist() for r in run(program, x.to(target))] == [r.tolist() for r in expected]
    stored = program.state_dict
    assert [stored[name].dtype for name in ("lowest", "close", "highest")] == [target, torch.float32, target]


@pytest.mark.parametrize(
    ("target", "ignored"),
    [
        (torch.float16, None),
        (torch.bfloat16, None),
        *((torch.float16, op) for op in (ATEN.lt.Scalar, ATEN.unsqueeze.default, ATEN.add.Tensor)),
    ],
)
def test_mask_numbers_are_found_wherever_they_come_from(target: torch.dtype, ignored: object) -> None:
    """In a constant that is added, too, in an input, and in what is computed, in float32 or not."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.tensor([LOWEST, 0.0, LOWEST]))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
            made = x.masked_fill(x > 1, LOWEST)
            tested = (self.held, mask, self.held + x, made, torch.full((3,), LOWEST), mask + self.held)
            lower = [tensor[None] < number for tensor in tested for number in (-1.5e38, -1e30)]
            upper = [-tensor[None] > number for tensor in tested for number in (1.5e38, 1e30)]
            return [torch.where(truth, 1.0, x) for truth in (*lower, *upper)]

    x, mask = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([LOWEST, 0.0, 0.0])
    program = export(Masks(), x, mask)
    expected = run(program, x, mask)
    cast_fp32_to_fp16(program, ignored, dtype=target)
    inputs = (x.to(target), mask.clamp_min(torch.finfo(target).min).to(target))
    check_metadata(program, *inputs)
    assert [r.tolist() for r in run(program, *inputs)] == [r.tolist() for r in expected]


@pytest.mark.parametrize(
    ("target", "ignored"), [(torch.float16, None), (torch.bfloat16, None), (torch.float16, ATEN.lt)]
)
def test_thresholds_in_tensors_are_found_as_numbers_are(target: torch.dtype, ignored: object) -> None:
    """On either side, of any shape that is spread, as constant, buffer or computed; a parameter is no number."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.tensor([-1e30]))
            self.register_buffer("mask", torch.tensor([LOWEST, 0.0, 1.0]))
            self.learned = nn.Parameter(torch.tensor(0.75))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            made, third = x.masked_fill(x > 1, LOWEST), torch.tensor(0.3)
            lower = [made < torch.tensor(-1e30), made < self.held, made < self.held.expand(3), self.mask < self.held]
            lower += [torch.full((), -1e30) > made, made < torch.full_like(x, LOWEST / 2), made <= -torch.tensor(1e30)]
            lower += [made < torch.tensor(-1e30, dtype=torch.float64), x < third, third >= x, x < self.learned]
            # A number that went into the mask lies where it did, also when it is not the lowest.
            other, number = x.masked_fill(x > 1, -(2.0**127)), -(2.0**127)
            lower += [other < number, other >= number, other < torch.tensor(number), other < -2e38, other <= number]
            lower += [x.masked_fill(x > 1, -1e38) < torch.tensor(-1e38)]
            return [torch.where(truth, 1.0, x) for truth in lower]

    x = torch.tensor([0.5, 0.25, 2.0])
    x[1] = torch.tensor(0.3).to(target).float()
    program = export(Masks(), x, decompose=ignored is None)
    expected = run(program, x)
    cast_fp32_to_fp16(program, ignored, dtype=target)
    check_metadata(program, x.to(target))
    assert [r.tolist() for r in run(program, x.to(target))] == [r.tolist() for r in expected]
    program.state_dict["learned"].data.fill_(0.0)
    assert run(program, x.to(target))[10].tolist() == x.tolist()


def test_a_threshold_that_became_a_number_is_not_said_to_stay(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([0.5, 2.0])
    program = export(Wrapped(lambda x: x.masked_fill(x > 1, LOWEST) < torch.full((), -1e30)), x)
    cast_fp32_to_fp16(program, example_inputs=(x,))
    assert run(program, x.half())[0].tolist() == [False, True]
    assert "stay in float32" not in caplog.text


def test_numbers_beyond_the_format_are_compared_in_float32_with_what_is_computed_there() -> None:
    x = torch.tensor([1.0, 20.0, 60.0])
    program = export(Wrapped(lambda x: torch.where(torch.exp(x) > 1e10, 1.0, x)), x)
    cast_fp32_to_fp16(program, ATEN.exp)
    assert run(program, x.half())[0].tolist() == [1.0, 20.0, 1.0]


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_an_epsilon_that_an_operator_has_as_a_default_does_not_vanish(decompose: bool, target: torch.dtype) -> None:
    """1e-8 is zero in float16: the cosine with a vector of zeros would be NaN."""
    a, b = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.ones(2, 2)
    program = export(Wrapped(lambda a, b: F.cosine_similarity(a, b, dim=-1)), a, b, decompose=decompose)
    exact = run(program, a, b)[0]
    cast_fp32_to_fp16(program, dtype=target)
    assert node_dtypes(program)[torch.float32] == 0
    result = run(program, a.to(target), b.to(target))[0]
    assert result[0] == 0
    assert torch.allclose(result.float(), exact, atol=1e-2)


SMALL_FACTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: torch.add(x * 0, x, alpha=3e-8),
    "sub": lambda x: torch.sub(x * 0, x, alpha=3e-8),
    "addcmul": lambda x: torch.addcmul(x * 0, x, x, value=2e-8),
    "addcdiv": lambda x: torch.addcdiv(x * 0, x, x * 0 + 0.001, value=2e-8),
    "lerp": lambda x: torch.lerp(x * 0, x, 2e-8),
    "leaky_relu": lambda x: F.leaky_relu(-x, 2e-8),
    "baddbmm": lambda x: torch.baddbmm(x * 0, x / 1000, x / 1000, alpha=2e-8),
    "addmm_beta": lambda x: torch.addmm(x[0], x[0] * 0, x[0], beta=2e-8),
}


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("name", SMALL_FACTORS)
def test_a_factor_below_the_normal_numbers_keeps_its_digits(name: str, decompose: bool) -> None:
    """3e-8 would become 6e-8 in float16."""
    function, x = SMALL_FACTORS[name], torch.full((1, 4, 4), 6e4)
    program = cast_fp32_to_fp16(export(Wrapped(function), x, decompose=decompose))
    assert torch.allclose(run(program, x.half())[0].float(), function(x.half().float()), rtol=2e-3)


@pytest.mark.parametrize(("decompose", "seen"), [(False, False), (True, True)])
def test_bounds_of_masks_beyond_the_format_leave_comparisons_as_they_were(decompose: bool, seen: bool) -> None:
    """-1e30 bounds what the lowest number of float16 stands for, too; beside numbers of float32 nothing is settled."""

    def tests(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        bounded, upper = mask.clamp(min=-1e30), (-mask).clamp_max(1e30)
        truths = [bounded > -1e29, bounded[:, None] <= -1e29, bounded > -1e30, bounded <= -1e30, bounded >= -1e30]
        truths += [bounded < -1e30, bounded == -1e30, bounded != torch.tensor(-1e30), bounded > -2e30]
        truths += [upper < 1e29, upper >= 1e30, upper == 1e30, F.hardtanh(mask, -1e30, 1e30) > -1e29]
        truths += [torch.maximum(mask, torch.tensor(-1e30)) > -1e29, mask.masked_fill(x > 1, -1e9) > -1e8]
        truths += [torch.where(x > 1, torch.exp(60 * x), 0.0) > 1e10, torch.exp(20 * x).clamp(max=1e9) < 1e8]
        return [torch.where(truth, 1.0, x) for truth in truths]

    x, mask = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([LOWEST, 0.0, -math.inf])
    program = export(Wrapped(tests), x, mask, decompose=decompose)
    expected = run(program, x, mask)
    cast_fp32_to_fp16(program, ATEN.exp, example_inputs=(x, mask) if seen else None)
    inputs = (x.half(), mask.clamp_min(torch.finfo(torch.float16).min).half())
    check_metadata(program, *inputs)
    assert [r.tolist() for r in run(program, *inputs)] == [r.tolist() for r in expected]


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        lambda x, hidden: x.masked_fill(hidden, -1e9),
        lambda x, hidden: torch.where(hidden, -1e9, x),
        lambda x, hidden: x + hidden.float() * -1e9,
        lambda x, hidden: x + x.masked_fill(hidden, -math.inf).clamp(min=-1e30, max=0.0),
        lambda x, hidden: torch.nan_to_num(x.masked_fill(hidden, -math.inf), neginf=-1e9),
    ],
    ids=["masked_fill", "where", "product", "clamp", "nan_to_num"],
)
def test_rows_that_are_masked_whole_are_no_nan(mask: Callable[..., torch.Tensor], decompose: bool) -> None:
    """A mask number beyond the format stays finite, so that the softmax of such a row is even."""
    x, hidden = torch.tensor([[0.5, 0.25, 2.0]] * 2), torch.tensor([[False, True, False], [True, True, True]])
    program = export(Wrapped(lambda x, hidden: torch.softmax(mask(x, hidden), -1)), x, hidden, decompose=decompose)
    expected = run(program, x, hidden)[0]
    cast_fp32_to_fp16(program)
    check_metadata(program, x.half(), hidden)
    assert torch.allclose(run(program, x.half(), hidden)[0].float(), expected, atol=2e-3)
