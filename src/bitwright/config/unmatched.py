"""Config keys without effect, and what they may have meant."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

__all__ = ["ShadowedKey", "UnmatchedKey"]


@dataclass(frozen=True, slots=True)
class UnmatchedKey:
    """A key of the config that matched nothing.

    Attributes:
        where: the key as one would write it, e.g. ``module_name_configs['layer.0']``.
        key: the key itself.
        candidates: the names that it could have matched.
        related: candidates that are known to be akin, such as subclasses of the class that the key names.
    """

    where: str
    key: str
    candidates: tuple[str, ...] = field(repr=False)
    related: tuple[str, ...] = ()

    @property
    def nearest(self) -> tuple[str, ...]:
        """Up to three candidates: related ones, then those that look most like the key, best first."""
        plain = re.sub(r"\\(.)", r"\1", self.key)
        names = list(dict.fromkeys(self.candidates))
        last = plain.rpartition(".")[2]
        # Paths of classes differ in their middles; the last part tells more.
        same_end = [name for name in names if last and name.rpartition(".")[2].lower().endswith(last.lower())]
        alike = difflib.get_close_matches(plain, names, n=3)
        return tuple(dict.fromkeys([*self.related, *alike, *same_end]))[:3]

    def __str__(self) -> str:
        near = self.nearest
        return f"{self.where} matches nothing" + (f"; nearest: {', '.join(map(repr, near))}." if near else ".")


@dataclass(frozen=True, slots=True)
class ShadowedKey:
    """A key that matched modules, each of which a stronger entry had claimed.

    Attributes:
        where: the key as one would write it.
        by: descriptions of the entries that own those modules.
    """

    where: str
    by: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where} has no effect: every module that it matches belongs to {', '.join(self.by)}."
