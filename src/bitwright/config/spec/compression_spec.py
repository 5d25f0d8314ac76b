"""Base class of all specs."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from bitwright.common import CompressionType

__all__ = ["CompressionSpec"]


class CompressionSpec(BaseModel):
    """What is done to one tensor. Frozen, hashable, and strict: an unknown field is an error.

    Fields that a subclass *computes* (``computed_field``) appear in ``model_dump()``. On the way back in they are
    accepted and set nothing; a subclass may compare them with what it computes.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest one), or a bad value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    _compression_type: CompressionType = PrivateAttr()
    _EXTRA_ACCEPTED: ClassVar[frozenset[str]] = frozenset()

    def get_compression_type(self) -> CompressionType:
        """Return the technique that this spec belongs to."""
        return self._compression_type

    @model_validator(mode="before")
    @classmethod
    def _drop_computed_and_name_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        computed = {*cls.model_computed_fields, *cls._EXTRA_ACCEPTED}
        kept = {key: value for key, value in data.items() if key not in computed}
        unknown = [key for key in kept if key not in cls.model_fields]
        if unknown:
            raise ValueError("; ".join(_unknown_field(cls, str(key)) for key in unknown))
        return kept


def _unknown_field(cls: type[BaseModel], key: str) -> str:
    near = difflib.get_close_matches(key, cls.model_fields, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"the fields are {sorted(cls.model_fields)}."
    return f"{cls.__name__} has no field {key!r}; {remedy}"
