"""``bitwright demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Output

__all__ = ["demo"]


def demo(
    output: Annotated[Path, typer.Option(help="File for the table as JSON.")] = Path("out/demo.json"),
    epochs: Annotated[int, typer.Option(help="Epochs of float training.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of data order and initial weights.")] = 0,
) -> None:
    """Train a small CNN on handwritten digits, quantize it in several ways and compare."""
    from rich.table import Table

    from bitwright.demo import run_demo

    out = Output()
    with out.progress() as say:
        result = run_demo(epochs=epochs, seed=seed, progress=say)
    table = Table(title="Handwritten digits, depthwise-separable CNN, held-out test split")
    for header in ("model", "accuracy", "bits/weight", "bytes", "SQNR of logits, dB", "seconds"):
        table.add_column(header, justify="left" if header == "model" else "right")
    for row in result.rows:
        sqnr = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        table.add_row(
            row.name,
            f"{row.accuracy:.2%}",
            f"{row.bits_per_weight:.2f}",
            f"{row.bytes:,}",
            sqnr,
            f"{row.seconds:.1f}",
        )
    out.console.print(table)
    result.save(output)
    out.say(f"Saved as {output}")
