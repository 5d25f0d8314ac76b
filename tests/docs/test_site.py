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
from pathlib import Path
from types import ModuleType

import pytest

import bitwright
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
    pictures = hooks.pictures()
    shown = set(re.findall(r"\((pictures/\w+\.svg)\)", (ROOT / "docs" / "concepts.md").read_text()))
    assert shown == set(pictures)
    for text in pictures.values():
        assert len(list(ET.fromstring(text))) > 3
    staircase = ET.fromstring(pictures["pictures/staircase.svg"])
    points = staircase.findall("{*}polyline")[1].attrib["points"].split()
    assert len({point.split(",")[1] for point in points}) == 7  # of 8 codes, symmetric data leaves one out


def test_generated_pages(hooks: ModuleType) -> None:
    """Every diagnostic has its heading; the capability table says what Core ML lacks."""
    pages = hooks.pages()
    for code in diagnostics():
        assert f"\n## {code}: " in pages["diagnostics.md"]
    rows = {
        row.split(" |")[0].strip("| "): row for row in pages["capabilities.md"].splitlines() if row.startswith("| ")
    }
    assert rows["int8, per channel"].endswith("| yes | yes |")
    assert rows["int2, per channel"].endswith("| no |")
    assert "no: " not in rows["float4_e2m1fn, blocks of 32, power-of-two scales"]


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
