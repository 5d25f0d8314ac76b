"""Graph plans: whose parameter a key names, what may be named by position, and scales that moving ops keep."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import fx, nn

from bitwright.artifact import Artifact, QuantizedTensor
from bitwright.errors import ConfigMatchWarning, PlanError
from bitwright.planning import Plan
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import (
    FakeQuantizeImplBase,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
)
from tests.measures import sqnr

OFF = {"op_input_spec": None, "op_output_spec": None, "op_state_spec": None}
INT8 = QuantizationSpec(dtype="int8", granularity=PerTensorGranularity())


class Owner(nn.Module):
    """Scales by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.here


class Borrower(Owner):
    """Has a parameter of the same name, and that of another module under another name."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.there = owner.here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.here + self.there


class Shared(nn.Module):
    """The two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner()
        self.borrower = Borrower(self.owner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.borrower(self.owner(x))


def simulated(plan: Plan, kind: str) -> set[str]:
    """Names of the tensors of a kind that get simulators."""
    return {row.tensor for row in plan if row.spec is not None and row.kind == kind}


@pytest.mark.parametrize(
    ("module", "key", "expected"),
    [
        ("owner", "here", {"owner.here"}),
        ("owner", "there", set()),
        ("borrower", "there", {"owner.here"}),
        ("borrower", "here", {"borrower.here"}),
    ],
)
def test_module_state_spec_knows_a_tied_parameter_by_the_modules_own_name(
    module: str, key: str, expected: set[str]
) -> None:
    config = ModuleQuantizerConfig(**OFF, module_state_spec={key: INT8})
    quantizer = Quantizer(Shared(), QuantizerConfig(global_config=None, module_name_configs={module: config}))
    assert simulated(quantizer.plan((torch.randn(3, 2),)), "weight") == expected


def test_a_parameter_is_no_input() -> None:
    """Position 1 of a linear layer is its weight, which op_input_spec does not speak about."""
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec={1: INT8}))
    with pytest.raises(PlanError, match="Config is attempting to set op_input_spec for 'weight'") as raised:
        Quantizer(nn.Linear(4, 4), config).prepare((torch.randn(2, 4),))
    assert isinstance(raised.value, RuntimeError)
    left_alone = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec={1: None, 0: INT8}))
    Quantizer(nn.Linear(4, 4), left_alone).prepare((torch.randn(2, 4),))


def test_counters_are_no_tensors_to_quantize() -> None:
    """A batch norm that is captured in training adds one to its counter, which is the first input of that addition."""
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec={0: INT8}, op_output_spec=None))
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).train()
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((torch.randn(2, 3, 6, 6),))
    assert sum(isinstance(module, FakeQuantizeImplBase) for module in ready.modules()) == 4
    with quantizer.training_mode():
        ready(torch.randn(2, 3, 6, 6))
    assert ready.get_buffer("1.num_batches_tracked") == 1


class BothWays(nn.Module):
    """A matrix that goes in, and comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.enc(x), self.enc.weight.t())


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_remedy_for_axes_that_conflict_works_as_written(mode: str, axis: int) -> None:
    """The axis that is set for the module that owns the weight serves both of its readers."""
    torch.manual_seed(0)
    model, x, presets = BothWays().eval(), torch.randn(3, 4), ModuleQuantizerConfig.presets
    config = QuantizerConfig(global_config=presets.w8(), execution_mode=mode)
    (problem,) = Quantizer(model, config).plan((x,)).problems
    assert problem.code == "axis-conflict"
    assert "op_state_spec['weight'] in module_name_configs['enc']" in problem.message
    spec = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=axis))
    named = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    config = QuantizerConfig(global_config=presets.w8(), module_name_configs={"enc": named}, execution_mode=mode)
    quantizer = Quantizer(model, config)
    assert not quantizer.plan((x,)).problems
    weight = model.enc.weight.detach()
    scale = weight.abs().amax(1 - axis, keepdim=True) / 127.5
    rounded = (weight / scale).round().clamp(-128, 127) * scale
    torch.testing.assert_close(quantizer.prepare((x,))(x), x @ rounded.T @ rounded)


@pytest.mark.parametrize(("shape", "quantized"), [((1, 5), True), ((5,), False)])
def test_a_vector_is_left_alone_only_where_each_number_would_get_a_scale(
    shape: tuple[int, ...], quantized: bool
) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    spec = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0))
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(**{**OFF, "op_state_spec": {"*": spec}}))
    plan = Quantizer(Shift(), config).plan((torch.randn(2, 5),))
    assert simulated(plan, "weight") == ({"shift"} if quantized else set())


@pytest.mark.parametrize(
    ("granularity", "kept"),
    [
        (PerChannelGranularity(axis=1), True),
        (PerChannelGranularity(axis=2), False),
        (PerBlockGranularity(axis=1, block_size=2), False),
    ],
)
def test_scales_that_span_all_axes_survive_only_where_no_axis_moves(
    granularity: PerChannelGranularity | PerBlockGranularity, kept: bool
) -> None:
    """A square tensor beside its transpose: blocks along the channels have a scale for each row and column too."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return torch.cat([y, y.permute(0, 1, 3, 2)], 0)

    spec = QuantizationSpec(dtype="int8", granularity=granularity)
    config = ModuleQuantizerConfig(op_state_spec=None, op_input_spec=None, op_output_spec={"*": spec})
    x = torch.randn(2, 3, 6, 6)
    quantizer = Quantizer(Beside(), QuantizerConfig(global_config=config))
    found = {type(row.spec.granularity) for row in quantizer.plan((x,)) if row.spec is not None}  # type: ignore[attr-defined]
    assert found == ({type(granularity)} if kept else {PerTensorGranularity})
    with contextlib.nullcontext() if kept else pytest.warns(ConfigMatchWarning, match="axis changes its size or"):
        assert quantizer.prepare((x,))(x).shape == (4, 4, 6, 6)


@pytest.mark.parametrize("shared", [False, True])
def test_plans_count_biases_of_folded_batch_norms_as_the_artifact_holds_them(shared: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
    if shared:
        model[2].bias = model[0].bias
    specs = dict.fromkeys(("weight", "bias"), QuantizationSpec(dtype="int8"))
    config = ModuleQuantizerConfig(op_state_spec=specs, op_input_spec=None, op_output_spec=None)
    quantizer = Quantizer(model, QuantizerConfig(global_config=config, execution_mode="graph"))
    plan = quantizer.plan((torch.randn(2, 3, 8, 8),))
    artifact = Artifact.from_model(quantizer.prepare((torch.randn(2, 3, 8, 8),)))
    rows = {row.tensor: row for row in plan}
    assert ("a batch norm is folded" in rows["0.bias"].note) is not shared
    held = [entry.nbytes for name, entry in artifact.items() if isinstance(entry, QuantizedTensor)]
    folded = [] if shared else [artifact["0.bias"].nbytes]
    assert sorted(row.compressed_bytes for row in plan) == sorted([*held, *folded])


@pytest.mark.parametrize(("training", "norms"), [(False, (3, 4)), (True, (5, 6))])
def test_folded_layers_are_named_as_by_pt2e(training: bool, norms: tuple[int, int]) -> None:
    """The expected names are those that prepare_qat_pt2e gives to a convolution and a linear layer with batch norms."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.linear, self.flat = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.flat(self.linear(self.norm(self.conv(x)).mean((2, 3))))

    prepared = Quantizer(Net().train(training), QuantizerConfig()).prepare((torch.randn(2, 3, 4, 4),))
    assert isinstance(prepared, fx.GraphModule)
    names = [node.name for node in prepared.graph.nodes if node.op != "get_attr"]
    kept = [name for name in names if name.startswith(("conv", "linear", "batch_norm_")) and "folds" not in name]
    assert kept == ["conv2d_1", f"batch_norm_{norms[0]}", "linear", f"batch_norm_{norms[1]}"]


class PooledTokens(nn.Module):
    """Joins both sides of an op that leaves other tokens, or the same ones in another order."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.second(y.mean(1) if self.way == "mean" else y.transpose(0, 1))


@pytest.mark.parametrize("way", ["mean", "transpose"])
@pytest.mark.parametrize("calculator", ["moving_average", "dynamic"])
def test_ranges_of_tokens_that_an_op_moves_are_joined(calculator: str, way: str) -> None:
    """A running range for each token cannot be one for those behind a mean; what is computed anew each time can."""
    spec = QuantizationSpec(dtype="int8", granularity=PerTokenGranularity(), qparam_calculator_cls=calculator)
    config = ModuleQuantizerConfig(op_state_spec=None, op_input_spec={"*": spec}, op_output_spec={"*": spec})
    x = torch.randn(3, 3, 4)
    quantizer = Quantizer(PooledTokens(way).eval(), QuantizerConfig(global_config=config))
    moved = calculator != "dynamic"
    with pytest.warns(ConfigMatchWarning, match="axes of the tokens") if moved else contextlib.nullcontext():
        prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    assert sqnr(quantizer._engine.model(x), prepared(x)) > 30
    assert quantizer.applied_plan is not None
    kinds = {type(row.spec.granularity) for row in quantizer.applied_plan if row.spec is not None}  # type: ignore[attr-defined]
    assert kinds == ({PerTokenGranularity, PerTensorGranularity} if moved else {PerTokenGranularity})
