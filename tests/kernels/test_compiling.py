"""Where the machine code of compiled functions is kept."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
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


_SLOW = """
import logging, sys, time
from pathlib import Path
from bitwright.kernels.cpu import compiling

# Compiling ends when the test has written to the pipe; what is compiled and what is waited for is printed.
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
start = compiling._Notice.on_start

def on_start(self, event):
    start(self, event)
    print("compiling", flush=True)
    sys.stdin.readline()

compiling._Notice.on_start = on_start

def add(a, b):
    return a + b

function = compiling.compiled(add)
print("result", compiling.entry(function, 2)(3, 4), *function.stats.cache_hits.values(), flush=True)
"""


def _process(script: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-u", str(script)], stdin=pipe, stdout=pipe, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.skipif(compiling.fcntl is None, reason="files cannot be locked here")
@pytest.mark.parametrize("killed", [False, True])
def test_one_process_compiles_and_another_waits_for_it(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one loads what the first one has compiled; it compiles only if the first one was killed."""
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "slow.py").write_text(_SLOW)
    with _process(tmp_path / "slow.py") as first, _process(tmp_path / "slow.py") as second:
        try:
            lines = {process: [_line(process)] for process in (first, second)}
            (compiling_one,) = (process for process in lines if lines[process][0].startswith("Bitwright compiles"))
            (waiting,) = (process for process in lines if lines[process][0].startswith("Bitwright waits"))
            assert _line(compiling_one) == "compiling\n"
            if killed:
                os.kill(compiling_one.pid, signal.SIGKILL)
                rest, _ = waiting.communicate("\n", timeout=120)
                assert [line.split()[0] for line in rest.splitlines()] == ["Bitwright", "compiling", "result"]
            else:
                assert compiling_one.communicate("\n", timeout=120)[0] == "result 7\n"
                assert waiting.communicate(timeout=120)[0] == "result 7 1\n"
        finally:
            first.kill()
            second.kill()


@pytest.mark.parametrize("trouble", ["no locks", "no answer", "no file"])
def test_where_no_lock_is_to_be_had_functions_are_compiled(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems without locks, a process that never ends and a folder that is gone keep nobody from compiling."""
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "_LONGEST_WAIT", 0.0)
    asked = []

    class Locks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def lockf(file: object, how: int) -> None:
            asked.append(file)
            raise OSError("no locks available") if trouble == "no locks" else BlockingIOError

    monkeypatch.setattr(compiling, "fcntl", Locks)
    add = compiling.compiled(_add)
    if trouble == "no file":
        for folder in (tmp_path / "cache").glob("kernels-*"):
            folder.rename(tmp_path / "elsewhere")
            folder.write_text("")
        monkeypatch.setattr(add, "_cache", type(compiling.numba.njit(_add)._cache)())
    assert compiling.entry(add, 2)(3, 4) == 7
    assert bool(asked) == (trouble != "no file")


@pytest.mark.parametrize("trouble", ["gone", "full", "not found again", "cut off", "index cut off"])
def test_files_of_machine_code_keep_nobody_from_compiling(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is gone or full by then is said, and so is code that numba lost; a cut off file is made anew."""
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    add = compiling.compiled(_add)
    if trouble == "gone":
        for folder in (tmp_path / "cache").iterdir():
            shutil.rmtree(folder)
            folder.write_text("")
    if trouble == "full":
        monkeypatch.setattr(add._cache._cache_file, "_dump", _no_space)
    if trouble == "not found again":
        monkeypatch.setattr(add._cache._impl, "reduce", _no_object)
    with caplog.at_level(logging.WARNING):
        assert add(1, 2) == 3
    assert ("No space left" in caplog.text) == (trouble == "full")
    not_kept = trouble in ("gone", "full", "not found again")
    assert ("Compiled functions of kernels cannot be kept" in caplog.text) == not_kept
    if not_kept:
        return
    (file,) = (tmp_path / "cache").rglob("*.nbi" if trouble == "index cut off" else "*.nbc")
    file.write_bytes(file.read_bytes()[:5])
    assert compiling.compiled(_add)(1, 2) == 3
    kept = compiling.compiled(_add)
    assert kept(1, 2) == 3
    assert sum(kept.stats.cache_hits.values()) == 1


def test_the_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell writes it, which leaves a tilde in quotes alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("BITWRIGHT_CACHE_DIR", "~/cache")
    folder = compiling._cache_folder(package(tmp_path / "sums", "a = 1"))
    assert folder is not None
    assert Path(folder).parent == tmp_path / "cache"


def _no_object(_: object) -> bytes:
    raise RuntimeError("no compiled object yet")


def _no_space(_: object) -> bytes:
    raise OSError(errno.ENOSPC, "No space left on device")


def _subtract(a: int, b: int) -> int:
    return a - b


def _add(a: int, b: int) -> int:
    return a + b
