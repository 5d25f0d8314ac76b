"""Optional libraries that are not there."""

from __future__ import annotations

import sys

import pytest

from bitwright.export import MissingExtraError
from bitwright.export.extras import require

from .models import W8, Mlp, built, prepared


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


def test_what_is_there_is_imported():
    assert require("json", "none", "Nothing").dumps([]) == "[]"
