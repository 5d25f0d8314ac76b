"""``bitwright export``: every target is written from the command line, and read back or run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bitwright.artifact import Artifact
from bitwright.cli import app
from bitwright.export.targets import TARGETS

from .project import make_project, run

NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))

def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 64, generator=generator) for _ in range(2)]

class WithKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make()
    def forward(self, x, factor=None):
        y = self.net(x)
        return y if factor is None else y * factor

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make()
    def forward(self, pair):
        return self.net(pair[0] + pair[1])

def pairs():
    return [[[x, x]] for x in batches()]

def keywords():
    return [{"x": batch, "factor": torch.full((8, 32), 2.0)} for batch in batches()]
"""

RECIPE = """\
quantization_config:
  execution_mode: eager
  global_config:
    op_input_spec: null
    op_output_spec: null
    op_state_spec:
      weight: {dtype: int4, granularity: {type: per_block, axis: 1, block_size: 32}}
"""

ENDINGS = {
    "artifact": "folder", "torch": "m.pt2", "aot-inductor": "m.pt2", "onnx": "m.onnx", "onnx-nbits": "m.onnx",
    "coreai": "m.aimodel", "coreml": "m.mlpackage", "executorch": "m.pte", "compressed-tensors": "folder",
    "gguf": "m.gguf",
}  # fmt: skip
SLOW = ("aot-inductor", "executorch")


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the model, in the current folder."""
    make_project(tmp_path, monkeypatch, "exportnet", NET, RECIPE)
    return importlib.import_module("exportnet")


def export(*arguments: str, code: int = 0) -> Any:
    return run("export", *arguments, code=code)


COMMON = ("exportnet:make", "--data", "exportnet:batches", "--config", "w4.yaml")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in TARGETS])
def test_every_target_is_written_and_computes_the_same(name: str, net: Any) -> None:
    """The written file alone, without the model, gives what the artifact's weights give."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing() or "")
    export(*COMMON, "--target", name, "-o", ENDINGS[name], "-q")
    path, x = Path(ENDINGS[name]), net.batches()[0]
    export(*COMMON, "--target", "artifact", "-o", "packed", "-q")
    model = net.make().eval()
    expected = Artifact.load("packed").load_into(model)(x)
    if target.run is not None:
        torch.testing.assert_close(target.run(path, [x])[0], expected, rtol=1e-3, atol=1e-5)
    elif name == "coreml":
        from bitwright.export.coreml_package import compressed_constants

        decoded = [constant.float() for _, constant in compressed_constants(path)]
        for layer in (model[0], model[2]):
            same = [c for c in decoded if c.shape == layer.weight.shape]
            torch.testing.assert_close(same[0], layer.weight.detach(), rtol=2e-3, atol=1e-4)
    elif name != "artifact":
        from bitwright.export.checkpoints import read_compressed_tensors, read_gguf

        state = read_gguf(path) if name == "gguf" else read_compressed_tensors(path)
        torch.testing.assert_close(state["0.weight"], model[0].weight.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("ending", ["m.onnx", "m.aimodel", "m.mlpackage", "m.gguf"])
def test_the_ending_says_what_to_write(ending: str, net: Any) -> None:
    export(*COMMON, "-o", ending, "-q")
    assert Path(ending).exists()
    assert not [path for path in Path().iterdir() if path.name.startswith(f".{ending}")]


def test_a_free_batch_dimension(net: Any) -> None:
    """With --dynamic-batch the file takes batches of other sizes."""
    export(*COMMON, "-o", "m.onnx", "--dynamic-batch", "-q")
    assert TARGETS["onnx"].run is not None
    assert TARGETS["onnx"].run(Path("m.onnx"), [torch.randn(3, 64)])[0].shape == (3, 32)


def test_a_free_batch_dimension_of_a_finalized_program(net: Any) -> None:
    """A .pt2 file without a target takes batches of other sizes, too."""
    export(*COMMON, "--backend", "_torch", "-o", "m.pt2", "--dynamic-batch", "-q")
    assert torch.export.load("m.pt2").module()(torch.randn(3, 64)).shape == (3, 32)


def test_a_free_batch_dimension_of_tensors_in_containers(net: Any) -> None:
    """A list of tensors is an input, too."""
    command = ("exportnet:Pair", "--data", "exportnet:pairs", "--config", "w4.yaml")
    export(*command, "-o", "m.onnx", "--dynamic-batch", "-q")
    assert TARGETS["onnx"].run is not None
    assert TARGETS["onnx"].run(Path("m.onnx"), [torch.randn(3, 64), torch.randn(3, 64)])[0].shape == (3, 32)


def test_a_free_batch_dimension_needs_positional_inputs(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said before anything is calibrated."""
    monkeypatch.setattr("bitwright.inspection.apply_configs", lambda *_, **__: pytest.fail("too late"))
    command = ("exportnet:WithKeyword", "--data", "exportnet:keywords", "--config", "w4.yaml")
    result = export(*command, "-o", "m.onnx", "--dynamic-batch", code=2)
    assert "positional inputs only" in result.stderr


def test_keyword_inputs(net: Any) -> None:
    """They are inputs of the file."""
    command = ("exportnet:WithKeyword", "--data", "exportnet:keywords", "--config", "w4.yaml")
    export(*command, "-o", "m.onnx", "-q")
    export(*command, "-o", "m.mlpackage", "-q")
    export(*command, "-o", "m.pte", "-q")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "tpu", "-o", "x"), "no target 'tpu'"),
        (("-o", "model.bin"), "does not say what to write"),
        (("--target", "onnx", "-o", "model.pt2"), "call the output model.onnx"),
        (("--target", "onnx", "--backend", "coreml", "-o", "m.onnx"), "either --target or --backend"),
        (("--backend", "coreml", "-o", "m.onnx"), "needs no --backend"),
        (("--target", "coreml", "--dynamic-batch", "-o", "m.mlpackage"), "fixes the largest shapes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compressed(
    arguments: tuple[str, ...], message: str, net: Any
) -> None:
    result = export(*COMMON, *arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_extra_is_named(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'pip install "bitwright[gguf]"' in export(*COMMON, "-o", "m.gguf", code=2).stderr


def test_what_a_target_cannot_hold_is_one_message(net: Any) -> None:
    """Nothing is left behind."""
    result = export("exportnet:make", "--data", "exportnet:batches", "--config", "preset:w8a8", "-o", "m.gguf", code=1)
    assert "gguf cannot hold" in result.stderr
    assert "holds weights only" in result.stderr
    assert not Path("m.gguf").exists()


def test_a_folder_that_is_not_empty_stays(net: Any) -> None:
    Path("out").mkdir()
    (Path("out") / "mine").write_text("x")
    assert "exists already" in export(*COMMON, "--target", "artifact", "-o", "out", code=1).stderr
    assert (Path("out") / "mine").read_text() == "x"


def test_plans_for_a_target(net: Any) -> None:
    """``plan --target`` lists what the target lacks and exits with 3; for others the plan is as it was."""
    command = ["plan", "exportnet:make", "--data", "exportnet:batches", "--config", "preset:w8a8"]
    refused = CliRunner().invoke(app, [*command, "--target", "gguf"])
    assert refused.exit_code == 3
    assert "GGUF cannot hold it" in refused.output
    assert CliRunner().invoke(app, [*command, "--target", "onnx"]).exit_code == 0
    assert "no target 'tpu'" in CliRunner().invoke(app, [*command, "--target", "tpu"]).output
