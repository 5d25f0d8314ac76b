"""Names and types: which config entry applies to a module, an op, a tensor.

All matching of the project stands here, so that quantization, palettization and pruning, planning and reports agree on
it. Three questions, from outside in:

* :func:`resolve_module_rules`: which entry of a config owns each module;
* :func:`resolve_op_rule`: which part of that entry holds for an op;
* :func:`lookup_spec`: which key of a spec dictionary names a tensor.

Each remembers what never matched, so that a misspelt key does not pass in silence.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ._module_index import ModuleIndex, compile_key, type_matches, type_name
from .module_config import ModuleCompressionConfig
from .spec_dicts import ALL_TENSORS
from .unmatched import ShadowedKey, UnmatchedKey, mistaken_keys, state_names

if TYPE_CHECKING:
    from .compression_config import CompressionConfig

__all__ = [
    "ConfigLevel",
    "ModuleRule",
    "ModuleRules",
    "OpLevel",
    "OpRule",
    "ShadowedKey",
    "SpecMatch",
    "UnmatchedKey",
    "lookup_spec",
    "match_module",
    "module_configs",
    "refuse_invalid_patterns",
    "resolve_module_rules",
    "resolve_op_rule",
    "type_name",
]

_logger = logging.getLogger(__name__)


class ConfigLevel(enum.IntEnum):
    """Where in a config a rule stands; a smaller number is stronger."""

    MODULE_NAME = 0
    MODULE_TYPE = 1
    GLOBAL = 2


class OpLevel(enum.IntEnum):
    """Where in a module's config an op's specs stand; a smaller number is stronger."""

    OP_NAME = 0
    OP_TYPE = 1
    DEFAULT = 2


_OP_SECTION = {OpLevel.OP_NAME: "op_name_config", OpLevel.OP_TYPE: "op_type_config"}
_SECTION = {
    ConfigLevel.MODULE_NAME: "module_name_configs",
    ConfigLevel.MODULE_TYPE: "module_type_configs",
    ConfigLevel.GLOBAL: "global_config",
}


def _describe(level: ConfigLevel, key: str | None) -> str:
    return _SECTION[level] if key is None else f"{_SECTION[level]}[{key!r}]"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRule:
    """The config entry that owns one module.

    Attributes:
        level: section of the config.
        key: key in that section; None for ``global_config``.
        owner: canonical name of the module that the key matched; this module, or an ancestor of it.
        inherited: whether the module got the rule from ``owner``. Then the three ``module_*_spec`` do not apply.
        config: the module config, shared by all modules that the entry owns.
        priority: rank of the rule among all modules of the model, 0 the strongest. It decides for shared tensors.
    """

    level: ConfigLevel
    key: str | None
    owner: str
    inherited: bool
    config: Any
    priority: int
    usage: _OpKeyUsage = field(repr=False)

    def describe(self) -> str:
        """Return the entry as one would write it, e.g. ``module_name_configs['layers.0']``."""
        return _describe(self.level, self.key)

    @property
    def module_input_spec(self) -> dict[str | int, Any]:
        """Specs of the module's inputs; empty where inherited."""
        return {} if self.inherited else self.config.module_input_spec

    @property
    def module_output_spec(self) -> dict[str | int, Any]:
        """Specs of the module's outputs; empty where inherited."""
        return {} if self.inherited else self.config.module_output_spec

    @property
    def module_state_spec(self) -> dict[str, Any]:
        """Specs of the module's own tensors; empty where inherited."""
        return {} if self.inherited else self.config.module_state_spec


class _OpKeyUsage:
    """Which op keys matched so far, and the op names and types that were asked for, by section of the config."""

    def __init__(self) -> None:
        self.matched: set[tuple[str, OpLevel, str]] = set()
        self.asked: defaultdict[tuple[str, OpLevel], dict[str, None]] = defaultdict(dict)

    def unmatched(self, where: str, level: OpLevel, key: str) -> UnmatchedKey:
        """Return the key of a section with the names or types that the section's ops go by."""
        found = self.asked[where, level]
        outside = {name for (_, kind), names in self.asked.items() if kind is level for name in names}.difference(found)
        described = _describe_op(where, level, key)
        if level is OpLevel.OP_NAME:
            elsewhere = any(map(compile_key(key, described).fullmatch, outside))
        else:
            elsewhere = key in outside
        return UnmatchedKey(described, key, tuple(found), section=where if elsewhere else None)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRules(Mapping[str, ModuleRule]):
    """Canonical module name to rule, for every module of a model (the root is ``""``).

    Attributes:
        unmatched: name and type keys that match no module.
        shadowed: name and type keys whose modules all belong to stronger entries.
    """

    _rules: dict[str, ModuleRule]
    unmatched: tuple[UnmatchedKey, ...]
    shadowed: tuple[ShadowedKey, ...]
    _usage: _OpKeyUsage = field(repr=False)
    _state_names: frozenset[str] = field(repr=False)

    def __getitem__(self, name: str) -> ModuleRule:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def by_priority(self) -> list[tuple[str, ModuleRule]]:
        """Return names and rules, the strongest first."""
        return sorted(self._rules.items(), key=lambda item: item[1].priority)

    def unmatched_op_keys(self) -> tuple[UnmatchedKey, ...]:
        """Return the op name and op type keys that no :func:`resolve_op_rule` call on these rules has matched.

        Keys of entries that own no module are left out: :attr:`unmatched` and :attr:`shadowed` name those.

        Raises:
            ValueError: a key of ``op_name_config`` is not a valid regular expression.
        """
        entries = {rule.describe(): rule.config for rule in self._rules.values()}
        return tuple(
            self._usage.unmatched(where, level, key)
            for where, config in entries.items()
            for level in (OpLevel.OP_NAME, OpLevel.OP_TYPE)
            for key in getattr(config, _OP_SECTION[level])
            if (where, level, key) not in self._usage.matched
        )

    def unmatched_state_keys(self) -> tuple[UnmatchedKey, ...]:
        """Return the keys of state specs that name no parameter or buffer of the model and look like a mistake.

        A dictionary may name tensors that only other models have, so a key counts as one if it resembles a name that
        the model has, or if nothing else in its dictionary names anything.
        """
        entries = {rule.describe(): rule.config for rule in self._rules.values()}
        return tuple(
            unmatched
            for where, config in entries.items()
            for section, specs in _state_specs(where, config)
            for unmatched in mistaken_keys(section, specs, self._state_names)
        )


@dataclass(slots=True)
class _Claims:
    """Who owns which module while a config is resolved; strongest entries claim first."""

    index: ModuleIndex
    usage: _OpKeyUsage
    rules: dict[str, ModuleRule] = field(default_factory=dict)

    def claim(self, level: ConfigLevel, key: str | None, config: Any, matched: Sequence[int]) -> int:
        """Give the subtrees of ``matched`` modules to an entry as far as they are free; return how many it got.

        The order, later modules first and each before its children, sets the priorities.
        """
        before, direct = len(self.rules), set(matched)
        for position in reversed(matched):
            owner = self.index.modules[position].name
            todo = [position]
            while todo:
                at = todo.pop()
                entry = self.index.modules[at]
                if entry.name in self.rules:  # then so is everything below it
                    continue
                # A shared module may be reached from another match before its own turn comes; it is no heir then.
                inherited = at not in direct
                self.rules[entry.name] = ModuleRule(
                    level, key, owner if inherited else entry.name, inherited, config, len(self.rules), self.usage
                )
                todo.extend(reversed(entry.children))
        return len(self.rules) - before


def resolve_module_rules(config: CompressionConfig[Any], model: nn.Module) -> ModuleRules:
    """Return which entry of ``config`` owns each module of ``model``.

    Names are stronger than types, and types stronger than ``global_config``. Within a section the last entry that
    matches wins, even over a more specific one. A name key is a regular expression for the whole dotted name and is
    tried on every name under which a shared module can be reached; a type key names the exact class, by its defining
    or its public path. What an entry owns includes all descendants that nothing stronger owns. Takes time linear in the
    number of modules, per entry.

    Args:
        config: any compressor's config.
        model: the model; only its module tree is read.

    Raises:
        ValueError: a name key is not a valid regular expression.
        TypeError: an entry is no module config.
    """
    index = ModuleIndex(model)
    claims = _Claims(index, _OpKeyUsage())
    unmatched: dict[ConfigLevel, list[UnmatchedKey]] = {level: [] for level in ConfigLevel}
    shadowed: dict[ConfigLevel, list[ShadowedKey]] = {level: [] for level in ConfigLevel}
    for level, key, entry in _entries(config):
        where = _describe(level, key)
        by_name = level is ConfigLevel.MODULE_NAME
        matched = index.named(key, where) if by_name else index.of_type(key)
        if not matched:
            candidates, related = (index.names, ()) if by_name else (index.type_names, index.subclass_names(key))
            unmatched[level].insert(0, UnmatchedKey(where, key, candidates, related))
        elif not claims.claim(level, key, entry, matched):
            owners = dict.fromkeys(claims.rules[index.modules[at].name].describe() for at in matched)
            shadowed[level].insert(0, ShadowedKey(where, tuple(owners)))
    claims.claim(ConfigLevel.GLOBAL, None, config.global_config, range(len(index.modules)))
    return ModuleRules(
        claims.rules,
        tuple(itertools.chain.from_iterable(unmatched.values())),
        tuple(itertools.chain.from_iterable(shadowed.values())),
        claims.usage,
        state_names(entry.module for entry in index.modules),
    )


def _state_specs(where: str, config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dictionaries of one module config whose keys are names of parameters and buffers."""
    yield f"{where}.op_state_spec", config.op_state_spec or {}
    yield f"{where}.module_state_spec", config.module_state_spec or {}
    for level, section in _OP_SECTION.items():
        for key, op_config in (getattr(config, section) or {}).items():
            if op_config is not None:
                yield f"{_describe_op(where, level, key)}.op_state_spec", op_config.op_state_spec or {}


def _entries(config: CompressionConfig[Any]) -> Iterator[tuple[ConfigLevel, str, Any]]:
    """Yield section, key and module config of all name and type entries, the strongest first.

    Raises:
        TypeError: something else was written into a section past validation.
    """
    sections: tuple[tuple[ConfigLevel, Mapping[Any, Any]], ...] = (
        (ConfigLevel.MODULE_NAME, config.module_name_configs or {}),
        (ConfigLevel.MODULE_TYPE, config.module_type_configs or {}),
    )
    for level, entries in sections:
        for key, written in reversed(list(entries.items())):
            # Classes and None stand here only if they were written past validation; they mean what they mean elsewhere.
            name = type_name(key) if isinstance(key, type) else str(key)
            entry = written if written is not None else config._module_config_class()._disabled()
            if not isinstance(entry, ModuleCompressionConfig):
                wanted = config._module_config_class().__name__
                raise TypeError(
                    f"{_describe(level, name)} is {entry!r}, not a {wanted} or None. "
                    "Set entries with set_module_name or set_module_type, which check them."
                )
            yield level, name, entry


def module_configs(config: CompressionConfig[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each module config of ``config``, with where it stands as one would write it.

    Raises:
        TypeError: something else was written into a section past validation.
    """
    yield _describe(ConfigLevel.GLOBAL, None), config.global_config
    for level, key, entry in _entries(config):
        yield _describe(level, key), entry


def refuse_invalid_patterns(config: CompressionConfig[Any]) -> None:
    """Check all keys that are regular expressions, also those that preparing a certain model would not come to.

    Raises:
        ValueError: one is not valid; the message says where it stands.
    """
    for level, key, _ in _entries(config):
        if level is ConfigLevel.MODULE_NAME:
            compile_key(key, _describe(level, key))
    for where, entry in module_configs(config):
        for key in () if entry is None else entry.op_name_config:
            compile_key(key, _describe_op(where, OpLevel.OP_NAME, key))


def match_module(config: CompressionConfig[Any], name: str, module: nn.Module | None) -> Any:
    """Return the module config whose key matches one module itself, else the global one; ancestors do not count.

    Args:
        config: any compressor's config.
        name: the module's full dotted name.
        module: the module, or None to look at names only.
    """
    for level, key, entry in _entries(config):
        if level is ConfigLevel.MODULE_NAME:
            matches = compile_key(key, _describe(level, key)).fullmatch(name) is not None
        else:
            matches = module is not None and type_matches(key, type_before_parametrizations(module))
        if matches:
            return entry
    return config.global_config


@dataclass(frozen=True, slots=True, eq=False)
class OpRule:
    """The specs that hold for one op.

    Attributes:
        op_input_spec: spec by input position, name or ``"*"``.
        op_output_spec: the same for outputs.
        op_state_spec: spec by local tensor name or ``"*"``.
        level: part of the module's config that they come from.
        key: key in that part; None for the module's own three fields.
        module_rule: the rule of the module that the op belongs to.
    """

    op_input_spec: Mapping[str | int, Any]
    op_output_spec: Mapping[str | int, Any]
    op_state_spec: Mapping[str, Any]
    level: OpLevel
    key: str | None
    module_rule: ModuleRule

    def describe(self) -> str:
        """Return the part as one would write it, e.g. ``global_config.op_type_config['linear']``."""
        where = self.module_rule.describe()
        return where if self.key is None else _describe_op(where, self.level, self.key)


def _describe_op(where: str, level: OpLevel, key: str) -> str:
    return f"{where}.{_OP_SECTION[level]}[{key!r}]"


def resolve_op_rule(rule: ModuleRule, op_name: str | Sequence[str], op_type: str | Sequence[str]) -> OpRule:
    """Return the specs for an op in a module that ``rule`` owns.

    The last entry of ``op_name_config`` whose regular expression matches a whole name wins, else the last entry of
    ``op_type_config`` that equals a type, else the module's own op-level fields.

    Args:
        rule: the rule of the op's module.
        op_name: name of the op in this model, or all names that it goes by.
        op_type: type of the op (``"linear"``), or all spellings of it.

    Raises:
        ValueError: a key of ``op_name_config`` is not a valid regular expression.
    """
    names = (op_name,) if isinstance(op_name, str) else tuple(op_name)
    types = (op_type,) if isinstance(op_type, str) else tuple(op_type)
    where = rule.describe()
    rule.usage.asked[where, OpLevel.OP_NAME].update(dict.fromkeys(names))
    rule.usage.asked[where, OpLevel.OP_TYPE].update(dict.fromkeys(types))
    winner: tuple[OpLevel, str, Any] | None = None
    for key, config in rule.config.op_type_config.items():
        if key in types:
            rule.usage.matched.add((where, OpLevel.OP_TYPE, key))
            winner = (OpLevel.OP_TYPE, key, config)
    for key, config in rule.config.op_name_config.items():
        pattern = compile_key(key, _describe_op(where, OpLevel.OP_NAME, key))
        if any(pattern.fullmatch(name) for name in names):
            rule.usage.matched.add((where, OpLevel.OP_NAME, key))
            winner = (OpLevel.OP_NAME, key, config)
    level, found, config = winner or (OpLevel.DEFAULT, None, rule.config)
    if config is None:
        off: dict[Any, None] = {ALL_TENSORS: None}
        return OpRule(off, off, off, level, found, rule)
    return OpRule(config.op_input_spec, config.op_output_spec, config.op_state_spec, level, found, rule)


@dataclass(frozen=True, slots=True)
class SpecMatch:
    """Outcome of a look-up in a spec dictionary.

    Attributes:
        spec: the spec; None if the tensor was opted out, or if nothing named it.
        found: whether a key named the tensor, which tells those two apart.
        key: the key that did; None if none.
    """

    spec: Any
    found: bool
    key: str | int | None


_NO_MATCH = SpecMatch(None, False, None)


def lookup_spec(spec_dict: Mapping[Any, Any], keys: Sequence[str | int]) -> SpecMatch:
    """Return what ``spec_dict`` says about a tensor that goes by any of ``keys``.

    Exact keys come first; if several are present the one declared last in ``spec_dict`` wins, with a log warning.
    Then ``"*"``.
    """
    matched = [key for key in spec_dict if key in keys and key != ALL_TENSORS]
    if len(matched) > 1:
        _logger.warning(
            "A tensor known as %s is named by several keys %s of one spec: Components dict contains multiple "
            "specifications for it. The last one, %r, is used.",
            list(keys),
            matched,
            matched[-1],
        )
    if matched:
        return SpecMatch(spec_dict[matched[-1]], True, matched[-1])
    if ALL_TENSORS in spec_dict:
        return SpecMatch(spec_dict[ALL_TENSORS], True, ALL_TENSORS)
    return _NO_MATCH
