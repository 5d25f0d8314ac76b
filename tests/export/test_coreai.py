"""Core AI: finalized models compute what prepared ones did, in torch bit for bit and in the Core AI runtime."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.artifact import ArtifactError
from bitwright.export import coreai_weights
from bitwright.export.mapped import MappedFiles
from bitwright.quantization import QuantizationSpec, _export_utils
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTensorGranularity
from tests.artifact.strategies import weight_specs
from tests.matrix import each_pair, each_value
from tests.measures import sqnr

from .coreai_runtime import converted, coreai_ops, run
from .models import (
    JOINT,
    PALETTES,
    W8,
    ConvNet,
    Deconv,
    Mlp,
    Tied,
    blocks,
    built,
    grouped,
    palettized,
    prepared,
    pruned,
    pruned_and_compressed,
    spec_of,
)

WEIGHTS = {
    **{name: (ConvNet, spec_of(name)) for name in ("int8", "uint8", "int4", "uint4", "int2", "uint2", "int3", "uint5")},
    "int4 asymmetric": (ConvNet, spec_of("int4", qscheme="asymmetric")),
    "int4 blocks": (Mlp, spec_of("int4", blocks(32))),
    "int8 clipped": (ConvNet, spec_of("int8", qscheme="symmetric_with_clipping")),
    "int8 minval": (ConvNet, spec_of("int8", qformulation="minval")),
    "int8 minval clipped": (ConvNet, spec_of("int8", qformulation="minval", qscheme="symmetric_with_clipping")),
    "int3 minval": (ConvNet, spec_of("int3", qformulation="minval")),
    "fp8": (ConvNet, spec_of("float8_e4m3fn")),
    "mxfp8": (ConvNet, spec_of("float8_e5m2", scale_dtype="float8_e8m0fnu")),
    "fp4": (Mlp, spec_of("float4_e2m1fn_x2", blocks(32))),
}

ACTIVATIONS = {
    f"{dtype} {scheme} {formulation}": QuantizationSpec(dtype=dtype, qscheme=scheme, qformulation=formulation)
    for dtype in ("int8", "uint8", "int4")
    for scheme in ("symmetric", "asymmetric", "symmetric_with_clipping")
    for formulation in ("zp", "minval")
} | {"fp8": QuantizationSpec(dtype="float8_e4m3fn"), "fp8 wide": QuantizationSpec(dtype="float8_e5m2")}


@pytest.mark.parametrize(("name", "mode"), each_value(list(WEIGHTS), ["eager", "graph"]))
def test_weights_in_torch(name, mode):
    kind, spec = WEIGHTS[name]
    model, x = built(kind)
    quantizer, ready = prepared(model, x, spec, mode=mode)
    expected = ready(x)
    assert torch.equal(quantizer.finalize(backend="coreai")(x), expected)


@pytest.mark.parametrize(("name", "mode"), each_value(list(ACTIVATIONS), ["eager", "graph"]))
def test_activations_in_torch(name, mode):
    """Bit for bit, far beyond the calibrated range too, where a clipped range saturates earlier than its type."""
    model, x = built(ConvNet)
    quantizer, ready = prepared(model, x, W8, ACTIVATIONS[name], mode)
    inputs = (x, 6 * x, -9 * x)
    expected = [ready(value) for value in inputs]
    final = quantizer.finalize(backend="coreai")
    for value, y in zip(inputs, expected, strict=True):
        assert torch.equal(final(value), y)


@pytest.mark.parametrize(
    ("dtype", "mode", "formulation"), each_pair([torch.float16, torch.bfloat16], ["eager", "graph"], ["zp", "minval"])
)
def test_half_precision_in_torch(dtype, mode, formulation):
    """Simulators compute in float32; so does what takes their place."""
    model, x = built(Mlp, dtype)
    weight = spec_of("int4", qformulation=formulation)
    quantizer, ready = prepared(model, x, weight, QuantizationSpec(qformulation=formulation), mode)
    expected = ready(x)
    found = quantizer.finalize(backend="coreai")(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_graphs_store_parameters_in_half_precision(dtype):
    """Scales and minvals are computed in the model's dtype, so that its buffers hold them; the ops get float32."""
    model, x = built(Mlp, dtype)
    spec = spec_of("int4", qformulation="minval")
    final = prepared(model, x, spec, QuantizationSpec(qformulation="minval"), "graph")[0].finalize(backend="coreai")
    found = {name: tensor.dtype for name, tensor in final.named_buffers() if name.endswith(("_scale", "_minval"))}
    assert len(found) == 10
    assert set(found.values()) == {dtype}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "uint8", "float8_e4m3fn"])
def test_half_precision_activations_of_graphs_are_not_cast(name, dtype):
    """Only scales are, and the codes are the prepared model's, in torch and in the runtime."""
    model, x = built(Mlp, dtype)
    scheme = {"qscheme": "asymmetric"} if name == "uint8" else {}
    quantizer, ready = prepared(model, x, W8, QuantizationSpec(dtype=name, **scheme), "graph")
    expected = ready(x)
    final = quantizer.finalize(backend="coreai")
    casts = [node for node in final.graph.nodes if node.target == torch.ops.aten.to.dtype]
    assert casts
    assert all(node.args[0].op == "get_attr" for node in casts)
    assert torch.equal(final(x), expected)
    assert sqnr(expected.float(), run(converted(final, (x,))[0], (x,))[0][0].float()) > 25


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_scales_that_half_precision_holds_as_subnormals_only_stay_in_single_precision(mode):
    """Core AI's runtime reads half-precision numbers below 2 ** -14 as zero."""
    model, x = built(Mlp, torch.float16)
    spec = spec_of("float8_e5m2", PerTensorGranularity())
    x = x * 0.01
    quantizer, ready = prepared(model, x, spec, spec, mode)
    final = quantizer.finalize(backend="coreai")
    small = [
        tensor
        for name, tensor in final.named_buffers()
        if name.endswith("scale") and "weight" not in name and float(tensor) < 2**-14
    ]
    assert small
    assert {scale.dtype for scale in small} == {torch.float32}
    assert sqnr(ready(x), run(converted(final, (x,))[0], (x,))[0][0]) > 20


QUICK = ["int8", "int4 blocks", "int3", "int8 minval clipped", "mxfp8", "fp4"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in WEIGHTS])
def test_weights_in_the_runtime(name):
    kind, spec = WEIGHTS[name]
    model, x = built(kind)
    quantizer, ready = prepared(model, x, spec)
    expected = ready(x)
    program, exported = converted(quantizer.finalize(backend="coreai"), (x,))
    layers = sum(1 for module in model.modules() if hasattr(module, "weight"))
    assert coreai_ops(exported) == {"constexpr_blockwise_shift_scale": layers}
    (found,), _ = run(program, (x,))
    assert sqnr(expected, found) > 120


QUICK_ACTIVATIONS = ["int8 symmetric zp", "int8 symmetric_with_clipping minval", "int4 asymmetric zp", "fp8"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK_ACTIVATIONS else [pytest.mark.slow]) for n in ACTIVATIONS]
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_activations_in_the_runtime(name, mode):
    """The runtime's codes are the prepared model's, but for sums that round to the other side of a bound.

    An average of 64 codes would often lie on one; of 49, with the same scale, never.
    """
    model, x = built(ConvNet)
    x = x[..., :7, :7]
    quantizer, ready = prepared(model, x, W8, ACTIVATIONS[name], mode)
    expected = ready(x)
    program, _ = converted(quantizer.finalize(backend="coreai"), (x,))
    (found,), _ = run(program, (x,))
    assert sqnr(expected, found) > 40


@pytest.mark.parametrize("name", PALETTES)
def test_palettes_in_torch(name):
    """Bit for bit, except where quantized tables and channel scales are multiplied into one factor."""
    model, x = built(Deconv)
    palettizer, ready = palettized(model, x, **PALETTES[name])
    expected = ready(x).detach()
    found = palettizer.finalize(backend="coreai")(x)
    assert sqnr(expected, found) > (120 if name == "all together" else 1e9)


@pytest.mark.parametrize("name", ["3 bits", "vectors in groups", "all together", pytest.param("fp8 tables")])
def test_palettes_in_the_runtime(name):
    model, x = built(Deconv)
    palettizer, ready = palettized(model, x, **PALETTES[name])
    expected = ready(x).detach()
    program, exported = converted(palettizer.finalize(backend="coreai"), (x,))
    assert coreai_ops(exported)["lut_to_dense"] == 3
    (found,), _ = run(program, (x,))
    assert sqnr(expected, found) > 120


@pytest.mark.parametrize("name", JOINT)
def test_pruned_and_compressed(name):
    """Masks stay masks next to codes and palettes, or are folded in where the op could not tell zeros."""
    model, x = built(Deconv)
    compressor, ready = pruned_and_compressed(model, x, JOINT[name])
    expected = ready(x).detach()
    final = compressor.finalize(backend="coreai")
    assert torch.equal(final(x), expected)
    program, exported = converted(final, (x,))
    if name == "grouped palette":
        assert coreai_ops(exported)["lut_to_dense"] == 3
    elif name not in ("int4 asymmetric", "int8 minval"):
        assert coreai_ops(exported)["sparse_to_dense"] == 3
    (found,), _ = run(program, (x,))
    assert sqnr(expected, found) > 120


SEVERAL_TABLES = {
    "groups": {"n_bits": 4, "granularity": grouped(32)},
    "groups of columns": {"n_bits": 2, "granularity": grouped(32, axis=1)},
    "channel scale": {"n_bits": 4, "enable_per_channel_scale": True},
    "int8 tables": {"n_bits": 3, "granularity": grouped(32), "lut_qspec": QuantizationSpec(dtype="int8")},
    "all values in use": {"n_bits": 8, "granularity": grouped(64)},
}


@pytest.mark.parametrize("name", SEVERAL_TABLES)
def test_pruned_weights_with_several_tables(name):
    """What was pruned selects a zero of its table, where the table has a place for one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 128)).eval(), torch.randn(4, 128)
    palettizer, ready = pruned_and_compressed(model, x, SEVERAL_TABLES[name])
    expected = ready(x).detach()
    final = palettizer.finalize(backend="coreai")
    assert torch.equal(final(x), expected)
    program, exported = converted(final, (x,))
    (found,), size = run(program, (x,))
    assert sqnr(expected, found) > 120
    is_dense = name == "all values in use"
    assert coreai_ops(exported)["sparse_to_dense" if is_dense else "lut_to_dense"] == 1
    assert size < 0.3 * 4 * 128 * 128 or is_dense


@pytest.mark.parametrize("case", ["quantized", "half precision", "fp4", "palettized", *JOINT])
def test_finalized_eager_models_are_copied_and_saved(case, monkeypatch):
    """What calls the ops itself registers them where it is loaded, which may be a new process."""
    model, x = built(Mlp if case == "fp4" else Deconv, torch.bfloat16 if case == "half precision" else torch.float32)
    if case in JOINT:
        compressor, _ = pruned_and_compressed(model, x, JOINT[case])
    elif case == "palettized":
        compressor, _ = palettized(model, x, n_bits=4, granularity=grouped(4))
    else:
        weight = WEIGHTS["fp4"][1] if case == "fp4" else W8
        compressor, _ = prepared(model, x, weight, ACTIVATIONS["int8 symmetric zp"])
    final = compressor.finalize(backend="coreai")
    expected = final(x)
    assert torch.equal(copy.deepcopy(final)(x), expected)
    file, registered = io.BytesIO(), []
    torch.save(final, file)
    file.seek(0)
    monkeypatch.setattr(coreai_weights, "coreai_layers", lambda: registered.append(True))
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), expected)
    calling = [module for module in loaded.modules() if isinstance(module, coreai_weights.CallsCoreAI)]
    assert len(registered) == len(calling)
    assert bool(calling) or case not in ("half precision", "int8", "palette")


def test_pruned(tmp_path):
    model, x = built(Deconv)
    pruner, ready = pruned(model, x)
    expected = ready(x).detach()
    final = pruner.finalize(backend="coreai")
    parametrization = final.fc.parametrizations.weight[0]
    assert type(parametrization).__name__ == "SparseModuleParametrization"
    assert final.fc.parametrizations.weight.original.numel() == 0
    (found,), size = run(converted(final, (x,))[0], (x,))
    assert sqnr(expected, found) > 120
    (_, dense_size) = run(converted(model, (x,))[0], (x,))
    assert size < dense_size


def test_eager_buffers_and_names():
    """The buffers, their names, shapes and dtypes that code written for coreai-opt looks for."""
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, spec_of("int4", blocks(32), qscheme="asymmetric"), QuantizationSpec())
    final = quantizer.finalize(backend="coreai")
    weight = final.up.parametrizations.weight[0]
    assert weight.quantized_data.dtype == torch.int8
    assert weight.quantized_data.shape == (96, 64)
    assert weight.scale.shape == weight.zero_point.shape == (96, 2)
    assert weight.zero_point.dtype == torch.int8
    assert weight.input_dtype == torch.int4
    assert final.up.parametrizations.weight.original.numel() == 0
    assert isinstance(final.up.parametrizations.weight.original, nn.Parameter)
    activation = final.up.linear_quantize_input
    assert [name for name, _ in activation.named_children()] == ["quantize", "dequantize"]
    assert activation.quantize.scale.shape == ()


def test_graph_buffers_and_nodes():
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec(), "graph")
    dense = ready.up.weight
    final = quantizer.finalize(backend="coreai")
    buffers = dict(final.named_buffers())
    assert {"up_weight_quantized", "up_weight_scale", "up_weight_zero_point"} <= buffers.keys()
    assert "activation_post_process_0_scale" in buffers
    assert buffers["up_weight_quantized"].dtype == torch.int8
    ops = torch.ops.coreai
    counts = [len(final.graph.find_nodes(op="call_function", target=op)) for op in (ops.quantize, ops.dequantize)]
    assert counts == [3, 3]
    assert final.up.weight.numel() == 0
    assert ready.up.weight is dense
    assert dense.numel() == 96 * 64


def test_graph_finalize_again_and_for_another_backend():
    """Finalizing leaves the prepared graph alone, so it can be finalized as often as one likes."""
    model, x = built(ConvNet)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec(), "graph")
    expected = ready(x)
    for backend in ("coreai", "coreml", "coreai", "_torch"):
        assert sqnr(expected, quantizer.finalize(backend=backend)(x)) > 90
    assert torch.equal(ready(x), expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_mapped_files(mode, name, tmp_path):
    """Weights lie in files, one for each, and are mapped from them; the output does not change."""
    model, x = built(Mlp)
    spec = spec_of("float4_e2m1fn_x2", blocks(32)) if name == "fp4" else spec_of("int4")
    expected = prepared(model, x, spec, mode=mode)[0].finalize(backend="coreai")(x)
    final = prepared(model, x, spec, mode=mode)[0].finalize(backend="coreai", mmap_dir=str(tmp_path / "maps"))
    assert torch.equal(final(x), expected)
    stem = "up.weight" if mode == "eager" else "up_weight"
    files = {path.name for path in (tmp_path / "maps").iterdir()}
    assert files == {f"{stem}.safetensors", f"{stem.replace('up', 'down')}.safetensors"}
    owner = final.up.parametrizations.weight[0] if mode == "eager" else final
    for key, stored in load_file(tmp_path / "maps" / f"{stem}.safetensors").items():
        live = getattr(getattr(owner, key), "elem", getattr(owner, key))
        assert torch.equal(stored.view(torch.uint8), live.view(torch.uint8))
        assert not live.untyped_storage().resizable()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_any_name_of_a_module_names_a_file(mode, tmp_path):
    """Names that are paths, are too long for a file, or are the same on disks that know no small letters."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in ("x/y", "/z", "Q", "q", "n" * 250, "n" * 251):
        model.add_module(name, nn.Linear(32, 32))
    x = torch.randn(2, 32)
    expected = prepared(model.eval(), x, W8, mode=mode)[0].finalize(backend="coreai")(x)
    final = prepared(model, x, W8, mode=mode)[0].finalize(backend="coreai", mmap_dir=str(tmp_path / "deep" / "maps"))
    assert torch.equal(final(x), expected)
    files = [path.name.lower() for path in (tmp_path / "deep" / "maps").iterdir()]
    assert len(set(files)) == 6
    assert [path.name for path in tmp_path.rglob("*") if path.parent.name != "maps"] == ["deep", "maps"]


def test_numbered_names_of_files_are_free(tmp_path):
    """A name that a number makes may be another tensor's own."""
    files = MappedFiles(tmp_path / "maps", nn.Identity())
    stored = [
        files.store_tensors({"t": torch.full((4,), float(i))}, name)["t"] for i, name in enumerate(("a-1", "A", "a"))
    ]
    assert [float(tensor[0]) for tensor in stored] == [0.0, 1.0, 2.0]
    assert len(list((tmp_path / "maps").iterdir())) == 3


def test_mapped_files_are_refused_where_they_cannot_go(tmp_path):
    model, x = built(Mlp)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        prepared(model, x, W8)[0].finalize(backend="coreai", mmap_dir=str(tmp_path / "file"))
    with pytest.raises(FileExistsError):
        prepared(model, x, W8)[0].finalize(backend="coreai", mmap_dir=str(tmp_path))
    with pytest.raises(ValueError, match="mmap_dir is only supported with backend="):
        prepared(model, x, W8)[0].finalize(backend="coreml", mmap_dir=str(tmp_path / "new"))


def test_tied_weights_share_their_module():
    model, x = built(Tied)
    quantizer, ready = prepared(model, x, W8)
    expected = ready(x)
    final = quantizer.finalize(backend="coreai")
    assert final.embed.parametrizations.weight[0] is final.head.parametrizations.weight[0]
    assert torch.equal(final(x), expected)


def test_tied_weights_are_released_under_all_names():
    """The dense form of a tied weight goes, also under the name that the forward never reads."""

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.used = nn.Linear(64, 64), nn.Linear(64, 64)
            self.used.weight = self.spare.weight

        def forward(self, x):
            return self.used(x)

    quantizer, ready = prepared(Spare(), torch.randn(2, 64), W8, mode="graph")
    final = quantizer.finalize(backend="coreai")
    assert final.spare.weight.numel() == final.used.weight.numel() == 0
    assert ready.spare.weight.numel() == 64 * 64


REFUSED = {
    "fp4 in blocks of 16": (spec_of("float4_e2m1fn_x2", blocks(16)), None, "blocks of 32 along the last axis"),
    "fp4 per channel": (spec_of("float4_e2m1fn_x2"), None, "blocks of 32 along the last axis"),
    "fp4 activation": (W8, spec_of("float4_e2m1fn_x2", PerChannelGranularity(axis=-1)), "FP4 activations"),
    "blocked activation": (
        W8,
        QuantizationSpec(granularity=PerBlockGranularity(axis=-1, block_size=32)),
        "does not support PerBlockGranularity",
    ),
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_core_ai_lacks_is_refused_and_nothing_is_touched(name, mode, tmp_path):
    weight, activation, words = REFUSED[name]
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, weight, activation, mode)
    before, y = copy.deepcopy(ready.state_dict()), ready(x)
    with pytest.raises(ValueError, match=words) as raised:
        quantizer.finalize(backend="coreai", mmap_dir=str(tmp_path / "maps"))
    assert mode == "eager" or isinstance(raised.value, RuntimeError)
    after = ready.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(ready(x), y)
    assert not list((tmp_path / "maps").glob("*")) if (tmp_path / "maps").exists() else True


def test_dynamic_activations_are_refused_by_name():
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, W8, QuantizationSpec(qparam_calculator_cls="dynamic"))
    with pytest.raises(NotImplementedError, match=r"up\.linear_quantize_input.*dynamic.*, which \w+ cannot hold"):
        quantizer.finalize(backend="coreai")


@pytest.mark.parametrize("backend", ["coreai", "coreml"])
def test_the_remedy_for_dynamic_activations_fits_the_backend(backend):
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, W8, QuantizationSpec(qparam_calculator_cls="dynamic"))
    with pytest.raises(NotImplementedError, match="Use a static qparam_calculator_cls") as raised:
        quantizer.finalize(backend=backend)
    assert ("activation export handler" in str(raised.value)) == (backend == "coreai")
    assert "_TORCH" not in str(raised.value)


def test_a_registered_handler_takes_over(monkeypatch):
    """A plugin exports what Core AI's own ops cannot hold."""
    handlers = {PerBlockGranularity: lambda simulator: nn.Identity()}
    monkeypatch.setattr(_export_utils, "_EAGER_ACTIVATION_EXPORT_HANDLERS", handlers)
    model, x = built(Mlp)
    spec = QuantizationSpec(granularity=PerBlockGranularity(axis=-1, block_size=32))
    quantizer, _ = prepared(model, x, W8, spec)
    assert isinstance(quantizer.finalize(backend="coreai").up.linear_quantize_input, nn.Identity)


def test_a_graph_without_simulators_is_refused():
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, None, None, "graph")
    with pytest.raises(ValueError, match="no fake quantization nodes"):
        quantizer.finalize(backend="coreai")


def test_uncalibrated_scales_are_refused():
    """A NaN that got into an activation's range is found before anything is written."""
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec())
    ready.up.linear_quantize_input.qparams_calculator.scale.fill_(float("nan"))
    with pytest.raises(ArtifactError, match=r"up\.linear_quantize_input"):
        quantizer.finalize(backend="coreai")


@settings(max_examples=30, deadline=None)
@given(weight_specs((32, 32)), st.sampled_from(["eager", "graph"]))
def test_random_weight_specs_are_exact_or_refused(spec, mode):
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, spec, mode=mode)
    expected = ready(x)
    blocks_of_32 = spec.granularity.get_block_size((96, 64)) == (1, 32)
    if spec.dtype == torch.float4_e2m1fn_x2 and not blocks_of_32:
        with pytest.raises(ValueError, match="FP4"):
            quantizer.finalize(backend="coreai")
        assert torch.equal(ready(x), expected)
    else:
        assert torch.equal(quantizer.finalize(backend="coreai")(x), expected)


class Scaled(nn.Module):
    """A layer whose output is multiplied by a single number that was computed, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.layer(x) * self.scale.exp()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", QUICK_ACTIVATIONS)
def test_single_numbers_in_torch_and_in_the_runtime(name, mode):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    quantizer, ready = prepared(Scaled().eval(), x, W8, ACTIVATIONS[name], mode)
    expected, finalized = ready(x), quantizer.finalize(backend="coreai")
    assert sqnr(expected, finalized(x)) > 100
    program, _ = converted(finalized, (x,))
    (found,), _ = run(program, (x,))
    assert sqnr(expected, found) > 40
