"""The performance page and its charts, made of the JSON files under ``benchmarks/results``.

``python docs/site_hooks/performance.py`` prints the page. The site makes it anew at every build, so that it cannot
differ from the results. A benchmark states a target for a figure ``x`` as ``x_wanted`` (at least) or ``x_allowed`` (at
most) beside it, or for ``cpu_ratio`` as ``aim``; figures that miss theirs are marked, here and in the chart.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Table", "charts", "page", "tables_of"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

_TIMING = {"minimum", "median", "maximum"}
_TARGETS = (("_wanted", "at least"), ("_allowed", "at most"))
_AIM, _AIMED = "aim", "cpu_ratio"
_CHARTED = ("accuracy", "top1", "ratio", "faster", "over", "speedup", "gap", "perplexity", "loss")
_BLUE, _ORANGE, _GREY = "#2f6fb7", "#d07a1f", "#8a94a0"


@dataclass(frozen=True)
class Table:
    """Rows of one benchmark.

    Attributes:
        title: keys that lead to the rows, joined.
        rows: cells by column.
    """

    title: str
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        """All columns but those that hold targets."""
        names = dict.fromkeys(name for row in self.rows for name in row if name != _AIM)
        return [name for name in names if not any(name.endswith(suffix) for suffix, _ in _TARGETS)]

    @property
    def charted(self) -> str | None:
        """The column for the chart: one with a target, else one whose name says that it can be compared."""
        numeric = [name for name in self.columns if any(_is_number(row.get(name)) for row in self.rows)]
        with_target = [name for name in numeric if any(_target(row, name) is not None for row in self.rows)]
        named = [name for key in _CHARTED for name in numeric if key in name.lower()]
        return next(iter((*with_target, *named)), None)

    def missed(self) -> int:
        """Return how many figures miss their target."""
        return sum(_misses(row, name) for row in self.rows for name in self.columns)

    def stated(self) -> int:
        """Return how many figures have a target."""
        return sum(_target(row, name) is not None for row in self.rows for name in self.columns)


def tables_of(document: Any, title: str = "") -> Iterator[Table]:
    """Yield the tables in the results of a benchmark, whatever they are nested in."""
    if isinstance(document, Sequence) and not isinstance(document, str):
        rows = [_flat(row) for row in document if isinstance(row, Mapping)]
        if rows:
            yield Table(title, rows)
        return
    if not isinstance(document, Mapping):
        return
    if len(document) > 1 and all(_is_row(value) for value in document.values()):
        yield Table(title, [{"": name, **_flat(row)} for name, row in document.items()])
        return
    single = {name: value for name, value in document.items() if not isinstance(value, (Mapping, list)) and value != ""}
    if single:
        yield Table(title, [single])
    for name, value in document.items():
        yield from tables_of(value, f"{title}, {name}" if title else str(name))


def page() -> str:
    """Return the page as Markdown."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    lines = [
        "# Performance",
        "",
        "Made from the results of `make bench` in the tree. Times are medians within one run, the sides taking turns;",
        "ratios carry over to other machines, times do not.",
        "",
    ]
    if not found:
        lines.append("There are no results in this tree. Run `make bench`, then build the site again.")
    tables = {name: _tables(document) for name, document in found.items()}
    stated = sum(table.stated() for group in tables.values() for table in group)
    if stated:
        missed = sum(table.missed() for group in tables.values() for table in group)
        lines += [
            f"{stated} figures have a stated target; {stated - missed} reach it, {missed} miss it (**bold**).",
            "",
        ]
    for name, document in found.items():
        lines += [f"## {name.replace('_', ' ')}", "", _machine(document.get("machine")), ""]
        for number, table in enumerate(tables[name]):
            lines += [f"### {table.title}", ""] if table.title else []
            if _chart(table) is not None:
                lines += [f"![{table.charted} of {name}](pictures/{_picture(name, number)}.svg)", ""]
            lines += [*_markdown(table), ""]
    return "\n".join(lines) + "\n"


def charts() -> dict[str, str]:
    """Return the charts of the page as SVG, by name without extension."""
    made = {}
    for path in sorted(RESULTS.glob("*.json")):
        for number, table in enumerate(_tables(json.loads(path.read_text()))):
            chart = _chart(table)
            if chart is not None:
                made[_picture(path.stem, number)] = chart
    return made


def _tables(document: Mapping[str, Any]) -> list[Table]:
    content = document.get("results", {name: value for name, value in document.items() if name != "machine"})
    return list(tables_of(content))


def _picture(name: str, number: int) -> str:
    return f"performance_{name}_{number}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_row(value: Any, most: int = 20) -> bool:
    """Whether a mapping, with what is nested in it, fits into one row."""
    if not isinstance(value, Mapping):
        return False
    lists = [entry for entry in _entries(value) if isinstance(entry, list)]
    flat = not any(isinstance(cell, (Mapping, list)) for entry in lists for cell in entry)
    return flat and len(_flat(value)) <= most


def _entries(value: Mapping[str, Any]) -> Iterator[Any]:
    for entry in value.values():
        if isinstance(entry, Mapping):
            yield from _entries(entry)
        else:
            yield entry


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Bring nested mappings into one row; a timing counts as one cell."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and not set(value) >= _TIMING:
            cells |= _flat(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            cells[f"{prefix}{name}"] = value
        elif len(value) <= 8 and not any(isinstance(entry, (Mapping, list)) for entry in value):
            cells[f"{prefix}{name}"] = ", ".join(map(_text, value))
    return cells


def _target(row: Mapping[str, Any], name: str) -> tuple[str, float] | None:
    for suffix, word in _TARGETS:
        value = row.get(f"{name}{suffix}")
        if _is_number(value) and _is_number(row.get(name)):
            return word, float(value)  # type: ignore[arg-type]
    if name == _AIMED and _is_number(row.get(_AIM)) and _is_number(row.get(name)):
        return "at least", float(row[_AIM])
    return None


def _misses(row: Mapping[str, Any], name: str) -> bool:
    target = _target(row, name)
    if target is None:
        return False
    return bool(row[name] < target[1] if target[0] == "at least" else row[name] > target[1])


def _markdown(table: Table) -> list[str]:
    columns = table.columns
    lines = ["| " + " | ".join(name or " " for name in columns) + " |", "|" + "---|" * len(columns)]
    for row in table.rows:
        lines.append("| " + " | ".join(_cell(row, name) for name in columns) + " |")
    return lines


def _cell(row: Mapping[str, Any], name: str) -> str:
    target, text = _target(row, name), _text(row.get(name))
    if target is not None:
        text += f" ({target[0]} {_text(target[1])})"
    return f"**{text}, missed**" if _misses(row, name) else text


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if "repeats" not in value:  # not seconds
            return f"{_text(value['median'])} ({_text(value['minimum'])} to {_text(value['maximum'])})"
        unit, factor = ("µs", 1e6) if value["median"] < 1e-3 else ("ms", 1e3)
        return f"{_text(factor * value['median'])} {unit}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _machine(machine: Any) -> str:
    if not isinstance(machine, Mapping):
        return ""
    return "Measured on: " + ", ".join(f"{name} {_text(value)}" for name, value in machine.items()) + "."


def _label(row: Mapping[str, Any]) -> str:
    if "" in row:
        return str(row[""])
    texts = [str(value) for value in row.values() if isinstance(value, str)]
    return ", ".join(texts + [f"{name} {row[name]}" for name in ("threads", "bits", "seed") if name in row])


def _chart(table: Table, most: int = 48) -> str | None:
    """Draw a bar for each row; a stroke stands at its target, and a bar that misses it is orange."""
    name = table.charted
    rows = [row for row in table.rows if name is not None and _is_number(row.get(name))][:most]
    if name is None or len(rows) < 2 or not all(row[name] >= 0 for row in rows):
        return None
    reach = [max(row[name], (_target(row, name) or ("", 0.0))[1]) for row in rows]
    largest = max(reach) or 1.0
    height = 34 + 18 * len(rows)
    parts = [f'<text x="300" y="16">{html.escape(name)}</text>']
    for number, row in enumerate(rows):
        y, width = 26 + 18 * number, 260 * row[name] / largest
        target, color = _target(row, name), _ORANGE if _misses(row, name) else _BLUE
        parts.append(f'<text x="292" y="{y + 11}" text-anchor="end">{html.escape(_label(row)[:46])}</text>')
        parts.append(f'<rect x="300" y="{y}" width="{width:.1f}" height="13" fill="{color}"/>')
        if target is not None:
            x = 300 + 260 * target[1] / largest
            parts.append(f'<path d="M{x:.1f} {y - 2}v17" stroke="{_GREY}" stroke-width="2"/>')
        parts.append(f'<text x="{306 + 260 * reach[number] / largest:.1f}" y="{y + 11}">{_text(row[name])}</text>')
    style = "<style>text { font: 11px system-ui, sans-serif; fill: #8a94a0 }</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img">{style}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    print(page(), end="")
