"""Packed models as exported and compiled programs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from bitwright.artifact import DenseTensor, PackedTensor, compress_tensor, palettized_tensor
from bitwright.artifact.packed import pack_tensor
from bitwright.quantization.spec import PerBlockGranularity, QuantizationSpec

from .strategies import FLOATS, INTEGERS, observed

BLOCKS = PerBlockGranularity(axis=1, block_size=8)


def packed_linear(tensor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(tensor.shape[1], tensor.shape[0]), nn.ReLU())
    pack_tensor(model[0], "weight", tensor)
    return model.eval()


def quantized(dtype, **options):
    torch.manual_seed(1)
    weight = torch.randn(6, 24)
    scale = {"scale_dtype": "float8_e8m0fnu"} if dtype.startswith("float4") else {}
    simulator = observed(QuantizationSpec(dtype=dtype, granularity=BLOCKS, **scale, **options), weight)
    return compress_tensor(weight, [simulator], "w")


def palette(groups=(1, 1), vector_size=1):
    torch.manual_seed(1)
    lut = DenseTensor.from_tensor(torch.randn(*groups, 6, vector_size))
    return palettized_tensor(torch.randint(6, (6, 24)), lut, n_bits=3, channel_scale=torch.rand(6 * vector_size))


TENSORS = {
    **{dtype: lambda dtype=dtype: quantized(dtype) for dtype in INTEGERS + FLOATS},
    "int4 asymmetric": lambda: quantized("int4", qscheme="asymmetric"),
    "uint3 minval": lambda: quantized("uint3", qformulation="minval"),
    "palette": palette,
    "grouped palette": lambda: palette((3, 2)),
    "vector palette": lambda: palette((3, 2), 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_exported_programs_compute_the_same(name, tmp_path):
    """``torch.export``, saved and loaded again: equal, and the weight in it is still packed."""
    tensor = TENSORS[name]()
    model = packed_linear(tensor)
    x = torch.randn(3, tensor.shape[1])
    program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert torch.equal(loaded.module()(x), model(x))
    stored = sum(t.nbytes for t in loaded.state_dict.values()) - model[0].bias.nbytes
    assert stored == tensor.nbytes


def test_exported_programs_need_nothing_of_this_package(tmp_path):
    """Another process that only has torch runs it."""
    model = packed_linear(quantized("int4"))
    x = torch.randn(3, 24)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "data.pt")
    code = (
        "import sys, torch\n"
        f"x, y = torch.load({str(tmp_path / 'data.pt')!r}, weights_only=True)\n"
        f"print(torch.equal(torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(x), y))\n"
        "print([name for name in sys.modules if name.startswith('bitwright')])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert process.stdout.split("\n")[:2] == ["True", "[]"]


def test_sparse_weights_are_exported():
    """Masks need no data-dependent shapes in the exported program."""
    from bitwright.artifact import dense_tensor

    torch.manual_seed(0)
    mask = torch.rand(6, 24) > 0.6
    tensor = dense_tensor(torch.randn(6, 24) * mask, mask)
    assert tensor.is_sparse
    model = packed_linear(tensor)
    x = torch.randn(3, 24)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_one_graph_under_torch_compile():
    """No graph break, and the same numbers from the eager backend."""
    model = packed_linear(quantized("int4"))
    x = torch.randn(3, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["int4", "uint3 minval", "grouped palette"])
def test_aot_inductor_packages(name, tmp_path):
    """Compiled ahead of time, loaded from the package: equal up to the compiler's contraction of products."""
    tensor = TENSORS[name]()
    model = packed_linear(tensor)
    x = torch.randn(3, tensor.shape[1])
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)), package_path=str(tmp_path / "model.pt2")
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x).detach(), rtol=1e-5, atol=1e-6)


def test_parts_are_buffers_with_flat_names():
    module = PackedTensor(palette())
    assert {name for name, _ in module.named_buffers()} == {"indices", "lut_values", "channel_scale"}
    assert torch.equal(module(), palette().decode())
