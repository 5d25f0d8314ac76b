"""What is compressed inside one module: per op, and at the module's boundary."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from ._polymorphic import OfKind
from ._strict import StrictModel
from .op_config import _OFF_IF_NONE, _OP_SPEC_FIELDS, _POSITIONS, OpCompressionConfig, _refuse_active, _with_op_defaults
from .spec import CompressionSpec
from .spec_dicts import _empty_if_none

__all__ = ["ModuleCompressionConfig", "WeightOnlyModuleValidationMixin"]

_OpConfigT = TypeVar("_OpConfigT", bound=OpCompressionConfig[Any])
_SpecT = TypeVar("_SpecT", bound=CompressionSpec)

_EMPTY_IF_NONE = BeforeValidator(_empty_if_none)
_MODULE_SPEC_FIELDS = ("module_input_spec", "module_output_spec", "module_state_spec")


def _generic_argument(cls: type[BaseModel], origin: type[BaseModel]) -> type[Any] | None:
    """Return the first type argument that ``cls`` or a base gave to the generic ``origin``; None if it gave none."""
    for base in cls.__mro__:
        metadata = base.__dict__.get("__pydantic_generic_metadata__", {})
        if metadata.get("origin") is origin and isinstance(metadata["args"][0], type):
            return cast("type[Any]", metadata["args"][0])
    return None


class ModuleCompressionConfig(StrictModel, Generic[_OpConfigT, _SpecT]):
    """Specs for the ops inside a module, and for the module as an opaque box.

    The op-level fields follow :class:`OpCompressionConfig`. For one op the last matching entry of ``op_name_config``
    wins, else its entry in ``op_type_config``, else the three op-level fields; nothing is merged between these.
    Module-level fields (None means ``{}``) override op-level ones for the tensors that they name. They hold for the
    module that the config was given to and are not passed on to its children.

    Attributes:
        op_input_spec: default for inputs of ops in this module.
        op_output_spec: default for outputs of ops in this module.
        op_state_spec: default for parameters and buffers that ops in this module use.
        op_type_config: op config by op type (``"linear"``); None as a value switches that type off.
        op_name_config: op config by regular expression that matches the whole op name; None as a value means off.
        module_input_spec: spec by position or name of the module's inputs, or ``"*"``.
        module_output_spec: the same for the module's outputs.
        module_state_spec: spec by local name of tensors that are registered on the module itself, or ``"*"``.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest) or a bad value.
    """

    op_input_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _OFF_IF_NONE] = Field(
        default_factory=dict
    )
    op_output_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _OFF_IF_NONE] = Field(
        default_factory=dict
    )
    op_state_spec: Annotated[dict[str, OfKind[_SpecT] | None] | None, _OFF_IF_NONE] = Field(default_factory=dict)
    op_type_config: Annotated[dict[str, _OpConfigT | None] | None, _EMPTY_IF_NONE] = Field(default_factory=dict)
    op_name_config: Annotated[dict[str, _OpConfigT | None] | None, _EMPTY_IF_NONE] = Field(default_factory=dict)
    module_input_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _EMPTY_IF_NONE] = Field(
        default_factory=dict
    )
    module_output_spec: Annotated[dict[str | int, OfKind[_SpecT] | None] | None, _POSITIONS, _EMPTY_IF_NONE] = Field(
        default_factory=dict
    )
    module_state_spec: Annotated[dict[str, OfKind[_SpecT] | None] | None, _EMPTY_IF_NONE] = Field(default_factory=dict)

    @classmethod
    def _get_op_config_class(cls) -> type[_OpConfigT] | None:
        return _generic_argument(cls, ModuleCompressionConfig)

    @classmethod
    def _disabled(cls) -> Self:
        return cls.model_validate(dict.fromkeys(_OP_SPEC_FIELDS))

    @model_validator(mode="before")
    @classmethod
    def _fill_omitted(cls, data: Any) -> Any:
        op_config_cls = cls._get_op_config_class()
        if op_config_cls is None:
            raise ValueError(
                f"{cls.__name__} does not say which op config it holds; derive it from "
                "ModuleCompressionConfig[<op config class>, <spec class>]."
            )
        return _with_op_defaults(op_config_cls, data)

    @field_validator("op_type_config", "op_name_config", mode="after")
    @classmethod
    def _disable_none_entries(cls, configs: dict[str, _OpConfigT | None]) -> dict[str, _OpConfigT]:
        op_config_cls = cast("type[_OpConfigT]", cls._get_op_config_class())
        off: dict[str, Any] = dict.fromkeys(_OP_SPEC_FIELDS)
        return {key: op_config_cls.model_validate(off) if config is None else config for key, config in configs.items()}

    def _get_fake_module_kwargs(self) -> dict[str, Any]:
        """Return the settings that a subclass added: what its simulators take besides the spec."""
        own = [name for name in type(self).model_fields if name not in ModuleCompressionConfig.model_fields]
        return {name: getattr(self, name) for name in own}


class WeightOnlyModuleValidationMixin(StrictModel):
    """Refuse active input and output specs; stands before :class:`ModuleCompressionConfig` among the bases.

    Raises:
        pydantic.ValidationError: an op-level or module-level input or output spec holds anything but None.
    """

    @model_validator(mode="after")
    def _refuse_activation_specs(self) -> WeightOnlyModuleValidationMixin:
        _refuse_active(self, ("op_input_spec", "op_output_spec", "module_input_spec", "module_output_spec"))
        return self
