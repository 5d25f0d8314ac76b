"""Spec values whose class may be a subclass of the declared one: written with its name, and read back by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import SerializerFunctionWrapHandler, ValidatorFunctionWrapHandler, WrapSerializer, WrapValidator
from pydantic_core.core_schema import SerializationInfo

from .spec import CompressionSpec

SPEC_CLASS_KEY = "spec_class"
"""Key under which a dump names the spec's class when it is not the declared one."""

_T = TypeVar("_T")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _subclasses(cls: type[CompressionSpec]) -> Iterator[type[CompressionSpec]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _find_spec_class(name: object) -> type[CompressionSpec]:
    """Return the loaded spec class called ``name``. Nothing is imported: a config file must not run code."""
    found = [cls for cls in _subclasses(CompressionSpec) if _class_name(cls) == name]
    if not found:
        raise ValueError(f"No spec class {name!r} is loaded; import the module that defines it before reading this.")
    return found[-1]


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, Mapping) and SPEC_CLASS_KEY in value:
        fields = {key: field for key, field in value.items() if key != SPEC_CLASS_KEY}
        return handler(_find_spec_class(value[SPEC_CLASS_KEY]).model_validate(fields))
    return handler(value)


def _serialize(value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    if not isinstance(value, CompressionSpec) or not _is_extended(type(value)):
        return handler(value)
    dumped = value.model_dump(mode=info.mode)
    return {SPEC_CLASS_KEY: _class_name(type(value)), **dumped}


def dump_spec(spec: CompressionSpec) -> dict[str, Any]:
    """Return the fields of ``spec`` as plain data, named if it is of a user's subclass.

    Computed fields are left out, and so are fields that are unset by default and were left so.
    """
    cls = type(spec)
    unset = {
        name
        for name, field in cls.model_fields.items()
        if _is_unset(value := getattr(spec, name)) and value == field.get_default(call_default_factory=True)
    }
    fields = spec.model_dump(mode="json", exclude={*cls.model_computed_fields, *unset})
    return {SPEC_CLASS_KEY: _class_name(cls), **fields} if _is_extended(cls) else fields


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(item is None for item in value))


def _is_extended(cls: type[CompressionSpec]) -> bool:
    """Return whether ``cls`` is a user's subclass: its parent is itself a concrete spec class."""
    return any(issubclass(base, CompressionSpec) and base is not CompressionSpec for base in cls.__bases__)


OfKind = Annotated[_T, WrapValidator(_validate), WrapSerializer(_serialize)]
"""``OfKind[Spec]``: a ``Spec`` or a subclass of it; a subclass survives a dump and a load."""
