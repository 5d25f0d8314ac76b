"""The page on the design names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, ROOT / "src" / "bitwright")


def test_every_path_on_the_page_exists() -> None:
    """A path of a file or folder is relative to the repository or to the package."""
    page = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+\w*)`", page))
    assert len(named) > 40
    assert sorted(path for path in named if not any((place / path).exists() for place in PLACES)) == []
