"""How the API reference reads docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["ExampleSections"]

_HEADING = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Shows ``Example:`` as code: griffe knows the plural only, and would take the singular for running text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section before the docstring is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
