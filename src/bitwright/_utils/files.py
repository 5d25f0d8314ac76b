"""Writing files so that an interruption leaves the old content or the new one, never half."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["make_empty_directory", "new_directory_atomically", "new_file_atomically", "write_text_atomically"]


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write UTF-8 text to a file beside ``path``, then put it in its place; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def new_directory_atomically(path: str | Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``path`` if the block ends well and is removed if it does not.

    A folder that is there already, which may be a mount, stays and takes what was written. A link stays too: the folder
    that it points to is made where there is none.

    Raises:
        NotADirectoryError: ``path`` is a file.
        FileExistsError: it is a folder that is not empty.
    """
    _refuse_full(Path(path))
    target = _followed(Path(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    there = target.exists()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target if there else target.parent) as scratch:
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
    _refuse_full(folder)
    _followed(folder).mkdir(parents=True, exist_ok=True)


def _followed(path: Path) -> Path:
    """Return what a link points to, which need not be there; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _refuse_full(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; give a folder that is empty or does not exist.")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{str(folder)!r} exists already and is not empty; give a folder that is empty or does not exist."
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def new_file_atomically(path: str | Path) -> Iterator[str]:
    """Give the name of a file to write, which becomes ``path`` if the block ends well and is removed if it does not.

    The name ends as ``path`` does.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        part = Path(scratch) / target.name
        yield str(part)
        os.replace(part, target)
