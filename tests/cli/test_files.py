"""Files and folders are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from bitwright._utils.files import (
    make_empty_directory,
    new_directory_atomically,
    new_file_atomically,
    write_text_atomically,
)
from bitwright._utils.tensor_files import write_tensors


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


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it points to becomes the folder, whether it was there or not, and the link stays."""
    link = tmp_path / "link"
    link.symlink_to(Path("deep") / "real")
    for write in (_write_atomically, _make_and_write):
        write(link)
        assert link.is_symlink()
        assert (tmp_path / "deep" / "real" / "a").read_text() == "1"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "link"]
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["real"]
        with pytest.raises(FileExistsError, match="link' exists already"):
            write(link)
        shutil.rmtree(tmp_path / "deep")


def _write_atomically(path: Path) -> None:
    with new_directory_atomically(path) as folder:
        (folder / "a").write_text("1")


def _make_and_write(path: Path) -> None:
    make_empty_directory(path)
    (path / "a").write_text("1")


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Likewise for a file that a library writes by name."""
    with new_file_atomically(tmp_path / "x.bin") as name:
        assert name.endswith("x.bin")
        Path(name).write_bytes(b"1")
        assert not (tmp_path / "x.bin").exists()
    assert (tmp_path / "x.bin").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_what_is_written_beside_a_file_is_moved_along(tmp_path: Path) -> None:
    """A second file, and folders in the place of empty ones; after an error neither is there."""
    with pytest.raises(KeyboardInterrupt), new_file_atomically(tmp_path / "x") as name:
        _fail(Path(name).write_text("1"), Path(f"{name}.data").write_text("2"))
    assert not list(tmp_path.iterdir())
    with new_file_atomically(tmp_path / "x") as name:
        Path(name).write_text("1")
        Path(f"{name}.data").write_text("2")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x": "1", "x.data": "2"}
    (tmp_path / "folder").mkdir()
    with new_file_atomically(tmp_path / "folder") as name:
        Path(name).mkdir()
        (Path(name) / "a").write_text("3")
    assert (tmp_path / "folder" / "a").read_text() == "3"


def test_links_and_pipes_stay(tmp_path: Path) -> None:
    """A link is written through, with the ending that it has; names as long as the disk takes are taken."""
    real, link, pipe = tmp_path / ("r" * 255), tmp_path / "link.bin", tmp_path / "pipe"
    link.symlink_to(real.name)
    for text in ("1", "2"):
        with new_file_atomically(link) as name:
            assert name.endswith("link.bin")
            Path(name).write_text(text)
        assert link.is_symlink()
        assert real.read_text() == text
    os.mkfifo(pipe)
    with new_file_atomically(pipe) as name:
        assert Path(name) == pipe
    assert pipe.is_fifo()


def test_text_is_written_through_links_and_devices(tmp_path: Path) -> None:
    """What a link points to is replaced and keeps its permissions; a device or a pipe is written to."""
    real, link, device = tmp_path / "real", tmp_path / "link", tmp_path / "device"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real.name)
    write_text_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640
    device.symlink_to(os.devnull)
    write_text_atomically(device, "gone")
    assert device.is_symlink()
    assert Path(os.devnull).is_char_device()


def _fail(*_: object) -> None:
    raise KeyboardInterrupt


def test_permissions_are_those_of_the_old_file_or_of_new_files(tmp_path: Path) -> None:
    """Whoever may read the folder of an artifact may read its tensors; a file that was private stays so."""
    old, new, tensors = tmp_path / "old", tmp_path / "new", tmp_path / "new.safetensors"
    old.write_text("old")
    old.chmod(0o600)
    for path in (old, new):
        with new_file_atomically(path) as part:
            Path(part).write_text("content")
    write_tensors({"weight": torch.ones(2)}, tensors)
    plain = tmp_path / "plain"
    plain.touch()
    assert old.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode == tensors.stat().st_mode == plain.stat().st_mode


def test_a_folder_with_files_is_no_place_for_a_file(tmp_path: Path) -> None:
    """It is said before anything is written, and the folder stays."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    with (
        pytest.raises(IsADirectoryError, match=r"folder that is not empty.*folder'"),
        new_file_atomically(tmp_path / "folder"),
    ):
        raise AssertionError("nothing is to be written")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "file"]
