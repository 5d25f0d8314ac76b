"""Artifacts on disk: safetensors files, written and read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bitwright._utils.tensor_files import write_tensors

from .activations import QuantizedActivation
from .errors import ArtifactError
from .layouts import ActivationLayout, TensorLayout
from .manifest import FileEntry, Manifest, StoredActivation, StoredTensor
from .tensors import CompressedTensor, build_tensor

__all__ = [
    "DEFAULT_SHARD_BYTES", "StoredFiles", "StoredTensors", "TensorWriter", "file_sizes", "read_activations",
]  # fmt: skip

_logger = logging.getLogger(__name__)

DEFAULT_SHARD_BYTES = 1 << 28

_OPEN_FILES = 4
"""Files that stay open. In the order of a model's modules, compressed tensors and others are read from one file each;
a file that is open counts as memory of the process, so not all may be."""

_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names of dtypes in safetensors, in the order in which it ranks them; files begin with the last."""


def file_sizes(
    layouts: Iterable[tuple[str, TensorLayout | ActivationLayout]], shard_bytes: int = DEFAULT_SHARD_BYTES
) -> list[int]:
    """Return the bytes of each file that :class:`TensorWriter` writes for tensors of these names, headers included."""
    files: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
    room = 0
    for name, layout in layouts:
        parts = {f"{name}/{part}": shape for part, shape in layout.parts().items()}
        if parts and room <= 0:
            files.append({})
            room = shard_bytes
        if parts:
            files[-1] |= parts
            room -= sum(map(_part_bytes, parts.values()))
    return [_header_bytes(parts) + sum(map(_part_bytes, parts.values())) for parts in files]


def _part_bytes(part: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize


def _header_bytes(parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Return the length of a safetensors header: eight bytes, and JSON padded to a multiple of eight."""
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype) in sorted(parts.items(), key=lambda item: (-ranks[item[1][1]], item[0])):
        start, end = end, end + _part_bytes((shape, dtype))
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8


class TensorWriter:
    """Writes tensors to numbered safetensors files; holds no more than one file's worth of them.

    Args:
        directory: folder to write to.
        shard_bytes: a file is closed as soon as it holds that much.
    """

    def __init__(self, directory: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self.files: list[FileEntry] = []
        self._directory = directory
        self._limit = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add(self, name: str, parts: Mapping[str, torch.Tensor]) -> int:
        """Add the parts of one tensor and return the number of the file that they go to."""
        if self._pending_bytes >= self._limit:
            self.flush()
        for part, tensor in parts.items():
            self._pending[f"{name}/{part}"] = tensor.detach().to("cpu").contiguous()
            self._pending_bytes += tensor.nbytes
        return len(self.files)

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        path = self._directory / f"tensors-{len(self.files) + 1:05d}.safetensors"
        write_tensors(_unshared(self._pending), path)
        size, digest = _hash_file(path)
        self.files.append(FileEntry(name=path.name, nbytes=size, sha256=digest))
        self._pending, self._pending_bytes = {}, 0


class StoredFiles:
    """The tensor files of an artifact: checked against the manifest, opened when asked for, and kept open for a while.

    A file is hashed before it is opened, and must be the same file, of the same size and time, whenever it is read.

    Args:
        directory: folder of the artifact.
        entries: the files, as the manifest describes them.
    """

    def __init__(self, directory: Path, entries: Sequence[FileEntry]) -> None:
        self._directory = directory
        self._entries = entries
        self._states: dict[int, tuple[int, ...]] = {}
        self._open: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: no open file, and nothing of files that are hashed anew elsewhere."""
        return self.__dict__ | {"_states": {}, "_open": {}}

    def path(self, number: int) -> Path:
        """Return the path of a file."""
        return self._directory / self._entries[number].name

    def check(self, manifest: Manifest) -> None:
        """Compare size, hash and contents of every file with the manifest.

        Raises:
            ArtifactError: a file is missing or differs.
        """
        for number in range(len(self._entries)):
            self._states[number] = self._checked_state(number)
        _check_keys(self, manifest)

    def opened(self, number: int) -> Any:
        """Return a file as ``safe_open`` gives it.

        Raises:
            ArtifactError: it is missing, damaged, or was changed since it was checked.
        """
        path = self.path(number)
        if number not in self._states:
            self._states[number] = self._checked_state(number)
        file = self._open.pop(number, None)
        try:
            file = safe_open(str(path), framework="pt", device="cpu") if file is None else file
            state = _state_of(path.stat())
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}") from error
        if state != self._states[number]:  # reading memory that is mapped behind the end would end the process
            raise ArtifactError(f"{path} was changed after the artifact was opened; load the artifact again.")
        self._open[number] = file  # as the one that was used last
        for longest_unused in list(self._open)[:-_OPEN_FILES]:
            self._open.pop(longest_unused, None)
        return file

    def parts(self, number: int, name: str, layout: TensorLayout | ActivationLayout) -> dict[str, torch.Tensor]:
        """Return the parts of a tensor or an activation, mapped to the file.

        Raises:
            ArtifactError: as :meth:`opened`, or a part is not there.
        """
        file = self.opened(number)
        try:
            with torch.inference_mode(False):  # models that outlive the mode may keep them
                return {part: file.get_tensor(f"{name}/{part}") for part in layout.parts()}
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise ArtifactError(f"{self.path(number)}: the parts of {name!r} cannot be read: {error}") from error

    def give_away(self) -> None:
        """Leave the files that are open to who holds parts of them; what is read from now on is mapped anew.

        A mapping is private to the process, and what is written to a part is in every other part of the same mapping.
        """
        self._open.clear()

    def _checked_state(self, number: int) -> tuple[int, ...]:
        """What tells the file from others and from later versions of itself, taken before it was hashed."""
        path, entry = self.path(number), self._entries[number]
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a device or a pipe may have no end
                raise ArtifactError(f"{path} is no file.")
            size = status.st_size
            found = _hash_file(path) if size == entry.nbytes else (size, "")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error}.") from error
        if found != (entry.nbytes, entry.sha256):
            why = "its hash differs" if size == entry.nbytes else f"it has {size} bytes, not {entry.nbytes}"
            raise ArtifactError(f"{path} is damaged or was exchanged: {why} from what the manifest says.")
        return _state_of(status)


class StoredTensors(Mapping[str, CompressedTensor[Any]]):
    """The compressed tensors of an artifact on disk, read when asked for; their parts stay mapped to the file."""

    def __init__(self, files: StoredFiles, manifest: Manifest) -> None:
        self._files = files
        self._stored = manifest.tensors

    def __getitem__(self, name: str) -> CompressedTensor[Any]:
        stored = self._stored[name]
        try:
            tensor = build_tensor(stored.layout, self._files.parts(stored.file, name, stored.layout))
            tensor.check_values()
        except ArtifactError as error:
            raise ArtifactError(f"{self._files.path(stored.file)}, tensor {name!r}: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def give_away(self) -> None:
        """See :meth:`StoredFiles.give_away`."""
        self._files.give_away()

    def layout(self, name: str) -> TensorLayout:
        """Return the layout of a tensor without reading it."""
        return self._stored[name].layout


def read_activations(files: StoredFiles, manifest: Manifest) -> dict[str, QuantizedActivation]:
    """Read the parameters of all activations.

    Raises:
        ArtifactError: one is missing or out of range.
    """
    activations = {}
    for name, stored in manifest.activations.items():
        parts = files.parts(stored.file, f"activations/{name}", stored.layout) if stored.layout.parts() else {}
        try:
            activations[name] = QuantizedActivation(stored.layout, parts)
            activations[name].check_values()
        except ArtifactError as error:
            where = files.path(stored.file) if parts else "The manifest"
            raise ArtifactError(f"{where}, activation {name!r}: {error}") from error
    return activations


def _check_keys(files: StoredFiles, manifest: Manifest) -> None:
    """Every part that the manifest promises is there in its file with its shape, and there is nothing else."""
    wanted: list[dict[str, tuple[int, ...]]] = [{} for _ in manifest.files]
    stored: list[tuple[str, StoredTensor | StoredActivation]] = [*manifest.tensors.items()]
    stored += [(f"activations/{name}", entry) for name, entry in manifest.activations.items()]
    for name, entry in stored:
        for part, (shape, _) in entry.layout.parts().items():
            wanted[entry.file][f"{name}/{part}"] = shape
    for number, keys in enumerate(wanted):
        path, opened = files.path(number), files.opened(number)
        try:
            found = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"{path} is damaged: {error}") from error
        if found != keys:
            odd = sorted(found.keys() ^ keys.keys() or {k for k in keys if keys[k] != found[k]})
            raise ArtifactError(f"{path} does not hold what the manifest says; they differ in {odd[:5]}.")


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _hash_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file, read piece by piece."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors that share memory, which safetensors refuses to write."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if tensor.numel() and address in seen else tensor
        seen.add(address)
    return result
