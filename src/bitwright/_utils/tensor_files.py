"""Writing safetensors files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .files import give_usual_mode

__all__ = ["write_tensors"]

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, which safetensors itself would let nobody else read.

    Raises:
        OSError: it cannot be written; safetensors has an error of its own for that, with the number in its words.
    """
    try:
        save_file(tensors, path, metadata)
        give_usual_mode(path)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
