"""The module tree of a model, indexed by name and by type, so that config keys find their modules fast."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations


def type_name(cls: type) -> str:
    """Return the fully qualified name that type keys match, e.g. ``torch.nn.modules.linear.Linear``."""
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class IndexedModule:
    """A module, all dotted names that lead to it (the first is the canonical one), and its children's positions."""

    module: nn.Module
    names: list[str]
    children: list[int]

    @property
    def name(self) -> str:
        """The canonical name, which ``named_modules`` gives too."""
        return self.names[0]


def _index_tree(model: nn.Module) -> list[IndexedModule]:
    """Return every module once, in ``named_modules`` order. A module that contains itself ends the walk there."""
    found: list[IndexedModule] = []
    position: dict[int, int] = {}

    def visit(module: nn.Module, name: str, path: frozenset[int]) -> int:
        new = id(module) not in position
        if new:
            position[id(module)] = len(found)
            found.append(IndexedModule(module, [], []))
        entry = found[position[id(module)]]
        entry.names.append(name)
        children: dict[int, None] = {}
        for child_name, child in module._modules.items():
            if child is not None and id(child) not in path:
                at = visit(child, f"{name}.{child_name}" if name else child_name, path | {id(child)})
                children[at] = None
        if new:
            entry.children.extend(children)
        return position[id(module)]

    visit(model, "", frozenset({id(model)}))
    return found


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def compile_key(key: str, where: str) -> re.Pattern[str]:
    """Return the compiled regular expression ``key``, which stands at ``where`` in the config.

    Raises:
        ValueError: it is not a valid regular expression.
    """
    try:
        return _compile(key)
    except re.error as error:
        at = "" if error.pos is None else f" at position {error.pos}"
        raise ValueError(
            f"{where}: the key is not a valid regular expression: {error.msg}{at}. Escape special characters with a "
            "backslash, e.g. r'\\('."
        ) from error


_PLAIN_KEY = re.compile(r"[\w.]*")
_DOT_FREE = re.compile(r"[^.]+")
_Named: TypeAlias = tuple[str, int]


def type_matches(key: str, cls: type) -> bool:
    """Return whether ``key`` is the defining path of ``cls``, or a public one such as ``torch.nn.Linear``.

    Only modules that are loaded are looked into: a config file must not import anything.
    """
    if key == type_name(cls):
        return True
    prefix, _, last = key.rpartition(".")
    # ``sys.modules`` may hold anything: None where an import is forbidden.
    return getattr(sys.modules.get(prefix), "__dict__", {}).get(last) is cls


class ModuleIndex:
    """Finds modules by name pattern and by type.

    Attributes:
        modules: every module once, in ``named_modules`` order. Positions in this list stand for modules.
        names: all dotted names, aliases included.
        type_names: defining paths of all module classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = _index_tree(model)
        self._by_length: dict[int, list[_Named]] = {}
        self._by_part: dict[tuple[int, int, int], dict[str, list[_Named]]] = {}
        self._by_type: dict[type, list[int]] = {}
        for position, entry in enumerate(self.modules):
            # A parametrized module (weight norm, a prepared weight) has a class made for it; the user means its base.
            self._by_type.setdefault(type_before_parametrizations(entry.module), []).append(position)
            for name in entry.names:
                self._by_length.setdefault(len(name), []).append((name, position))
        self.names = tuple(name for entry in self.modules for name in entry.names)
        self.type_names = tuple(type_name(cls) for cls in self._by_type)

    def named(self, key: str, where: str) -> list[int]:
        """Return, in order, the positions of modules one of whose names the pattern ``key`` matches as a whole.

        Raises:
            ValueError: ``key`` is not a valid regular expression; it stands at ``where``.
        """
        pattern = compile_key(key, where)
        groups = [self._with_longest_part(key)] if _PLAIN_KEY.fullmatch(key) else self._by_length.values()
        return sorted({position for group in groups for name, position in group if pattern.fullmatch(name)})

    def _with_longest_part(self, key: str) -> list[_Named]:
        """Return names of the key's length that have its longest dot-free part in the same place.

        A key without quantifiers matches no others, as only its dots are wildcards. So a config with an entry for each
        layer does not try every entry on every name.
        """
        part = max(_DOT_FREE.finditer(key), key=lambda found: len(found[0]), default=None)
        names = self._by_length.get(len(key), [])
        if part is None:
            return names
        place = (len(key), *part.span())
        if place not in self._by_part:
            table = self._by_part.setdefault(place, {})
            for name, position in names:
                table.setdefault(name[slice(*part.span())], []).append((name, position))
        return self._by_part[place].get(part[0], [])

    def of_type(self, key: str) -> list[int]:
        """Return, in order, the positions of modules whose class is exactly the one that ``key`` names."""
        return sorted(at for cls, positions in self._by_type.items() if type_matches(key, cls) for at in positions)

    def subclass_names(self, key: str) -> tuple[str, ...]:
        """Return the paths of classes in the model that derive from a class that ``key`` names."""
        return tuple(
            type_name(cls) for cls in self._by_type if any(type_matches(key, base) for base in cls.__mro__[1:])
        )
