"""The package as a whole: what importing it costs and does."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from bitwright import _plugins, _versions
from bitwright.common import TorchaoTorchIncompatibilityWarning, UntestedTorchVersionWarning


def test_import_is_lazy():
    """Importing loads nothing heavy: no torch for the package, no torchao or Numba for quantization; both cost seconds.

    A sub-package is there when it is asked for.
    """
    code = """
import sys, bitwright
heavy = ("torch", "torchao", "numba", "pandas", "rich", "transformers")
print([name for name in heavy if name in sys.modules])
print(bitwright.quantization.config.__name__)
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "bitwright.quantization.config", "['torch']"]


def test_unknown_attribute_is_an_attribute_error():
    """A typo does not import anything."""
    import bitwright

    with pytest.raises(AttributeError, match="quantisation"):
        _ = bitwright.quantisation


class EntryPoint:
    def __init__(self, name, action):
        self.name, self.value, self.action = name, f"{name}:register", action

    def load(self):
        return self.action


def test_plugins_are_called_and_a_broken_one_is_skipped(monkeypatch):
    """Every entry point of the group is called; one that fails is named in a warning."""
    called, groups = [], []

    def broken():
        raise ImportError("no such thing")

    def entry_points(*, group):
        groups.append(group)
        return [EntryPoint("bad", broken), EntryPoint("good", lambda: called.append("good"))]

    monkeypatch.setattr(_plugins, "entry_points", entry_points)
    with pytest.warns(RuntimeWarning, match=r"'bad'.*no such thing"):
        _plugins.load_plugins()
    assert called == ["good"]
    assert groups == ["bitwright.plugins"]


@pytest.mark.parametrize(
    ("torch", "torchao", "category"),
    [
        ("2.10.0", "0.18.0", TorchaoTorchIncompatibilityWarning),
        ("2.14.0", "0.19.0", UntestedTorchVersionWarning),
        ("2.13.0+cpu", "0.18.0", None),
    ],
)
def test_version_checks(monkeypatch, torch, torchao, category):
    """Warnings depend on the installed versions only."""
    monkeypatch.setattr(_versions, "version", {"torch": torch, "torchao": torchao}.__getitem__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _versions.check_versions()
    assert [w.category for w in caught] == ([] if category is None else [category])
