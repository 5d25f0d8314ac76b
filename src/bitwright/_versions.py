"""Checks of the versions of torch and torchao, from package metadata: neither is imported."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .common import TorchaoTorchIncompatibilityWarning, UntestedTorchVersionWarning

__all__ = ["check_versions"]

_FIRST_UNTESTED_TORCH = Version("2.14.dev0")
_TORCHAO_NEEDING_NEW_TORCH = Version("0.18.0")
_TORCH_FOR_NEW_TORCHAO = Version("2.11.0.dev0")


def check_versions() -> None:
    """Warn about a torch that is newer than what was tested, and about a torchao that needs a newer torch."""
    torch, torchao = _installed("torch"), _installed("torchao")
    if torch is None:
        return
    if torchao is not None and torchao >= _TORCHAO_NEEDING_NEW_TORCH and torch < _TORCH_FOR_NEW_TORCHAO:
        warnings.warn(
            f"torchao {torchao} needs torch 2.11 or newer, but torch {torch} is installed. Upgrade torch.",
            TorchaoTorchIncompatibilityWarning,
            stacklevel=3,
        )
    if torch >= _FIRST_UNTESTED_TORCH:
        warnings.warn(
            f"torch {torch} is newer than what Bitwright was tested with (2.13).",
            UntestedTorchVersionWarning,
            stacklevel=3,
        )


def _installed(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
