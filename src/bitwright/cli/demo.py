"""``bitwright demo``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .output import FAILED, Output

__all__ = ["demo"]


def demo(
    output: Annotated[Path, typer.Option(help="File for the table as JSON.")] = Path("out/demo.json"),
    epochs: Annotated[int, typer.Option(help="Epochs of float training.")] = 10,
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
            "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
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
    columns = ("target", "recipe", "bytes", "SQNR, dB", "accuracy", "in PyTorch", "seconds", "")
    rows = []
    for row in result.rows:
        ratio = "equal" if row.equal else "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        size = "" if row.bytes is None else f"{row.bytes:,}"
        shares = ("" if share is None else f"{share:.2%}" for share in (row.accuracy, row.prepared_accuracy))
        seconds = f"{row.seconds:.1f}" if row.seconds else ""
        note = row.note if row.status != "missing" else f"not installed: {row.note}"
        rows.append((row.target, row.recipe, size, ratio, *shares, seconds, note))
    title = (
        f"Handwritten digits in every target's own runtime; SQNR against the prepared model "
        f"(float32: {result.float_bytes:,} bytes, {result.float_accuracy:.2%})"
    )
    _print(out, title, columns, rows)
    result.save(folder / "exports.json")
    out.say(f"Saved as {folder / 'exports.json'}")
    if result.failures:
        raise typer.Exit(FAILED)


def _print(out: Output, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(title=title)
    for header in columns:
        table.add_column(header, justify="left" if header in ("model", "target", "recipe", "") else "right")
    for row in rows:
        table.add_row(*row)
    out.console.print(table)
