"""Every snippet of the documentation runs, page by page, in a folder of its own."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bitwright.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=_name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks run one after the other; titled blocks become files; commands exit with 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("net", None)
    scope: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for language, title, content in _FENCE.findall(page.read_text()):
            if title:
                Path(title).write_text(content)
            elif language == "python":
                exec(compile(content, _name(page), "exec"), scope)
            elif language == "console":
                for line in content.splitlines():
                    _run_command(line)


def test_no_snippet_is_left_out() -> None:
    """Blocks of code are fenced so that the test above finds them: not indented, and in a known language."""
    for page in PAGES:
        text = page.read_text()
        languages = {language for language, _, _ in _FENCE.findall(text)}
        assert languages <= {"python", "console", "yaml", "text"}, _name(page)
        assert text.count("```") == 2 * len(_FENCE.findall(text)), _name(page)


def _run_command(line: str) -> None:
    assert line.startswith("$ bitwright ")
    result = CliRunner().invoke(app, shlex.split(line)[2:])
    assert result.exit_code == 0, (line, result.output)


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links and pictures exist, or are generated."""
    generated = {"diagnostics.md", "capabilities.md", "performance.md"}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists() or path.name in generated or path.parent.name == "pictures", (_name(page), target)


def test_every_difference_has_its_test() -> None:
    """What the last column of ``docs/differences.md`` names is a test, a class of tests or a file of them."""
    files = list((ROOT / "tests").rglob("*.py"))
    sources, text = {path.name for path in files}, "\n".join(path.read_text() for path in files)
    missing = []
    for row in (ROOT / "docs" / "differences.md").read_text().splitlines():
        if not row.startswith("|") or row.startswith(("|---", "| coreai-opt")):
            continue
        proofs = row.rstrip("| ").rpartition(" | ")[2]
        names = re.findall(r"`([\w.]+)`", proofs)
        found = [name in sources or re.search(rf"\b(?:def|class) {name}\b", text) is not None for name in names]
        missing += [row] if not names and proofs != "the same" else []
        missing += [name for name, known in zip(names, found, strict=True) if not known]
    assert missing == []
