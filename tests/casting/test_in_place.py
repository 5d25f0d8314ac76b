"""Programs that write in place compute what they computed: a cast is a copy of its moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitwright.casting import CastingWarning, cast_fp32_to_fp16, cast_int32_to_int16
from bitwright.casting._arguments import written_in_place

from .programs import check_metadata, export, run
from .test_scalars import Wrapped

ATEN = torch.ops.aten
ADDED_IN_FLOAT32 = [ATEN.exp.default, ATEN.add_.Tensor, ATEN.view.default, ATEN.chunk.default, ATEN.dropout.default]


def _one_of_two_written(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    a = x.to(dtype)
    a.add_(1)
    b = x.to(dtype)
    return a * 10 + b


def test_two_casts_of_one_value_stay_two() -> None:
    i, x = torch.arange(4, dtype=torch.int32), torch.arange(4.0)
    integers = export(Wrapped(lambda i: _one_of_two_written(i, torch.int64)), i, decompose=False)
    floats = export(Wrapped(lambda x: _one_of_two_written(x, torch.float64)), x, decompose=False)
    with pytest.warns(CastingWarning, match="no bounds"):
        cast_int32_to_int16(integers)
    assert run(integers, i)[0].tolist() == [10, 21, 32, 43]
    assert run(cast_fp32_to_fp16(floats), x.half())[0].tolist() == [10, 21, 32, 43]


def _cast_written(h: torch.Tensor) -> torch.Tensor:
    a = h.float()
    a.add_(1.0)
    return a + h


def _source_written(h: torch.Tensor) -> torch.Tensor:
    a = h.float()
    h.add_(1.0)
    return a + h


@pytest.mark.parametrize("function", [_cast_written, _source_written])
@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_widening_copy_stays_a_copy(
    function: Callable[[torch.Tensor], torch.Tensor], decompose: bool, dtype: torch.dtype
) -> None:
    """In the source's own dtype ``to`` would return its argument."""
    h = torch.arange(4.0).to(dtype)
    program = cast_fp32_to_fp16(export(Wrapped(function), h, decompose=decompose), dtype=dtype)
    assert run(program, h.clone())[0].tolist() == [1.0, 3.0, 5.0, 7.0]


def _through_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    v = y.view(-1)
    z = torch.relu(y)
    v.add_(1.0)
    return z + torch.relu(y)


def _view_read(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    v = y.view(-1)
    z = torch.relu(v)
    y.add_(1.0)
    return z + torch.relu(v)


def _through_part(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    v, _ = y.chunk(2)
    z = torch.relu(y)
    v.add_(1.0)
    return z + torch.relu(y)


def _through_dropout(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    v = nn.functional.dropout(y, 0.5, False)
    z = torch.relu(y)
    v.add_(1.0)
    return z + torch.relu(y)


@pytest.mark.parametrize("function", [_through_view, _view_read, _through_part, _through_dropout])
def test_readers_before_and_after_a_write_have_a_cast_each(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(4.0)
    program = cast_fp32_to_fp16(export(Wrapped(function), x, decompose=False), ADDED_IN_FLOAT32)
    assert torch.allclose(run(program, x.half())[0].float(), function(x), rtol=1e-3)


def test_what_shares_memory_with_a_written_tensor() -> None:
    """And nothing behind operators that compute something."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        y.view(-1).add_(1.0)
        return torch.relu(y.t())

    written = written_in_place(export(Wrapped(function), torch.ones(2, 2), decompose=False).graph)
    assert {node.name for node in written} == {"exp", "view", "add_", "t"}


@pytest.mark.parametrize("ignored", [ATEN.slice.Tensor, ATEN.as_strided.default, ATEN.add.Tensor])
def test_no_cast_comes_between_a_view_and_what_as_strided_reads_beside_it(ignored: object) -> None:
    """A cast is a copy, which ends where the view does."""

    class Beside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_strided((x + x)[:2], (2,), (1,), 2) * 2

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    program = cast_fp32_to_fp16(export(Beside(), x, decompose=False), ignored)
    check_metadata(program, x.half())
    assert run(program, x.half())[0].tolist() == [12.0, 16.0]
