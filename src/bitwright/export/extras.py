"""Optional dependencies: imported when an exporter needs them, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MissingExtraError", "require"]


class MissingExtraError(ImportError):
    """A library that an exporter needs is not installed."""


def require(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional dependency.

    Args:
        module: dotted name.
        extra: the extra of this package that installs it.
        purpose: what it is needed for, to complete "... needs ...".

    Raises:
        MissingExtraError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {top}, which cannot be imported ({error}). "
            f'Install it with: pip install "bitwright[{extra}]"',
            name=top,
        ) from error
