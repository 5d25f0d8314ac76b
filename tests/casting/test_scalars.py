"""Numbers that guard against poles, and numbers that values are compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.casting import cast_fp32_to_fp16

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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("name", GUARDED)
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
