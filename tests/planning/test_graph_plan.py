"""The plan of a graph: chains, sharing, known ranges, masks, boundaries, problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.config.matching import resolve_module_rules
from bitwright.planning import Plan, PlanRow
from bitwright.planning.chains import find_chains
from bitwright.planning.graph import boundary_paths, plan_graph_quantization
from bitwright.program.graph import capture_graph
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import OpQuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity, PerTensorGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.lambda_module import Lambda

X = torch.randn(2, 8)
IMAGE = torch.randn(1, 3, 4, 4)
VOLUME = torch.randn(1, 3, 4, 4, 4)
INT4 = {"*": QuantizationSpec(dtype=torch.int4)}


def plan_of(model: nn.Module, *inputs: Any, config: QuantizerConfig | None = None, **kwargs: Any) -> Plan:
    """Capture and plan."""
    config = QuantizerConfig() if config is None else config
    _, program = capture_graph(model.eval(), inputs or (X,), kwargs, boundaries=boundary_paths(config, model))
    return plan_graph_quantization(config, model, program).plan


def rows(plan: Plan) -> dict[str, PlanRow]:
    """Rows by tensor."""
    return {row.tensor: row for row in plan}


def linear(inputs: int = 8, outputs: int = 8) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def globally(**fields: Any) -> QuantizerConfig:
    return QuantizerConfig(global_config=ModuleQuantizerConfig(**fields))


class TestChains:
    @pytest.mark.parametrize(
        ("model", "x", "keys"),
        [
            (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(1, 3, 4, 4), ["conv_bn_act"]),
            (nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), torch.randn(1, 3, 4), ["conv_bn"]),
            (nn.Sequential(nn.ConvTranspose2d(3, 4, 1), nn.SiLU()), torch.randn(1, 3, 4, 4), ["conv_transpose_act"]),
            (nn.Sequential(nn.Conv3d(3, 4, 1, padding="same"), nn.ReLU6(True)), VOLUME, ["conv_act"]),
            (nn.Sequential(linear(), nn.BatchNorm1d(8), nn.GELU()), X, ["linear_bn_act"]),
            (nn.Sequential(linear(), nn.Dropout(), nn.ReLU()), X, ["linear", "act"]),
            (Lambda(lambda s, x: F.relu(x @ x.T)), X, ["matmul_act"]),
            (Lambda(lambda s, x: torch.sigmoid(torch.einsum("ij,kj->ik", x, x))), X, ["einsum_act"]),
            (Lambda(lambda s, x: F.relu(x + x) * x), X, ["add_act", "mul"]),
            (Lambda(lambda s, x: F.relu(x - x)), X, ["sub", "act"]),
            (nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten()), IMAGE, ["maxpool", "avgpool", "flatten"]),
            (Lambda(lambda s, x: torch.cat([x, torch.stack([x, x]).mean(0)])), X, ["concat", "avgpool", "concat"]),
        ],
    )  # fmt: skip
    def test_what_is_fused(self, model: nn.Module, x: torch.Tensor, keys: list[str]) -> None:
        """An op, a batch norm and an activation right behind each other are one chain."""
        config = QuantizerConfig()
        _, program = capture_graph(model.eval(), (x,))
        assert [chain.key for chain in find_chains(program, resolve_module_rules(config, model))] == keys

    def test_nothing_is_fused_across_a_second_reader(self) -> None:
        """The tensor in between is somebody else's, too, or the model's result."""
        for function in (lambda s, x: F.relu(y := s.l(x)) + y, lambda s, x: (F.relu(y := s.l(x)), y)):
            plan = plan_of(Lambda(function, l=linear()))
            assert "linear[output 0]" in rows(plan)

    def test_ranks(self) -> None:
        """Names before types before the global part; op names, op types, defaults; longer chains; later entries."""
        named_op = ModuleQuantizerConfig(op_name_config={"linear_3": None}, op_type_config={"linear": None})
        config = QuantizerConfig(
            module_type_configs={nn.Linear: ModuleQuantizerConfig()},
            module_name_configs={"0": ModuleQuantizerConfig(), "2": ModuleQuantizerConfig(), "3": named_op},
        )
        model = nn.Sequential(linear(), linear(), linear(), linear(), nn.ReLU(), linear(), nn.ReLU())
        _, program = capture_graph(model, (X,))
        chains = find_chains(program, resolve_module_rules(config, model))
        assert [chain.primary.name for chain in sorted(chains, key=lambda c: c.rank)] == [
            "linear_3",  # by op name, in an entry by name
            "linear_2",  # later entry by name
            "linear",
            "linear_4",  # by type, longer
            "linear_1",
        ]

    def test_ranks_within_a_section(self) -> None:
        """In the order in which modules are claimed: later ones first, and parents before heirs; as in coreai-opt."""
        part = ModuleQuantizerConfig()
        model = nn.Sequential(linear(), Lambda(lambda s, x: s.l(x) * 2.0, l=linear()))
        _, program = capture_graph(model, (X,))
        for config, expected in (
            (QuantizerConfig(module_name_configs={"[01].*": part}), ["linear_1", "mul", "linear"]),
            (QuantizerConfig(module_type_configs={nn.Linear: part, Lambda: part}), ["mul", "linear_1", "linear"]),
            (QuantizerConfig(), ["linear", "linear_1", "mul"]),
        ):
            chains = find_chains(program, resolve_module_rules(config, model))
            assert [chain.primary.name for chain in sorted(chains, key=lambda c: c.rank)] == expected

    def test_op_types_match_every_spelling(self) -> None:
        """``concat`` and ``cat`` are one; a fused pattern's key and an attention's function name work too."""
        for key in ("cat", "concat"):
            plan = plan_of(Lambda(lambda s, x: torch.concatenate([x, x])), config=globally(op_type_config={key: None}))
            assert not plan.rows
            assert not plan.problems
        off = globally(op_type_config={"linear_act": None})
        found = rows(plan_of(nn.Sequential(linear(), nn.ReLU(), linear()), config=off))
        assert found["0.weight"].spec is None
        assert found["2.weight"].spec is not None
        attention = Lambda(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(8, 2, batch_first=True))
        off = globally(op_type_config={"multi_head_attention_forward": None})
        assert not [r for r in plan_of(attention, torch.randn(1, 3, 8), config=off) if r.spec is not None]


class TestSharing:
    def test_rows_of_one_simulator_have_one_group(self) -> None:
        """Both ends of an edge, pools and flatten share; layers do not."""
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4))
        found = rows(plan_of(model, torch.randn(1, 3, 8, 8)))
        shared = {found[name].group for name in ("relu[output 0]", "max_pool2d[output 0]", "flatten[output 0]")}
        assert len(shared) == 1
        assert found["conv2d[input]"].group not in shared
        assert found["linear[output 0]"].group not in shared

    def test_a_conflict_is_decided_and_told(self) -> None:
        """The entry by name wins over the global one; the note says over whom."""
        config = QuantizerConfig(module_name_configs={"1": ModuleQuantizerConfig(op_input_spec=INT4)})
        row = rows(plan_of(nn.Sequential(linear(), linear()), config=config))["linear[output 0]"]
        assert row.spec.dtype == torch.int4
        assert row.rule == "module_name_configs['1'].op_input_spec['*']"
        assert "global_config.op_output_spec" in row.note

    @pytest.mark.parametrize(("source", "pool", "on"), [(None, {}, 0), ({}, {}, 0), (INT4, {}, 1), (INT4, None, 0)])
    def test_an_op_that_moves_values_hands_on_what_it_reads(self, source: Any, pool: Any, on: int) -> None:
        """A mean whose result is off is simulated with what it reads, if that is and its input is not off as well."""
        moves = ModuleQuantizerConfig(op_input_spec=pool, op_output_spec=None)
        specs = {"l": ModuleQuantizerConfig(op_output_spec=source), "p": moves}
        layers = {"l": linear(), "p": Lambda(lambda s, x: x.mean(0, True)), "m": linear()}
        model = Lambda(lambda s, x: s.m(s.p(s.l(x))), **layers)
        assert ("mean[output 0]" in rows(plan_of(model, config=QuantizerConfig(module_name_configs=specs)))) == on

    @pytest.mark.parametrize(
        ("before", "alone"),
        [
            (lambda s, x: x, True),
            (lambda s, x: x.exp(), True),
            (lambda s, x: x.flip(0), False),
            (lambda s, x: s.l(x), False),
        ],
    )
    def test_an_input_that_nobody_speaks_of_is_left_alone(self, before: Any, alone: bool) -> None:
        """Pools in a row, told nothing of their inputs, wait for a simulation; the second has that of the first."""
        model = Lambda(lambda s, x: F.avg_pool1d(F.max_pool1d(before(s, x), 2), 2), l=linear())
        found = rows(plan_of(model, config=globally(op_input_spec={})))
        groups = {name: row.group for name, row in found.items() if row.kind == "activation"}
        assert len(set(groups.values())) == 1
        assert (set(groups) == {"max_pool1d[output 0]", "avg_pool1d[output 0]"}) == alone
        assert {"max_pool1d[output 0]", "avg_pool1d[output 0]"} <= set(groups)

    def test_subclasses_of_specs_keep_their_fields(self) -> None:
        """What reconciliation changes is changed in the user's own class."""

        class Mine(QuantizationSpec):
            flavour: str = "plain"

        spec = Mine(flavour="sweet")
        config = globally(op_output_spec={"*": spec}, op_input_spec=None)
        found = rows(plan_of(nn.Sequential(linear(), nn.ReLU()), config=config))["relu[output 0]"].spec
        assert type(found) is Mine
        assert found.flavour == "sweet"
        assert found.qscheme.value == "asymmetric"

    @pytest.mark.parametrize("function", [lambda s, x: s.l(x).split(4, -1), lambda s, x: s.l(x).chunk(2, -1)])
    def test_pieces_share_with_the_whole(self, function: Any) -> None:
        """Splitting moves values; the pieces are not rounded a second time."""
        plan = plan_of(Lambda(function, l=linear()))
        assert len({row.group for row in plan if row.kind == "activation" and row.tensor != "linear[input]"}) == 1

    def test_an_axis_that_is_moved_falls_back_to_one_scale(self) -> None:
        """A problem of the plan names the op that moves it."""
        per_channel = {"*": QuantizationSpec(granularity=PerChannelGranularity(axis=1))}
        config = globally(op_input_spec=per_channel, op_output_spec=per_channel)
        plan = plan_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), torch.randn(1, 3, 8, 8), config=config)
        (problem,) = plan.problems
        assert problem.code == "axis-moved"
        assert "flatten" in problem.message
        assert isinstance(rows(plan)["flatten[output 0]"].spec.granularity, PerTensorGranularity)

    def test_a_pool_keeps_the_channel_axis(self) -> None:
        """Where the axis survives, the scales per channel do."""
        per_channel = {"*": QuantizationSpec(granularity=PerChannelGranularity(axis=1))}
        config = globally(op_input_spec=per_channel, op_output_spec=per_channel)
        plan = plan_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), torch.randn(1, 3, 8, 8), config=config)
        assert not plan.problems
        assert rows(plan)["max_pool2d[output 0]"].spec.granularity == PerChannelGranularity(axis=1)


class TestKnownRanges:
    @pytest.mark.parametrize(
        ("function", "scheme", "bounds"),
        [
            (torch.tanh, "symmetric", [-1.0, 1.0]),
            (torch.sigmoid, "asymmetric", [0.0, 1.0]),
            (F.hardsigmoid, "asymmetric", [0.0, 1.0]),
            (F.relu, "asymmetric", [0.0, None]),
            (F.relu6, "asymmetric", [0.0, 6.0]),
            (lambda x: F.hardtanh(x, -3.0, 3.0), "symmetric", [-3.0, 3.0]),
            (lambda x: F.hardtanh(x, 0.0, 6.0), "asymmetric", [0.0, 6.0]),
            (lambda x: F.hardtanh(x, 1.0, 2.0), "asymmetric", [0.0, 2.0]),
            (lambda x: torch.softmax(x, -1), "asymmetric", [0.0, 1.0]),
            (F.gelu, "symmetric", [None, None]),
        ],
    )
    def test_of_a_result(self, function: Any, scheme: str, bounds: list[float | None]) -> None:
        """The formula gives scheme and bounds, and the data lies within them."""
        plan = plan_of(Lambda(lambda s, x: function(s.l(x)), l=linear()))
        spec = list(plan)[-1].spec
        assert (spec.qscheme.value, spec.float_range) == (scheme, bounds)
        y = function(torch.randn(100, 8) * 5)
        assert bounds[0] is None or y.min() >= bounds[0]
        assert bounds[1] is None or y.max() <= bounds[1]

    def test_a_float_format_stays_symmetric(self) -> None:
        """An FP8 layer behind an int8 ReLU works (the peer ends in a meaningless TypeError)."""
        fp8 = {"*": QuantizationSpec(dtype=torch.float8_e4m3fn)}
        config = QuantizerConfig(module_name_configs={"2": ModuleQuantizerConfig(op_input_spec=fp8)})
        spec = rows(plan_of(nn.Sequential(linear(), nn.ReLU(), linear()), config=config))["relu[output 0]"].spec
        assert spec.dtype == torch.float8_e4m3fn
        assert spec.qscheme.value == "symmetric"

    def test_dynamic_parameters_have_no_fixed_range(self) -> None:
        """A dynamic spec behind a sigmoid works (the peer raises)."""
        dynamic = {"*": QuantizationSpec(qparam_calculator_cls="dynamic")}
        plan = plan_of(nn.Sequential(linear(), nn.Sigmoid()), config=globally(op_output_spec=dynamic))
        assert rows(plan)["sigmoid[output 0]"].spec.float_range == [None, None]


def masked_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention as older models write it: a mask with the smallest number is added to the scores."""
    scores = x @ x.transpose(-1, -2)
    return torch.softmax(scores + (1.0 - mask.to(x.dtype)) * torch.finfo(x.dtype).min, -1) @ x


class TestMasks:
    def test_masks_and_masked_scores_are_not_simulated(self) -> None:
        """One scale for numbers up to 3e38 would round all scores to zero, as it does in the peer."""
        model = Lambda(lambda s, x, mask: masked_attention(s.l(x), mask), l=linear())
        x, mask = torch.randn(1, 4, 8), torch.tensor([[1, 1, 1, 0]])
        found = rows(plan_of(model, x, mask))
        assert not [name for name in found if name.startswith(("add", "mul", "softmax[input"))]
        assert "matmul[output 0]" in found
        assert "softmax[output 0]" in found

    @pytest.mark.parametrize(
        "function",
        [
            lambda s, x: torch.softmax(x.masked_fill(x > 0, float("-inf")), -1),
            lambda s, x: torch.softmax(x + torch.triu(torch.full((2, 8), float("-inf")), 1), -1),
            lambda s, x: torch.softmax(torch.where(x > 0, x, torch.finfo(x.dtype).min), -1),
            lambda s, x: torch.softmax(x + s.mask, -1),
        ],
        ids=["masked_fill", "triu", "where", "buffer"],
    )
    def test_ways_to_write_a_mask(self, function: Any) -> None:
        """Whatever puts minus infinity into the scores, the softmax's input is left alone."""
        model = Lambda(function)
        model.register_buffer("mask", torch.tensor([0.0] * 7 + [-1e9]))
        assert not [row.tensor for row in plan_of(model) if row.tensor.startswith("softmax[input")]

    def test_attention_masks(self) -> None:
        """The mask of ``scaled_dot_product_attention`` is no input that ``"*"`` speaks about."""
        model = Lambda(lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT))
        found = rows(plan_of(model, torch.randn(1, 2, 4, 8)))
        assert "scaled_dot_product_attention[query]" in found
        assert "scaled_dot_product_attention[attn_mask]" not in found


class TestBoundaries:
    def test_inputs_are_numbered_by_forwards_signature(self) -> None:
        """Not by their use, as in the peer; names work too."""

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l, self.m = linear(), linear()

            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return self.l(b) + self.m(a)

        for key in (0, "a"):
            config = QuantizerConfig(
                module_name_configs={"p": ModuleQuantizerConfig(module_input_spec={key: INT4["*"]})}
            )
            plan = plan_of(Lambda(lambda s, x, y: s.p(x, y), p=Pair()), X, X.clone(), config=config)
            found = {row.tensor: row.spec.dtype for row in plan if row.kind == "activation"}
            assert found["linear_1[input]"] == torch.int4
            assert found["linear[input]"] == torch.int8

    def test_an_input_that_is_opted_out(self) -> None:
        """None at a module's boundary leaves the tensor alone there."""
        config = QuantizerConfig(module_name_configs={"0": ModuleQuantizerConfig(module_input_spec={0: None})})
        assert "linear[input]" not in rows(plan_of(nn.Sequential(linear()), config=config))

    def test_outputs_and_repeated_calls(self) -> None:
        """The spec holds at every call of the module."""
        config = QuantizerConfig(module_name_configs={"l": ModuleQuantizerConfig(module_output_spec=INT4)})
        found = rows(plan_of(Lambda(lambda s, x: s.l(s.l(x)), l=linear()), config=config))
        assert found["linear[output 0]"].spec.dtype == found["linear_1[output 0]"].spec.dtype == torch.int4

    def test_a_module_that_is_not_called(self) -> None:
        """The plan says so."""
        config = QuantizerConfig(module_name_configs={"unused": ModuleQuantizerConfig(module_input_spec=INT4)})
        plan = plan_of(Lambda(lambda s, x: s.l(x), l=linear(), unused=linear()), config=config)
        assert "unknown-boundary" in {problem.code for problem in plan.problems}


class TestProblems:
    def test_an_op_key_that_only_names_fused_ops(self) -> None:
        """It has no effect, and the plan says whom to configure instead."""
        plan = plan_of(nn.Sequential(linear(), nn.ReLU()), config=globally(op_type_config={"relu": None}))
        (problem,) = plan.problems
        assert problem.code == "fused-op"
        assert "linear" in problem.message
        mixed = nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(8), nn.ReLU())
        assert not plan_of(mixed, config=globally(op_type_config={"relu": None})).problems

    def test_unmatched_keys_and_axes_come_together(self) -> None:
        """Every problem is listed, not only the first."""
        no_axis = {"*": QuantizationSpec(granularity=PerChannelGranularity())}
        config = globally(op_input_spec=no_axis, op_type_config={"liner": OpQuantizerConfig()})
        config.set_module_name("absent", None)
        codes = sorted({problem.code for problem in plan_of(nn.Sequential(linear()), config=config).problems})
        assert codes == ["axis-unresolved", "unmatched-key"]

    def test_results_without_elements_are_told(self) -> None:
        """They have no simulator, of which finalize would say that it has seen nothing; the others have theirs."""

        def some(s: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([s.l(x[:0]).transpose(0, 1).sum(1)[None], s.l(x)])

        boundary = ModuleQuantizerConfig(module_input_spec=INT4, module_output_spec=INT4)
        for config in (QuantizerConfig.presets.w8a8(), QuantizerConfig(module_name_configs={"l": boundary})):
            plan = plan_of(Lambda(some, l=linear()), config=config)
            (problem,) = plan.problems
            assert (problem.code, problem.where) == ("empty-activation", "linear")
            found = [row for row in plan if row.kind == "activation"]
            assert all(0 not in row.shape for row in found)
            assert "linear_1[input]" in rows(plan)
        assert not plan_of(Lambda(some, l=linear()), config=QuantizerConfig.presets.w8()).problems


class TestMutation:
    def test_caches_that_are_written_to_are_not_simulated(self) -> None:
        """A simulator in front of a write would divert it to a copy."""
        model = Lambda(lambda s, x: s.l(x) + s.cache.add_(x), l=linear())
        model.register_buffer("cache", torch.zeros(2, 8))
        config = globally(op_state_spec={"*": QuantizationSpec()})
        plan = plan_of(model, config=config)
        assert not [row.tensor for row in plan if row.kind == "activation" and "add_[input]" in row.tensor]

    def test_inputs_written_through_a_view(self) -> None:
        """They are simulated where ops read them, each time anew, and not where they are views that are written to."""

        def write(s: Any, x: torch.Tensor) -> torch.Tensor:
            x[:, :4].copy_(s.l(x)[:, 4:])
            return s.l(x)

        found = [row for row in plan_of(Lambda(write, l=linear()), torch.randn(2, 8)) if row.kind == "activation"]
        assert [row.tensor for row in found if row.tensor.endswith("[input]")] == ["linear[input]", "linear_1[input]"]

    def test_results_written_through_a_view(self) -> None:
        """As in partial convolutions: what is written is simulated neither at its producer, nor for the write."""

        def write(s: Any, x: torch.Tensor) -> torch.Tensor:
            x = F.gelu(s.l(x))
            x[:, :4] = s.some(x[:, :4])
            return s.l(x)

        found = [
            row.tensor for row in plan_of(Lambda(write, l=linear(), some=linear(4, 4))) if row.kind == "activation"
        ]
        assert found == [
            "linear[input]", "linear_1[input]", "linear_1[output 0]", "linear_2[input]", "linear_2[output 0]",
        ]  # fmt: skip


def test_eager_and_graph_agree_on_weights() -> None:
    """The same weights, specs, axes and rules; differing activations are told by notes and groups."""
    from bitwright.quantization import Quantizer

    def build() -> nn.Module:
        torch.manual_seed(0)
        first = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2), nn.Flatten())
        return nn.Sequential(*first, nn.Linear(294, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def mixed(execution_mode: str) -> QuantizerConfig:
        int4 = ModuleQuantizerConfig(op_state_spec={"weight": QuantizationSpec(dtype="int4")})
        return QuantizerConfig(execution_mode=execution_mode, module_name_configs={"5": None, "0": int4})

    def blocks(execution_mode: str) -> QuantizerConfig:
        return QuantizerConfig.presets.w4_per_block(block_size=2, execution_mode=execution_mode)

    configs: tuple[Any, ...] = (QuantizerConfig.presets.w8, blocks, mixed)
    x = torch.randn(1, 3, 8, 8)
    for make in configs:
        plans = [Quantizer(build(), make(execution_mode=mode)).plan((x,)) for mode in ("eager", "graph")]
        weights = [[(r.tensor, r.spec, r.block_size, r.rule) for r in plan if r.kind == "weight"] for plan in plans]
        assert weights[0] == weights[1]


class TestUnreadResults:
    """Results that nobody reads are no part of an exported graph; the others keep their numbers."""

    def test_a_later_piece_is_simulated_at_its_own_place(self) -> None:
        """Of three columns the first two are left out; per-channel scales keep the piece from sharing the whole's."""

        def last(s: Any, x: torch.Tensor) -> torch.Tensor:
            return s.layer(torch.unbind(x * 2, 1)[2])

        plan = plan_of(Lambda(last, layer=linear()).eval(), torch.randn(2, 3, 8))
        values = [site.value for placement in plan.placements for site in placement.sites if site.output_index]
        assert [(value.name, value.output_index) for value in values] == [("getitem_2", 2)]

    def test_a_recurrent_layer_of_which_only_the_state_is_read(self) -> None:
        """Key 1 of ``op_output_spec`` means the state; ``"*"`` means the sequence, which is not there."""

        def state(s: Any, x: torch.Tensor) -> torch.Tensor:
            return s.layer(s.rnn(x)[1][0])

        def model() -> nn.Module:
            return Lambda(state, rnn=nn.GRU(8, 8), layer=linear()).eval()

        x = torch.randn(3, 2, 8)
        assert not any("gru[output" in name for name in rows(plan_of(model(), x)))
        chosen = QuantizationSpec(granularity=PerTensorGranularity())
        config = globally(op_type_config={"gru": OpQuantizerConfig(op_output_spec={1: chosen})})
        assert "gru[output 1]" in rows(plan_of(model(), x, config=config))


def test_equal_specs_on_both_sides_of_a_boundary_are_one_simulator() -> None:
    """What a module's boundary says, and what the ops around it say, are the same tensor; other specs are others."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x)
            return result

    def simulators(boundary: QuantizationSpec) -> int:
        model = nn.Sequential(nn.Linear(32, 32), Wrapped(), Wrapped(), nn.Linear(32, 32)).eval()
        edges = ModuleQuantizerConfig(module_input_spec={"*": boundary}, module_output_spec={"*": boundary})
        config = QuantizerConfig(module_type_configs={Wrapped: edges})
        prepared = Quantizer(model, config).prepare((torch.randn(1, 32),))
        return sum(isinstance(module, FakeQuantizeImplBase) for module in prepared.modules())

    weights = 4
    assert simulators(QuantizationSpec(dtype="int8")) == weights + 5
    # The weights' readers take their inputs' simulators from the boundary, and the outer layers keep their own.
    assert simulators(QuantizationSpec(dtype="uint8", qscheme="asymmetric")) == weights + 7


def test_the_first_input_of_an_embedding_is_its_indices() -> None:
    """aten puts the weight there; ``{0: ...}`` for a whole model speaks of what a layer is called with."""
    model = nn.Sequential(nn.Embedding(5, 8), linear())
    plan = plan_of(model, torch.tensor([[1, 2]]), config=globally(op_input_spec={0: QuantizationSpec()}))
    assert not plan.problems
    simulated = [row for row in plan if row.kind == "activation"]
    assert [row.shape for row in simulated] == [(1, 2, 8), (1, 2, 8)]
    assert rows(plan)["0.weight"].spec is not None
