"""A folder as a user of the command line has it, and the command itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bitwright.cli import app


def make_project(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, recipe: str) -> None:
    """Write a module and the recipe ``w4.yaml`` into a folder, and make that the current one."""
    (folder / f"{module}.py").write_text(source)
    (folder / "w4.yaml").write_text(recipe)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(module, None)


def run(*arguments: str, code: int = 0) -> Any:
    """Run ``bitwright`` and check its exit code."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result
