"""ExecuTorch programs run in its Python runtime and give what the prepared model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir")

from bitwright.export.conversion import ConversionError
from bitwright.export.executorch import export_executorch, run_executorch, runtime
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerTokenGranularity
from tests.measures import sqnr

from .executorch_pieces import roundings
from .models import CHANNEL, W8, ConvNet, Mlp, blocks, built, prepared

TOKEN = PerTokenGranularity()
ACTIVATIONS = {
    "none": None,
    "int8 asymmetric": QuantizationSpec(qscheme="asymmetric"),
    "uint8": QuantizationSpec(dtype="uint8", qscheme="asymmetric"),
    "clipped": QuantizationSpec(qscheme="symmetric_with_clipping"),
    "dynamic": QuantizationSpec(qscheme="asymmetric", qparam_calculator_cls="dynamic"),
}


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        ("none", "eager", ConvNet),
        ("int8 asymmetric", "graph", ConvNet),
        ("uint8", "eager", ConvNet),
        ("clipped", "graph", ConvNet),
        pytest.param("dynamic", "eager", Mlp, marks=pytest.mark.slow),
        pytest.param("int8 asymmetric", "eager", ConvNet, marks=pytest.mark.slow),
    ],
)
def test_int8_models(name, mode, kind, tmp_path):
    """The runtime's output is the prepared model's; a sum in another order may move a code by one."""
    model, x = built(kind)
    _, ready = prepared(model, x, W8, ACTIVATIONS[name], mode)
    path = export_executorch(ready, (x,), tmp_path / "model.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 35


@pytest.mark.parametrize(
    "spec",
    [
        QuantizationSpec(dtype="int4", granularity=blocks(32)),
        QuantizationSpec(dtype="float8_e4m3fn", granularity=CHANNEL),
    ],
)
def test_other_weights_are_dense_and_exact(spec, tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "model.pte"), (x,))
    assert sqnr(ready(x), found) > 110


def test_int8_layers_are_delegated_and_small(tmp_path):
    """Weights take one byte each in the file."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec(qscheme="asymmetric"), "graph")
    path = export_executorch(ready, (x,), tmp_path / "model.pte")
    dense = sum(p.nbytes for p in model.parameters())
    assert path.stat().st_size < 0.6 * dense


class AroundErf(nn.Module):
    """A sum reads what its other summand is made of, through an operator that XNNPACK lacks."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return self.last(x + torch.erf(self.inner(x)))


def test_int8_layers_around_other_operators_run_in_xnnpack(tmp_path, caplog):
    """Its partitioner joins readers of one dequantized tensor, and would find a cycle here and give up."""
    torch.manual_seed(0)
    model, x = AroundErf().eval(), torch.randn(2, 5, 16)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="uint8", qscheme="asymmetric"), "graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Rearranged(nn.Module):
    """Two layers, the second of which quantizes what the first did once more, in another shape."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).view(2, 5, 2, 8).transpose(1, 2))


def test_tensors_with_two_scales_around_a_move_run_in_xnnpack(tmp_path, caplog):
    """Its runtime would refuse a reshape of int8 with one scale to int8 with another."""
    torch.manual_seed(0)
    model, x = Rearranged().eval(), torch.randn(2, 5, 16)
    modules = {
        name: ModuleQuantizerConfig(op_state_spec={"weight": W8}, op_input_spec=spec, op_output_spec=spec)
        for name, spec in (
            ("first", {"*": QuantizationSpec(qscheme="asymmetric")}),
            ("second", {"*": QuantizationSpec(qscheme="symmetric")}),
        )
    }
    quantizer = Quantizer(model, QuantizerConfig(global_config=None, module_name_configs=modules))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Gated(nn.Module):
    """A layer whose output goes through an activation function before it is quantized."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_layers_with_float_outputs_keep_the_others_in_xnnpack(tmp_path, caplog):
    """Int8 goes in and floats come out of the gate, which XNNPACK's runtime would refuse the file for."""
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(2, 5, 16)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="uint8", qscheme="asymmetric"), "graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


@pytest.mark.parametrize("spec", [QuantizationSpec(), QuantizationSpec(qscheme="asymmetric", granularity=CHANNEL)])
def test_int8_weights_beside_float_activations(spec, tmp_path):
    """Per tensor, and with zero points: forms that XNNPACK computes wrong or refuses are written otherwise."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec, mode="graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


DYNAMIC = {
    "int8 per token": QuantizationSpec(granularity=TOKEN, qparam_calculator_cls="dynamic"),
    "uint8 per token, asymmetric": QuantizationSpec(
        dtype="uint8", qscheme="asymmetric", granularity=TOKEN, qparam_calculator_cls="dynamic"
    ),
    "uint8 per tensor": QuantizationSpec(dtype="uint8", qparam_calculator_cls="dynamic"),
    "int8 per tensor, asymmetric": QuantizationSpec(qscheme="asymmetric", qparam_calculator_cls="dynamic"),
    "int4 per token": QuantizationSpec(dtype="int4", granularity=TOKEN, qparam_calculator_cls="dynamic"),
    "uint5 per tensor, asymmetric": QuantizationSpec(
        dtype="uint5", qscheme="asymmetric", qparam_calculator_cls="dynamic"
    ),
}
LEFT_TO_OTHERS = (b"aten::addmm", b"aten::mm", b"aten::linear", b"quantized_decomposed::")


def _inputs_quantized(model, x, weight, activation, mode="eager"):
    """A copy of ``model`` whose linear layers have quantized weights and inputs."""
    module = ModuleQuantizerConfig(
        op_state_spec={"weight": weight}, op_input_spec={"*": activation}, op_output_spec=None
    )
    config = QuantizerConfig(global_config=None, module_type_configs={nn.Linear: module}, execution_mode=mode)
    return Quantizer(copy.deepcopy(model), config).prepare((x,))


@pytest.mark.parametrize(
    ("name", "weight", "mode"),
    [
        ("int8 per token", "int4", "eager"),
        ("uint8 per token, asymmetric", "int8", "graph"),
        ("int8 per tensor, asymmetric", "int8", "eager"),
        *(
            pytest.param(name, weight, mode, marks=pytest.mark.slow)
            for name in DYNAMIC
            for weight in ("int8", "int4")
            for mode in ("eager", "graph")
        ),
    ],
)
def test_linear_layers_quantize_dynamic_activations(name, weight, mode, tmp_path):
    """In XNNPACK alone, with the simulator's codes also where the largest value lies half-way between two of them."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 48, bias=weight == "int8").eval(), torch.randn(5, 40, 32)
    ready = _inputs_quantized(model, x, QuantizationSpec(dtype=weight, granularity=CHANNEL), DYNAMIC[name], mode)
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 100
    assert not [op for op in LEFT_TO_OTHERS if op in path.read_bytes()]


def test_int4_weights_of_dynamic_layers_take_half_a_byte(tmp_path):
    model, x = nn.Linear(256, 256).eval(), torch.randn(2, 256)
    weight = QuantizationSpec(dtype="int4", granularity=CHANNEL)
    ready = _inputs_quantized(model, x, weight, DYNAMIC["int8 per token"])
    assert export_executorch(ready, (x,), tmp_path / "m.pte").stat().st_size < 0.75 * 256 * 256


@pytest.mark.parametrize("name", ["int8 per token", "uint8 per tensor", "int8 per tensor, asymmetric"])
def test_values_half_way_between_two_codes(name, tmp_path):
    """They go to the even code, as in PyTorch, though the scale that XNNPACK finds differs in its last bit."""
    torch.manual_seed(0)
    values = torch.arange(-127.5, 128, 0.5)
    model, x = nn.Linear(len(values), 16, bias=False).eval(), values[None] * torch.tensor([[0.3], [1.0]])
    ready = _inputs_quantized(model, x, W8, DYNAMIC[name])
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


class Looked(nn.Module):
    """A layer that reads rows of a quantized table, which are multiples of one scale."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 48)
        self.head = nn.Linear(48, 64, bias=False)

    def forward(self, x):
        return self.head(self.table(x))


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_multiples_of_a_scale_half_way_between_two_codes(scheme, tmp_path):
    """Also where XNNPACK could find the range by itself; its codes of such rows would not be PyTorch's."""
    torch.manual_seed(0)
    model, x = Looked().eval(), torch.arange(64)[None]
    activation = QuantizationSpec(qscheme="asymmetric", granularity=TOKEN, qparam_calculator_cls="dynamic")
    table = {"weight": QuantizationSpec(qscheme=scheme)}
    config = QuantizerConfig(
        global_config=None,
        module_type_configs={
            nn.Embedding: ModuleQuantizerConfig(op_state_spec=table, op_input_spec=None, op_output_spec=None),
            nn.Linear: ModuleQuantizerConfig(
                op_state_spec={"weight": W8}, op_input_spec={"*": activation}, op_output_spec=None
            ),
        },
    )
    ready = Quantizer(model, config).prepare((x,))
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


class Block(nn.Module):
    """A norm, whose sums no two runtimes add in one order, and layers around an activation function."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("name", ["int8 per token", "uint8 per tensor"])
def test_all_roundings_beside_calibrated_activations_are_pytorchs_or_ties(name, tmp_path):
    """Whatever one moved code becomes further on, nothing rounds wrongly by itself."""
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(8, 50, 64)
    linear = ModuleQuantizerConfig(
        op_state_spec={"weight": W8}, op_input_spec={"*": DYNAMIC[name]}, op_output_spec=None
    )
    config = QuantizerConfig(module_type_configs={nn.Linear: linear}, execution_mode="graph")
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    rows = roundings(ready, (x,), tmp_path / "piece.pte")
    assert {row.name.partition("_")[0] for row in rows} == {"quantize", "round"}
    assert sum(row.numbers for row in rows) > 150_000
    # Codes quantized anew lie half way between two often: how many of them, depends on the processor's order of sums.
    assert sum(row.differing for row in rows) < 30
    assert max(row.error for row in rows) < 1e-4


class Scaled(nn.Module):
    """A layer behind a product with a tensor without dimensions."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x * x.amax())


def test_quantized_numbers_without_dimensions_leave_the_rest_to_xnnpack(tmp_path, caplog):
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    _, ready = prepared(Scaled().eval(), x, W8, QuantizationSpec(), "graph")
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 35
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


def test_rows_of_zeros_and_of_one_sign(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(16, 8).eval(), torch.rand(6, 16)
    x[1], x[2], x[3] = 0, -x[2], 1e-9
    for spec in (DYNAMIC["int8 per token"], DYNAMIC["uint8 per token, asymmetric"]):
        ready = _inputs_quantized(model, x, W8, spec)
        (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
        assert sqnr(ready(x), found) > 100


class Mixed(nn.Module):
    """Layers with calibrated int8, with int8 found at run time, called twice, and in floats."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.first, self.again, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.conv(x)).transpose(1, 2)
        x = self.again(torch.tanh(self.again(self.first(x))))
        return self.last(x + x.mean(1, keepdim=True))


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "graph"])
def test_dynamic_layers_beside_calibrated_and_float_ones(mode, tmp_path, caplog):
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(2, 4, 9)
    static, dynamic = QuantizationSpec(qscheme="asymmetric"), DYNAMIC["uint8 per token, asymmetric"]
    weight = {"weight": W8}
    linear = ModuleQuantizerConfig(op_state_spec=weight, op_input_spec={"*": dynamic}, op_output_spec=None)
    conv = ModuleQuantizerConfig(op_state_spec=weight, op_input_spec={"*": static}, op_output_spec={"*": static})
    config = QuantizerConfig(
        global_config=None,
        module_name_configs={"first": linear, "again": linear, "conv": conv},
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 60
    assert b"aten::addmm" not in path.read_bytes()
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Activated(nn.Module):
    """A sum that reads what is quantized at run time, and a layer whose weight is another's too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x)) + self.table(x)


def test_dynamic_activations_of_other_readers_are_arithmetic(tmp_path):
    torch.manual_seed(0)
    model, x = Activated().eval(), torch.randint(0, 16, (2, 5))
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec={"weight": W8}, op_input_spec={"*": DYNAMIC["int8 per token"]}, op_output_spec=None
        ),
        execution_mode="graph",
    )
    ready = Quantizer(model, config).prepare((x,))
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


def test_int8_weights_with_a_bias_beside_floats_run_in_xnnpack(tmp_path):
    """The weight stays one byte each in the file, and its floats are made a layer at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x = torch.randn(2, 3, 256)
    _, ready = prepared(model, x, W8)
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 110
    assert path.stat().st_size < 1.3 * 2 * 256 * 256
    assert b"aten::addmm" not in path.read_bytes()


def test_damaged_files_and_wrong_inputs_are_named(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    path = export_executorch(ready, (x,), tmp_path / "model.pte")
    for inputs in ((), (x[:1, :3].contiguous(),)):
        with pytest.raises(ConversionError, match=r"model\.pte' on inputs of shape (none|\(1, 3\))"):
            run_executorch(path, inputs)
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], bytes(len(content))):
        path.write_bytes(damaged)
        with pytest.raises(ConversionError, match=r"cannot run .*model\.pte'.*Write the file anew"):
            run_executorch(path, (x,))
    path.unlink()
    with pytest.raises(ConversionError, match=r"model\.pte"):
        run_executorch(path, (x,))


def test_fp4_blocks_with_scales_computed_at_run_time(tmp_path):
    model, x = built(Mlp)
    spec = QuantizationSpec(
        dtype="float4_e2m1fn",
        granularity=PerBlockGranularity(axis=-1, block_size=32),
        scale_dtype="float8_e8m0fnu",
        qparam_calculator_cls="dynamic",
    )
    _, ready = prepared(model, x, W8, spec)
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    for other in (x, x * 1e-30, x * torch.tensor([0, 1]).repeat_interleave(32)):
        assert sqnr(ready(other), run_executorch(path, (other,))[0]) > 100


def test_fp8_activations_are_refused_by_name(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="float8_e4m3fn"))
    with pytest.raises(ValueError, match=r"up\.linear_quantize_input.*no FP8"):
        export_executorch(ready, (x,), tmp_path / "m.pte")


class Masked(nn.Module):
    """Masks some scores, and has some that are no numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y.masked_fill(x > 0, -torch.inf), torch.where(x < -1, torch.nan, y), y.masked_fill(x < 9, torch.inf)


def test_infinities_and_nan_are_outputs_like_others(tmp_path, caplog):
    """None of them is noise where the model has it too, and all of the other numbers are still compared."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = Masked().eval()
    path = export_executorch(model, (x,), tmp_path / "m.pte")
    assert "did not work" not in caplog.text
    for expected, found in zip(model(x), run_executorch(path, (x,)), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan, 0.0, 1.0])
def test_infinities_of_a_file_that_the_model_does_not_have_are_refused(wrong, tmp_path, monkeypatch):
    """So are other numbers in the place of infinities, and infinities of the other sign."""
    right = torch.tensor([[-torch.inf, 0.5, torch.nan, -2.0]])
    for place in range(4):
        outputs = right.clone()
        outputs[0, place] = wrong
        if torch.equal(outputs.nan_to_num(9), right.nan_to_num(9)):
            continue
        monkeypatch.setattr(runtime, "run_executorch", lambda path, inputs, found=outputs: [found])
        with pytest.raises(ConversionError, match="computes something else"):
            export_executorch(nn.Identity(), (right,), tmp_path / "m.pte")
    monkeypatch.setattr(runtime, "run_executorch", lambda path, inputs: [right])
    export_executorch(nn.Identity(), (right,), tmp_path / "m.pte")
