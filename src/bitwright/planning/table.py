"""The plan as a table for people."""

from __future__ import annotations

import io
from typing import Any

from .plan import Plan, PlanRow

__all__ = ["describe_spec", "format_plan"]


def format_plan(plan: Plan, width: int = 160) -> str:
    """Return the plan as a text table, its totals, and its problems."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, title=f"Plan ({plan.mode} mode, {len(plan.rows)} tensors)", title_justify="left")
    for header in ("tensor", "kind", "shape", "as", "bytes", "group", "rule", "note"):
        table.add_column(header, overflow="fold", justify="right" if header in ("bytes", "group") else "left")
    for row in plan.rows:
        table.add_row(*map(Text, _cells(row)))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    lines = [console.export_text().rstrip()]
    if plan.dense_bytes:
        share = plan.compressed_bytes / plan.dense_bytes
        lines.append(f"weights: {plan.dense_bytes:,} -> {plan.compressed_bytes:,} bytes ({share:.1%})")
    lines += [f"{problem.severity}: {problem}" for problem in plan.problems]
    return "\n".join(lines)


def describe_spec(spec: Any) -> str:
    """Return a spec in a few words (``"int4 symmetric per_block(1, 32)"``)."""
    if spec is None:
        return "-"
    describe = getattr(spec, "describe", None)
    if callable(describe):
        return str(describe())
    granularity = spec.granularity
    extent = [str(granularity.axis)] if granularity.axis is not None else []
    if getattr(granularity, "block_size", None) is not None:
        extent.append(str(granularity.block_size))
    where = f"{granularity.registry_key()}({', '.join(extent)})" if extent else granularity.registry_key()
    return f"{str(spec.dtype).removeprefix('torch.')} {spec.qscheme.value} {where}"


def _cells(row: PlanRow) -> list[str]:
    size = f"{row.dense_bytes:,} -> {row.compressed_bytes:,}" if row.dense_bytes else ""
    group = str(row.group) if row.group >= 0 else ""
    return [
        row.tensor,
        row.kind,
        "x".join(map(str, row.shape)),
        describe_spec(row.spec),
        size,
        group,
        row.rule,
        row.note,
    ]
