"""The graph front end: what is captured, under which names, and what happens to the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.func import functional_call
from torch.fx import proxy
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._traceback import CapturedTraceback
from torch.utils.hooks import RemovableHandle

from bitwright.errors import TraceError
from bitwright.export.conversion import ConversionError
from bitwright.export.onnx import export_onnx
from bitwright.export.torch_program import export_torch, run_torch
from bitwright.program import ValueKind
from bitwright.program.export_errors import UnknownClassError
from bitwright.program.graph import capture_graph
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.lambda_module import Lambda


class Inner(nn.Module):
    """Two linear layers whose use does not follow the order of the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.first(b) + self.second(a) * scale, "a": a}


class Outer(nn.Module):
    """Calls one module twice, has a tied weight, a plain tensor, a buffer that is not saved, and splits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 4)
        self.tied = self.head.weight
        self.constant = torch.full((4,), 0.5)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(x)
        z = self.inner(y, x, scale=x)["sum"]
        left, right = (self.inner(z, y, scale=y)["sum"] + self.constant + self.shift).split(2, -1)
        return {"left": left, "right": torch.cat([right, F.linear(y, self.tied)], -1)}


@pytest.fixture
def captured() -> tuple[Any, Any, Outer, torch.Tensor]:
    """Graph, program, model and input."""
    torch.manual_seed(0)
    model, x = Outer().eval(), torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim.AUTO}}
    graph, program = capture_graph(model, (x,), dynamic_shapes=shapes, boundaries=("inner",))
    return graph, program, model, x


class TestGraph:
    def test_computes_what_the_model_computes(self, captured: Any) -> None:
        """Outputs have the model's structure and values, for other batch sizes too."""
        graph, _, model, _ = captured
        for batch in (1, 3, 7):
            x = torch.randn(batch, 4)
            expected, found = model(x), graph(x)
            assert list(found) == ["left", "right"]
            assert all(torch.equal(found[key], expected[key]) for key in expected)

    def test_refers_to_the_models_own_tensors_under_their_names(self, captured: Any) -> None:
        """The state_dict has the same keys; the parameters are the same objects, tied ones and unused ones included."""
        graph, _, model, _ = captured
        assert sorted(graph.state_dict()) == sorted(model.state_dict())
        assert graph.head.weight is model.head.weight is graph.tied
        assert graph.unused.weight is model.unused.weight

    def test_has_no_node_for_unused_states(self, captured: Any) -> None:
        """Only states that ops read have nodes."""
        graph, *_ = captured
        assert not [n for n in graph.graph.nodes if n.op == "get_attr" and "unused" in str(n.target)]

    @pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_survives_copies(self, captured: Any, way: Callable[[Any], Any]) -> None:
        """A copy computes the same, keeps names and sharing, and owns its tensors."""
        graph, _, model, x = captured
        twin = way(graph)
        assert torch.equal(twin(x)["right"], model(x)["right"])
        assert [n.name for n in twin.graph.nodes] == [n.name for n in graph.graph.nodes]
        assert twin.head.weight is twin.tied is not graph.tied
        assert twin.meta == graph.meta

    def test_refuses_shapes_that_it_was_not_captured_for(self, captured: Any) -> None:
        """The error names the input, both shapes and the remedy."""
        graph, *_ = captured
        with pytest.raises(ValueError, match=r"Input 'x' has shape \(3, 5\).*dynamic_shapes"):
            graph(torch.randn(3, 5))

    def test_hooks_leave_the_check_in_another_process(self, captured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which counts its hooks from zero."""
        graph, *_ = captured
        stored = pickle.dumps(graph)
        monkeypatch.setattr(RemovableHandle, "next_id", 0)
        twin, called = pickle.loads(stored), []
        for _ in range(max(graph._forward_pre_hooks) + 1):
            twin.register_forward_pre_hook(lambda module, args: called.append(module))
        with pytest.raises(ValueError, match="captured for"):
            twin(torch.randn(2, 5))
        twin(torch.randn(3, 4))
        assert called

    def test_switches_its_mode_like_any_module(self, captured: Any) -> None:
        """``train`` and ``eval`` return the module and reach its children; PT2E's name for the mode follows."""
        graph, *_ = captured
        assert graph.train() is graph
        assert graph.training
        assert graph._exported_training
        assert graph.inner.training
        assert graph.eval() is graph
        assert not graph._exported_training

    def test_is_captured_again_and_compiled_whole(self, captured: Any) -> None:
        """``torch.export`` and ``torch.compile(fullgraph=True)`` take it."""
        graph, _, model, x = captured
        assert torch.equal(torch.export.export(graph, (x,)).module()(x)["left"], model(x)["left"])
        compiled = torch.compile(graph, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x)["left"], model(x)["left"])


class TestProgram:
    def test_ops_have_names_types_and_module_paths(self, captured: Any) -> None:
        """Names are those of nodes, types those of the functions called."""
        _, program, *_ = captured
        found = [(op.name, op.type, op.module_path) for op in program.ops][:5]
        assert found == [
            ("linear", "linear", "head"),
            ("linear_1", "linear", "inner.first"),
            ("linear_2", "linear", "inner.second"),
            ("mul", "mul", "inner"),
            ("add", "add", "inner"),
        ]

    def test_results_of_a_split_are_outputs_of_the_op(self, captured: Any) -> None:
        """What is taken from a tuple is a value of the op that made the tuple."""
        _, program, *_ = captured
        (split,) = [op for op in program.ops if op.type == "split"]
        assert [value.output_index for value in split.outputs] == [0, 1]
        assert [value.shape for value in split.outputs] == [(3, 2), (3, 2)]

    def test_tied_weights_are_one_state_with_all_uses(self, captured: Any) -> None:
        """A tensor under two names is one state."""
        _, program, model, _ = captured
        state = next(s for s in program.states.values() if s.tensor is model.head.weight)
        assert set(state.names) == {"tied", "head.weight"}
        assert [use.op.type for use in state.uses] == ["linear", "linear"]
        assert [use.name for use in state.uses] == ["weight", "weight"]

    def test_constants_are_states_too(self, captured: Any) -> None:
        """A tensor that is neither parameter nor buffer is known by its name."""
        _, program, *_ = captured
        assert program.states["constant"].uses[0].value.kind is ValueKind.STATE

    def test_boundaries_follow_forwards_arguments(self, captured: Any) -> None:
        """Inputs come in the order of the signature, not of their use; each call is recorded."""
        _, program, *_ = captured
        call = program.calls["inner"]
        assert call.input_names == ["a", "b", "scale"]
        assert [value.name for value in call.inputs] == ["linear", "x", "x"]
        assert [value.name for value in call.outputs] == ["add", "linear"]
        assert [value.name for value in call.repeats[0].inputs] == ["add", "linear", "linear"]

    def test_embedding_arguments_are_numbered_like_the_functions(self) -> None:
        """aten puts the weight first, people put the indices first."""
        _, program = capture_graph(nn.Embedding(5, 4), (torch.tensor([1, 2]),))
        (op,) = program.ops
        assert {argument.name: argument.index for argument in op.arguments} == {"weight": 1, "input": 0}

    @pytest.mark.parametrize(
        ("function", "kind", "alias"),
        [
            (lambda s, x: x + x, "add", None),
            (lambda s, x: torch.add(x, x), "add", None),
            (lambda s, x: x.add_(x), "add_", "add"),
            (lambda s, x: torch.concat([x, x]), "concat", "cat"),
            (lambda s, x: x @ x, "matmul", None),
            (lambda s, x: x[0], "select", "__getitem__"),
            (lambda s, x: F.interpolate(x[None], scale_factor=2), "interpolate", "upsample_nearest1d"),
            (lambda s, x: 1 - x, "__rsub__", "rsub"),
            (lambda s, x: F.relu(x, inplace=True), "relu", "relu_"),
        ],
    )
    def test_types_are_the_functions_that_people_call(self, function: Any, kind: str, alias: str | None) -> None:
        """Operators and functions have one type; further spellings are kept."""
        _, program = capture_graph(Lambda(function), (torch.randn(4, 4),))
        assert program.ops[-1].type == kind
        assert alias is None or alias in program.ops[-1].aliases

    def test_ops_inside_attention_have_their_own_types(self) -> None:
        """A function made of several ops does not hide them, and attention is not fused into one op."""
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        _, program = capture_graph(attention, (torch.randn(1, 3, 8),) * 3)
        linears = [op for op in program.ops if op.type == "linear"]
        assert linears
        assert all("multi_head_attention_forward" in op.aliases for op in linears)


class TestInputs:
    def test_keyword_inputs(self) -> None:
        """Keyword inputs are inputs of the program, and may be passed in any order."""
        model = Lambda(lambda s, x, *, scale, shift: s.l(x) * scale + shift, l=nn.Linear(4, 4))
        kwargs = {"scale": torch.randn(2, 4), "shift": torch.randn(2, 4)}
        graph, program = capture_graph(model, (torch.randn(2, 4),), kwargs)
        assert len(program.inputs) == 3
        x = torch.randn(2, 4)
        backwards = dict(reversed(kwargs.items()))
        assert torch.equal(graph(x, **backwards), model(x, **kwargs))
        with pytest.raises(ValueError, match="'scale'"):
            graph(x, **{**kwargs, "scale": torch.randn(3, 4)})

    def test_a_range_of_sizes_is_kept(self) -> None:
        """A dimension with limits refuses sizes outside them."""
        shapes = {"input": {0: torch.export.Dim("batch", min=2, max=6)}}
        graph, _ = capture_graph(nn.Linear(4, 4), (torch.randn(3, 4),), dynamic_shapes=shapes)
        assert graph(torch.randn(6, 4)).shape == (6, 4)
        with pytest.raises(ValueError, match=r"\(7, 4\)"):
            graph(torch.randn(7, 4))

    def test_equal_symbols_need_equal_sizes(self) -> None:
        """Two inputs that share a dynamic dimension must agree on it."""
        batch = torch.export.Dim("batch")
        model = Lambda(lambda s, x, y: x + y)
        shapes = ({0: batch}, {0: batch})
        graph, _ = capture_graph(model, (torch.randn(3, 4), torch.randn(3, 4)), dynamic_shapes={"args": shapes})
        with pytest.raises(ValueError, match="has shape"):
            graph(torch.randn(5, 4), torch.randn(4, 4))

    def test_the_gradient_mode_is_what_the_caller_wants(self) -> None:
        """With ``no_grad`` the model sees gradients disabled, without it enabled."""
        model = Lambda(lambda s, x: x + 1 if torch.is_grad_enabled() else x * 2)
        _, without = capture_graph(model, (torch.randn(2),), no_grad=True)
        _, with_gradients = capture_graph(model, (torch.randn(2),), no_grad=False)
        assert [op.type for op in without.ops] == ["mul"]
        assert [op.type for op in with_gradients.ops] == ["add"]


class TestTransformer:
    @pytest.mark.parametrize("given", [False, True])
    def test_masks_of_torchs_own_layers(self, given: bool) -> None:
        """``torch.export`` alone refuses to look whether a mask is the causal one."""

        def decoded(s: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(5) if mask is None else mask
            return s.decoder(s.encoder(x, causal), x, causal)

        options = {"dropout": 0.0, "batch_first": True}
        model = Lambda(
            decoded,
            encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **options), 1),
            decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **options), 1),
        ).eval()
        inputs = [torch.randn(2, 5, 8)]
        if given:
            inputs.append(nn.Transformer.generate_square_subsequent_mask(5))
        module, _ = capture_graph(model, tuple(inputs))
        with torch.no_grad():
            torch.testing.assert_close(module(*inputs), model(*inputs))
            if given:
                inputs[1] = torch.zeros(5, 5)
                torch.testing.assert_close(module(*inputs), model(*inputs))


class Cache:
    """What language models return beside their logits: a class of its own around tensors."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


class TestForeignResults:
    def test_a_cache_beside_tensors_is_left_out_with_a_warning(self) -> None:
        """The graph returns None in its place, under the same name."""
        model = Lambda(lambda s, x: {"logits": s.layer(x), "cache": Cache(x * 2)}, layer=nn.Linear(4, 4)).eval()
        x = torch.randn(2, 4)
        with pytest.warns(UserWarning, match="Lambda returns Cache, which torch.export does not know"):
            module, _ = capture_graph(model, (x,))
        result = module(x)
        assert torch.equal(result["logits"], model(x)["logits"])
        assert result["cache"] is None
        assert isinstance(model(x)["cache"], Cache)

    def test_a_result_that_is_nothing_else_is_refused(self) -> None:
        """The error says how to register the class."""
        with pytest.raises(RuntimeError, match="register_pytree_node"):
            capture_graph(Lambda(lambda s, x: Cache(s.layer(x)), layer=nn.Linear(4, 4)), (torch.randn(2, 4),))


class TestExportedModules:
    def test_an_exported_module_is_captured_with_its_paths(self) -> None:
        """Ops of an already exported module still know the modules that they came from."""
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        x = torch.randn(3, 4)
        exported = torch.export.export(model, (x,)).module()
        graph, program = capture_graph(exported, (x,))
        assert torch.equal(graph(x), model(x))
        assert [(op.type, op.module_path) for op in program.ops] == [("linear", "0"), ("relu", ""), ("linear", "2")]


class TestControlFlow:
    def test_cond_stays_whole(self) -> None:
        """Both branches are in the graph; each is taken when its condition holds, also after pickling."""

        class Branch(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x * 2, (x,))

        model = Branch()
        graph, program = capture_graph(model, (torch.ones(2, 4),))
        assert any("cond" in op.type for op in program.ops)
        for twin in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            for x in (torch.ones(2, 4), -torch.ones(2, 4)):
                assert torch.equal(twin(x), model(x))


class TestFailure:
    def test_says_why_where_and_what_to_do(self) -> None:
        """The error has the cause, the line of the user's model, and the advice to use eager mode."""

        class DataDependent(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.sum() > 0:
                    return x * 2
                return x * 3

        with pytest.raises(TraceError) as caught:
            capture_graph(DataDependent(), (torch.randn(2, 2),))
        message = str(caught.value)
        assert "if x.sum() > 0:" in message
        assert "test_graph_capture.py" in message
        assert "Debugging hints" in message
        assert 'execution_mode="eager"' in message
        assert caught.value.__cause__ is not None

    def test_an_error_in_forward_is_told_with_its_line(self) -> None:
        """A model that raises by itself is reported the same way."""
        with pytest.raises(TraceError, match="ZeroDivisionError"):
            capture_graph(Lambda(lambda s, x: x / (1 // 0)), (torch.randn(2),))

    def test_inputs_that_only_a_real_forward_refuses_are_described(self) -> None:
        """A capture does not read indices, so that it is the forward of the example inputs that fails."""
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).eval()
        quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="graph"))
        with pytest.raises(TraceError, match=r"does not run on its inputs \(int64\[1\] on cpu\): IndexError"):
            quantizer.prepare((torch.tensor([7]),))


class Neighbours(nn.Module):
    """Lays each row beside the next one, a slice that has one row where there are two."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        both = torch.cat([x, F.pad(x[:, 1:], (0, 0, 0, 1))], -1)
        return both if other is None else both + other[:, ::2]


ASKED: dict[str, Callable[[Any], Any]] = {
    "is even": lambda rows: rows % 2 == 0,
    "is not five": lambda rows: rows != 5,
    "is a power of two": lambda rows: rows & (rows - 1) == 0,
    "is more than": lambda rows: 2 * rows > 5,
}


def _branches(s: Any, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    y = torch.cat([x[:half] + x[half : 2 * half], x[2 * half :]])
    return y if ASKED[s.asks](x.shape[0]) else -y


def _in_fours(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Work on four rows at a time, as Mamba-2 does on chunks; what is padded is cut off again."""
    s.count.add_(1)
    s.seen.append(0)
    rows, missing = x.shape[0], (4 - x.shape[0] % 4) % 4
    if missing > 0:
        x = F.pad(x, (0, 0, 0, missing))
    x = F.dropout(s.l(x), 0.5, training=s.training).view(-1, 4, 4)
    return x.cumsum(1).view(-1, 4)[:rows]


class TestSizesOfParts:
    """A part of a dynamic size may be 1 where torch.export takes it for another number."""

    @pytest.mark.parametrize("least", [None, 1, 3])
    def test_part_of_a_size_may_be_one(self, least: int | None) -> None:
        """The graph has all sizes that were asked for, from 2 on, and computes what the model does."""
        size = torch.export.Dim("s", min=least, max=32)
        graph, _ = capture_graph(Neighbours(), (torch.randn(2, 8, 4),), dynamic_shapes=({1: size},))
        for rows in {2, 3, 32} - ({2} if least == 3 else set()):
            x = torch.randn(2, rows, 4)
            assert torch.equal(graph(x), Neighbours()(x))

    def test_sizes_that_depend_on_one_another_stay_so(self) -> None:
        """A multiple of the size begins with that of its least."""
        size = torch.export.Dim("s", max=32)
        shapes = {"x": {1: size}, "other": {1: 2 * size}}
        graph, _ = capture_graph(Neighbours(), (torch.randn(2, 8, 4), torch.randn(2, 16, 8)), dynamic_shapes=shapes)
        x, other = torch.randn(2, 2, 4), torch.randn(2, 4, 8)
        assert torch.equal(graph(x, other), Neighbours()(x, other))

    def test_what_only_one_row_would_change_is_settled(self) -> None:
        """XLNet's shift by one row, whose reshape asks for ``(2 * s - 1) % s != 0``: the size itself begins with 2."""

        def shifted(s: Lambda, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[1]
            pairs = x[:, :, None] * torch.cat([x, x], 1)[:, None]
            return pairs.reshape(2, 2 * rows, rows)[:, 1:].reshape(2, rows, 2 * rows - 1)

        size = torch.export.Dim("s", max=32)
        graph, _ = capture_graph(Lambda(shifted), (torch.randn(2, 8),), dynamic_shapes=(({1: size},),))
        for rows in (2, 3, 32):
            x = torch.randn(2, rows)
            assert torch.equal(graph(x), Lambda(shifted)(x))

    def test_what_the_model_itself_asks_is_refused(self) -> None:
        """A branch on whether there is one row would be lost."""

        def branch(s: Lambda, x: torch.Tensor) -> torch.Tensor:
            return x[:, 1:] * 5 if x[:, 1:].shape[1] == 1 else x[:, 1:] + 1

        shapes = (({1: torch.export.Dim("s", max=32)},),)
        with pytest.raises(TraceError, match="Constraints violated"):
            capture_graph(Lambda(branch), (torch.randn(2, 8),), dynamic_shapes=shapes)

    @pytest.mark.parametrize("asks", ASKED)
    def test_sizes_with_another_branch_are_refused(self, asks: str) -> None:
        """A free size does not bind the branch that was captured; the error shows the line, in copies and pickles too.

        What torch asks for itself, here whether a half is one row, binds nothing.
        """
        model = Lambda(_branches)
        model.asks = asks
        graph, _ = capture_graph(model, (torch.randn(4, 4),), dynamic_shapes=(({0: torch.export.Dim.AUTO},),))
        for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            for rows in range(2, 9):
                x = torch.randn(rows, 4)
                if ASKED[asks](rows) == ASKED[asks](4):
                    assert torch.equal(module(x), model(x))
                else:
                    line = re.escape("return y if ASKED[s.asks](x.shape[0]) else -y")
                    with pytest.raises(ValueError, match=rf"args_0\.shape\[0\] = {rows}\.(?s:.*){line}"):
                        module(x)

    def test_another_branch_with_the_same_numbers(self) -> None:
        """A pad of 0 is none: the model is asked, once, and goes on as if it had not been."""
        model = Lambda(_in_fours, l=nn.Linear(4, 4)).train()
        model.register_buffer("count", torch.zeros(()))
        model.seen = []
        shapes = (({0: torch.export.Dim.AUTO},),)
        graph, _ = capture_graph(model, (torch.randn(6, 4),), dynamic_shapes=shapes)
        model.l.eval()
        before, random, x = (model.count.clone(), list(model.seen)), torch.get_rng_state(), torch.randn(8, 4)
        graph._input_check.check_leaves(graph, [x])
        assert (model.count, model.seen, model.training, model.l.training) == (*before, True, False)
        torch.set_rng_state(random)
        expected = model(x)
        torch.set_rng_state(random)
        torch.testing.assert_close(graph(x), expected)
        pickled, copied = pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)
        assert (pickled(x).shape, copied(x[:4]).shape) == ((8, 4), (4, 4))
        with pytest.raises(ValueError, match="keep the model that was prepared: it is gone"):
            pickled(x[:4])

    def test_a_branch_on_whether_there_is_one_row(self) -> None:
        """torch.export asks nothing about 0 and 1: the model is asked in the first such call, where it is there."""
        branching = Lambda(lambda s, x: s.l(x) if x.shape[0] > 1 else s.l(x) - 1, l=nn.Linear(4, 4))
        plain = Lambda(lambda s, x: s.l(x).squeeze(), l=nn.Linear(4, 1))
        varies, x = (({0: torch.export.Dim.AUTO},),), torch.randn(1, 4)
        graph, _ = capture_graph(plain, (torch.randn(3, 4),), dynamic_shapes=varies)
        assert torch.equal(graph(x), plain(x))
        graph, _ = capture_graph(branching, (torch.randn(3, 4),), dynamic_shapes=varies)
        assert pickle.loads(pickle.dumps(graph))(x).shape == (1, 4)  # nobody knows
        for module in (graph, copy.deepcopy(graph)):
            with pytest.raises(ValueError, match=r"args_0\.shape\[0\] = 1: .*without dynamic_shapes"):
                module(x)

    def test_what_differs_each_time_is_not_compared(self) -> None:
        """A model with random numbers of its own is taken at its word for one row too."""
        numbers = iter(range(100))
        model = Lambda(lambda s, x: x * next(numbers))
        graph, _ = capture_graph(model, (torch.randn(3, 4),), dynamic_shapes=(({0: torch.export.Dim.AUTO},),))
        assert graph(torch.randn(1, 4)).shape == (1, 4)

    def test_what_zeros_do_not_tell(self) -> None:
        """Branches that agree for the numbers of one call do not for others; where none differ, nobody knows."""
        model = Lambda(lambda s, x: x * 2 if x.shape[0] % 2 else x * 3)
        for zeros in (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.long)):
            graph, _ = capture_graph(model, (zeros,), dynamic_shapes=(({0: torch.export.Dim.AUTO},),))
            with pytest.raises(ValueError, match="another branch"):
                graph(zeros[:2])


def test_the_model_is_left_alone() -> None:
    """Modes, buffers, hooks and random state are as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    capture_graph(model, (torch.randn(3, 4),))
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model._forward_pre_hooks
    torch.set_rng_state(state)


class _Named(nn.Module):
    """A layer under a name of the caller's choice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 4))
        self.name = name

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("name", ["code", "twin", "input_check", 'a"b', "a\nb", "a\\nb"])
def test_submodules_may_have_the_names_of_a_graph_modules_attributes(name: str) -> None:
    """And any other, with quotes, line breaks and backslashes in them."""
    model = _Named(name)
    x = torch.randn(2, 4)
    module, _ = capture_graph(model, (x,))
    assert torch.equal(module(x), model(x))
    assert torch.equal(copy.deepcopy(module)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), model(x))
    assert list(module.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", ["graph", "meta", "recompile"])
def test_names_that_a_graph_module_cannot_do_without_are_told(name: str) -> None:
    with pytest.raises(TraceError, match=rf"'{name}' \(it holds '{name}.weight'\).*Rename.*eager"):
        capture_graph(_Named(name), (torch.randn(2, 4),))


def test_graphs_with_memory_formats_are_saved() -> None:
    """``torch.save`` writes pickles of a protocol in which torch's memory formats fail."""
    x = torch.randn(2, 3, 4, 4)
    module, _ = capture_graph(Lambda(lambda s, x: x.contiguous(memory_format=torch.channels_last) * 2), (x,))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), 2 * x)
    assert loaded(x).is_contiguous(memory_format=torch.channels_last)


def test_calls_that_fail_and_are_caught_leave_no_trace() -> None:
    """As in SpeechBrain's x-vectors: torch's tracer stays in a module whose call raises. Others keep their names."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, flag: int = 0) -> torch.Tensor:
            y = self.inner(x)
            if flag:
                raise ValueError("no flags")
            return y

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (layers.plain, layers.picky):
            try:
                x = layer(x, flag=1)
            except (TypeError, ValueError):
                x = layer(x)
        return x

    model, x = Lambda(forward, plain=nn.Linear(4, 4), picky=Picky()).eval(), torch.randn(2, 4)
    graph, program = capture_graph(model, (x,))
    assert torch.equal(graph(x), model(x))
    assert [op.module_path for op in program.ops if "linear" in str(op.handle.target)] == ["plain", "picky.inner"]


def test_graphs_that_call_ops_with_all_their_overloads_are_saved() -> None:
    """As those do that are finalized for Core AI, ``torch.ops.coreai.quantize``; an op that nobody knows is named."""
    x = torch.randn(2, 4)
    graph, _ = capture_graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (x,))
    (relu,) = (node for node in graph.graph.nodes if "relu" in str(node.target))
    relu.target = torch.ops.aten.relu
    graph.recompile()
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), graph(x))
    stored = pickle.dumps(graph).replace(b"aten", b"none")
    with pytest.raises(RuntimeError, match=r"torch\.ops\.none\.\w+, .* import the package"):
        pickle.loads(stored)


def test_generated_code_calls_torchs_functions_and_the_graph_keeps_the_ops() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.GELU(approximate="tanh")).eval()
    x = torch.randn(2, 4)
    module, _ = capture_graph(model, (x,))
    assert "torch._C._nn.linear(" in module.code
    assert "torch.ops.aten.linear" not in module.code
    targets = {node.target for node in module.graph.nodes if node.op == "call_function"}
    assert {torch.ops.aten.linear.default, torch.ops.aten.relu.default, torch.ops.aten.gelu.default} <= targets
    assert torch.equal(module(x), model(x))
    exported = torch.export.export(module, (x,)).module()
    assert targets <= {node.target for node in exported.graph.nodes}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "parameter": lambda m: setattr(m.get_submodule("0"), "weight", nn.Parameter(torch.full((4, 4), 0.5))),
    "module": lambda m: setattr(m, "0", nn.Linear(4, 4)),
    "inner module": lambda m: setattr(m.get_submodule("1"), "0", nn.Linear(4, 4)),
    "parametrization": lambda m: parametrizations.weight_norm(m.get_submodule("1.0")),
    "written": lambda m: m.get_submodule("0").weight.data.mul_(3),
    "buffer": lambda m: m.get_submodule("2").register_buffer("running_mean", torch.ones(4)),
    "no bias": lambda m: setattr(m.get_submodule("0"), "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_states_are_read_where_they_are(change: str) -> None:
    """What is set or replaced in the module tree is used, as in any other module."""
    models = []
    for capture in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4)).eval()
        model = capture_graph(model, (torch.randn(2, 4),))[0] if capture else model
        model(torch.randn(2, 4))
        torch.manual_seed(1)
        CHANGES[change](model)
        models.append(model)
    x = torch.randn(2, 4)
    assert torch.equal(models[1](x), models[0](x))
    other = {name: value * 2 for name, value in models[0].state_dict().items() if value.is_floating_point()}
    assert torch.equal(functional_call(models[1], other, (x,)), functional_call(models[0], other, (x,)))
    assert torch.equal(models[1](x), models[0](x))


def test_stack_traces_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Outer(), Lambda(lambda s, y: torch.relu(y["left"]) + 1)), torch.randn(3, 4)
    traces = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr("bitwright.program.graph.short_stack_traces", contextlib.nullcontext)
        module, _ = capture_graph(model, (x,))
        traces.append([(node.name, node.stack_trace) for node in module.graph.nodes])
    assert traces[0] == traces[1]
    assert any(trace is not None and "test_graph_capture.py" in trace for _, trace in traces[0])
    assert proxy.CapturedTraceback is CapturedTraceback


class Caching(nn.Module):
    """Keeps what it made for a length in a dictionary and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.by_length: dict[int, torch.Tensor] = {2: torch.zeros(2, 1)}
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in self.by_length:
            self.by_length[length] = torch.arange(float(length))[:, None]
            self.made.append(self.by_length[length] * 2)
        return self.layer(x) + self.by_length[length] + self.made[-1]


class Registering(nn.Module):
    """Makes a buffer in its first call, or in every one."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.always:
            self._buffers.pop("bias", None)
        if "bias" not in self._buffers:
            self.register_buffer("bias", torch.arange(12.0).view(3, 4), persistent=False)
        return self.layer(x) + self.bias


def test_a_model_that_keeps_results_is_left_without_those_of_the_capture():
    model, x = Caching().eval(), torch.randn(1, 3, 4)
    by_length, made = model.by_length, model.made
    module, _ = capture_graph(model, (x,))
    assert list(by_length) == [2]
    assert not made
    assert model.by_length is by_length
    assert model.made is made
    assert torch.equal(copy.deepcopy(module)(x), model(x))
    assert list(model.by_length) == [2, 3]


class Counting(nn.Module):
    """Counts its calls in a tensor that is no buffer, and in one in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = torch.zeros(2)
        self.kept = {"calls": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls.sum() + self.kept["calls"].add_(1)


def test_a_capture_is_no_call_for_tensors_in_attributes() -> None:
    """torch.export runs what writes to them as it is."""
    model, x = Counting(), torch.randn(2, 4)
    calls, kept = model.calls, model.kept["calls"]
    module, _ = capture_graph(model, (x,))
    assert model.calls is calls
    assert calls.tolist() == [0, 0]
    assert kept.item() == 0
    assert torch.equal(copy.deepcopy(module)(x), model(x))


def test_a_buffer_that_is_made_in_the_first_call_is_no_write_to_an_input():
    model, x = Registering(always=False).eval(), torch.randn(1, 3, 4)
    given = x.clone()
    module, _ = capture_graph(model, (x,))
    expected = model(x)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert torch.equal(module(x + 1), model(x + 1))
    assert torch.equal(x, given)
    assert not isinstance(model.bias, FakeTensor)


def test_a_buffer_that_is_made_in_every_call_is_refused():
    with pytest.raises(TraceError, match="registers a buffer, 'bias'"):
        capture_graph(Registering(always=True).eval(), (torch.randn(1, 3, 4),))


@dataclasses.dataclass
class Pair:
    """Registered nowhere."""

    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Registered(Pair):
    """As the error says."""


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("forward", "place"),
    [
        (lambda s, x: Pair(s.fc(x), x), "the output of the model"),
        (lambda s, x: s.fc(x.first) + x.second, r"input \[0\] of the model"),
    ],
)
def test_dataclasses_that_torch_export_does_not_know_are_told(
    mode: str, forward: Any, place: str, tmp_path: Any
) -> None:
    """Where it is, which class, and what to do; in the capture, in exports and in the plan for a target."""
    model = Lambda(forward, fc=nn.Linear(4, 4)).eval()
    inputs = (torch.randn(2, 4),) if "output" in place else (Pair(torch.randn(2, 4), torch.randn(2, 4)),)
    told = rf"class of {place}, .*Pair.*torch\.export\.register_dataclass\(Pair, serialized_type_name='Pair'\).*tuple"
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode))
    if mode == "graph":
        with pytest.raises(UnknownClassError, match=told):
            quantizer.prepare(inputs)
        return
    (problem,) = quantizer.plan(inputs, target="torch").problems
    assert re.search(told, problem.message)
    prepared = quantizer.prepare(inputs)
    with pytest.raises(ConversionError, match=told):
        export_torch(prepared, inputs, tmp_path / "model.pt2")
    pytest.importorskip("onnxscript")
    with pytest.raises(ConversionError, match=r"class of .*Pair.*torch\.export\.register_dataclass\(Pair"):
        export_onnx(prepared, inputs, tmp_path / "model.onnx")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_registered_dataclass_goes_all_the_way(mode: str, tmp_path: Any) -> None:
    """What the error proposes is enough, for inputs and outputs."""
    if Registered not in torch.utils._pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Registered, serialized_type_name="Registered")
    model = Lambda(lambda s, x: Registered(s.fc(x.first), x.second * 2), fc=nn.Linear(4, 4)).eval()
    inputs = (Registered(torch.randn(2, 4), torch.randn(2, 4)),)
    prepared = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare(inputs)
    result = prepared(*inputs)
    assert isinstance(result, Registered)
    assert torch.equal(result.second, 2 * inputs[0].second)
    path = export_torch(prepared, inputs, tmp_path / "model.pt2")
    first, _ = run_torch(path, (inputs[0].first, inputs[0].second))
    torch.testing.assert_close(first, result.first)


class KeepsBiases(nn.Module):
    """As in LeViT of timm: until it is trained, the biases of a call serve the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.biases = nn.Parameter(torch.randn(2))
        self.kept: dict[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> KeepsBiases:
        super().train(mode)
        if mode:
            self.kept = {}
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.project(x) + self.biases[[0, 1, 1, 0]]
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.biases[[0, 1, 1, 0]]
        return self.project(x) + self.kept["cpu"]


class MergesWeights(KeepsBiases):
    """As low-rank adapters do: added to the weight for inference, and subtracted in place for training."""

    def train(self, mode: bool = True) -> MergesWeights:
        if mode and self.kept:
            self.biases.data -= 1
            self.project.weight.data -= 1
        super().train(mode)
        return self


class MergesForInference(nn.Module):
    """Multiplies its factors when it goes into eval mode, and relies on the product there."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.merged: torch.Tensor | None = None

    def train(self, mode: bool = True) -> MergesForInference:
        super().train(mode)
        self.merged = None if mode else (self.left @ self.right).detach()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.left @ self.right if self.training else F.linear(x, self.merged)


class TestKeptResults:
    def test_what_eval_mode_relies_on_stays(self) -> None:
        model, x = MergesForInference().eval(), torch.randn(2, 4)
        merged = model.merged
        module, _ = capture_graph(model, (x,))
        torch.testing.assert_close(module(x), model(x))
        assert model.merged is merged

    @pytest.mark.parametrize("called", [False, True])
    def test_a_graph_trains_what_the_model_kept_a_result_of(self, called: bool) -> None:
        model, x = KeepsBiases().eval(), torch.randn(2, 4)
        with torch.no_grad():
            expected = model(x) if called else copy.deepcopy(model)(x)
        kept = model.kept.get("cpu")
        module, _ = capture_graph(model, (x,))
        torch.testing.assert_close(module(x), expected)
        module(x).sum().backward()
        assert model.biases.grad is not None
        assert model.kept.get("cpu") is kept
        assert not model.training

    def test_a_model_that_merges_its_weights_stays_as_it_is(self) -> None:
        model, x = MergesWeights().eval(), torch.randn(2, 4)
        with torch.no_grad():
            expected = model(x)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        module, _ = capture_graph(model, (x,))
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_threads_capture_one_after_the_other():
    """``torch.export`` itself fails where two threads call it at once."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval() for _ in range(6)]

    def captured(model):
        return [op.type for op in capture_graph(model, (torch.randn(2, 8),))[1].ops]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(captured, models)) == [["linear", "relu", "linear"]] * len(models)
