"""Files and folders are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright._utils.files import new_directory_atomically, new_file_atomically, write_text_atomically


def test_text_replaces_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails, the old content is there, and nothing else."""
    path = tmp_path / "deep" / "file.txt"
    write_text_atomically(path, "old")
    monkeypatch.setattr("os.fsync", _fail)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Until then there is none; after an error neither."""
    target = tmp_path / "out"
    with new_directory_atomically(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with pytest.raises(FileExistsError, match="exists already"), new_directory_atomically(target):
        pass
    with pytest.raises(KeyboardInterrupt), new_directory_atomically(tmp_path / "other"):
        _fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_there_is_written_to(tmp_path: Path) -> None:
    """It may be a mount, or the current folder: it stays the same one, and after an error it is empty."""
    before = tmp_path.stat().st_ino
    with pytest.raises(KeyboardInterrupt), new_directory_atomically(tmp_path) as folder:
        _fail((folder / "a").write_text("1"))
    assert not list(tmp_path.iterdir())
    with new_directory_atomically(tmp_path) as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert tmp_path.stat().st_ino == before
    with pytest.raises(NotADirectoryError, match="is a file"), new_directory_atomically(tmp_path / "a"):
        pass


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Likewise for a file that a library writes by name."""
    with new_file_atomically(tmp_path / "x.bin") as name:
        assert name.endswith("x.bin")
        Path(name).write_bytes(b"1")
        assert not (tmp_path / "x.bin").exists()
    assert (tmp_path / "x.bin").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def _fail(*_: object) -> None:
    raise KeyboardInterrupt
