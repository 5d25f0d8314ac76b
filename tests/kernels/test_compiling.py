"""Where the machine code of compiled functions is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitwright.kernels.cpu import compiling


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """The answer is kept for a process; here every test asks again."""
    compiling._cache_folder.cache_clear()
    yield
    compiling._cache_folder.cache_clear()


def package(folder: Path, source: str) -> Path:
    """A package of one module."""
    folder.mkdir(exist_ok=True)
    (folder / "kernels.py").write_text(source)
    return folder


def test_every_state_of_the_sources_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba would keep code that contains an old version of what a function calls from another file."""
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    first = compiling._cache_folder(package(tmp_path / "sums", "a = 1"))
    compiling._cache_folder.cache_clear()
    assert compiling._cache_folder(tmp_path / "sums") == first
    compiling._cache_folder.cache_clear()
    second = compiling._cache_folder(package(tmp_path / "sums", "a = 2"))
    assert first is not None
    assert second is not None
    assert first != second
    assert [Path(found).name.split("-")[0] for found in (first, second)] == ["sums", "sums"]
    assert Path(first).parent == Path(second).parent == tmp_path / "cache"


def test_without_a_writable_folder_functions_work_and_a_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the package and the variable that helps."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        add = compiling.compiled(_add)
    assert add(1, 2) == 3
    assert "Compiled functions of kernels cannot be kept" in caplog.text
    assert "BITWRIGHT_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_compiled_is_said_once_and_what_is_kept_is_not(
    terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A minute of silence looks like a hang; logs and pipes get no lines that they did not ask for."""
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    said = []
    for functions in ([_add, _subtract], [_add]):  # the second time, from disk
        monkeypatch.setattr(compiling._notice, "given", False)
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            for function in functions:
                assert compiling.entry(compiling.compiled(function), 2)(3, 0) == 3
        said.append((capsys.readouterr().err, caplog.text))
    (printed, logged), later = said
    assert printed.count("compiles its CPU kernels") == terminal
    assert logged.count(f"The code is kept in {tmp_path / 'cache'}.") == 1
    assert later == ("", "")


def _subtract(a: int, b: int) -> int:
    return a - b


def _add(a: int, b: int) -> int:
    return a + b
