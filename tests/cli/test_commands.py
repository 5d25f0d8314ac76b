"""The command line: results, JSON, exit codes, messages, and files that stay whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bitwright
from bitwright.artifact import Artifact
from bitwright.cli.loading import load_recipe, recipe_schema
from bitwright.inspection import FidelityReport, diagnostics

from .project import make_project, run

NET = """
import time
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 16, generator=generator) for _ in range(2)]

def labelled():
    return [(x, x.sum(1)) for x in batches()]

def one():
    yield batches()[0]
    raise OSError("a second batch was asked for")

def leaves():
    raise SystemExit(0)

empty = []
number = 3
name = "batches"

def needs(width):
    return nn.Linear(width, width)

def broken():
    raise OSError("no such dataset: /data/x.h5")

def other_shape():
    return [torch.zeros(2, 5)]

def mean(output, batch):
    return float(output.mean())

def most(output, batch):
    return float(output.max())

def nan(output, batch):
    return float("nan")

def text(output, batch):
    return "x"

class Slow(list):
    def __deepcopy__(self, memo):
        return self

class SlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()
    def forward(self, x):
        print("RUNNING", flush=True)
        time.sleep(1)
        return self.inner(x)
"""

RECIPE = """\
quantization_config:
  execution_mode: eager
  global_config:
    op_input_spec: null
    op_output_spec: null
    op_state_spec:
      weight: {dtype: int4, granularity: {type: per_channel, axis: 0}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and a recipe, which is the current one."""
    make_project(tmp_path, monkeypatch, "clinet", NET, RECIPE)
    return tmp_path


COMMON = ("clinet:make", "--data", "clinet:batches")


class TestResults:
    def test_inspect_prints_names(self, folder: Path) -> None:
        """Text and JSON list the ops under the names that a recipe matches."""
        text = run("inspect", *COMMON, "--mode", "eager").stdout
        assert "◆ 0.linear [linear]" in text
        document = json.loads(run("inspect", *COMMON, "--mode", "eager", "--compressor", "quantizer", "--json").stdout)
        assert document == {
            "mode": "eager",
            "ops": [
                {"name": "0.linear", "type": "linear", "modules": ["", "0"]},
                {"name": "2.linear", "type": "linear", "modules": ["", "2"]},
            ],
        }

    def test_plan(self, folder: Path) -> None:
        """The golden text of a plan, and the same as JSON."""
        text = run("plan", *COMMON, "--config", "w4.yaml").stdout
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "Plan (eager mode, 2 tensors)" in lines
        assert "weights: 1,280 -> 240 bytes (18.8%)" in lines
        rows = json.loads(run("plan", *COMMON, "--config", "w4.yaml", "--json").stdout)["rows"]
        assert [(row["tensor"], row["compressed_bytes"]) for row in rows] == [("0.weight", 192), ("2.weight", 48)]

    def test_plan_with_a_key_that_matches_nothing(self, folder: Path) -> None:
        """It is printed; with --strict the exit code is 3."""
        (folder / "bad.yaml").write_text(RECIPE + "  module_name_configs:\n    encoder: null\n")
        assert "encoder" in run("plan", *COMMON, "--config", "bad.yaml").stdout
        run("plan", *COMMON, "--config", "bad.yaml", "--strict", code=3)

    @pytest.mark.parametrize("recipe", ["w4.yaml", "preset:w8a8"])
    def test_compress_writes_an_artifact(self, folder: Path, recipe: str) -> None:
        """Eager and graph recipes: the artifact opens, and its size is what the command prints."""
        document = json.loads(run("compress", *COMMON, "--config", recipe, "-o", "out", "--json", "-q").stdout)
        artifact = Artifact.load(folder / "out")
        assert artifact.nbytes == document["bytes_after"] < document["bytes_before"]
        assert document["findings"] == []
        assert document["sqnr_db"] > 15
        assert {"0.weight", "2.weight"} <= set(artifact.compressed)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".out")] == []

    def test_compare_with_recipe_and_with_artifact(self, folder: Path) -> None:
        """Both give the same numbers; JSON is the report's; the page is written."""
        run("compress", *COMMON, "--config", "w4.yaml", "-o", "out", "-q")
        first = run("compare", *COMMON, "--config", "w4.yaml", "--json", "--html", "report.html").stdout
        second = run("compare", *COMMON, "--artifact", "out", "--json", "-q").stdout
        reports = FidelityReport.from_json(first), FidelityReport.from_json(second)
        assert reports[0].end_to_end == reports[1].end_to_end
        assert reports[0].bytes_after == reports[1].bytes_after
        assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
        text = run("compare", *COMMON, "--config", "w4.yaml", "--metric", "clinet:mean", "--limit", "1").stdout
        assert "metric:" in text
        assert "and 1 more layers" in text

    def test_a_bound_sets_the_exit_code(self, folder: Path) -> None:
        """3 where the output is worse than asked for, 0 where it is not."""
        run("compare", *COMMON, "--config", "w4.yaml", "--min-sqnr", "10")
        run("compare", *COMMON, "--config", "w4.yaml", "--min-sqnr", "90", code=3)
        run("compress", *COMMON, "--config", "w4.yaml", "-o", "a", "--min-sqnr", "90", code=3)
        assert (folder / "a" / "manifest.json").exists()
        run("compress", *COMMON, "--config", "w4.yaml", "-o", "b", "--min-sqnr", "90", "--on-damage", "raise", code=1)
        assert not (folder / "b").exists()

    def test_sweep_goes_on(self, folder: Path) -> None:
        """Layers times candidates; the second call reads the file."""
        command = ("sweep", *COMMON, "--config", "w4.yaml", "--config", "preset:w8", "-o", "sweep.jsonl")
        text = run(*command).stdout
        assert "w4" in text
        document = json.loads(run(*command, "--json").stdout)
        assert {entry["candidate"] for entry in document["entries"]} == {"w4", "w8"}

    def test_sweep_puts_candidates_side_by_side(self, folder: Path) -> None:
        """A preset follows an eager recipe or a palette into eager mode; a graph recipe beside them is remarked on."""
        result = run("sweep", *COMMON, "--config", "preset:palette-w2", "--config", "preset:w8", "--config", "w4.yaml")
        rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith(("0 ", "2 "))]
        assert [len(row) for row in rows] == [4, 4]
        assert "-" not in {cell for row in rows for cell in row}
        (folder / "graph.yaml").write_text(RECIPE.replace("execution_mode: eager", "execution_mode: graph"))
        assert "note: graph name" in run("sweep", *COMMON, "--config", "graph.yaml", "--config", "w4.yaml").stderr

    def test_export_saves_a_program_that_computes_the_same(self, folder: Path) -> None:
        """For Core ML and for torch; the program loads without Bitwright's help."""
        run("export", *COMMON, "--config", "w4.yaml", "--backend", "coreml", "-o", "model.pt2", "-q")
        program = torch.export.load("model.pt2").module()
        import clinet  # type: ignore[import-not-found]

        assert program(clinet.batches()[0]).shape == (8, 4)

    def test_exported_programs_are_models_too(self, folder: Path) -> None:
        """A .pt2 file can be planned and compared."""
        import clinet

        program = torch.export.export(clinet.make().eval(), (clinet.batches()[0],))
        torch.export.save(program, "float.pt2")
        rows = json.loads(
            run("plan", "float.pt2", "--data", "clinet:batches", "--config", "preset:w8", "--json").stdout
        )["rows"]
        assert {row["tensor"] for row in rows} >= {"0.weight", "2.weight"}
        document = run(
            "compare", "float.pt2", "--data", "clinet:batches", "--config", "preset:w8", "--json", "-q"
        ).stdout
        assert FidelityReport.from_json(document).end_to_end.error.sqnr_db > 30

    def test_no_batch_more_than_needed_is_asked_for(self, folder: Path) -> None:
        """The next one may be slow, or not there."""
        run("plan", "clinet:make", "--data", "clinet:one", "--config", "w4.yaml")

    def test_labels_are_left_out(self, folder: Path) -> None:
        """Batches of inputs and labels give the report of the inputs alone."""
        rest = ("--config", "w4.yaml", "--json", "-q")
        labelled = run("compare", "clinet:make", "--data", "clinet:labelled", *rest).stdout
        assert FidelityReport.from_json(labelled) == FidelityReport.from_json(run("compare", *COMMON, *rest).stdout)

    def test_explain(self) -> None:
        """One page, or the list."""
        assert run("explain", "bw104").stdout.startswith("# BW104: ")
        for code in diagnostics():
            page = run("explain", code).stdout
            assert code in run("explain").stdout
            assert page.startswith(f"# {code}: ")
            assert json.loads(run("explain", code, "--json").stdout)["page"].strip() == page.strip()
        assert json.loads(run("explain", "--json").stdout)["BW106"] == "Nothing compressed"


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("plan", "clinet", "--data", "clinet:batches", "--config", "w4.yaml"), "module:attribute"),
            (("plan", ".clinet:make", "--data", "clinet:batches", "--config", "w4.yaml"), "for example net:make"),
            (("plan", "clinet:make", "--data", "pkg..a:b", "--config", "w4.yaml"), "for example net:batches"),
            (("plan", "clinet:mak", "--data", "clinet:batches", "--config", "w4.yaml"), "did you mean 'make'?"),
            (("plan", "clinet:qqqq", "--data", "clinet:batches", "--config", "w4.yaml"), "it has"),
            (("plan", "clinet.py", "--data", "clinet:batches", "--config", "w4.yaml"), "clinet:NAME"),
            (("plan", "clinet.py:make", "--data", "clinet:batches", "--config", "w4.yaml"), "clinet:make"),
            (("plan", "weights.pt", "--data", "clinet:batches", "--config", "w4.yaml"), "file of weights"),
            (("plan", "damaged.pt2", "--data", "clinet:batches", "--config", "w4.yaml"), "no program"),
            (("plan", "damaged:make", "--data", "clinet:batches", "--config", "w4.yaml"), "SyntaxError"),
            (("plan", "needy:make", "--data", "clinet:batches", "--config", "w4.yaml"), "named 'nosuchlibrary'"),
            (("plan", "clinet:needs", "--data", "clinet:batches", "--config", "w4.yaml"), "without arguments"),
            (("plan", "clinet:make", "--data", "clinet:broken", "--config", "w4.yaml"), "no such dataset"),
            (("plan", "clinet:make", "--data", "clinet:leaves", "--config", "w4.yaml"), "ends the process"),
            (("plan", "script:make", "--data", "clinet:batches", "--config", "w4.yaml"), "ends the process"),
            (("demo", "--epochs", "0"), "--epochs"),
            (("compare", *COMMON, "--config", "w4.yaml", "--limit", "-1"), "--limit"),
            (("plan", "clinet:make", "--data", "clinet:name", "--config", "w4.yaml"), "iterable of batches"),
            (("plan", "nonet:make", "--data", "clinet:batches", "--config", "w4.yaml"), "no Python module 'nonet'"),
            (("plan", "none.pt2", "--data", "clinet:batches", "--config", "w4.yaml"), "no file 'none.pt2'"),
            (
                ("plan", "needy_net:make", "--data", "clinet:batches", "--config", "w4.yaml"),
                "No module named 'needy_n'",
            ),
            (("plan", *COMMON, "--config", "integer.yaml"), "unknown sections: 1"),
            (("sweep", *COMMON, "--config", "w4.yaml", "--config", "deep/w4.yaml"), "both be called 'w4'"),
            (("plan", "clinet:number", "--data", "clinet:batches", "--config", "w4.yaml"), "torch.nn.Module"),
            (("plan", "clinet:make", "--data", "clinet:empty", "--config", "w4.yaml"), "is empty"),
            (("plan", "clinet:make", "--data", "clinet:number", "--config", "w4.yaml"), "iterable of batches"),
            (("plan", *COMMON, "--config", "none.yaml"), "no recipe 'none.yaml'"),
            (("plan", *COMMON, "--config", "preset:w77"), "there are"),
            (("plan", *COMMON, "--config", "other.yaml"), "needs at least one"),
            (("plan", *COMMON, "--config", "broken.yaml"), "cannot be read"),
            (("plan", *COMMON, "--config", "typo.yaml"), "op_state_spec"),
            (("compare", *COMMON), "--config"),
            (("compare", *COMMON, "--config", "w4.yaml", "--metric", "clinet:number"), "must be a function"),
            (("inspect", *COMMON, "--compressor", "zip"), "no compressor 'zip'"),
            (("export", *COMMON, "--config", "w4.yaml", "--backend", "tpu", "-o", "x.pt2"), "no backend 'tpu'"),
            (("export", *COMMON, "--config", "preset:w8a8", "--backend", "coreml", "-o", "x.pt2"), ".mlpackage"),
            (
                ("export", *COMMON, "--config", "w4.yaml", "--backend", "_torch", "-o", "x.mlpackage"),
                "--backend coreml",
            ),
            (("explain", "BW9"), "no diagnostic 'BW9'"),
            (("plan", *COMMON, "--config", "null.yaml"), "'null.yaml' is not valid: The section 'quantization_config'"),
            (
                ("plan", *COMMON, "--config", "names.yaml"),
                "'names.yaml' is not valid: module_name_configs['enc(']: the key is not a valid regular expression",
            ),
            (
                ("plan", *COMMON, "--config", "ops.yaml"),
                "'ops.yaml' is not valid: module_name_configs['1'].op_name_config['add(']: the key is not a valid",
            ),
            (("plan", *COMMON, "--config", "latin.yaml"), "'latin.yaml' cannot be read"),
            (("plan", *COMMON, "--config", "twice.yaml"), "found the key 'execution_mode' twice"),
            (("plan", *COMMON, "--config", "twice.json"), "the key 'execution_mode' stands there twice"),
            (("inspect", *COMMON, "--mode", "foo"), "--mode must be 'graph' or 'eager', got 'foo'"),
            (("compress", *COMMON, "--config", "w4.yaml", "-o", "x", "--batches", "0"), "--batches"),
            (("compare", *COMMON, "--config", "w4.yaml", "--batches", "-1"), "--batches"),
            (("export", *COMMON, "--config", "w4.yaml", "-o", "x.pt2", "--batches", "0"), "--batches"),
            (
                ("compare", *COMMON, "--config", "w4.yaml", "--metric", "clinet:text"),
                "metric 'clinet:text' returned 'x'; it must return a number",
            ),
            (
                ("sweep", *COMMON, "--config", "w4.yaml", "--metric", "clinet:needs"),
                "metric 'clinet:needs' failed: Type",
            ),
        ],
    )
    def test_usage_errors_say_what_to_write(self, folder: Path, arguments: tuple[str, ...], message: str) -> None:
        """Exit code 2 and one message without a traceback."""
        (folder / "other.yaml").write_text("something: 1\n")
        (folder / "broken.yaml").write_text("a: [1\n")
        (folder / "null.yaml").write_text("quantization_config: null\n")
        (folder / "names.yaml").write_text("quantization_config: {module_name_configs: {'enc(': null}}\n")
        (folder / "ops.yaml").write_text(
            "quantization_config: {module_name_configs: {'0': null, '1': {op_name_config: {'add(': null}}}}\n"
        )
        (folder / "latin.yaml").write_bytes(b"quantization_config: {}  # \xe9\n")
        (folder / "twice.yaml").write_text("quantization_config:\n  execution_mode: eager\n  execution_mode: graph\n")
        (folder / "twice.json").write_text(
            '{"quantization_config": {"execution_mode": "eager", "execution_mode": "graph"}}'
        )
        (folder / "damaged.pt2").write_text("no archive")
        (folder / "damaged.py").write_text("def make(:\n")
        (folder / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--lr', '1'])\n")
        (folder / "needy.py").write_text("import nosuchlibrary\n")
        (folder / "needy_net.py").write_text("import needy_n\n")
        (folder / "integer.yaml").write_text(f"{RECIPE}1: x\n")
        (folder / "deep").mkdir()
        (folder / "deep" / "w4.yaml").write_text(RECIPE)
        (folder / "typo.yaml").write_text("quantization_config:\n  global_config: {op_state_specs: null}\n")
        result = run(*arguments, code=2)
        assert message in result.stderr
        assert "Traceback" not in result.output

    @pytest.mark.parametrize(
        "command",
        [
            ("inspect", "--mode", "eager"),
            ("inspect",),
            ("plan", "--config", "w4.yaml"),
            ("plan", "--config", "preset:w8a8"),
            ("compress", "--config", "w4.yaml", "-o", "out"),
            ("compare", "--config", "preset:w8"),
            ("sweep", "--config", "w4.yaml"),
        ],
        ids=" ".join,
    )
    def test_data_that_does_not_fit_the_model(self, folder: Path, command: tuple[str, ...]) -> None:
        """Exit code 1; one message says what the data is and what the model says to it, and nothing about export."""
        name, *options = command
        result = run(name, "clinet:make", "--data", "clinet:other_shape", *options, code=1)
        assert "mat1 and mat2" in result.stderr
        assert "float32[2, 5] on cpu" in result.stderr or "traced with the example inputs" in result.stderr
        assert "torch.export" not in result.stderr
        assert "Traceback" not in result.output
        assert not (folder / "out").exists()

    def test_metrics_that_return_nan(self, folder: Path) -> None:
        """The metric is named, not the recipe."""
        result = run("compare", *COMMON, "--config", "w4.yaml", "--metric", "clinet:nan", code=1)
        assert "error: The metric returned nan for the float model's output on batch 1" in result.stderr

    def test_a_sweep_leaves_files_of_others_alone(self, folder: Path) -> None:
        """Such as the model's own source, named by mistake."""
        (folder / "clinet.py").write_text(f"{NET}# no newline")
        result = run("sweep", *COMMON, "--config", "w4.yaml", "-o", "clinet.py", code=1)
        assert "'clinet.py' exists and does not hold the results of a sweep" in result.stderr
        assert (folder / "clinet.py").read_text() == f"{NET}# no newline"

    def test_a_sweep_with_another_metric(self, folder: Path) -> None:
        """Its results belong to the metric that they were measured with."""
        command = ("sweep", *COMMON, "--config", "w4.yaml", "-o", "s.jsonl", "--metric")
        run(*command, "clinet:mean", "-q")
        assert "another sweep" in run(*command, "clinet:most", code=1).stderr

    def test_version(self) -> None:
        """What is installed, and nothing else."""
        assert run("--version").stdout == f"bitwright {bitwright.__version__}\n"

    def test_existing_output_is_not_overwritten(self, folder: Path) -> None:
        """The error names the folder; what is in it stays."""
        (folder / "out").mkdir()
        (folder / "out" / "mine").write_text("x")
        result = run("compress", *COMMON, "--config", "w4.yaml", "-o", "out", code=1)
        assert "'out' exists already" in result.stderr
        assert (folder / "out" / "mine").read_text() == "x"


def test_recipe_with_several_sections_applies_all(folder: Path) -> None:
    """Pruning comes before quantization, whatever their order in the file."""
    (folder / "joint.yaml").write_text(RECIPE + "magnitude_pruning_config:\n  global_config: {}\n")
    names = [type(config).__name__ for config in load_recipe("joint.yaml").configs]
    assert names == ["MagnitudePrunerConfig", "QuantizerConfig"]


def test_presets_are_those_of_the_quantizer_unless_palettes_are_asked_for() -> None:
    """``w4`` is quantization, ``palette-w4`` palettization."""
    assert type(load_recipe("preset:w4").configs[0]).__name__ == "QuantizerConfig"
    assert type(load_recipe("preset:palette-w4").configs[0]).__name__ == "KMeansPalettizerConfig"


def test_recipe_schema_is_closed_and_resolves() -> None:
    """Every reference leads to a definition; unknown sections are refused."""
    schema = recipe_schema()
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
    assert references <= set(schema["$defs"])
    assert schema["additionalProperties"] is False
    assert {"quantization_config", "kmeans_palettization_config", "magnitude_pruning_config"} <= set(
        schema["properties"]
    )
    assert json.loads(run("schema").stdout) == schema


# A process started in the background ignores SIGINT; the one under test must not.
_MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from bitwright.cli import main
main()
"""


def test_interruption_leaves_files_whole(folder: Path) -> None:
    """Ctrl-C while the model runs: exit code 130, no output folder, no remains."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "compress", "clinet:SlowNet", "--data",
         "clinet:batches", "--config", "w4.yaml", "-o", "out"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "RUNNING"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert not (folder / "out").exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".out")] == []
