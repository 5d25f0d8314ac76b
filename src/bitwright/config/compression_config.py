"""The whole config of a compressor: which module config applies where in a model."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, Self, TypeAlias, TypeVar, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch import nn

from ._module_index import type_name
from .files import ConfigFile
from .matching import ConfigLevel, match_module, resolve_module_rules
from .module_config import (
    _MODULE_SPEC_FIELDS,
    ModuleCompressionConfig,
    WeightOnlyModuleValidationMixin,
    _generic_argument,
)
from .op_config import OpCompressionConfig, WeightOnlyOpValidationMixin
from .spec_dicts import _empty_if_none

__all__ = [
    "CompressionConfig",
    "ModuleCompressionConfig",
    "ModuleConfigDict",
    "OpCompressionConfig",
    "WeightOnlyModuleValidationMixin",
    "WeightOnlyOpValidationMixin",
]

_T = TypeVar("_T", bound=ModuleCompressionConfig[Any, Any])

ModuleConfigDict: TypeAlias = dict[ConfigLevel, dict[str, Any]]
"""Section of the config, to canonical module name, to the module's config."""

_Target: TypeAlias = str | type[nn.Module]
_EMPTY_IF_NONE = BeforeValidator(_empty_if_none)


def _names_as_text(value: Any) -> Any:
    """Turn the integer keys that YAML makes of names such as ``0`` back into text."""
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if isinstance(key, float):
            raise ValueError(f"The module name {key!r} was read as a number; put it in quotes.")
    named = {str(key) if type(key) is int else key: config for key, config in value.items()}
    if len(named) < len(value):
        both = ", ".join(f"{key!r} and {str(key)!r}" for key in value if type(key) is int and str(key) in value)
        raise ValueError(f"Key collision detected: {both} name the same module. Keep one of them.")
    return named


class CompressionConfig(ConfigFile, ABC, Generic[_T]):
    """Module configs for a whole model, by module name, by module type, and for the rest.

    Names beat types and types beat ``global_config``; within a section the last entry that matches wins. A config
    holds for the matched module and everything below it that nothing stronger claims. Nothing is merged: one entry
    decides everything about a module. :func:`bitwright.config.matching.resolve_module_rules` says which.

    Subclasses name their section of a config file in ``_CONFIG_KEY``, and in ``_SPEC_KEY`` the section that is free for
    YAML anchors.

    Attributes:
        global_config: config of modules that no other entry owns. Omitted means the class's default; None means off.
        module_type_configs: config by module class, or by its dotted path; None as a value means off.
        module_name_configs: config by regular expression for the whole dotted module name; None as a value means off.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest), a type name without a dot,
            module-level specs in ``global_config``, or a bad value.
    """

    global_config: _T | None = Field(default_factory=lambda: None)
    module_type_configs: Annotated[dict[str | type[nn.Module], _T | None] | None, _EMPTY_IF_NONE] = Field(
        default_factory=dict
    )
    module_name_configs: Annotated[dict[str, _T | None] | None, BeforeValidator(_names_as_text), _EMPTY_IF_NONE] = (
        Field(default_factory=dict)
    )

    @classmethod
    def _get_module_config_class(cls) -> type[_T] | None:
        return _generic_argument(cls, CompressionConfig)

    @classmethod
    def _module_config_class(cls) -> type[_T]:
        found = cls._get_module_config_class()
        if found is None:
            raise RuntimeError(
                f"{cls.__name__} does not say which module config it holds; derive it from "
                "CompressionConfig[<module config class>]."
            )
        return found

    @model_validator(mode="before")
    @classmethod
    def _fill_omitted_global(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "global_config" in data:
            return data
        return {**data, "global_config": cls._module_config_class()()}

    @field_validator("global_config", mode="after")
    @classmethod
    def _disable_none_global(cls, config: _T | None) -> _T:
        return cls._module_config_class()._disabled() if config is None else config

    @field_validator("module_name_configs", mode="after")
    @classmethod
    def _disable_none_entries(cls, configs: dict[str, _T | None]) -> dict[str, _T]:
        module_cls = cls._module_config_class()
        return {key: module_cls._disabled() if config is None else config for key, config in configs.items()}

    @field_validator("module_type_configs", mode="after")
    @classmethod
    def _name_types(cls, configs: dict[_Target, _T | None]) -> dict[str, _T]:
        return cls._disable_none_entries({cls._normalize_module_type(key): value for key, value in configs.items()})

    @model_validator(mode="after")
    def _refuse_global_module_specs(self) -> Self:
        used = [field for field in _MODULE_SPEC_FIELDS if getattr(self.global_config, field)]
        if used:
            raise ValueError(
                "global_config cannot have module_input_spec, module_output_spec, or module_state_spec, but sets "
                f"{', '.join(used)}. Give them to the modules they are meant for, in module_type_configs or "
                "module_name_configs."
            )
        return self

    @staticmethod
    def _normalize_module_type(key: Any) -> str:
        """Return the dotted path for a key of ``module_type_configs``."""
        if isinstance(key, type) and issubclass(key, nn.Module):
            return type_name(key)
        if not isinstance(key, str):
            raise TypeError(
                "Keys of module_type_configs must be fully-qualified names or nn.Module subclasses, "
                f"got {type(key).__name__}: {key!r}."
            )
        if "." not in key:
            known = getattr(nn, key, None)
            hint = f" Did you mean {type_name(known)!r}?" if isinstance(known, type) else ""
            raise ValueError(f"Expected the fully-qualified name of a module type, got {key!r}.{hint}")
        return key

    def _is_global_config_disabled(self) -> bool:
        return self.global_config == self._module_config_class()._disabled()

    # Mutators

    def set_global(self, config: _T | None) -> Self:
        """Set ``global_config``; None switches compression off where no other entry applies.

        Raises:
            pydantic.ValidationError: the config is refused; this object is as it was.
        """
        self.global_config = config
        return self

    def set_module_type(self, module_type: str | type[nn.Module], config: _T | None) -> Self:
        """Set the config of one module type; None means off. A type that has an entry keeps its rank among them.

        Raises:
            TypeError: ``module_type`` is neither a string nor an ``nn.Module`` subclass.
            ValueError: a type name without a dot, or a config that is refused; this object is as it was.
        """
        key = self._normalize_module_type(module_type)
        self.module_type_configs = {**(self.module_type_configs or {}), key: config}
        return self

    def set_module_name(self, module_name: str, config: _T | None) -> Self:
        """Set the config for module names that the regular expression ``module_name`` matches; None means off.

        A pattern that has an entry keeps its rank among them.

        Raises:
            TypeError: ``module_name`` is not a string.
            pydantic.ValidationError: the config is refused; this object is as it was.
        """
        if not isinstance(module_name, str):
            raise TypeError(
                f"Keys of module_name_configs must be strings, got {type(module_name).__name__}: {module_name!r}."
            )
        self.module_name_configs = {**(self.module_name_configs or {}), module_name: config}
        return self

    def only_for(self, *targets: _Target | Iterable[_Target]) -> Self:
        """Move the global config onto ``targets`` (module types or name patterns) and switch the rest off.

        Each target gets a copy of its own, which replaces an entry that it has. Entries for other targets stay.

        Raises:
            ValueError: no targets, or ``global_config`` is off.
            TypeError: a target is neither a string nor an ``nn.Module`` subclass; this object is as it was.
        """
        found = _unpacked(targets)
        if not found:
            raise ValueError("only_for requires at least one target.")
        if self._is_global_config_disabled():
            raise ValueError(
                "only_for requires a non-disabled global_config, which it gives to the targets. After only_for or "
                "set_global(None) it is off: name all targets in one only_for(...) call, or call set_global first."
            )
        _check_targets(found)
        moved = cast("_T", self.global_config)
        with self._all_or_nothing():
            self._set_targets({target: moved.model_copy(deep=True) for target in found})
            self.set_global(None)
        return self

    def without(self, *targets: _Target | Iterable[_Target]) -> Self:
        """Switch compression off for ``targets`` (module types or name patterns); no targets is no change.

        Raises:
            TypeError: a target is neither a string nor an ``nn.Module`` subclass; this object is as it was.
        """
        found = _unpacked(targets)
        _check_targets(found)
        with self._all_or_nothing():
            self._set_targets(dict.fromkeys(found))
        return self

    def _set_targets(self, configs: Mapping[_Target, _T | None]) -> None:
        types: dict[_Target, _T | None] = dict(self.module_type_configs or {})
        names = dict(self.module_name_configs or {})
        for target, config in configs.items():
            if isinstance(target, str):
                names[target] = config
            else:
                types[type_name(target)] = config
        self.module_type_configs, self.module_name_configs = types, names

    # Resolution

    def build_module_config_dict(self, model: nn.Module) -> ModuleConfigDict:
        """Return the config of every module of ``model``, under the section that it comes from.

        Modules stand in order of priority, the strongest first. Where a module inherits its config from an ancestor
        the three ``module_*_spec`` fields are empty. Modules with the same config share one object.

        Raises:
            ValueError: a name key is not a valid regular expression.
        """
        result: ModuleConfigDict = {level: {} for level in ConfigLevel}
        inherited: dict[int, _T] = {}
        for name, rule in resolve_module_rules(self, model).by_priority():
            config = rule.config
            if rule.inherited:
                if id(config) not in inherited:
                    inherited[id(config)] = config.model_copy(update={field: {} for field in _MODULE_SPEC_FIELDS})
                config = inherited[id(config)]
            result[rule.level][name] = config
        return result

    def get_module_config(self, name: str, module: nn.Module | None) -> _T | None:
        """Return the config that names or types ``module`` itself, else the global one; ancestors do not count.

        Args:
            name: full dotted name.
            module: the module, or None to look at names only.
        """
        return cast("_T", match_module(self, name, module))


def _unpacked(targets: tuple[Any, ...]) -> tuple[_Target, ...]:
    """Return the targets of a call; a single list, tuple or other iterable of targets is unpacked."""
    if len(targets) == 1 and isinstance(targets[0], Iterable) and not isinstance(targets[0], str | type):
        return tuple(targets[0])
    return targets


def _check_targets(targets: Iterable[object]) -> None:
    for target in targets:
        if isinstance(target, type):
            if not issubclass(target, nn.Module):
                raise TypeError(f"targets must be nn.Module subclasses or name strings, got {target.__name__}.")
        elif not isinstance(target, str):
            raise TypeError(f"targets must be module types or name strings, got {type(target).__name__}: {target!r}.")
