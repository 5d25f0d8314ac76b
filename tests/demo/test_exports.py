"""The demo's export: every target has its row, measured in its runtime; what is missing is named."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.demo import EXPORT_RECIPES, run_exports
from bitwright.demo.digits import load_digits
from bitwright.demo.exports import ExportResult, ExportRow, _codes_note, _dense_weights, _measured
from bitwright.demo.run import DemoResult
from bitwright.demo.run import _row as _demo_row
from bitwright.demo.verification import Verified
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig

pytest.importorskip("sklearn")

EVERY_TARGET = {name for _, names in EXPORT_RECIPES for name in names}


def _without(monkeypatch, *kept):
    """Pretend that the extras of all targets but ``kept`` are not installed, so that a run takes a second."""
    for target in TARGETS.values():
        if target.name not in kept:
            for module in target.modules:
                monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("bitwright.export.targets.has_compiler", lambda: "aot-inductor" in kept)


def test_every_target_has_a_recipe():
    assert set(TARGETS) == EVERY_TARGET


def test_rows_of_what_is_installed_and_of_what_is_not(tmp_path, monkeypatch):
    """The files are there with their sizes; a missing extra is a row that says what to install."""
    _without(monkeypatch)
    result = run_exports(tmp_path, epochs=1)
    kinds = ("run", "read", "missing", "computed")
    by_status = {status: [row for row in result.rows if row.status == status] for status in kinds}
    assert len(result.rows) - len(by_status["computed"]) == sum(len(names) for _, names in EXPORT_RECIPES)
    assert {(row.target, row.recipe) for row in by_status["computed"]} == {("PyTorch, float64", "w8a8")}
    assert {row.target for row in by_status["run"]} == {"torch.export"}
    assert {row.target for row in by_status["read"]} == {"packed artifact"}
    assert not result.failures
    for row in by_status["run"] + by_status["read"]:
        assert row.equal
        assert row.accuracy == row.prepared_accuracy
        path = tmp_path / row.file
        files = [path] if path.is_file() else list(path.iterdir())
        assert row.bytes == sum(file.stat().st_size for file in files)
    missing = {row.target: row.note for row in by_status["missing"]}
    assert missing["ONNX"] == 'pip install "bitwright[onnx]"'
    assert "C++ compiler" in missing["AOTInductor"]
    assert missing.keys() == {t.title for t in TARGETS.values()} - {"torch.export", "packed artifact"}


def test_a_target_that_fails_is_a_row_and_an_exit_code(tmp_path, monkeypatch):
    """The others are written all the same, and the table is saved."""
    _without(monkeypatch)

    def broken(*_, **__):
        raise RuntimeError("out of paper")

    monkeypatch.setattr("bitwright.export.torch_program.export_torch", broken)
    result = CliRunner().invoke(app, ["demo", "--export", str(tmp_path), "--epochs", "1"], env={"COLUMNS": "250"})
    assert result.exit_code == 1, result.output
    rows = [ExportRow(**row) for row in json.loads((tmp_path / "exports.json").read_text())["rows"]]
    assert {row.status for row in rows} == {"failed", "missing", "read", "computed"}
    assert {row.note for row in rows if row.status == "failed"} == {"RuntimeError: out of paper"}


def test_differences_of_quantized_outputs_are_counted_in_codes():
    """Two codes that are off, by one step and by two, and nothing to say of outputs that are not quantized."""
    codes = torch.arange(200.0).repeat(5)
    found = codes.clone()
    found[7] += 1
    found[11] -= 2
    assert _codes_note(codes * 0.1, found * 0.1) == "2 of 1,000 output codes differ, by 2 at most"
    assert _codes_note(codes, codes) == ""
    assert _codes_note(torch.randn(1000), torch.randn(1000)) == ""


def test_the_table_fits_80_columns_and_claims_nothing_that_did_not_run(tmp_path, monkeypatch):
    """Notes stand below the tables, the same one once; what was only read back as weights has no accuracy."""
    weights = Verified("read", weights_db=70.5, note="weights compared")
    digits = load_digits()
    expected = torch.nn.functional.one_hot(digits.test_labels, 10).float()
    recipe = EXPORT_RECIPES[0][0]
    row = _measured("Core ML", recipe, None, weights, expected, digits, 1.0)
    assert (row.accuracy, row.prepared_accuracy, row.sqnr_db, row.equal) == (None, 1.0, 70.5, False)
    rows = [row, ExportRow("compressed-tensors", recipe.name, "missing", note="x" * 200), row]
    monkeypatch.setattr("bitwright.demo.run_exports", lambda *_, **__: ExportResult(0.5, 1000, rows))
    result = CliRunner().invoke(app, ["demo", "--export", str(tmp_path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    table, _, notes = result.output.partition("[1] ")
    assert max(map(len, table.splitlines()[1:])) <= 80
    assert "compressed-tensors" in table
    assert f"{recipe.name}: 100.00% in PyTorch" in table
    assert notes.count("weights compared") == 1
    assert "not installed: " + "x" * 200 in notes


def test_weights_that_a_target_stores_dense_are_told():
    """ExecuTorch packs the linear layer's int4 weight, but not the convolution's; the row says so."""
    model = torch.nn.Sequential(torch.nn.Conv2d(32, 8, 1), torch.nn.Flatten(), torch.nn.Linear(32, 8))
    prepared = Quantizer(model, QuantizerConfig.presets.w4(execution_mode="eager")).prepare((torch.zeros(1, 32, 2, 2),))
    told = _dense_weights(TARGETS["executorch"], prepared)
    assert told.startswith("1 of 2 weights dense: it packs symmetric signed integers")
    assert told.endswith("in convolutions int8")
    assert _dense_weights(TARGETS["coreai"], prepared) == ""


@pytest.mark.slow
def test_every_runtime_agrees(tmp_path):
    """All targets that are installed here: the prepared model's answers.

    With quantized activations, a sum in another order moves values over rounding bounds, most where they are pooled, as
    averages of few codes often lie on such a bound. The prepared model in float64 shows how much that is; integer
    kernels round biases besides. What a layer does to equal inputs is in ``tests/export/test_layers.py``.
    """
    torch.manual_seed(0)
    result = run_exports(tmp_path, epochs=2)
    assert not result.failures
    (exact,) = (row for row in result.rows if row.status == "computed")
    for row in result.rows:
        if row.status == "missing":
            continue
        if row.accuracy is not None:
            assert abs(row.accuracy - row.prepared_accuracy) < 0.02
        assert row.equal or row.sqnr_db > (exact.sqnr_db - 6 if row.recipe == "w8a8" else 60), row


def test_logits_that_are_equal_are_valid_json(tmp_path):
    """A ratio that is infinite is no number of JSON."""
    digits = load_digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
    logits = model(digits.test_images).detach()
    rows = [_demo_row("same", model, digits, logits, 0.1), _demo_row("other", model, digits, logits + 1, 0.1)]
    DemoResult([*rows, _demo_row("float32", model, digits, None, 0.1)]).save(tmp_path / "demo.json")
    saved = json.loads((tmp_path / "demo.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["equal"] for row in saved] == [True, False, None]
    assert [row["sqnr_db"] is None for row in saved] == [True, False, True]
