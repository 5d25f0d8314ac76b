"""Programs cast to float16 and bfloat16: close to the float program, whole, and run in the dtypes they claim."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bitwright.casting import cast_fp32_to_bf16, cast_fp32_to_fp16, cast_to_16_bit_precision

from .programs import ConvNet, check_metadata, dtype, export, find, node_dtypes, run, sqnr

ATEN = torch.ops.aten
FLOORS = {torch.float16: 50.0, torch.bfloat16: 34.0}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _inputs_in(dtype: torch.dtype, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(dtype) if x.dtype == torch.float32 else x for x in inputs]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.rnn(x)
        return y, h


MODELS = {
    "conv": (ConvNet, (torch.randn(2, 3, 8, 8),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (torch.randn(2, 5, 16),)),
    "lstm": (Recurrent, (torch.randn(2, 4, 6),)),
}


@pytest.mark.parametrize(
    ("name", "decompose", "target"),
    [
        ("conv", False, torch.float16),
        ("conv", True, torch.bfloat16),
        ("encoder", True, torch.float16),
        ("encoder", False, torch.bfloat16),
        ("lstm", True, torch.float16),
    ],
)
def test_close_to_float_saved_and_exported_again(
    name: str, decompose: bool, target: torch.dtype, tmp_path: Path
) -> None:
    """Half in, half out, close to float; metadata true; equal after save and load; exportable again."""
    make, inputs = MODELS[name]
    program = export(make(), *inputs, decompose=decompose)
    reference = run(program, *inputs)
    bytes_before = sum(tensor.nbytes for tensor in program.state_dict.values())
    assert cast_to_16_bit_precision(program, dtype=target) is program
    half = _inputs_in(target, *inputs)
    results = run(program, *half)
    for exact, result in zip(reference, results, strict=True):
        assert result.dtype == target
        assert sqnr(exact, result) > FLOORS[target]
    assert node_dtypes(program)[torch.float32] == 0
    assert sum(tensor.nbytes for tensor in program.state_dict.values()) < 0.51 * bytes_before
    assert [x.dtype for x in program.example_inputs[0]] == [x.dtype for x in half]
    check_metadata(program, *half)
    torch.export.save(program, tmp_path / "cast.pt2")
    loaded = torch.export.load(tmp_path / "cast.pt2")
    assert all(torch.equal(a, b) for a, b in zip(run(loaded, *half), results, strict=True))
    again = torch.export.export(program.module(), tuple(half), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(run(again, *half), results, strict=True))


def test_casting_twice_changes_nothing() -> None:
    program = export(ConvNet(), torch.randn(2, 3, 8, 8))
    cast_to_16_bit_precision(program)
    code = program.graph_module.code
    cast_to_16_bit_precision(program)
    assert program.graph_module.code == code


def test_bf16_function_is_the_bf16_target() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = ConvNet()
    one, other = cast_fp32_to_bf16(export(model, x)), cast_fp32_to_fp16(export(model, x), dtype=torch.bfloat16)
    assert torch.equal(run(one, x.bfloat16())[0], run(other, x.bfloat16())[0])


def test_dynamic_shapes_stay_dynamic() -> None:
    batch = torch.export.Dim("batch", min=2, max=16)
    program = export(ConvNet(), torch.randn(2, 3, 8, 8), dynamic_shapes={"x": {0: batch}})
    symbols = dict(program.range_constraints)
    cast_fp32_to_fp16(program)
    assert dict(program.range_constraints) == symbols
    assert run(program, torch.randn(7, 3, 8, 8).half())[0].shape == (7, 5)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_a_weight_with_a_vanishing_entry_has_the_dtype_that_the_graph_claims(target: torch.dtype) -> None:
    """Among many small entries one is below the smallest number of the format; it keeps its sign."""
    layer = nn.Linear(8, 4)
    with torch.no_grad():
        layer.weight[0, :2] = torch.tensor([1e-42, -1e-42])
    x = torch.randn(2, 8)
    program = cast_fp32_to_fp16(export(layer, x), dtype=target)
    assert program.state_dict["weight"].dtype == target
    assert torch.equal(program.state_dict["weight"][0, :2].sign().float(), torch.tensor([1.0, -1.0]))
    assert sqnr(layer(x), run(program, x.to(target))[0]) > FLOORS[target]


def test_masks_keep_minus_infinity_and_finite_minimum() -> None:
    """-inf stays -inf; ``finfo.min`` becomes the smallest finite number, so that fully masked rows are uniform."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stored", torch.tensor([0.0, float("-inf"), -3e38, 1.0]))

        def forward(self, x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
            lowest = torch.finfo(torch.float32).min
            causal = torch.triu(torch.full((4, 4), float("-inf")), 1)
            return x.masked_fill(m, float("-inf")), x.masked_fill(m, lowest).softmax(-1), x + causal, self.stored + 0

    x, m = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool).triu()
    for target in (torch.float16, torch.bfloat16):
        program = cast_fp32_to_fp16(export(Masks(), x, m), dtype=target)
        filled, softmax, causal, stored = run(program, x.to(target), m)
        assert torch.equal(filled == float("-inf"), m)
        assert torch.equal(softmax[0].float(), torch.full((4,), 0.25))
        assert torch.equal(causal == float("-inf"), torch.ones(4, 4).triu(1).bool())
        expected = -torch.finfo(target).max if target is torch.float16 else float(torch.tensor(-3e38).to(target))
        assert stored.tolist() == [0.0, float("-inf"), expected, 1.0]


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(i))

    program = cast_fp32_to_fp16(export(Tied(), torch.tensor([1, 2])))
    first, second = program.state_dict["embed.weight"], program.state_dict["head.weight"]
    assert first is second
    assert isinstance(first, nn.Parameter)
    assert first.dtype == torch.float16


def test_tensor_beyond_float16_keeps_its_consumers_in_float32() -> None:
    """One entry of 1e6 keeps the weight and its product in float32; what follows is float16 again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    x = torch.randn(3, 4) * 1e-3
    program = export(model, x)
    reference = run(program, x)[0]
    cast_fp32_to_fp16(program)
    assert program.state_dict["0.weight"].dtype == torch.float32
    assert program.state_dict["0.bias"].dtype == torch.float16
    assert dtype(find(program, ATEN.addmm.default)) == torch.float32
    assert dtype(find(program, ATEN.relu.default)) == torch.float16
    assert sqnr(reference, run(program, x.half())[0]) > 50


def test_tensor_below_the_normal_numbers_stays_float32() -> None:
    """Scales of 1e-7 would keep two bits in float16."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(8) * 1e-7 + 1e-8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    x = torch.rand(8) * 1e4
    program = export(Scaled(), x)
    reference = run(program, x)[0]
    assert sqnr(reference, (x.half() * Scaled().scale.half()).float()) < 40
    cast_fp32_to_fp16(program)
    assert program.constants.get("scale", program.state_dict.get("scale")).dtype == torch.float32
    assert sqnr(reference, run(program, x.half())[0]) > 50


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.clamp(max=70000.0) + 1, ATEN.clamp.default),
        (lambda x: (x * 1e-6) * 1e5, ATEN.mul.Tensor),
        (lambda x: torch.fft.rfft(x).abs(), ATEN._fft_r2c.default),
        (lambda x: torch.linalg.inv_ex(x @ x.T + torch.eye(4))[0], ATEN.linalg_inv_ex.default),
        (lambda x: x.view(torch.int32).bitwise_and(0x7FFFFFFF).view(torch.float32), ATEN.view.dtype),
    ],
    ids=["scalar-too-large", "factor-too-small", "complex", "no-kernel", "bits"],
)
def test_operators_that_stay_float32(function: object, kept: object) -> None:
    """They compute in float32 between casts, and the program is still close and runs on half inputs."""

    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    x = torch.randn(4, 4)
    program = export(Wrapped(), x)
    reference = run(program, x)[0]
    cast_fp32_to_fp16(program)
    nodes = [node for node in program.graph.nodes if node.target == kept]
    assert torch.float32 in {dtype(source) for node in nodes for source in node.all_input_nodes}
    result = run(program, x.half())[0]
    assert result.dtype == torch.float16
    assert sqnr(reference, result) > 45


def test_positions_and_their_phases_stay_float32() -> None:
    """Rotary phases at position 3000 are right; with float16 positions they are noise."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", 10000 ** (-torch.arange(0, 8) / 8))
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            phase = positions[:, None].float() * self.frequencies
            return self.fc(x * phase.cos() + x.roll(1, -1) * phase.sin())

    x, positions = torch.randn(5, 8), torch.arange(3000, 3005)
    for target, floor in FLOORS.items():
        program = export(Rotary(), x, positions)
        reference = run(program, x, positions)[0]
        cast_fp32_to_fp16(program, dtype=target)
        assert {dtype(find(program, op)) for op in (ATEN.sin.default, ATEN.cos.default)} == {torch.float32}
        assert program.state_dict["frequencies"].dtype == torch.float32
        assert program.state_dict["fc.weight"].dtype == target
        assert sqnr(reference, run(program, x.to(target), positions)[0]) > floor


def test_coordinates_of_a_resize_stay_float32() -> None:
    """Decomposed bicubic resize: floor and fraction of coordinates need every digit."""

    class Resize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(x, size=(7, 7), mode="bicubic")

    x = torch.randn(1, 1, 8, 8)
    program = export(Resize(), x)
    reference = run(program, x)[0]
    cast_fp32_to_fp16(program)
    assert sqnr(reference, run(program, x.half())[0]) > 58


def test_integers_beyond_float16_stay_float32() -> None:
    """70000 made of a range is known to overflow, without example inputs."""

    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(70000, 70004).float() / 1e5

    x = torch.zeros(4)
    program = export(Late(), x)
    reference = run(program, x)[0]
    cast_fp32_to_fp16(program)
    assert sqnr(reference, run(program, x.half())[0]) > 60


def test_scalar_that_fills_a_tensor_beyond_float16_stays_float32() -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + torch.full((2,), 1e6) / 1e6

    program = cast_fp32_to_fp16(export(Filled(), torch.ones(2)))
    assert run(program, torch.ones(2).half())[0].tolist() == [3.0, 3.0]


def test_operator_that_refuses_half_is_left_in_float32() -> None:
    """Nobody lists it: its own shape function says no."""

    @torch.library.custom_op("bitwright_test::only_float32", mutates_args=())
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @only_float32.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return torch.empty_like(x)

    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.bitwright_test.only_float32(x + 1) + 1

    program = cast_fp32_to_fp16(export(Uses(), torch.ones(2)))
    assert dtype(find(program, torch.ops.bitwright_test.only_float32.default)) == torch.float32
    assert run(program, torch.ones(2).half())[0].tolist() == [5.0, 5.0]
    check_metadata(program, torch.ones(2).half())


def test_mutated_input_keeps_the_dtype_that_it_is_fed_in() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(torch.exp(y))
            return x * 2

    program = cast_fp32_to_fp16(export(Writes(), torch.zeros(2), torch.zeros(2)), ATEN.exp)
    x = torch.zeros(2).half()
    assert run(program, x, torch.zeros(2).half())[0].tolist() == [2.0, 2.0]
    assert x.tolist() == [1.0, 1.0]


def test_program_without_example_inputs() -> None:
    program = export(nn.Linear(2, 2), torch.ones(1, 2))
    program.example_inputs = None
    assert cast_to_16_bit_precision(program).example_inputs is None


def test_sine_of_trained_values_is_float16() -> None:
    """Only positions are kept; a sine of an activation is no phase of a position."""

    class Siren(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 4)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.fc(i.float()))

    program = cast_fp32_to_fp16(export(Siren(), torch.ones(3, 2, dtype=torch.int64)))
    assert dtype(find(program, ATEN.sin.default)) == torch.float16


def test_mutated_buffers_and_outputs_keep_one_signature(tmp_path: Path) -> None:
    """A buffer that the program updates is float16 inside, outside and in the signature."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.mean(0))
            self.steps.add_(1)
            return torch.exp(x) + self.seen

    x = torch.randn(3, 4)
    program = export(Counting(), x)
    cast_fp32_to_fp16(program, ignored_ops=ATEN.mean)
    produced = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        assert spec.arg.name in produced
    assert program.state_dict["seen"].dtype == torch.float16
    module = program.module()
    module(x.half())
    assert torch.allclose(module.get_buffer("seen").float(), x.mean(0), atol=2e-3)
    assert module.get_buffer("steps").item() == 1
    torch.export.save(program, tmp_path / "m.pt2")
    assert torch.export.load(tmp_path / "m.pt2").graph_signature.buffers_to_mutate


def test_signatures_of_submodules_survive() -> None:
    """A program that keeps the calls of its submodules can still be taken apart by them."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.fc(x)
            return torch.exp(y), y

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Part(), Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            p, q = self.a(x)
            return self.b(p + q)[0]

    model, x = Whole(), torch.randn(2, 4)
    program = export(model, x, preserve_module_call_signature=("a", "b"))
    cast_fp32_to_fp16(program, ATEN.exp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        apart = torch.export.unflatten(program)
    assert sqnr(model(x).detach(), apart(x.half()).detach()) > 50
    assert sqnr(model.a(x)[1].detach(), apart.a(x.half())[1].detach()) > 50


def test_in_place_write_across_the_border_is_refused_before_any_change() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x)
            return self.seen * 2

    program = export(Writes(), torch.randn(4), decompose=False)
    code = program.graph_module.code
    with pytest.raises(ValueError, match=r"add_.*writes in place to b_seen.*run_decompositions"):
        cast_fp32_to_fp16(program, ignored_ops=ATEN.add_)
    assert program.graph_module.code == code
    assert program.state_dict["seen"].dtype == torch.float32
    cast_fp32_to_fp16(program)
    assert run(program, torch.ones(4).half())[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("read_later", [True, False])
def test_write_through_a_view_across_the_border_is_refused_where_the_rest_is_read(read_later: bool) -> None:
    """A view in half precision of a float32 tensor is a copy, into which a write would be lost."""

    class WritesToRow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = torch.exp(x)
            row = whole[0]
            row.add_(100.0)
            return whole * 2 if read_later else row * 2

    program, x = export(WritesToRow(), torch.randn(3, 4), decompose=False), torch.randn(3, 4)
    if read_later:
        with pytest.raises(ValueError, match=r"add_.*writes in place to select, which has the memory of exp"):
            cast_fp32_to_fp16(program, ignored_ops=ATEN.exp)
    else:
        cast_fp32_to_fp16(program, ignored_ops=ATEN.exp)
        assert sqnr(WritesToRow()(x), run(program, x.half())[0]) > 50


def test_default_dtype_of_the_process_does_not_leak_in() -> None:
    """``zeros`` without a dtype is written with one, so that the program means the same everywhere."""

    class Fresh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.zeros(2)])

    program = cast_fp32_to_fp16(export(Fresh(), torch.randn(3), decompose=False))
    assert find(program, ATEN.zeros.default).kwargs["dtype"] == torch.float16


@pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), "program", None])
def test_what_is_no_exported_program_is_refused(wrong: object) -> None:
    for function in (cast_fp32_to_fp16, cast_to_16_bit_precision):
        with pytest.raises(TypeError, match=r"torch\.export\.export\(model"):
            function(wrong)


def test_other_target_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16 or torch\.bfloat16, got torch\.float64"):
        cast_fp32_to_fp16(export(nn.Linear(2, 2), torch.randn(1, 2)), dtype=torch.float64)


_UNARY = (torch.tanh, torch.relu, torch.sigmoid, torch.neg, lambda x: x.softmax(-1), lambda x: x.mean(-1, keepdim=True))
_BINARY = (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b))


class RandomGraph(nn.Module):
    """Apply operators to values picked from what has been computed so far."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x, self.fc(x)]
        for op, first, second in self.steps:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(_UNARY[op](a) if op < len(_UNARY) else _BINARY[op - len(_UNARY)](a, b))
        return values[-1], values[1]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(_UNARY) + len(_BINARY) - 1), st.integers(0, 99), st.integers(0, 99)), max_size=8
    ),
    ignored=st.sampled_from([None, ATEN.tanh, ATEN.add, [ATEN.mul, ATEN.sub], lambda node: len(node.name) % 2 == 0]),
    target=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_random_graphs_stay_close_and_true_to_their_metadata(
    steps: list[tuple[int, int, int]], ignored: object, target: torch.dtype
) -> None:
    """Whatever is ignored: outputs in the target dtype, metadata true, error explained by rounding."""
    torch.manual_seed(1)
    x = torch.randn(3, 4).to(target).float()
    program = export(RandomGraph(steps), x)
    reference = run(program, x)
    cast_fp32_to_fp16(program, ignored, dtype=target)
    check_metadata(program, x.to(target))
    results = run(program, x.to(target))
    size = max(1.0, *(float(r.abs().max()) for r in reference))
    for exact, result in zip(reference, results, strict=True):
        assert result.dtype == target
        assert float((exact - result.float()).abs().max()) < 60 * torch.finfo(target).eps * size**2
