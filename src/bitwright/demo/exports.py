"""The demo's network written for every target, and run there."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from bitwright.artifact.sites import activation_simulators
from bitwright.export.capabilities import Form, weight_support
from bitwright.export.targets import TARGETS, Target
from bitwright.inspection import artifact_of

from .digits import Digits, load_digits
from .network import DigitsCNN, accuracy, train
from .recipes import EXPORT_RECIPES, Recipe
from .run import sqnr_db
from .verification import Verified, verify

__all__ = ["ExportResult", "ExportRow", "run_exports"]


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One line of the table: one recipe in the format of one target.

    Attributes:
        target: what it was written for.
        recipe: how the network was compressed.
        status: ``"run"`` in the target's runtime, ``"read"`` back by the library that owns the format, ``"missing"``
            where an extra is not installed, or ``"failed"``. ``"computed"`` is the prepared model in float64: what
            exact sums change in it is what no runtime can be blamed for.
        file: what was written, below the folder.
        bytes: its size on disk, None if nothing was written.
        sqnr_db: power of the prepared model's logits (or, where ``note`` says so, weights) over the power of the
            difference, in dB; None where the two are equal bit for bit, or were not compared.
        equal: whether they are equal bit for bit; None if they were not compared.
        accuracy: share of the held-out digits that are recognised there; None if the target does not run here.
        prepared_accuracy: the same in PyTorch.
        seconds: time for writing and running.
        note: what to install, what was compared, or what went wrong.
    """

    target: str
    recipe: str
    status: str
    file: str = ""
    bytes: int | None = None
    sqnr_db: float | None = None
    equal: bool | None = None
    accuracy: float | None = None
    prepared_accuracy: float | None = None
    seconds: float = 0.0
    note: str = ""


@dataclass(slots=True)
class ExportResult:
    """The table, what the float network has, and the versions it was made with."""

    float_accuracy: float
    float_bytes: int
    rows: list[ExportRow] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[ExportRow]:
        """Rows of targets that are installed and did not work."""
        return [row for row in self.rows if row.status == "failed"]

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


def run_exports(
    directory: Path, *, epochs: int = 10, seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> ExportResult:
    """Train the float network, compress it, write it for every target, and run what was written on the test digits.

    Args:
        directory: folder for the files. Files of an earlier run are replaced.
        epochs: epochs of float training.
        seed: seed of data order and initial weights.
        progress: called with what is being done.
    """
    from bitwright import __version__

    torch.manual_seed(seed)
    digits, model = load_digits(), DigitsCNN()
    progress("float32: training")
    train(model.train(), digits, epochs=epochs, learning_rate=5e-3, seed=seed)
    with torch.no_grad():
        logits = model.eval()(digits.test_images)
    result = ExportResult(accuracy(logits, digits.test_labels), sum(p.nbytes for p in model.state_dict().values()))
    result.versions = {"bitwright": __version__, "torch": torch.__version__}
    for recipe, names in EXPORT_RECIPES:
        targets = [TARGETS[name] for name in names]
        ready = [target for target in targets if target.missing() is None]
        prepared: nn.Module | None = None
        if ready:
            progress(recipe.name)
            prepared = recipe.compress(copy.deepcopy(model), digits, seed).eval()
            if activation_simulators(prepared):
                result.rows.append(_row_of_exact_sums(recipe, prepared, digits))
        for target in targets:
            missing = target.missing()
            if missing is not None or prepared is None:
                result.rows.append(ExportRow(target.title, recipe.name, "missing", note=missing or ""))
                continue
            progress(f"{recipe.name}: {target.title}")
            result.rows.append(_row(target, recipe, prepared, model, digits, directory))
    return result


def _row_of_exact_sums(recipe: Recipe, prepared: nn.Module, digits: Digits) -> ExportRow:
    start = time.perf_counter()
    with torch.no_grad():
        expected = prepared(digits.test_images)
        exact = copy.deepcopy(prepared).double()(digits.test_images.double()).float()
    seconds = time.perf_counter() - start
    return _measured("PyTorch, float64", recipe, None, Verified("computed", exact), expected, digits, seconds)


def _row(
    target: Target, recipe: Recipe, prepared: nn.Module, model: nn.Module, digits: Digits, directory: Path
) -> ExportRow:
    path = directory / f"{target.name}-{recipe.name.replace(' ', '-').replace(',', '')}{target.suffix}"
    images, start = digits.test_images, time.perf_counter()
    with torch.no_grad():
        expected = prepared(images)
    try:
        _remove(path)
        with _native_output_dropped():
            target.write(prepared, (images,), path, {}, None)
            checked = verify(target, path, prepared, model, images)
    except Exception as error:  # one target that fails must not take the others with it
        return ExportRow(target.title, recipe.name, "failed", note=f"{type(error).__name__}: {error}")
    row = _measured(target.title, recipe, path, checked, expected, digits, time.perf_counter() - start)
    dense = _dense_weights(target, prepared)
    return replace(row, note="; ".join(filter(None, (row.note, dense))))


def _dense_weights(target: Target, prepared: nn.Module) -> str:
    """How many of the compressed weights a target stores at full size; empty for none."""
    artifact = artifact_of(prepared)
    supports = [weight_support(target.name, artifact[name]) for name in artifact.compressed]
    reasons = {support.reason: None for support in supports if support.form == Form.DENSE}
    count = sum(support.form == Form.DENSE for support in supports)
    return f"{count} of {len(supports)} weights dense: {', '.join(reasons)}" if count else ""


def _measured(
    target: str,
    recipe: Recipe,
    path: Path | None,
    checked: Verified,
    expected: torch.Tensor,
    digits: Digits,
    seconds: float,
) -> ExportRow:
    found = checked.outputs
    noise = checked.weights_db if found is None else sqnr_db(expected, found)
    return ExportRow(
        target=target,
        recipe=recipe.name,
        status=checked.how,
        file="" if path is None else path.name,
        bytes=None if path is None else _size(path),
        sqnr_db=noise if math.isfinite(noise) else None,
        equal=noise == math.inf,
        accuracy=None if found is None else accuracy(found, digits.test_labels),
        prepared_accuracy=accuracy(expected, digits.test_labels),
        seconds=seconds,
        note=checked.note or ("" if found is None else _codes_note(expected, found)),
    )


def _codes_note(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Where the output is quantized: how many codes differ. A sum in another order decides ties the other way."""
    values: torch.Tensor = torch.unique(expected)
    if not 2 <= len(values) <= 256 or torch.equal(expected, found):
        return ""
    steps = ((found - expected) / (values[1:] - values[:-1]).min()).round().abs()
    return f"{int(steps.count_nonzero()):,} of {steps.numel():,} output codes differ, by {int(steps.max())} at most"


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _remove(path: Path) -> None:
    """Delete a file, or a folder of files, of an earlier run."""
    if path.is_dir():
        for entry in path.iterdir():
            _remove(entry)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _native_output_dropped() -> Iterator[None]:
    """Drop what the runtimes' native code writes to stdout and stderr, which Python cannot redirect."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with open(os.devnull, "wb") as nowhere:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
            yield
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)
