"""Patterns that a user registers: how their ops are fused, quantized, and share simulators."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._graph._annotation_pattern_registry import (
    ConcatPattern,
    NAryActPattern,
    SharedObserverModulePattern,
    WeightedModulePattern,
    _AnnotationPatternRegistry,
    _get_all_patterns_from_base_ops,
    registered_roles,
)
from bitwright.quantization._graph._annotation_utils import OpsListPattern
from bitwright.quantization._graph._qspec_constraints import InheritFields, ShareFields, ShareObserverInstance
from bitwright.quantization._graph._qspec_resolution import _build_concrete_spec
from bitwright.quantization._graph._qspec_types import (
    OP_INTRINSIC_PRIORITY,
    FieldName,
    FieldValue,
    NodeSlot,
    ProvisionalQSpec,
    ReconciliationError,
    SlotKind,
)
from bitwright.quantization._graph.quantizer import _AnnotationHandler
from bitwright.quantization.config import OpQuantizerConfig
from bitwright.quantization.spec import QuantizationScheme
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

INT8 = QuantizationSpec(dtype="int8")
INT4 = QuantizationSpec(dtype="int4")


@pytest.fixture
def registry() -> Iterator[type[_AnnotationPatternRegistry]]:
    """The registry, emptied again afterwards."""
    before = dict(_AnnotationPatternRegistry.REGISTRY)
    yield _AnnotationPatternRegistry
    _AnnotationPatternRegistry.REGISTRY.clear()
    _AnnotationPatternRegistry.REGISTRY.update(before)


def inputs_only(spec: QuantizationSpec) -> ModuleQuantizerConfig:
    """Every op's inputs, nothing else."""
    return ModuleQuantizerConfig(op_state_spec=None, op_input_spec={"*": spec}, op_output_spec=None)


def simulator_in_front_of(prepared: fx.GraphModule, name: str) -> FakeQuantizeImplBase | None:
    """The simulator that the op of this name reads through."""
    node = next(node for node in prepared.graph.nodes if node.name == name)
    source = node.all_input_nodes[0]
    found = prepared.get_submodule(str(source.target)) if source.op == "call_module" else None
    return found if isinstance(found, FakeQuantizeImplBase) else None


@pytest.mark.parametrize("registered", [False, True])
def test_an_activation_with_a_pattern_leaves_its_chain_where_the_config_names_it(
    registry: type[_AnnotationPatternRegistry], registered: bool
) -> None:
    """Without a pattern of its own a ReLU belongs to the convolution in front of it, whatever the config says."""
    if registered:

        @registry.register("relu")
        class Relu(NAryActPattern):
            @classmethod
            def generate_patterns(cls) -> list[OpsListPattern]:
                return [OpsListPattern([torch.ops.aten.relu.default])]

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    config = QuantizerConfig(global_config=inputs_only(INT8), module_type_configs={nn.ReLU: inputs_only(INT4)})
    prepared = Quantizer(model, config).prepare((torch.randn(1, 1, 5, 5),))
    assert isinstance(prepared, fx.GraphModule)
    conv, relu = simulator_in_front_of(prepared, "conv2d"), simulator_in_front_of(prepared, "relu")
    assert conv is not None
    assert conv.dtype == torch.int8
    assert (None if relu is None else relu.dtype) == (torch.int4 if registered else None)


def test_a_pattern_makes_a_new_op_quantizable(registry: type[_AnnotationPatternRegistry]) -> None:
    """cumsum is left alone until a pattern names it."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x, 1)

    def prepare() -> fx.GraphModule:
        prepared = Quantizer(Model(), QuantizerConfig(global_config=inputs_only(INT8))).prepare((torch.randn(2, 3),))
        assert isinstance(prepared, fx.GraphModule)
        return prepared

    assert simulator_in_front_of(prepare(), "cumsum") is None

    @registry.register("running_sum")
    class RunningSum(NAryActPattern):
        @classmethod
        def generate_patterns(cls) -> list[OpsListPattern]:
            return [OpsListPattern(["cumsum"])]

    assert simulator_in_front_of(prepare(), "cumsum") is not None


@pytest.mark.parametrize("share", [True, False])
def test_a_pattern_decides_who_shares_a_simulator(registry: type[_AnnotationPatternRegistry], share: bool) -> None:
    """The constraints that a pattern returns for an op decide about its slots."""
    seen: list[set[NodeSlot]] = []

    @registry.register("tile")
    class Tile(SharedObserverModulePattern):
        @classmethod
        def generate_patterns(cls) -> list[OpsListPattern]:
            return [OpsListPattern(["tile"])]

        @classmethod
        def generate_qspec_sharing_constraints(
            cls, node: fx.Node, qspecs: dict[NodeSlot, ProvisionalQSpec]
        ) -> list[ShareObserverInstance]:
            slots = frozenset({NodeSlot(node, SlotKind.INPUT, 0), NodeSlot(node, SlotKind.OUTPUT, 0)})
            seen.append(set(qspecs))
            return [ShareObserverInstance(slots)] if share else []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tile(x, (2, 1))

    both = ModuleQuantizerConfig(op_state_spec=None, op_input_spec={"*": INT8}, op_output_spec={"*": INT8})
    prepared = Quantizer(Model(), QuantizerConfig(global_config=both)).prepare((torch.randn(2, 3),))
    simulators = {id(m) for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)}
    assert len(simulators) == (1 if share else 2)
    assert {slot.kind for slots in seen for slot in slots} == {SlotKind.INPUT, SlotKind.OUTPUT}


def test_spellings_of_a_pattern_have_one_length(registry: type[_AnnotationPatternRegistry]) -> None:
    """Graph modules and lists of names are measured alike, and shared-observer patterns have one op."""

    def linear_relu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.linear(x, w))

    class Alike(WeightedModulePattern):
        @classmethod
        def generate_patterns(cls) -> list[object]:
            return [OpsListPattern(["linear", "relu"]), fx.symbolic_trace(linear_relu)]

    class Unlike(WeightedModulePattern):
        @classmethod
        def generate_patterns(cls) -> list[object]:
            return [OpsListPattern(["linear"]), fx.symbolic_trace(linear_relu)]

    class Long(ConcatPattern):
        @classmethod
        def generate_patterns(cls) -> list[OpsListPattern]:
            return [OpsListPattern(["cat", "relu"])]

    assert Alike.get_pattern_length() == 2
    for wrong in (Unlike, Long):
        with pytest.raises(RuntimeError, match=wrong.__name__):
            wrong.get_patterns()
    registry.register("alike")(Alike)
    role = registered_roles()["linear"]
    assert (role.pattern, role.takes_activation, role.takes_batch_norm, role.inputs) == ("alike", True, False, (0,))
    matches = _AnnotationHandler({}, {}, {})._match_all_annotators(fx.symbolic_trace(linear_relu))["alike"]
    assert [tuple(node.name for node in chain) for chain in matches.values()] == [("linear", "relu")]


class TestConstraints:
    """What constraints do to the specs of slots; the expected values are written out by hand."""

    @pytest.fixture
    def slots(self) -> tuple[NodeSlot, NodeSlot, NodeSlot]:
        node = fx.Graph().placeholder("x")
        return (
            NodeSlot(node, SlotKind.INPUT, 0),
            NodeSlot(node, SlotKind.INPUT, 1),
            NodeSlot(node, SlotKind.OUTPUT, 0),
        )

    def test_one_simulator_covers_all_ranges_and_follows_the_strongest(
        self, slots: tuple[NodeSlot, NodeSlot, NodeSlot]
    ) -> None:
        a, b, c = slots
        scheme = FieldValue(QuantizationScheme.ASYMMETRIC, OP_INTRINSIC_PRIORITY)
        qspecs = {
            a: ProvisionalQSpec(
                {
                    FieldName.DTYPE: FieldValue(torch.int4, 3),
                    FieldName.FLOAT_RANGE: FieldValue([0.0, 1.0], -1),
                    FieldName.QSCHEME: scheme,
                }
            ),
            b: ProvisionalQSpec(
                {FieldName.DTYPE: FieldValue(torch.int8, 1), FieldName.FLOAT_RANGE: FieldValue([-2.0, None], 1)}
            ),
            c: ProvisionalQSpec(declined_by=0),
        }
        assert ShareObserverInstance(frozenset({a, b})).apply(qspecs) == {a, b}
        assert ShareObserverInstance(frozenset({b, c})).apply(qspecs) == {a, b, c}
        assert qspecs[a] is qspecs[b]
        assert qspecs[b] is qspecs[c]
        fields = qspecs[a].fields
        assert fields[FieldName.DTYPE] == FieldValue(torch.int8, 1)
        assert fields[FieldName.FLOAT_RANGE] == FieldValue([-2.0, None], -1)
        assert fields[FieldName.QSCHEME] == scheme
        assert not qspecs[a].declined
        assert ShareObserverInstance(frozenset({a, c})).apply(qspecs) == set()

    def test_fields_are_shared_and_inherited_without_sharing_simulators(
        self, slots: tuple[NodeSlot, NodeSlot, NodeSlot]
    ) -> None:
        a, b, c = slots
        known = {FieldName.DTYPE: FieldValue(torch.int8, 2), FieldName.FLOAT_RANGE: FieldValue([0.0, None], -1)}
        qspecs = {a: ProvisionalQSpec(known), b: ProvisionalQSpec({FieldName.DTYPE: FieldValue(torch.int4, 1)})}
        assert ShareFields(frozenset({a, b}), frozenset({FieldName.DTYPE})).apply(qspecs) == {a}
        inherit = InheritFields(a, frozenset({b, c}), frozenset({FieldName.FLOAT_RANGE}))
        assert inherit.apply(qspecs) == {b}
        assert inherit.apply(qspecs) == set()
        assert qspecs[a] is not qspecs[b]
        assert c not in qspecs
        assert [qspecs[s].fields[FieldName.DTYPE].value for s in (a, b)] == [torch.int4, torch.int4]
        assert qspecs[b].fields[FieldName.FLOAT_RANGE].value == [0.0, None]

    def test_only_complete_specs_become_torchao_specs(self) -> None:
        pytest.importorskip("torchao")
        fields = {name: FieldValue(getattr(INT8, name.value, None), 0) for name in FieldName}
        fields[FieldName.QUANTIZATION_TARGET] = FieldValue("activation", 0)
        built = _build_concrete_spec(ProvisionalQSpec(fields))
        assert (built.dtype, built.quant_min, built.quant_max) == (torch.int8, -128, 127)
        assert isinstance(built.observer_or_fake_quant_ctr(), FakeQuantizeImplBase)
        assert _build_concrete_spec(ProvisionalQSpec(declined_by=0)) is None
        del fields[FieldName.GRANULARITY]
        with pytest.raises(ReconciliationError, match="granularity"):
            _build_concrete_spec(ProvisionalQSpec(fields))


def test_spellings_made_from_functions(registry: type[_AnnotationPatternRegistry]) -> None:
    """Each function with each activation behind it is one chain: nothing is quantized in between."""

    class Divided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.div(x, x.square() + 1))

    def simulators() -> int:
        config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_type_config={"div_act": inputs_and_outputs}))
        prepared = Quantizer(Divided().eval(), config).prepare((torch.randn(2, 8),))
        return sum(isinstance(module, FakeQuantizeImplBase) for module in prepared.modules())

    inputs_and_outputs = OpQuantizerConfig(op_input_spec={"*": INT8}, op_output_spec={"*": INT8})

    @registry.register("div_act")
    class DividedActivated(NAryActPattern):
        @classmethod
        def generate_patterns(cls) -> list[OpsListPattern]:
            return _get_all_patterns_from_base_ops({torch.div, operator.truediv}, use_act=True)

    assert DividedActivated.get_pattern_length() == 2
    assert len(_get_all_patterns_from_base_ops(["div", torch.mul])) == 2
    role = registered_roles()["div"]
    assert role.takes_activation
    assert simulators() > 0
