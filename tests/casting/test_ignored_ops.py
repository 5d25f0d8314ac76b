"""What ``ignored_ops`` takes, and what it says to the rest."""

from __future__ import annotations

import pytest
import torch

from bitwright.casting import cast_fp32_to_fp16

from .programs import Overflowing, dtype, export, find

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    "ignored",
    [
        ATEN.exp,
        ATEN.exp.default,
        {ATEN.exp},
        [ATEN.exp.default],
        (op for op in [ATEN.exp]),
        lambda node: node.name == "exp",
    ],
    ids=["packet", "overload", "set", "list", "generator", "predicate"],
)
def test_named_operator_stays_float32_and_nothing_else(ignored: object) -> None:
    program = cast_fp32_to_fp16(export(Overflowing(), torch.ones(2)), ignored)
    assert dtype(find(program, ATEN.exp.default)) == torch.float32
    assert dtype(find(program, ATEN.mul.Tensor)) == torch.float16


def test_neighbours_that_stay_float32_are_connected_without_casts() -> None:
    program = cast_fp32_to_fp16(export(Overflowing(), torch.ones(2)), {ATEN.exp, ATEN.mul})
    assert find(program, ATEN.mul.Tensor).args[0] is find(program, ATEN.exp.default)


@pytest.mark.parametrize(
    ("ignored", "hint"),
    [
        ("exp", r"the string 'exp'.*torch\.ops\.aten\.exp\?"),
        (["aten::exp"], r"holds 'aten::exp'.*torch\.ops\.aten\.exp\?"),
        ({"no_such_op"}, r"holds 'no_such_op'.*lambda node"),
        (torch.exp, r"torch\.ops\.aten\.exp\?"),
        ([torch.nn.Linear], r"holds <class"),
        (3, r"got int: 3"),
    ],
    ids=["string", "strings", "unknown", "function", "module", "number"],
)
def test_other_forms_are_refused_with_what_is_accepted(ignored: object, hint: str) -> None:
    program = export(Overflowing(), torch.ones(2))
    code = program.graph_module.code
    with pytest.raises(TypeError, match=r"ignored_ops accepts an operator(.|\n)*" + hint):
        cast_fp32_to_fp16(program, ignored)
    assert program.graph_module.code == code
