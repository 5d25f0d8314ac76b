"""``ModelInspector`` under the module path that coreai-opt gives it."""

from .inspector import ModelInspector

__all__ = ["ModelInspector"]
