"""Mixtures of experts, and sorts by ranks: in plain operators, and in the runtimes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.export.conversion import captured
from bitwright.export.experts import spell_out_experts, spell_out_split_experts
from bitwright.export.operators import check_operators
from bitwright.export.sorts import spell_out_dynamic_sorts, spell_out_sorts
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

GROUPS = {
    "more rows than experts": [0, 3, 3, 9],
    "as many rows": [1, 2, 2, 4],
    "fewer rows": [0, 0, 1, 2],
    "all rows of the last": [0, 0, 0, 7],
    "rows of nobody": [2, 3, 4, 6],
}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def _rewritten(function, inputs, rewrite, dynamic_shapes=None):
    program = captured(Call(function), inputs, None, dynamic_shapes)
    rewrite(program.graph_module)
    program.graph_module.graph.lint()
    return program


def _operators(program):
    return {str(node.target) for node in program.graph.nodes}


@pytest.mark.parametrize("groups", GROUPS)
def test_products_of_groups_are_those_of_each_group(groups):
    torch.manual_seed(0)
    ends = torch.tensor(GROUPS[groups], dtype=torch.int32)
    rows = int(ends[-1]) + (2 if groups == "rows of nobody" else 0)
    x, weight = torch.randn(rows, 8), torch.randn(4, 8, 3)
    x[0] = float("inf")  # of which nothing may reach other rows
    program = _rewritten(torch.ops.transformers.grouped_mm_fallback, (x, weight, ends), spell_out_experts)
    assert "transformers.grouped_mm_fallback.default" not in _operators(program)
    known = int(ends[-1])
    expected = torch.ops.transformers.grouped_mm_fallback(x, weight, ends)[:known]
    torch.testing.assert_close(program.module()(x, weight, ends)[:known], expected, equal_nan=True)


@pytest.mark.parametrize("bounds", [(4, 0, 3), (5, -1, 1), (3, -2.5, 0.5)])
def test_histograms_count_as_pytorch_does(bounds):
    x = torch.cat([torch.randn(200, generator=torch.Generator().manual_seed(0)), torch.arange(-3.0, 4.0)])
    program = _rewritten(lambda x: torch.histc(x, *bounds), (x,), spell_out_experts)
    assert "aten.histc.default" not in _operators(program)
    assert torch.equal(program.module()(x), torch.histc(x, *bounds))


def test_histograms_between_bounds_of_the_data_stay():
    program = _rewritten(lambda x: torch.histc(x, 4), (torch.randn(8),), spell_out_experts)
    assert "aten.histc.default" in _operators(program)


SORTS = {
    "values": lambda x: x.sort(1),
    "descending": lambda x: x.sort(0, descending=True),
    "stable": lambda x: torch.sort(x, stable=True, dim=-1),
    "stable, descending": lambda x: torch.sort(x, stable=True, dim=0, descending=True),
    "places": lambda x: torch.argsort(x, stable=True, descending=True),
}


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", SORTS)
def test_sorts_are_pytorchs(name, dynamic):
    """With equal values, infinities and NaN, where the places of equal values are asked for."""
    torch.manual_seed(0)
    x = torch.randn(6, 9).round() + 0.0
    x[0, 3], x[2, 1:4], x[3, 5] = float("nan"), float("inf"), float("nan")
    shapes = (({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},),) if dynamic else None
    rewrite = spell_out_dynamic_sorts if dynamic else spell_out_sorts
    program = _rewritten(SORTS[name], (x,), rewrite, shapes)
    assert not any("sort" in op for op in _operators(program))
    for size in (x, x[:4, 2:]) if dynamic else (x,):
        actual, expected = program.module()(size), SORTS[name](size)
        if name in ("values", "descending"):
            actual, expected = actual[0], expected[0]
        torch.testing.assert_close(actual, type(actual)(expected), equal_nan=True, rtol=0, atol=0)


class Hidden(nn.Module):
    """A small OLMoE: 4 experts, 2 for each token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.OlmoeConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0, max_position_embeddings=32,
        )  # fmt: skip
        self.model = transformers.OlmoeModel(config)

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False)[0]


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        ("coreai", "eager"),
        ("coreai", "graph"),
        ("executorch", "eager"),
        pytest.param("executorch", "graph", marks=pytest.mark.slow),
        pytest.param("onnx", "eager", marks=pytest.mark.slow),
        ("onnx", "graph"),
    ],
)
def test_a_mixture_of_experts_runs(target, mode, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    model, ids = Hidden().eval(), torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    assert check_operators(model, target, (ids,)) == []
    ready = Quantizer(model, QuantizerConfig.presets.w4(execution_mode=mode)).prepare((ids,)).eval()
    path = TARGETS[target].write(ready, (ids,), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    assert sqnr(ready(ids), TARGETS[target].run(path, (ids,))[0]) > 100


@pytest.mark.parametrize("target", ["coreai", pytest.param("executorch", marks=pytest.mark.slow), "onnx"])
def test_a_mixture_of_experts_takes_texts_of_any_length(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    model, ids = Hidden().eval(), torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    shapes = ({1: torch.export.Dim("length", min=2, max=12)},)
    assert check_operators(model, target, (ids,), None, shapes) == []
    ready = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8(execution_mode="eager")).prepare((ids,)).eval()
    path = TARGETS[target].write(ready, (ids,), tmp_path / f"model{TARGETS[target].suffix}", {}, shapes)
    for tokens in (ids, ids[:, :5]):
        assert sqnr(ready(tokens), TARGETS[target].run(path, (tokens,))[0]) > 100
    if target == "onnx":
        onnx = pytest.importorskip("onnx")
        assert onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim[1].dim_param == "length"


class SplitExperts(nn.Module):
    """As in JetMoE: rows split at numbers of the data, each part multiplied with its expert's matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 5, 8))

    def forward(self, x, counts):
        parts = x.split(counts.tolist(), dim=0)
        return torch.cat([nn.functional.linear(part, self.weight[place]) for place, part in enumerate(parts)], dim=0)


class SplitOtherwise(SplitExperts):
    """Matrices in another order, of which not all are asked for."""

    def forward(self, x, counts):
        parts = x.split(counts.tolist(), dim=0)
        return torch.cat(
            [nn.functional.linear(parts[0], self.weight[2]), nn.functional.linear(parts[1], self.weight[0])]
        )


SPLITS = {
    "all experts": (SplitExperts, [(2, 0, 4), (0, 6, 0), (1, 2, 3)]),
    "some, in another order": (SplitOtherwise, [(4, 2), (0, 6), (6, 0)]),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("target", ["coreai", pytest.param("executorch", marks=pytest.mark.slow)])
def test_rows_split_at_numbers_of_the_data_meet_their_experts(target, split, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    kind, counts = SPLITS[split]
    model, (first, *others) = kind().eval(), [torch.tensor(one) for one in counts]
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    path = TARGETS[target].write(model, (x, first), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    for one in (first, *others):
        assert sqnr(model(x, one), TARGETS[target].run(path, (x, one))[0]) > 100


def test_parts_that_are_not_put_together_in_their_order_stay():
    def other_order(x, weight, counts):
        first, second = x.split(counts.tolist(), dim=0)
        return torch.cat([nn.functional.linear(second, weight[1]), nn.functional.linear(first, weight[0])])

    inputs = torch.randn(6, 8), torch.randn(2, 5, 8), torch.tensor([2, 4])
    program = _rewritten(other_order, inputs, spell_out_split_experts)
    assert "aten.split_with_sizes.default" in _operators(program)
    torch.testing.assert_close(program.module()(*inputs), other_order(*inputs))


class TwiceSplit(nn.Module):
    """As in JetMoE's attention: two layers of experts, whose rows are split at the same numbers of the data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, 3)
        self.inwards = nn.Parameter(torch.randn(3, 5, 8))
        self.outwards = nn.Parameter(torch.randn(3, 8, 5))

    def forward(self, x):
        rows = x.flatten(0, 1)
        chosen = self.router(rows).topk(2, dim=1)[1]
        counts = torch.zeros(rows.shape[0], 3).scatter(1, chosen, 1.0).long().sum(0).tolist()
        order = chosen.flatten().sort(stable=True, dim=0)[1]
        parts = rows[order.div(2, rounding_mode="trunc")].split(counts, dim=0)
        inner = torch.cat([nn.functional.linear(part, self.inwards[place]) for place, part in enumerate(parts)])
        parts = inner.split(counts, dim=0)
        return torch.cat([nn.functional.linear(part, self.outwards[place]) for place, part in enumerate(parts)])


def test_rows_split_twice_at_the_same_numbers_run_in_core_ai(tmp_path):
    """With dynamic sizes its runtime misses what both layers compute of the numbers, unless it is computed once."""
    if TARGETS["coreai"].missing() is not None:
        pytest.skip(TARGETS["coreai"].missing())
    model, sizes = TwiceSplit().eval(), {0: torch.export.Dim("b", max=4), 1: torch.export.Dim("t", max=32)}
    path = TARGETS["coreai"].write(model, (torch.randn(2, 8, 8),), tmp_path / "model.aimodel", {}, (sizes,))
    for shape in ((3, 11, 8), (1, 2, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert sqnr(model(x), TARGETS["coreai"].run(path, (x,))[0]) > 100
