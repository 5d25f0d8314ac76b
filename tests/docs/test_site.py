"""What the site generates, and that it builds without network."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.slow
def test_site_builds_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict build, with sockets forbidden; pages refer to no other host for scripts, styles and fonts."""
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def forbidden(*_: object) -> None:
        raise AssertionError("the build opened a socket")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    start = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'<(?:script|img)[^>]+src="https?://', start)
    assert not re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="https?://', start)
    assert "ModelInspector" in (tmp_path / "site" / "api" / "inspection.html").read_text()
