"""Registries: extension points where a class is found by a string key."""

from __future__ import annotations

import difflib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T", bound=type)


class RegistryMixin:
    """Give every subclass a registry of its own; classes below it are added by ``@Base.register(key)``."""

    REGISTRY: ClassVar[OrderedDict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.REGISTRY = OrderedDict()

    @classmethod
    def register(cls, key: str) -> Callable[[_T], _T]:
        """Return a decorator that registers a class under ``key``; an existing key is replaced with a log warning."""

        def decorate(registered: _T) -> _T:
            if key in cls.REGISTRY and cls.REGISTRY[key] is not registered:
                _logger.warning("%s: key %r was registered before and is replaced.", cls.__name__, key)
            cls.REGISTRY[key] = registered
            return registered

        return decorate

    @classmethod
    def unregister(cls, key: str) -> Any:
        """Remove ``key`` and return its class.

        Raises:
            KeyError: nothing is registered under ``key``.
        """
        if key not in cls.REGISTRY:
            raise KeyError(cls._unknown(key))
        return cls.REGISTRY.pop(key)

    @classmethod
    def get_class(cls, key: str) -> Any:
        """Return the class registered under ``key``.

        Raises:
            KeyError: nothing is registered under ``key``.
        """
        try:
            return cls.REGISTRY[key]
        except KeyError:
            raise KeyError(cls._unknown(key)) from None

    @classmethod
    def resolve(cls, data: str | type) -> Any:
        """Return the registered class that ``data`` (a key, or the class itself) names.

        Raises:
            ValueError: the key or class is not registered, or ``data`` is neither; lists the choices.
        """
        if isinstance(data, str):
            if data in cls.REGISTRY:
                return cls.REGISTRY[data]
            raise ValueError(cls._unknown(data))
        if isinstance(data, type):
            if data in cls.REGISTRY.values():
                return data
            names = sorted(value.__name__ for value in cls.REGISTRY.values())
            raise ValueError(
                f"Class {data.__name__} is not registered in {cls.__name__}. Available classes: {names}. "
                f'Register it with @{cls.__name__}.register("<key>").'
            )
        raise ValueError(f"Expected a registry key or a class for {cls.__name__}, got {type(data).__name__}: {data!r}.")

    @classmethod
    def list_registry_keys(cls) -> list[str]:
        """Return the registered keys in order of registration."""
        return list(cls.REGISTRY.keys())

    @classmethod
    def list_registry_values(cls) -> list[Any]:
        """Return the registered classes in order of registration."""
        return list(cls.REGISTRY.values())

    @classmethod
    def _unknown(cls, key: object) -> str:
        near = difflib.get_close_matches(str(key), cls.REGISTRY, n=1)
        proposal = f"; did you mean {near[0]!r}?" if near else "."
        keys = sorted(cls.REGISTRY)
        return f"No class is registered with key {key!r} in {cls.__name__}. Available keys: {keys}{proposal}"


class UnknownKeyError(KeyError, ValueError):
    """No class is registered with a key that a mapping names: a ``KeyError`` for code written for coreai-opt, and a
    ``ValueError``, which pydantic turns into a validation error."""

    def __str__(self) -> str:
        return str(self.args[0])


class ClassRegistryMixin(RegistryMixin):
    """A registry whose entries are named in specs by key or by class."""

    @classmethod
    def get_key(cls, registered: type) -> str:
        """Return the key that ``registered`` stands under.

        Raises:
            ValueError: the class is not registered.
        """
        for key, value in cls.REGISTRY.items():
            if value is registered:
                return key
        raise ValueError(
            f"{registered!r} is not registered in {cls.__name__}; decorate it with @{cls.__name__}.register."
        )


class ConfigRegistryMixin(RegistryMixin):
    """A registry whose entries are built from a mapping with a ``type`` key."""

    @classmethod
    def maybe_build_from_dict(cls, data: Any) -> Any:
        """Build an entry from ``{"type": key, ...}``; anything that is neither a mapping nor a string is returned.

        Raises:
            ValueError: ``type`` is missing or unknown (a ``KeyError``, too), or ``data`` is a string.
            pydantic.ValidationError: a key is no field of the entry; proposes the nearest.
        """
        if isinstance(data, str):
            raise ValueError(
                f"{cls.__name__} is written as a mapping, for example {{'type': {cls._nearest_key(data)!r}}} with its "
                f"fields beside it; got {data!r}."
            )
        if not isinstance(data, dict):
            return data
        fields = dict(data)
        if "type" not in fields:
            raise ValueError(f"{cls.__name__} needs a 'type' key; choose one of {sorted(cls.REGISTRY)}.")
        key = fields.pop("type")
        if key not in cls.REGISTRY:
            raise UnknownKeyError(cls._unknown(key))
        kind = cls.REGISTRY[key]
        known = getattr(kind, "model_fields", fields)
        unknown = {name: value for name, value in fields.items() if name not in known}
        if unknown:
            raise ValidationError.from_exception_data(
                kind.__name__, [_no_field(kind.__name__, name, value, known) for name, value in unknown.items()]
            )
        return kind(**fields)

    @classmethod
    def _nearest_key(cls, name: str) -> str:
        return next(iter(difflib.get_close_matches(name, cls.REGISTRY, n=1, cutoff=0.0)), name)

    @classmethod
    def registry_key(cls) -> str:
        """Return the key that this class is registered under.

        Raises:
            ValueError: the class is not registered.
        """
        for base in cls.__mro__:
            for key, value in base.__dict__.get("REGISTRY", {}).items():
                if value is cls:
                    return str(key)
        raise ValueError(f'{cls.__name__} is not registered; decorate it with @<base>.register("<key>").')


def _no_field(owner: str, name: str, value: Any, known: Iterable[str]) -> InitErrorDetails:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"the keys are {sorted(['type', *known])}."
    text = f"{owner} has no field {name!r}; {remedy}".replace("{", "{{").replace("}", "}}")
    return InitErrorDetails(type=PydanticCustomError("extra_forbidden", text), loc=(str(name),), input=value)
