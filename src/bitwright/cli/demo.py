"""``bitwright demo``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import FAILED, Output

if TYPE_CHECKING:
    from bitwright.demo.exports import ExportRow

__all__ = ["demo"]


def demo(
    output: Annotated[Path, typer.Option(help="File for the table as JSON.")] = Path("out/demo.json"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of float training.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of data order and initial weights.")] = 0,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the network for every target into this folder, and run it there."),
    ] = None,
) -> None:
    """Train a small CNN on handwritten digits, quantize it in several ways and compare.

    With --export, write it for every target whose extra is installed instead, and compare what each runtime computes.
    """
    out = Output()
    if export is not None:
        _exports(out, export, epochs, seed)
        return
    from bitwright.demo import run_demo

    with out.progress() as say:
        result = run_demo(epochs=epochs, seed=seed, progress=say)
    columns = ("model", "accuracy", "bits/weight", "bytes", "SQNR of logits, dB", "seconds")
    rows = [
        (
            row.name,
            f"{row.accuracy:.2%}",
            f"{row.bits_per_weight:.2f}",
            f"{row.bytes:,}",
            "equal" if row.equal else "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
            f"{row.seconds:.1f}",
        )
        for row in result.rows
    ]
    _print(out, "Handwritten digits, depthwise-separable CNN, held-out test split", columns, rows)
    result.save(output)
    out.say(f"Saved as {output}")


def _exports(out: Output, folder: Path, epochs: int, seed: int) -> None:
    from bitwright.demo import run_exports

    with out.progress() as say:
        result = run_exports(folder, epochs=epochs, seed=seed, progress=say)
    out.console.print(
        f"Handwritten digits in every target's own runtime; SQNR against the prepared model (float32: "
        f"{result.float_bytes:,} bytes, {result.float_accuracy:.2%})"
    )
    notes: dict[str, int] = {}
    for recipe, rows in itertools.groupby(result.rows, key=lambda row: row.recipe):
        _print_recipe(out, recipe, list(rows), notes)
    for note, number in notes.items():
        out.console.print(f"[{number}] {note}", markup=False)
    result.save(folder / "exports.json")
    out.say(f"Saved as {folder / 'exports.json'}")
    if result.failures:
        raise typer.Exit(FAILED)


def _print_recipe(out: Output, recipe: str, rows: Sequence[ExportRow], notes: dict[str, int]) -> None:
    """Print the rows of a recipe in 80 columns; their notes get numbers, which are printed below all tables."""
    cells = []
    for row in rows:
        note = row.note if row.status != "missing" else f"not installed: {row.note}"
        cells.append(
            (
                row.target,
                "" if row.bytes is None else f"{row.bytes:,}",
                "equal" if row.equal else "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
                "" if row.accuracy is None else f"{row.accuracy:.2%}",
                f"{row.seconds:.1f}" if row.seconds else "",
                str(notes.setdefault(note, len(notes) + 1)) if note else "",
            )
        )
    there = next((row.prepared_accuracy for row in rows if row.prepared_accuracy is not None), None)
    title = recipe if there is None else f"{recipe}: {there:.2%} in PyTorch"
    _print(out, title, ("target", "bytes", "SQNR, dB", "accuracy", "seconds", "note"), cells)


def _print(out: Output, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in columns:
        table.add_column(header, justify="left" if header in ("model", "target") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.console.print(table)
