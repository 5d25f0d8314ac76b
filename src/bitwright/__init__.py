"""Bitwright makes PyTorch models small and fast in few bits: quantization, palettization and pruning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._about import __version__
from ._plugins import load_plugins as _load_plugins
from ._versions import check_versions as _check_versions
from .common import (
    CoreMLExportError,
    DependencyVersionWarning,
    ExportBackend,
    TorchaoTorchIncompatibilityWarning,
    UntestedTorchVersionWarning,
)

if TYPE_CHECKING:
    from . import casting as casting
    from . import coreai_utils as coreai_utils
    from . import inspection as inspection
    from . import palettization as palettization
    from . import pruning as pruning
    from . import quantization as quantization

__all__ = [
    "CoreMLExportError",
    "DependencyVersionWarning",
    "ExportBackend",
    "TorchaoTorchIncompatibilityWarning",
    "UntestedTorchVersionWarning",
    "__version__",
]

_SUBPACKAGES = (
    "artifact",
    "casting",
    "config",
    "coreai_utils",
    "export",
    "formats",
    "inspection",
    "kernels",
    "palettization",
    "planning",
    "program",
    "pruning",
    "quantization",
)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})


_check_versions()
_load_plugins()
