"""The inspector prints names that configurations match, in both modes, and knows boundaries and sources."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.inspection import ModelInspector, OpInfo
from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner
from bitwright.quantization import Quantizer, QuantizerConfig

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.skip = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + self.skip(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        pooled = self.block(x).mean((2, 3))
        return torch.cat([self.head(pooled), pooled + bias], 1)


INPUTS = (torch.randn(2, 3, 8, 8), torch.randn(4))


@MODES
def test_every_printed_op_name_is_matched_by_a_config(mode: str) -> None:
    """A config that names an op exactly matches it: the plan has no unmatched key and names it as the rule."""
    inspector = ModelInspector(Net().eval(), INPUTS, mode, compressor=Quantizer)
    for op in inspector.summary.model.all_ops():
        name = op.op_name.replace(".", r"\.")
        config = QuantizerConfig.model_validate(
            {"execution_mode": mode, "global_config": {"op_name_config": {name: {}}, "op_state_spec": None}}
        )
        plan = Quantizer(Net().eval(), config).plan(INPUTS)
        assert not [problem for problem in plan.problems if problem.code == "unmatched-key"], op.op_name


@MODES
def test_every_printed_type_and_module_is_matched_by_a_config(mode: str) -> None:
    """Op types, module paths and module types of the tree are keys that match something."""
    inspector = ModelInspector(Net().eval(), INPUTS, mode, compressor=Quantizer)
    root = inspector.summary.model
    empty = {"op_state_spec": None, "op_input_spec": None, "op_output_spec": None}
    config = QuantizerConfig.model_validate(
        {
            "execution_mode": mode,
            "global_config": {"op_type_config": {op.op_type: {} for op in root.all_ops()}},
            "module_name_configs": {m.module_name: empty for m in root.modules() if m.module_name},
            "module_type_configs": {m.module_type: empty for m in root.modules() if m.module_name},
        }
    )
    plan = Quantizer(Net().eval(), config).plan(INPUTS)
    unmatched = [str(problem) for problem in plan.problems if problem.code == "unmatched-key"]
    assert not [text for text in unmatched if "module_" in text], unmatched


@MODES
def test_modules_without_compressible_ops_are_in_the_tree(mode: str) -> None:
    """With the keys of their inputs and outputs, which ``module_input_spec`` takes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    root = ModelInspector(model, (torch.randn(1, 4),), mode, compressor=Quantizer).summary.model
    relu = root.get_submodule("1")
    assert list(root.child_modules) == ["0", "1", "2"]
    assert (list(relu.input_ops), list(relu.output_ops)) == ([0], [0])


def test_inputs_and_states_of_graphs_are_output_0_of_their_source() -> None:
    root = ModelInspector(Net().eval(), INPUTS, "graph").summary.model
    edges = [edge for op in root.all_ops() for edge in op.inputs]
    assert any(edge.is_state for edge in edges)
    assert all(edge.output_idx is not None for edge in edges)


@MODES
def test_boundaries_follow_the_arguments_of_forward(mode: str) -> None:
    """Key 1 of the root's inputs is forward's second argument, which the add reads as its second argument."""
    root = ModelInspector(Net().eval(), INPUTS, mode).summary.model
    [edge] = root.input_ops[1]
    assert edge.op.op_type == "add"
    assert edge.index == 1
    block = root.get_submodule("block")
    assert {edge.op.op_type for edge in block.input_ops[0]} == {"conv2d"}
    assert len(block.input_ops[0]) == 2
    assert block.output_ops[0].op.op_type == "add"


@MODES
def test_items_of_a_list_have_keys_of_their_own(mode: str) -> None:
    """The tensors of ``cat`` are addressed by their position in the list, as op_input_spec does."""
    [cat] = ModelInspector(Net().eval(), INPUTS, mode).get_matched_ops_for_op_type("cat")
    assert [edge.index for edge in cat.inputs] == [0, 1]


def test_activations_fused_into_a_layer_are_no_ops_of_their_own_in_graph_mode() -> None:
    """The plan quantizes conv, batch norm and ReLU as one; only the conv can be addressed."""
    inspector = ModelInspector(Net().eval(), INPUTS, "graph", compressor=Quantizer)
    assert not inspector.get_matched_ops_for_op_type("relu")
    assert len(inspector.get_matched_ops_for_op_type("conv2d")) == 2


@pytest.mark.parametrize("compressor", [KMeansPalettizer, MagnitudePruner])
def test_weight_only_compressors_show_weighted_ops(compressor: type) -> None:
    """Palettizer and pruner know layers with weights and nothing else."""
    inspector = ModelInspector(Net().eval(), INPUTS, "eager", compressor=compressor)
    assert {op.op_type for op in inspector.summary.model.all_ops()} == {"conv2d", "linear"}
    with pytest.raises(ValueError, match="not supported in graph mode"):
        ModelInspector(Net().eval(), INPUTS, "graph", compressor=compressor)


def test_source_lines_are_those_of_the_model() -> None:
    """The text shows file and code of the user's own line."""
    text = ModelInspector(Net().eval(), INPUTS, "eager").format_summary(colorize=False)
    assert "test_inspector.py" in text
    assert "torch.relu(self.norm(self.conv(x)))" in text
    assert "\x1b[" not in text
    assert "\x1b[" in ModelInspector(Net().eval(), INPUTS, "eager").format_summary(colorize=True)


def test_inspecting_leaves_the_model_as_it_was() -> None:
    """Mode, statistics and parameters are untouched."""
    model = Net().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for mode in ("eager", "graph"):
        ModelInspector(model, INPUTS, mode)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_invalid_expression_is_named() -> None:
    """The error quotes the expression."""
    inspector = ModelInspector(nn.Linear(2, 2), (torch.randn(1, 2),), "eager")
    with pytest.raises(ValueError, match=r"'\(' is no valid regular expression"):
        inspector.get_matched_ops_for_op_name("(")
    with pytest.raises(ValueError, match="no valid regular expression"):
        inspector.get_matched_ops_for_module_name("(")


def test_modules_that_are_not_there_are_answered_with_the_nearest() -> None:
    """A path that no module has is an error that proposes the paths most like it."""
    root = ModelInspector(Net().eval(), INPUTS, "eager").summary.model
    assert root.get_submodule("block.conv").module_type == "torch.nn.modules.conv.Conv2d"
    with pytest.raises(KeyError, match=r"No module 'blok.conv' below '<root>'. Did you mean 'block.conv'"):
        root.get_submodule("blok.conv")


def test_op_names_cannot_be_changed() -> None:
    """Ops are equal and hashed by name, so the name is fixed."""
    op = OpInfo("a", "add", (), (), (), {}, False)
    assert op == OpInfo("a", "mul", (), (), (), {}, False)
    with pytest.raises(AttributeError, match="cannot be changed"):
        op.op_name = "b"


def test_keyword_inputs_and_modules_that_take_other_objects() -> None:
    """Graph mode falls back to the flow of data where a module's call cannot be recorded."""

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, options: object) -> torch.Tensor:
            return x * options.factor  # type: ignore[attr-defined]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x, type("Options", (), {"factor": 2.0})())

    for mode in ("eager", "graph"):
        inspector = ModelInspector(Outer(), None, mode, example_kwargs={"x": torch.randn(2)})
        [edge] = inspector.summary.model.get_submodule("scale").input_ops[0]
        assert edge.op.op_type == "mul"


def test_inputs_that_are_no_tuple() -> None:
    """A bare tensor and a dict are common slips; the error shows the right form."""
    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"wrap it as \(x,\)"):
        ModelInspector(model, torch.randn(1, 4), "eager")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example_kwargs"):
        ModelInspector(model, {"input": torch.randn(1, 4)}, "graph")  # type: ignore[arg-type]
