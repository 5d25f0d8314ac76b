"""Entry-point plugins: installed packages that register something with Bitwright when it is imported."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points

__all__ = ["PLUGIN_GROUP", "load_plugins"]

PLUGIN_GROUP = "bitwright.plugins"


def load_plugins() -> None:
    """Call every entry point of the group; one that fails is skipped with a ``RuntimeWarning`` that names it."""
    for entry_point in entry_points(group=PLUGIN_GROUP):
        try:
            entry_point.load()()
        except Exception as error:
            warnings.warn(
                f"The plugin {entry_point.name!r} ({entry_point.value}) failed and is skipped: {error}. Update or "
                "uninstall the package that brings it.",
                RuntimeWarning,
                stacklevel=2,
            )
