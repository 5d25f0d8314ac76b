"""The fidelity report as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
import re
from importlib import resources

from .report import FidelityReport

__all__ = ["fidelity_page"]


def fidelity_page(report: FidelityReport, title: str) -> str:
    """Return the page; the report stands in it as JSON, and a script builds table, chart and histograms."""
    template = resources.files(__package__).joinpath("fidelity.html").read_text(encoding="utf-8")
    # "<" is escaped so that no name in the data can end the script element
    data = json.dumps(report.to_dict(), allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    filled = {"{{title}}": html.escape(title), "{{data}}": data}
    return re.sub(r"\{\{(title|data)\}\}", lambda match: filled[match[0]], template)
