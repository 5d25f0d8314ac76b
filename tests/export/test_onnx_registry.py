"""torch's translations to ONNX are put together once, and every export gets a copy of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")

from torch.onnx._internal.exporter._registration import ONNXRegistry

from bitwright.export.onnx import export_onnx
from bitwright.export.onnx.torchlib import registry_kept, torchs_registry
from bitwright.quantization import Quantizer, QuantizerConfig


def _prepared():
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    return Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval(), x


def test_torch_is_left_as_it_was(tmp_path):
    before = ONNXRegistry.__dict__["from_torchlib"]
    ready, x = _prepared()
    export_onnx(ready, (x,), tmp_path / "model.onnx")
    assert ONNXRegistry.__dict__["from_torchlib"] is before
    with pytest.raises(RuntimeError, match="stop"), registry_kept():
        raise RuntimeError("stop")
    assert ONNXRegistry.__dict__["from_torchlib"] is before


@pytest.mark.parametrize("opset", [18, 20])
def test_copies_are_what_torch_makes_and_nobody_elses(opset):
    expected = ONNXRegistry.from_torchlib(opset)
    with registry_kept():
        copy, other = ONNXRegistry().from_torchlib(opset_version=opset), ONNXRegistry.from_torchlib(opset)
    assert copy.opset_version == expected.opset_version
    assert list(copy.functions) == list(expected.functions)
    assert all(
        [(one.onnx_function, one.is_complex) for one in copy.functions[name]]
        == [(one.onnx_function, one.is_complex) for one in expected.functions[name]]
        for name in expected.functions
    )
    gelu = torch.ops.aten.gelu.default
    copy.register_op(gelu, lambda x, approximate="none": x)
    for registry in (other, torchs_registry(opset)):
        assert not any(found.is_custom for found in registry.get_decomps(gelu))


def test_the_first_copy_may_be_of_a_version_not_asked_for_before():
    torchs_registry.cache_clear()
    with registry_kept():
        assert ONNXRegistry.from_torchlib(18).functions


def test_files_do_not_depend_on_what_was_written_before(tmp_path):
    ready, x = _prepared()
    files = []
    for clear in (True, False, False):
        if clear:
            torchs_registry.cache_clear()
        path = tmp_path / f"model{len(files)}.onnx"
        export_onnx(ready, (x,), path)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]


def test_operators_that_come_later_are_translated():
    """torch leaves the translation of an operator out that no package has brought yet."""
    with registry_kept():
        before = torchs_registry(18)
    with torch.library._scoped_library("bitwright_test", "DEF") as library:
        library.define("later(Tensor x) -> Tensor")
        with registry_kept():
            assert torchs_registry(18) is not before
            assert torchs_registry(18) is torchs_registry(18)
