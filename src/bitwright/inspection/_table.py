"""The fidelity report as text."""

from __future__ import annotations

import io

from .metrics import SQNR_LIMIT_DB, ErrorMetrics
from .report import FidelityReport, LayerFidelity

__all__ = ["fidelity_table", "format_decibels"]

_WIDTH = 150
_HEADERS = (
    "layer", "kind", "weight dB", "channels dB", "isolated dB", "output dB", "accum. dB", "cosine", "clipped", "bytes",
)  # fmt: skip


def fidelity_table(report: FidelityReport, limit: int | None = None) -> str:
    """Return ranking, totals and notes as text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"Fidelity ({report.mode} mode, {len(report.layers)} layers, {report.batches} batches), worst layer first"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for header in _HEADERS:
        table.add_column(header, justify="left" if header in ("layer", "kind") else "right", overflow="fold")
    ranked = list(report.ranking)
    ranked += [layer for layer in report.layers if layer.damage is None]
    for layer in ranked[:limit]:
        table.add_row(*map(Text, _cells(layer, report.mode)))
    console = Console(width=_WIDTH, record=True, file=io.StringIO())
    console.print(table)
    lines = [console.export_text().rstrip()]
    if limit is not None and len(ranked) > limit:
        lines.append(f"... and {len(ranked) - limit} more layers")
    lines += ["", *_totals(report)]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def format_decibels(metrics: ErrorMetrics | None) -> str:
    """Return an SQNR as text: ``exact`` for equal tensors, ``-`` where it was not measured."""
    return "-" if metrics is None else _decibels(metrics.sqnr_db)


def _decibels(value: float) -> str:
    return "exact" if value >= SQNR_LIMIT_DB else f"{value:.1f}"


def _cells(layer: LayerFidelity, report_mode: str) -> tuple[str, ...]:
    errors = [weight.error for weight in layer.weights if weight.error is not None]
    worst = min(errors, key=lambda error: error.sqnr_db, default=None)
    shares = [weight.clipped for weight in layer.weights] + [values.clipped for values in layer.activations]
    rates = [share for share in shares if share is not None]
    size = f"{layer.bytes_before:,} -> {layer.bytes_after:,}" if layer.bytes_before else ""
    return (
        _label(report_mode, layer),
        layer.kind,
        format_decibels(worst),
        _decibels(min(error.channel_sqnr_db for error in errors)) if errors else "-",
        format_decibels(layer.isolated),
        format_decibels(layer.output),
        format_decibels(layer.accumulated),
        "-" if layer.accumulated is None else f"{layer.accumulated.cosine:.5f}",
        f"{max(rates):.2%}" if rates else "-",
        size,
    )


def _label(mode: str, layer: LayerFidelity) -> str:
    return f"{layer.name} ({layer.module})" if mode == "graph" and layer.module else layer.name or "<root>"


def _totals(report: FidelityReport) -> list[str]:
    end = report.end_to_end
    parts = [f"SQNR {format_decibels(end.error)} dB"]
    if end.error is not None:
        parts.append(f"cosine {end.error.cosine:.6f}")
        parts.append(f"largest error {end.error.max_error:.4g}")
    if end.kl_divergence is not None:
        parts.append(f"KL {end.kl_divergence:.3g} nats")
    if end.top1_agreement is not None:
        parts.append(f"same top entry {end.top1_agreement:.2%}")
    lines = ["output: " + ", ".join(parts)]
    if end.metric_float is not None and end.metric_compressed is not None:
        lines.append(f"metric: {end.metric_float:.6g} -> {end.metric_compressed:.6g}")
    share = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    lines.append(f"bytes:  {report.bytes_before:,} -> {report.bytes_after:,} packed ({share:.1%})")
    broken = [layer for layer in report.ranking if layer.broken]
    if broken:
        lines.append("broken, whatever its effect on the output; look at these first:")
        lines += [f"  {_label(report.mode, layer)}: {problem}" for layer in broken for problem in layer.broken]
    worst = [layer.name or "<root>" for layer in report.ranking[:3]]
    if worst:
        lines.append(f"keep these in higher precision first: {', '.join(worst)}")
    return lines
