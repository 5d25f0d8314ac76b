"""File-backed weights: written to safetensors one by one, and read back mapped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import load_file
from torch import nn

from bitwright._utils.files import make_empty_directory
from bitwright._utils.tensor_files import write_tensors

__all__ = ["MappedFiles"]

_LONGEST_NAME = 200
"""Characters, with room for a number and the ending: file systems take 255 bytes."""


class MappedFiles:
    """A folder of safetensors files that a finalized model's weights are mapped from. The files must outlive the model.

    Args:
        directory: folder that is empty or does not exist.
        model: its tensors must all be on the CPU.

    Raises:
        ValueError: the model has tensors on another device.
        NotADirectoryError: ``directory`` is a file.
        FileExistsError: it is not empty.
    """

    def __init__(self, directory: str | Path, model: nn.Module) -> None:
        devices = {str(t.device) for t in model.state_dict().values() if isinstance(t, torch.Tensor)} - {"cpu"}
        if devices:
            raise ValueError(
                f"mmap_dir needs a model on the CPU, but it has tensors on {', '.join(sorted(devices))}. "
                "Move it with model.cpu() first."
            )
        self._directory = Path(directory)
        self._made = not self._directory.exists()
        make_empty_directory(self._directory)
        self._written: list[Path] = []
        self._taken: set[str] = set()

    def store(self, module: nn.Module, name: str) -> None:
        """Write a module's buffers to a file and replace them by views of it; see :meth:`store_tensors`."""
        tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        mapped = self.store_tensors({key: _plain(value) for key, value in tensors.items()}, name)
        for key, value in tensors.items():
            owner_path, _, attribute = key.rpartition(".")
            owner = module.get_submodule(owner_path)
            owner._buffers[attribute] = _like(value, mapped[key])

    def store_tensors(self, tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """Write tensors to a file and return views of it.

        The file is ``<name>.safetensors``, with what is no letter, digit or ``-._~`` as ``%`` and two digits; long
        names are cut, and a number is added to one that is taken, on disks that know no small letters too.
        """
        path = self._directory / f"{self._file_name(name)}.safetensors"
        self._written.append(path)
        write_tensors({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
        mapped: dict[str, torch.Tensor] = load_file(str(path))
        return mapped

    def _file_name(self, name: str) -> str:
        quoted = quote(name, safe="")[:_LONGEST_NAME]
        numbered = (f"{quoted}-{number}" for number in itertools.count(1))
        free = next(one for one in itertools.chain([quoted], numbered) if one.lower() not in self._taken)
        self._taken.add(free.lower())
        return free

    def discard(self) -> None:
        """Delete what was written, and the folder if it was not there before."""
        for path in self._written:
            path.unlink(missing_ok=True)
        self._written.clear()
        self._taken.clear()
        if self._made:
            self._directory.resolve().rmdir()  # a link stays


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes behind Core AI's tensor subclass for FP4, or the tensor itself."""
    return getattr(tensor, "elem", tensor)


def _like(tensor: Any, mapped: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "elem"):
        return mapped
    wrapped: torch.Tensor = type(tensor)(mapped)
    return wrapped
