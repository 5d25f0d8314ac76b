"""Config keys without effect, and what they may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .spec_dicts import ALL_TENSORS

__all__ = ["ShadowedKey", "UnmatchedKey", "mistaken_keys", "state_names"]

_DEFAULT_STATES = frozenset({"weight", "in_proj_weight"})  # the defaults of configs; not every model has both
_ALIKE = 0.75


@dataclass(frozen=True, slots=True)
class UnmatchedKey:
    """A key of the config that matched nothing.

    Attributes:
        where: the key as one would write it, e.g. ``module_name_configs['layer.0']``.
        key: the key itself.
        candidates: the names that it could have matched.
        related: candidates that are known to be akin, such as subclasses of the class that the key names.
        section: the section that the key stands in, if only modules of other sections have what the key names.
    """

    where: str
    key: str
    candidates: tuple[str, ...] = field(repr=False)
    related: tuple[str, ...] = ()
    section: str | None = None

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
        if self.section is not None:
            place = f"in the model, but not in the modules that belong to {self.section}"
            return f"{self.where} matches nothing; {self.key!r} is {place}."
        if self.key in self.candidates:  # a name with special characters, which the key does not match as a pattern
            return f"{self.where} matches nothing; keys are regular expressions, so write {re.escape(self.key)!r}."
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


def state_names(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names that ``modules`` give their own parameters and buffers."""
    names: set[str] = set()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):  # its dictionaries can only be asked for single names
            names.update(name for name, _ in (*module.named_parameters("", False), *module.named_buffers("", False)))
            continue
        names.update(module._parameters, module._buffers)
        parametrizations = module._modules.get("parametrizations")
        if isinstance(parametrizations, nn.ModuleDict):
            names.update(parametrizations)
    return frozenset(names)


def mistaken_keys(where: str, keys: Collection[str], names: Collection[str]) -> Iterator[UnmatchedKey]:
    """Yield the keys that name none of ``names`` and either resemble one that no key names, or stand alone.

    Args:
        where: the dictionary as one would write it, e.g. ``global_config.op_state_spec``.
        keys: its keys.
        names: what they could name.
    """
    patterns = {_without_digits(name) for name in names}  # weight_hh_l1 is no mistake where only weight_hh_l0 exists
    known = {*names, *_DEFAULT_STATES, ALL_TENSORS}
    missing = [key for key in keys if key not in known and _without_digits(key) not in patterns]
    alone = len(missing) == len(keys)
    free = sorted(set(names).difference(keys))
    for key in missing:
        near = difflib.get_close_matches(key, free, n=3, cutoff=_ALIKE)
        if near or alone:
            yield UnmatchedKey(f"{where}[{key!r}]", key, (), tuple(near))


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)
