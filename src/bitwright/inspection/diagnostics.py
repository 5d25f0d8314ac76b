"""Named diagnostics: what can go wrong in silence, with a code and a page for each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

from bitwright.errors import BitwrightError, BitwrightWarning

__all__ = ["DamageError", "DamageWarning", "Diagnostic", "Finding", "diagnostics", "explain"]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A kind of damage.

    Attributes:
        code: ``"BW101"`` and so on; codes are never given to another kind.
        title: in a few words.
        page: what it means and what to do, as Markdown.
    """

    code: str
    title: str
    page: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnostic that applies to a model.

    Attributes:
        code: the diagnostic's code.
        where: layer, tensor or quantizer that it concerns; ``"model"`` for the whole.
        message: what was found, with numbers.
        layer: name of the layer in the fidelity report that can be put back to floating point; None for the whole.
    """

    code: str
    where: str
    message: str
    layer: str | None = None

    def __str__(self) -> str:
        return f"{self.code} {self.where}: {self.message} (bitwright explain {self.code})"


class DamageWarning(BitwrightWarning):
    """A check of a compressed model found damage."""


class DamageError(BitwrightError, ValueError):
    """Checks of a compressed model found damage; ``findings`` lists all."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        listed = "\n".join(f"  {finding}" for finding in findings)
        super().__init__(f"The compressed model is damaged; {len(findings)} finding(s):\n{listed}")
        self.findings = findings


def diagnostics() -> dict[str, Diagnostic]:
    """Return all diagnostics by code."""
    folder = resources.files(__package__).joinpath("pages")
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        page = entry.read_text(encoding="utf-8")
        match = re.match(r"# (BW\d+): (.*)\n", page)
        if match is not None:
            found[match[1]] = Diagnostic(match[1], match[2], page)
    return found


def explain(code: str) -> Diagnostic:
    """Return a diagnostic by its code, in any case.

    Raises:
        KeyError: there is no such code; lists those there are.
    """
    known = diagnostics()
    found = known.get(code.strip().upper())
    if found is None:
        raise KeyError(f"There is no diagnostic {code!r}; there are {', '.join(known)}.")
    return found
