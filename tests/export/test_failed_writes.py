"""A file that cannot be written whole: the old one stays, and the error is the system's."""

from __future__ import annotations

import contextlib
import errno
import importlib

import pytest
import torch
from torch import nn

from bitwright._utils.files import new_file_atomically
from bitwright.artifact import Artifact
from bitwright.export.checkpoints import export_compressed_tensors
from bitwright.export.conversion import ConversionError, converting
from bitwright.export.targets import TARGETS
from bitwright.export.torch_program import has_compiler
from bitwright.palettization.kmeans.sensitivity import load_sensitivities, save_sensitivities

from .models import W8, prepared

resource = pytest.importorskip("resource")

WRITERS = {
    "torch": "torch_program",
    "aot-inductor": "torch_program",
    "onnx": "onnx.exporter",
    "executorch": "executorch.exporter",
    "coreml": "coreml_package",
    "coreai": "coreai",
}
"""Modules that write the files of targets."""


def _model():
    torch.manual_seed(0)
    x = torch.randn(2, 256)
    return *prepared(nn.Sequential(nn.Linear(256, 256)).eval(), x, W8), x


@contextlib.contextmanager
def _short_files():
    """No file grows beyond 20 kB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _new_short_file(path):
    with new_file_atomically(path) as part, _short_files():
        yield part


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "aot-inductor")) for n in WRITERS])
def test_the_old_file_stays(name, tmp_path, monkeypatch):
    """The writer is stopped after 20 kB: nothing is left of what it wrote, and then it writes the file as ever."""
    target = TARGETS[name]
    if target.missing() is not None or (name == "aot-inductor" and not has_compiler()):
        pytest.skip(f"{name} is not installed")
    _, ready, x = _model()
    path = tmp_path / f"m{target.suffix}"
    folder = name in ("coreml", "coreai")
    if not folder:
        path.write_text("old")
    before = list(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        module = importlib.import_module(f"bitwright.export.{WRITERS[name]}")
        patched.setattr(module, "new_file_atomically", _new_short_file)
        with pytest.raises(OSError, match="File too large") as raised:
            target.write(ready, (x,), path, {}, None)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == before
    assert folder or path.read_text() == "old"
    target.write(ready, (x,), path, {}, None)
    assert list(tmp_path.iterdir()) == [path]
    assert folder or path.stat().st_size > 20_000


def test_folders_of_safetensors_files(tmp_path):
    """An error of safetensors is one of the system's, and a folder that was made is gone."""
    _, ready, _ = _model()
    artifact = Artifact.from_model(ready)
    with _short_files():
        for write in (artifact.save, lambda path: export_compressed_tensors(ready, path)):
            with pytest.raises(OSError, match="File too large") as raised:
                write(tmp_path / "out")
            assert raised.value.errno == errno.EFBIG
            assert type(raised.value.__cause__).__name__ == "SafetensorError"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("there", [False, True])
def test_folders_of_mapped_weights(there, mode, tmp_path):
    """A folder that was made is gone, one that was there is empty, and the model can be finalized after all."""
    pytest.importorskip("coreai_torch")
    torch.manual_seed(0)
    x = torch.randn(2, 256)
    quantizer, ready = prepared(nn.Sequential(nn.Linear(256, 256)).eval(), x, W8, mode=mode)
    expected, folder = ready(x), tmp_path / "maps"
    if there:
        folder.mkdir()
    with _short_files(), pytest.raises(OSError, match="File too large"):
        quantizer.finalize(backend="coreai", mmap_dir=folder)
    assert [str(path) for path in tmp_path.rglob("*")] == [str(folder)] * there
    assert torch.allclose(quantizer.finalize(backend="coreai", mmap_dir=folder)(x), expected, atol=1e-5)


def test_errors_of_the_disk_are_not_those_of_the_model():
    """Other errors of files are, such as one that a model reads when it is traced."""
    with pytest.raises(PermissionError), converting("gizmo"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(ConversionError, match="gizmo cannot take this model: FileNotFoundError"), converting("gizmo"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "vocabulary.txt")


@pytest.mark.parametrize("name", ["found.safetensors", "found.pt"])
def test_sensitivities_that_were_there_stay(name, tmp_path):
    path = tmp_path / name
    save_sensitivities({"weight": torch.ones(4)}, path)
    with _short_files(), pytest.raises(OSError, match="File too large"):
        save_sensitivities({"weight": torch.zeros(100_000)}, path)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(load_sensitivities(path)["weight"], torch.ones(4))
