"""Base of all config models: unknown keys are refused with a proposal, and a failed assignment changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from .spec.compression_spec import _unknown_field


class StrictModel(BaseModel):
    """A pydantic model that validates assignments and keeps its old state when one fails."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        unknown = {str(key): value for key, value in data.items() if key not in cls.model_fields}
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__, [_extra_forbidden(cls, key, value) for key, value in unknown.items()]
            )
        return data

    if not TYPE_CHECKING:  # a visible __setattr__ would make type checkers accept any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in type(self).model_fields:
                if not name.startswith("_") and not hasattr(type(self), name):
                    raise ValueError(_unknown_field(type(self), name))
                super().__setattr__(name, value)
                return
            # pydantic runs "after" validators on the changed model and leaves the change in place when they fail.
            with self._all_or_nothing():
                super().__setattr__(name, value)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put all fields back as they were if the block raises."""
        state, fields_set = self.__dict__.copy(), self.__pydantic_fields_set__.copy()
        try:
            yield
        except BaseException:
            object.__setattr__(self, "__dict__", state)
            object.__setattr__(self, "__pydantic_fields_set__", fields_set)
            raise


def _extra_forbidden(cls: type[BaseModel], key: str, value: Any) -> InitErrorDetails:
    text = _unknown_field(cls, key).replace("{", "{{").replace("}", "}}")
    return InitErrorDetails(type=PydanticCustomError("extra_forbidden", text), loc=(key,), input=value)
