"""What the site generates, and that it builds without network."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import bitwright
from bitwright.cli.loading import recipe_schema
from bitwright.export.targets import TARGETS
from bitwright.inspection import diagnostics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The hooks of the site."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawings_of_the_numbers(hooks: ModuleType) -> None:
    """Each is well-formed SVG with marks; the pages show all of them and no others."""
    pictures = {name: text for name, text in hooks.pictures().items() if "performance" not in name}
    shown = set(re.findall(r"\((pictures/\w+\.svg)\)", (ROOT / "docs" / "concepts.md").read_text()))
    assert shown == set(pictures)
    for text in pictures.values():
        assert len(list(ET.fromstring(text))) > 3
    staircase = ET.fromstring(pictures["pictures/staircase.svg"])
    points = staircase.findall("{*}polyline")[1].attrib["points"].split()
    assert len({point.split(",")[1] for point in points}) == 7  # of 8 codes, symmetric data leaves one out


def test_diagnostics_page(hooks: ModuleType) -> None:
    """Every diagnostic has its heading."""
    page = hooks.pages()["diagnostics.md"]
    for code in diagnostics():
        assert f"\n## {code}: " in page


def test_capability_table(hooks: ModuleType) -> None:
    """A column for every target, in order, and a row for every sample; what Core ML lacks is said with the reason."""
    page = hooks.pages()["capabilities.md"]
    header = next(line for line in page.splitlines() if line.startswith("| weight |"))
    targets = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert targets == list(TARGETS)
    weights = page.partition("## Activations")[0].splitlines()
    rows = {line.split(" |")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in weights}
    assert rows["int8, per channel"][targets.index("coreml")] == "packed"
    assert rows["int2, per channel"][targets.index("coreml")] == "no"
    assert rows["palette of 4 bits"][targets.index("gguf")] == "no"
    assert "CoreML export does not support int2" in page.partition("## Why not")[2]


def test_performance_page_shows_all_results(hooks: ModuleType) -> None:
    """A section for every file of results, the figures of the files, every chart that it refers to and no other."""
    page = hooks.pages()["performance.md"]
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert results
    for name, document in results.items():
        section = page.split(f"## {name.replace('_', ' ')}\n")[1].split("\n## ")[0]
        figures = {f"{value:.4g}" for value in _floats(document) if 1e-3 < abs(value) < 1e4}
        assert len([figure for figure in figures if figure in section]) >= 0.6 * len(figures), name
    charts = {name for name in hooks.pictures() if "performance" in name}
    assert set(re.findall(r"\((pictures/performance_\w+\.svg)\)", page)) == charts != set()
    for name in charts:
        assert len(ET.fromstring(hooks.pictures()[name]).findall("{*}rect")) > 1


def _floats(document: object) -> Iterator[float]:
    if isinstance(document, float):
        yield document
    elif isinstance(document, (dict, list)):
        timing = isinstance(document, dict) and "median" in document
        for value in document.values() if isinstance(document, dict) else document:
            if not timing:
                yield from _floats(value)


def test_missed_targets_are_said(hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most and at least: the count, the mark in the table, the colour in the chart."""
    rows = [
        {"case": "fine", "over": 1.2, "over_allowed": 1.5, "faster": 9.0, "faster_wanted": 8},
        {"case": "slow", "over": 1.7, "over_allowed": 1.5, "faster": 7.0, "faster_wanted": 8},
    ]
    (tmp_path / "speed.json").write_text(json.dumps({"machine": {"cores": 2}, "results": rows}))
    performance = hooks._load("performance")
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    page = performance.page()
    assert "4 figures have a stated target; 2 reach it, 2 miss it" in page
    assert "| fine | 1.2 (at most 1.5) | 9 (at least 8) |" in page
    assert "| slow | **1.7 (at most 1.5), missed** | **7 (at least 8), missed** |" in page
    bars = ET.fromstring(performance.charts()["performance_speed_0"]).findall("{*}rect")
    assert [bar.attrib["fill"] for bar in bars] == ["#2f6fb7", "#d07a1f"]


def test_tutorial_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells run from top to bottom; it is stored without outputs."""
    pytest.importorskip("sklearn")
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "tutorial.ipynb", "exec"), scope)


def test_site_builds_and_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict build with sockets forbidden: nothing comes from other hosts, every public name has an entry."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def forbidden(*_: object) -> None:
        raise AssertionError("the build opened a socket")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.chdir(ROOT)
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert [name for name, text in pages.items() if _OUTSIDE.search(text)] == []
    assert _names_without_entry("".join(text for name, text in pages.items() if name.startswith("api"))) == []
    published = json.loads((site / "schema" / "recipe.json").read_text())
    assert published["properties"] == recipe_schema()["properties"]
    reference = pages["api/inspection.html"]
    shown = sum(block.count("&gt;&gt;&gt;") for block in re.findall(r"<pre>.*?</pre>", reference, re.DOTALL))
    assert shown == reference.count("&gt;&gt;&gt;") > 5, "examples stand outside code blocks"


_OUTSIDE = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//'
)


def _names_without_entry(reference: str) -> list[str]:
    """Return the classes and functions in the ``__all__`` of public packages that have no entry in the reference."""
    entries = {entry.rpartition(".")[2] for entry in re.findall(r'id="(bitwright[\w.]*)"', reference)}
    missing = []
    for info in pkgutil.walk_packages(bitwright.__path__, "bitwright."):
        if not info.ispkg or any(part.startswith("_") for part in info.name.split(".")) or ".kernels." in info.name:
            continue
        namespace = importlib.import_module(info.name)
        values = {name: getattr(namespace, name) for name in getattr(namespace, "__all__", ())}
        known = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
        missing += [f"{info.name}.{name}" for name, value in known.items() if value.__name__ not in entries]
    return missing
