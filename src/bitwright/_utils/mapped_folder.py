"""The folder for weights that stay in files, which one backend alone has a use for."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from bitwright.common import ExportBackend

__all__ = ["mapped_folder"]


def mapped_folder(mmap_dir: str | PathLike[str] | None, backend: ExportBackend) -> str | None:
    """Return ``mmap_dir`` as text.

    Raises:
        ValueError: the backend is not Core AI.
    """
    if mmap_dir is not None and backend != ExportBackend.CoreAI:
        raise ValueError(f"mmap_dir is only supported with backend=ExportBackend.CoreAI, got {backend!r}.")
    return None if mmap_dir is None else str(Path(mmap_dir))
