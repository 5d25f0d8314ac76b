"""The manifest: one JSON file that says what the tensor files hold, and that protects itself with a hash."""

from __future__ import annotations

import hashlib
import json
import stat
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from bitwright._about import __version__
from bitwright._utils.json_keys import without_duplicates

from .errors import ArtifactError
from .layouts import ActivationLayout, Layout, _Schema

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "FileEntry",
    "Manifest",
    "StoredActivation",
    "StoredTensor",
    "library_versions",
    "read_manifest",
    "write_manifest",
]

FORMAT = "bitwright-artifact"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

_MAX_MANIFEST_BYTES = 1 << 28
_NO_DIGEST = "0" * 64

_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.safetensors$", max_length=100)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(_Schema):
    """One tensor file.

    Attributes:
        name: file name inside the artifact's folder.
        nbytes: its size.
        sha256: hash of its contents.
    """

    name: _FileName
    nbytes: Annotated[int, Field(ge=0)]
    sha256: _Digest


class StoredTensor(_Schema):
    """Where a compressed tensor lies: its parts are ``<name>/<part>`` in ``file``."""

    file: Annotated[int, Field(ge=0)]
    layout: Layout


class StoredActivation(_Schema):
    """Where the parameters of an activation lie."""

    file: Annotated[int, Field(ge=0)]
    layout: ActivationLayout


class Manifest(_Schema):
    """Everything about an artifact but the numbers.

    Attributes:
        format: always ``"bitwright-artifact"``.
        format_version: version of this schema; another one is refused.
        versions: versions of the libraries that wrote it.
        files: the tensor files.
        tensors: compressed tensors by name.
        aliases: further names of tensors, to the name that they are stored under.
        activations: activation quantizers by module path.
        folded_norms: paths of the batch norms that are part of the weights; None where that was not recorded.
        config: the compressor's configuration as JSON, or None.
        plan: the plan as JSON, or None.
        digest: SHA-256 of the manifest's bytes, taken with 64 zeros in this place.
    """

    format: Literal["bitwright-artifact"] = "bitwright-artifact"
    format_version: Literal[1] = 1
    versions: dict[str, str]
    files: list[FileEntry]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str] = Field(default_factory=dict)
    activations: dict[str, StoredActivation] = Field(default_factory=dict)
    folded_norms: list[str] | None = None
    config: Any = None
    plan: Any = None
    digest: _Digest = _NO_DIGEST


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that take part in writing an artifact."""
    versions = {"bitwright": __version__, "torch": torch.__version__}
    try:
        versions["safetensors"] = version("safetensors")
    except PackageNotFoundError:  # vendored without metadata
        versions["safetensors"] = "unknown"
    return versions


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with its digest; the file appears whole or not at all."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, allow_nan=False, ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_NO_DIGEST)
    temporary = directory / f"{MANIFEST_NAME}.part"
    temporary.write_bytes(f"{head}{digest}{tail}".encode())
    temporary.replace(directory / MANIFEST_NAME)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of an artifact.

    Raises:
        ArtifactError: it is missing, damaged, of another version, or holds anything unknown.
    """
    path = directory / MANIFEST_NAME
    data = _read(path)
    try:
        content = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: it is no JSON ({error}).") from None
    _check_version(path, content)
    _check_digest(path, data, content)
    try:
        manifest = Manifest.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise ArtifactError(f"{path} is not a manifest that this version understands:\n{error}") from None
    _check_references(path, manifest)
    return manifest


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path} is no file.")
        if status.st_size > _MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{path} has more than {_MAX_MANIFEST_BYTES} bytes, which no manifest has.")
        return path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path.parent} is no artifact: it has no {path.name}.") from None
    except NotADirectoryError:
        raise ArtifactError(f"{path.parent} is a file; an artifact is a folder, as Artifact.save writes it.") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}.") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_version(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not the manifest of a Bitwright artifact.")
    found = content.get("format_version")
    if found != FORMAT_VERSION or type(found) is not int:
        raise ArtifactError(
            f"{path} has format version {found!r}; this Bitwright ({__version__}) reads version {FORMAT_VERSION}. "
            f"Written by {content.get('versions')!r}."
        )


def _check_digest(path: Path, data: bytes, content: dict[str, Any]) -> None:
    digest = content.get("digest")
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST):
        raise ArtifactError(f"{path} is damaged: it has no digest.")
    head, found, tail = data.rpartition(digest.encode(errors="replace"))
    if not found or hashlib.sha256(head + _NO_DIGEST.encode() + tail).hexdigest() != digest:
        raise ArtifactError(f"{path} is damaged: its digest does not fit its contents.")


def _check_references(path: Path, manifest: Manifest) -> None:
    names = [entry.name for entry in manifest.files]
    if len(set(names)) != len(names):
        raise ArtifactError(f"{path} lists a file twice.")
    places = {name: stored.file for name, stored in manifest.tensors.items()}
    places |= {name: stored.file for name, stored in manifest.activations.items() if stored.layout.parts()}
    for name, file in places.items():
        if file >= len(names):
            raise ArtifactError(f"{path}: {name!r} lies in file {file}, but there are {len(names)}.")
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise ArtifactError(f"{path}: the alias {alias!r} of {name!r} refers to no tensor, or hides one.")
