"""What is compressed around one op: its inputs, its outputs and its state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from ._polymorphic import OfKind
from ._strict import StrictModel
from .spec import CompressionSpec
from .spec_dicts import _digit_keys_to_int, _disabled_if_none, spec_dict_is_active

__all__ = ["OpCompressionConfig", "WeightOnlyOpValidationMixin"]

_SpecT = TypeVar("_SpecT", bound=CompressionSpec)

_OFF_IF_NONE = BeforeValidator(_disabled_if_none)
_POSITIONS = BeforeValidator(_digit_keys_to_int)
_OP_SPEC_FIELDS = ("op_input_spec", "op_output_spec", "op_state_spec")


class OpCompressionConfig(StrictModel, Generic[_SpecT]):
    """Specs for the inputs, outputs and state of an op.

    For each of the three fields: omitted means the class's default, None means off (stored as ``{"*": None}``), and
    ``{}`` says nothing about any tensor.

    Attributes:
        op_input_spec: spec by input position, input name or ``"*"``; a digit string counts as a position.
        op_output_spec: the same for outputs.
        op_state_spec: spec by local parameter or buffer name (``"weight"``), or ``"*"``.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest), two keys for one position
            (``0`` and ``"0"``), or a bad spec.
    """

    op_input_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _OFF_IF_NONE] = Field(
        default_factory=dict
    )
    op_output_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _OFF_IF_NONE] = Field(
        default_factory=dict
    )
    op_state_spec: Annotated[dict[str, OfKind[_SpecT] | None] | None, _OFF_IF_NONE] = Field(default_factory=dict)

    @classmethod
    @abstractmethod
    def get_default_input_spec(cls) -> dict[str | int, _SpecT | None]:
        """Return what an omitted ``op_input_spec`` means."""

    @classmethod
    @abstractmethod
    def get_default_output_spec(cls) -> dict[str | int, _SpecT | None]:
        """Return what an omitted ``op_output_spec`` means."""

    @classmethod
    @abstractmethod
    def get_default_state_spec(cls) -> dict[str, _SpecT | None]:
        """Return what an omitted ``op_state_spec`` means."""

    @model_validator(mode="before")
    @classmethod
    def _fill_omitted(cls, data: Any) -> Any:
        return _with_op_defaults(cls, data)


def _with_op_defaults(op_config_cls: type[OpCompressionConfig[Any]], data: Any) -> Any:
    """Return a copy of ``data`` in which omitted op-level spec fields have the op config class's defaults."""
    if not isinstance(data, Mapping):
        return data
    filled = dict(data)
    defaults = (
        op_config_cls.get_default_input_spec,
        op_config_cls.get_default_output_spec,
        op_config_cls.get_default_state_spec,
    )
    for field, default in zip(_OP_SPEC_FIELDS, defaults, strict=True):
        if field not in filled:
            filled[field] = default()
    return filled


def _refuse_active(config: object, fields: tuple[str, ...]) -> None:
    for field in fields:
        specs = getattr(config, field)
        if spec_dict_is_active(specs):
            keys = [key for key, spec in specs.items() if spec is not None]
            raise ValueError(
                f"{type(config).__name__} does not support {field}: this technique compresses weights only. "
                f"Remove the keys {keys} or set them to None."
            )


class WeightOnlyOpValidationMixin(StrictModel):
    """Refuse active input and output specs; stands before :class:`OpCompressionConfig` among the bases.

    Raises:
        pydantic.ValidationError: an input or output spec holds anything but None.
    """

    @model_validator(mode="after")
    def _refuse_activation_specs(self) -> WeightOnlyOpValidationMixin:
        _refuse_active(self, ("op_input_spec", "op_output_spec"))
        return self
