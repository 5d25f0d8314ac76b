"""A captured graph is called with the numbers, flags and strings that it was captured with."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.quantization import Quantizer, QuantizerConfig


class _Switched(nn.Module):
    """What it computes depends on all of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, k: float = 1.0, flag: bool = False, mask: torch.Tensor | None = None, kind: str = "a"
    ) -> torch.Tensor:
        y = self.layer(x) * k
        y = -y if flag else y
        y = y + 1 if kind == "b" else y
        return y if mask is None else y * mask


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _prepared(*arguments: Any, **keywords: Any) -> nn.Module:
    quantizer = Quantizer(_Switched().eval(), QuantizerConfig(execution_mode="graph"))
    return quantizer.prepare(arguments, example_kwargs=keywords or None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((X, 4.0, False, None), r"Input 'k' was 2\.0 .* is 4\.0 now"),
        ((X, True, False, None), r"Input 'k' was 2\.0 .* is True now"),
        ((X, 2.0, True, None), "Input 'flag' was False .* is True now"),
        ((X, 2.0, 0, None), "Input 'flag' was False .* is 0 now"),
        ((X, 2.0, False, torch.zeros(4, 1)), r"Input 'mask' was None .* is a tensor of shape \(4, 1\) now"),
        ((X, torch.tensor(2.0), False, None), r"Input 'k' was 2\.0 .* is a tensor of shape \(\) now"),
    ],
)
def test_another_constant_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    prepared = _prepared(X, 2.0, False, None)
    expected = prepared(X, 2.0, False, None)
    for module in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with pytest.raises(ValueError, match=told):
            module(*arguments)
        torch.testing.assert_close(module(X, 2.0, False, None), expected, rtol=0, atol=0)


def test_none_for_a_tensor_is_refused() -> None:
    prepared = _prepared(X, 1.0, False, torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"Input 'mask' was a tensor .* is None now"):
        prepared(X, 1.0, False, None)


def test_constants_given_by_name() -> None:
    prepared = _prepared(X, kind="b", k=0.5)
    with pytest.raises(ValueError, match=r"Input 'kind' was 'b' .* is 'a' now"):
        prepared(X, k=0.5, kind="a")
    assert torch.equal(prepared(X, kind="b", k=0.5), prepared(X, k=0.5, kind="b"))


def test_equal_numbers_of_other_types_are_the_same() -> None:
    prepared = _prepared(X, 2.0, False)
    for number, flag in ((2, False), (np.float32(2), np.bool_(False)), (np.int64(2), False)):
        assert torch.equal(prepared(X, number, flag), prepared(X, 2.0, False))


def test_not_a_number_is_itself() -> None:
    prepared = _prepared(X, math.nan)
    assert prepared(X, float("nan")).isnan().all()
