"""Writing files so that an interruption leaves the old content or the new one, never half."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "give_usual_mode", "make_empty_directory", "new_directory_atomically", "new_file_atomically", "refuse_full",
    "write_text_atomically",
]  # fmt: skip


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write UTF-8 text to a file beside ``path``, then put it in its place; folders are made.

    Links, devices and permissions stay, as in :func:`new_file_atomically`.
    """
    with new_file_atomically(path) as name, open(name, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if Path(name).is_file():
            os.fsync(stream.fileno())


@contextlib.contextmanager
def new_directory_atomically(path: str | Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``path`` if the block ends well and is removed if it does not.

    A folder that is there already, which may be a mount, stays and takes what was written. A link stays too: the folder
    that it points to is made where there is none.

    Raises:
        NotADirectoryError: ``path`` is a file.
        FileExistsError: it is a folder that is not empty.
    """
    refuse_full(Path(path))
    target = _followed(Path(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    there = target.exists()
    with tempfile.TemporaryDirectory(prefix=_prefix(target), dir=target if there else target.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        yield folder
        if there:
            for entry in list(folder.iterdir()):
                os.replace(entry, target / entry.name)
        else:
            os.replace(folder, target)


def make_empty_directory(folder: Path) -> None:
    """Create a folder, or accept one that is empty; where the path is a link, that is the folder it points to.

    Raises:
        NotADirectoryError: the path is a file.
        FileExistsError: the folder holds something.
    """
    refuse_full(folder)
    _followed(folder).mkdir(parents=True, exist_ok=True)


def _followed(path: Path) -> Path:
    """Return what a link points to, which need not be there; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def refuse_full(folder: Path) -> None:
    """Refuse a path that a new folder cannot take.

    Raises:
        NotADirectoryError: it is a file.
        FileExistsError: it is a folder that is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; give a folder that is empty or does not exist.")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{str(folder)!r} exists already and is not empty; give a folder that is empty or does not exist."
        )


def _prefix(target: Path) -> str:
    """How names beside a target begin: cut, because file systems take 255 bytes."""
    return f".{target.name[:50]}."


def give_usual_mode(path: str | Path) -> None:
    """Let a file be read and written as new files are, by the process's umask."""
    os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def new_file_atomically(path: str | Path) -> Iterator[str]:
    """Give the name of a file to write, which becomes ``path`` if the block ends well and is removed if it does not.

    The name ends as ``path`` does. What is written beside it, as large ONNX models do, is moved along. It may also be a
    folder, which takes the place of an empty one. A link stays: what it points to is replaced. So do permissions.

    Raises:
        IsADirectoryError: the path is a folder that is not empty.
    """
    target = _followed(Path(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        yield str(path)  # a device or a pipe, which has no content to keep
        return
    if target.is_dir() and any(target.iterdir()):
        raise IsADirectoryError(errno.EISDIR, "This is a folder that is not empty; give the path of a file", str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_prefix(target), dir=target.parent) as scratch:
        part = Path(scratch) / Path(path).name
        yield str(part)
        if target.is_file() and part.is_file():
            shutil.copymode(target, part)
        for beside in Path(scratch).iterdir():
            if beside != part:
                os.replace(beside, target.parent / beside.name)
        os.replace(part, target)
