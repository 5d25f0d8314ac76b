"""Writers that wrap other people's converters: their errors and their noise, dynamic shapes, models left alone."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from bitwright.export.conversion import ConversionError, captured, converting
from bitwright.export.targets import TARGETS, target_named
from bitwright.export.torch_program import export_torch, packed_copy, run_torch
from bitwright.quantization import QuantizationSpec, Quantizer, QuantizerConfig
from tests.matrix import each_pair
from tests.measures import sqnr

from .models import CHANNEL, W8, ConvNet, Deconv, Mlp, blocks, built, palettized, prepared, pruned


def test_errors_of_converters_become_one_of_ours(capsys):
    """Its words are kept, what it printed is not."""

    @converting("gizmo")
    def convert():
        print("noise")
        raise KeyError("uint7")

    with pytest.raises(ConversionError, match=r"gizmo cannot take this.*KeyError: 'uint7'.*float model") as raised:
        convert()
    assert isinstance(raised.value.__cause__, KeyError)
    assert capsys.readouterr().out == ""


def test_the_cause_that_a_converter_names_is_in_the_message():
    """Long advice comes first in some; colours of a terminal are dropped."""

    @converting("gizmo")
    def convert():
        try:
            raise LookupError("no function for grouped_mm_fallback")
        except LookupError as error:
            raise RuntimeError("Conversion \x1b[96mfailed\x1b[0m.\n" + "- Do this.\n" * 50) from error

    with pytest.raises(ConversionError) as raised:
        convert()
    message = str(raised.value)
    assert "RuntimeError: Conversion failed." in message
    assert "because of LookupError: no function for grouped_mm_fallback" in message
    assert "batched_mm" in message


def test_names_that_programs_cannot_have_are_told():
    """torch.export captures a submodule called ``code``, and then cannot run what it captured."""

    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Linear(4, 4)

        def forward(self, x):
            return self.code(x)

    model, inputs = Coder().eval(), (torch.randn(2, 4),)
    with pytest.raises(ConversionError, match=r"'code'.*'code.weight': rename that attribute"):
        captured(model, inputs)
    with pytest.raises(ConversionError, match=r"'code'.*'code.weight': rename that attribute"), converting("gizmo"):
        torch.export.export(model, inputs).module()


def test_our_own_errors_pass_through():
    from bitwright.artifact import ArtifactError

    with pytest.raises(ArtifactError, match="mine"), converting("gizmo"):
        raise ArtifactError("mine")


def test_unknown_targets_are_refused_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no target 'tpu'.*onnx.*gguf"):
        target_named("tpu")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_packed_copies_are_small_and_exact(mode):
    """Weights stay packed in memory; the prepared model keeps its own."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, QuantizationSpec(dtype="int4", granularity=blocks(32)), QuantizationSpec(), mode)
    packed = packed_copy(ready)
    assert torch.equal(packed(x), ready(x))
    held = sum(t.numel() * t.element_size() for t in {id(t): t for t in packed.state_dict().values()}.values())
    assert held < 0.2 * sum(p.nbytes for p in model.parameters())


def test_saved_programs_hold_weights_and_graph_alone(tmp_path):
    """No example inputs, which may be larger than the model, and no stack traces."""
    model, _ = built(ConvNet)
    x = torch.randn(500, 3, 8, 8)
    _, ready = prepared(model, x, W8)
    path = export_torch(ready, (x,), tmp_path / "m.pt2", dynamic_shapes=({0: torch.export.Dim("n")},))
    assert path.stat().st_size < x.nbytes
    assert torch.equal(run_torch(path, (x[:7],))[0], ready(x[:7]))
    for inputs in ((), (x, x)):
        with pytest.raises(ValueError, match=rf"takes 1 tensors \(\w+\), got {len(inputs)}"):
            run_torch(path, inputs)


def test_weights_that_a_mask_does_not_make_smaller_are_copied():
    """A packed copy of a barely pruned model shares nothing that it writes to."""
    model, x = built(Deconv)
    _, ready = pruned(model, x, 0.02)
    before = {name: tensor.clone() for name, tensor in ready.state_dict().items()}
    assert torch.equal(packed_copy(ready)(x), ready(x))
    after = ready.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Recurrent(nn.Module):
    """An LSTM and a layer."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_core_ml_keeps_rnn_weights_dense(mode, tmp_path, caplog):
    """Its converter takes packed weights for other layers only; the log says so, and the values are right."""
    pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import compressed_constants, export_coreml

    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(1, 3, 8)
    _, ready = prepared(model, x, QuantizationSpec(dtype="int8", granularity=CHANNEL), mode=mode)
    with caplog.at_level(logging.WARNING, "bitwright"):
        path = export_coreml(ready, (x,), tmp_path / "m.mlpackage", precision="float32")
    assert "cannot pack weights of RNNs: rnn.weight_ih_l0" in caplog.text
    (constant,) = [constant for _, constant in compressed_constants(path)]
    head = ready.head.weight if mode == "eager" else ready.get_submodule("head").weight
    assert torch.allclose(constant, head, atol=0.01)


@pytest.mark.parametrize("spec", [{"n_bits": 5}, {"n_bits": 7}, {"n_bits": 4, "lut_qspec": QuantizationSpec()}])
def test_core_ml_palettes(spec, tmp_path):
    """Sizes of tables that Core ML lacks are filled up; quantized tables are read back through both ops."""
    pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import compressed_constants, export_coreml

    model, x = built(Mlp)
    _, ready = palettized(model, x, **spec)
    decoded = [c for _, c in compressed_constants(export_coreml(ready, (x,), tmp_path / "m.mlpackage"))]
    for layer in (ready.up, ready.down):
        (same,) = [c.float() for c in decoded if c.shape == layer.weight.shape]
        assert sqnr(layer.weight, same) > 55


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("sparsity", [0.02, 0.75])
def test_core_ml_palettes_below_masks(scheme, sparsity, tmp_path):
    """coremltools has no mask over quantized tables; their values are written as they are."""
    pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import compressed_constants, export_coreml

    model, x = built(Mlp)
    _, sparse = pruned(model, x, sparsity)
    _, ready = palettized(sparse, x, n_bits=4, lut_qspec=QuantizationSpec(dtype="uint8", qscheme=scheme))
    decoded = [c for _, c in compressed_constants(export_coreml(ready, (x,), tmp_path / "m.mlpackage"))]
    for layer in (ready.up, ready.down):
        (same,) = [c.float() for c in decoded if c.shape == layer.weight.shape]
        assert sqnr(layer.weight, same) > 55


@pytest.mark.parametrize("name", ["onnx", "coreai"])
def test_dynamic_shapes_are_kept(name, tmp_path):
    """One file for batches of any size, in the runtime too."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    path = target.write(ready, (x,), tmp_path / f"m{target.suffix}", {}, ({0: torch.export.Dim("batch", max=64)},))
    for batch in (2, 9):
        inputs = torch.randn(batch, 64)
        assert sqnr(ready(inputs), target.run(path, [inputs])[0]) > 100


class Rest(nn.Module):
    """Takes any number of inputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, *tensors):
        return self.fc(sum(tensors))


@pytest.mark.parametrize(
    ("name", "mode", "named", "count"),
    each_pair(["onnx", "coreai"], ["eager", "graph"], {"named": True, "in order": False}, [1, 2]),
)
def test_dynamic_shapes_of_any_number_of_inputs_are_those_that_it_was_prepared_with(name, mode, named, count, tmp_path):
    """torch.export takes them in a tuple of their own, but not for the graph that it has captured once."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    several = ({0: torch.export.Dim.DYNAMIC},) * count
    shapes = {"tensors": several} if named else (several,)
    inputs = tuple(torch.randn(2, 8) for _ in range(count))
    options = {"dynamic_shapes": shapes} if mode == "graph" else {}
    ready = Quantizer(Rest().eval(), QuantizerConfig.presets.w8(execution_mode=mode)).prepare(inputs, **options)
    path = target.write(ready, inputs, tmp_path / f"m{target.suffix}", {}, shapes)
    others = tuple(torch.randn(5, 8) for _ in range(count))
    assert sqnr(ready(*others), target.run(path, others)[0]) > 100


class Others(nn.Module):
    """Takes inputs of any name."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, **others):
        return self.fc(x) + others["mask"] * others["scale"]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", ["torch", "onnx", "executorch", "coreai"])
def test_dynamic_shapes_of_inputs_of_any_name_are_those_that_it_was_prepared_with(name, mode, tmp_path):
    """torch.export itself takes them neither in a dictionary of their own nor by name."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    batch = {0: torch.export.Dim("batch", max=64)}
    shapes = {"x": batch, "others": {"scale": {}, "mask": batch}}
    quantizer = Quantizer(Others().eval(), QuantizerConfig.presets.w8(execution_mode=mode))
    inputs = (torch.randn(2, 8),), {"mask": torch.randn(2, 8), "scale": torch.randn(8)}
    assert quantizer.plan(inputs[0], example_kwargs=inputs[1], dynamic_shapes=shapes, target=name).problems == []
    options = {"dynamic_shapes": shapes} if mode == "graph" else {}
    ready = quantizer.prepare(inputs[0], example_kwargs=inputs[1], **options)
    path = target.write(ready, inputs[0], tmp_path / f"m{target.suffix}", inputs[1], shapes)
    if name == "onnx":
        onnx = pytest.importorskip("onnx")
        names = [[d.dim_param for d in one.type.tensor_type.shape.dim] for one in onnx.load(str(path)).graph.input]
        assert names == [["batch", ""], ["batch", ""], [""]]
    others = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    assert sqnr(ready(others[0], mask=others[1], scale=others[2]), target.run(path, others)[0]) > 100


class Wrong(nn.Module):
    """Uses what no converter has."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.linalg.eigvals(self.fc(x).reshape(-1, 8, 8)).real


@pytest.mark.parametrize("name", ["onnx", "coreai", "coreml"])
def test_ops_that_a_converter_lacks(name, tmp_path):
    """One error of ours with the converter's words, and nothing is left behind."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    _, ready = prepared(Wrong().eval(), torch.randn(8, 8), W8)
    with pytest.raises(ConversionError, match="cannot take this model"):
        target.write(ready, (torch.randn(8, 8),), tmp_path / f"m{target.suffix}", {}, None)
    assert not list(tmp_path.iterdir())
