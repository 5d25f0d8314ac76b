"""Optional libraries that are not there."""

from __future__ import annotations

import sys

import pytest

from bitwright.export import MissingExtraError
from bitwright.export.checkpoints import read_compressed_tensors, read_gguf
from bitwright.export.extras import require
from bitwright.export.targets import TARGETS
from bitwright.quantization import QuantizationSpec
from tests.matrix import each_value

from .models import W8, Mlp, blocks, built, prepared


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_finalize_for_core_ai_names_the_extra(mode, monkeypatch):
    """The message is the command that installs what is missing, and the model stays as it was."""
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, W8, mode=mode)
    expected = ready(x)
    for name in [name for name in sys.modules if name.split(".")[0] == "coreai_torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "coreai_torch", None)
    with pytest.raises(MissingExtraError, match=r'pip install "bitwright\[coreai\]"') as raised:
        quantizer.finalize(backend="coreai")
    assert isinstance(raised.value, ImportError)
    assert (ready(x) == expected).all()


def test_export_to_onnx_names_the_extra(monkeypatch, tmp_path):
    from bitwright.export.onnx import export_onnx

    model, x = built(Mlp)
    _, ready = prepared(model, x, W8)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r'pip install "bitwright\[onnx\]"'):
        export_onnx(ready, (x,), tmp_path / "m.onnx")


WITH_EXTRAS = [target for target in TARGETS.values() if target.modules]
NEEDED_TO_WRITE = [target for target in WITH_EXTRAS if target.name != "compressed-tensors"]


def _blocked(monkeypatch, *names):
    """Pretend that packages are not installed, also if they were imported before."""
    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("target", "mode"), each_value({target.name: target for target in NEEDED_TO_WRITE}, ["eager", "graph"])
)
def test_every_writer_names_its_extra(target, mode, monkeypatch, tmp_path):
    """Nothing is written, and the model stays as it was."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, QuantizationSpec(dtype="int8", granularity=blocks(32)), mode=mode)
    expected = ready(x)
    _blocked(monkeypatch, *(name.split(".")[0] for name in target.modules))
    assert target.missing() == f'pip install "bitwright[{target.extra}]"'
    with pytest.raises(MissingExtraError, match=rf'pip install "bitwright\[{target.extra}\]"'):
        target.write(ready, (x,), tmp_path / f"m{target.suffix}", {}, None)
    assert not list(tmp_path.iterdir())
    assert (ready(x) == expected).all()


@pytest.mark.parametrize("target", [target for target in WITH_EXTRAS if target.run], ids=lambda target: target.name)
def test_every_runtime_names_its_extra(target, monkeypatch, tmp_path):
    _blocked(monkeypatch, *(name.split(".")[0] for name in target.modules))
    with pytest.raises(MissingExtraError, match=rf'pip install "bitwright\[{target.extra}\]"'):
        target.run(tmp_path / f"m{target.suffix}", [])


@pytest.mark.parametrize(("read", "name"), [(read_compressed_tensors, "compressed-tensors"), (read_gguf, "gguf")])
def test_readers_of_checkpoints_name_their_extra(read, name, monkeypatch, tmp_path):
    _blocked(monkeypatch, *TARGETS[name].modules)
    with pytest.raises(MissingExtraError, match=rf'pip install "bitwright\[{name}\]"'):
        read(tmp_path / "m")


def test_what_is_there_is_imported():
    assert require("json", "none", "Nothing").dumps([]) == "[]"
