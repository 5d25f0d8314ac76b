"""Writing files so that an interruption leaves the old content or the new one, never half."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["new_directory_atomically", "new_file_atomically", "write_text_atomically"]


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

    Raises:
        FileExistsError: ``path`` exists and is no empty folder.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{str(target)!r} exists already; give a folder that is empty or does not exist.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        yield folder
        if target.exists():
            target.rmdir()
        os.replace(folder, target)


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
