"""Defaults, None, empty dicts, keys and bad input of op, module and whole configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bitwright._utils.config_utils import get_last_matching_spec
from bitwright.config import CompressionConfig, ModuleCompressionConfig, OpCompressionConfig
from bitwright.config.spec_dicts import ALL_TENSORS, spec_dict_is_active

from .toy_configs import (
    ToyConfig,
    ToyModuleConfig,
    ToyOpConfig,
    ToySpec,
    WeightOnlyModuleConfig,
    WeightOnlyOpConfig,
    toy_module,
)

DEFAULTS = {
    "op_input_spec": {"*": ToySpec(level=1)},
    "op_output_spec": {0: ToySpec(level=2)},
    "op_state_spec": {"weight": ToySpec(level=3)},
}
OFF = {"*": None}
LINEAR = "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize("config_cls", [ToyOpConfig, ToyModuleConfig])
@pytest.mark.parametrize("field", list(DEFAULTS))
class TestOpSpecFields:
    """The three op-level fields of op and module configs."""

    def test_omitted_is_the_class_default_while_others_are_given(self, config_cls: Any, field: str) -> None:
        config = config_cls(**{other: {} for other in DEFAULTS if other != field})
        assert getattr(config, field) == DEFAULTS[field]

    def test_none_means_off_for_all_tensors(self, config_cls: Any, field: str) -> None:
        assert getattr(config_cls(**{field: None}), field) == OFF

    def test_empty_says_nothing_and_differs_from_off(self, config_cls: Any, field: str) -> None:
        assert getattr(config_cls(**{field: {}}), field) == {}
        assert config_cls(**{field: {}}) != config_cls(**{field: None})

    def test_assignment_follows_the_same_rules(self, config_cls: Any, field: str) -> None:
        config = config_cls()
        setattr(config, field, None)
        assert getattr(config, field) == OFF
        setattr(config, field, {"x": {"level": 9}})
        assert getattr(config, field) == {"x": ToySpec(level=9)}

    def test_defaults_are_not_shared_between_configs(self, config_cls: Any, field: str) -> None:
        first, second = config_cls(), config_cls()
        getattr(first, field)["added"] = None
        assert "added" not in getattr(second, field)


@pytest.mark.parametrize(
    "field", ["op_type_config", "op_name_config", "module_input_spec", "module_output_spec", "module_state_spec"]
)
def test_none_is_empty_in_the_other_fields_of_a_module_config(field: str) -> None:
    assert getattr(ToyModuleConfig(**{field: None}), field) == {}
    assert getattr(ToyModuleConfig(), field) == {}


@pytest.mark.parametrize("field", ["op_type_config", "op_name_config"])
def test_none_for_an_op_entry_switches_all_its_tensors_off(field: str) -> None:
    entries = getattr(ToyModuleConfig(**{field: {"linear": None, "add": ToyOpConfig()}}), field)
    assert entries["linear"] == ToyOpConfig(op_input_spec=None, op_output_spec=None, op_state_spec=None)
    assert entries["add"] == ToyOpConfig()


def test_an_op_entry_takes_defaults_not_its_modules_fields() -> None:
    """Levels are not merged: what an op entry omits is the class default."""
    config = ToyModuleConfig(
        op_state_spec={"weight": {"level": 50}}, op_type_config={"linear": {"op_input_spec": None}}
    )
    assert config.op_type_config is not None
    assert config.op_type_config["linear"] == ToyOpConfig(op_input_spec=None)
    assert config.op_type_config["linear"].op_state_spec == DEFAULTS["op_state_spec"]


class TestSpecKeys:
    """Keys of spec dictionaries."""

    @pytest.mark.parametrize("field", ["op_input_spec", "op_output_spec", "module_input_spec", "module_output_spec"])
    def test_digit_strings_are_positions(self, field: str) -> None:
        config = ToyModuleConfig(**{field: {"0": None, "12": None, "x": None, "*": None}})
        assert list(getattr(config, field)) == [0, 12, "x", "*"]

    def test_only_ascii_digits_are_positions(self) -> None:
        """A superscript two is a digit to str.isdigit, but no number."""
        assert list(ToyOpConfig(op_input_spec={"²": None, "-1": None, -1: None}).op_input_spec or {}) == ["²", "-1", -1]

    def test_state_keys_stay_text(self) -> None:
        assert list(ToyOpConfig(op_state_spec={"0": None}).op_state_spec or {}) == ["0"]
        with pytest.raises(ValidationError, match="valid string"):
            ToyOpConfig(op_state_spec={0: None})

    @pytest.mark.parametrize("keys", [[0, "0"], ["0", 0], ["1", "01"]])
    def test_two_keys_for_one_position_are_refused(self, keys: list[Any]) -> None:
        with pytest.raises(ValidationError, match=rf"Key collision.*{keys[0]!r} and {keys[1]!r}"):
            ToyOpConfig(op_input_spec=dict.fromkeys(keys))

    def test_active_means_any_value_that_is_not_none(self) -> None:
        assert spec_dict_is_active({0: None, "*": ToySpec()})
        assert not any(spec_dict_is_active(specs) for specs in (None, {}, {ALL_TENSORS: None}))


class TestMisspeltKeys:
    """An unknown key is an error that proposes the nearest, at every depth."""

    @pytest.mark.parametrize(
        ("build", "location", "proposal"),
        [
            (lambda: ToyOpConfig(op_inptu_spec=None), ("op_inptu_spec",), "op_input_spec"),
            (lambda: ToyModuleConfig(strenght=1), ("strenght",), "strength"),
            (lambda: ToyConfig(globl_config=None), ("globl_config",), "global_config"),
            (
                lambda: ToyConfig(module_name_configs={"a": {"op_type_config": {"linear": {"op_stat_spec": None}}}}),
                ("module_name_configs", "a", "op_type_config", "linear", "op_stat_spec"),
                "op_state_spec",
            ),
        ],
    )
    def test_error_locates_and_proposes(self, build: Any, location: tuple[str, ...], proposal: str) -> None:
        with pytest.raises(ValidationError) as caught:
            build()
        (error,) = caught.value.errors()
        assert error["type"] == "extra_forbidden"
        assert error["loc"] == location
        assert f"id you mean '{proposal}'" in error["msg"]

    def test_all_unknown_keys_are_reported_together(self) -> None:
        with pytest.raises(ValidationError) as caught:
            ToyOpConfig(op_inputs=None, op_outputs=None)
        assert [error["loc"] for error in caught.value.errors()] == [("op_inputs",), ("op_outputs",)]

    def test_a_misspelt_spec_field_is_an_error(self) -> None:
        with pytest.raises(ValidationError, match="id you mean 'level'"):
            ToyConfig(global_config={"op_state_spec": {"weight": {"levle": 3}}})

    def test_assigning_a_misspelt_field_is_an_error(self) -> None:
        config: Any = ToyConfig()
        with pytest.raises(ValueError, match="id you mean 'global_config'"):
            config.globl_config = None

    def test_braces_in_a_key_do_not_break_the_message(self) -> None:
        with pytest.raises(ValidationError, match=r"\{global\}"):
            ToyConfig(**{"{global}": None})


class TestWholeConfig:
    """CompressionConfig's three fields."""

    def test_omitted_global_config_is_the_default_module_config(self) -> None:
        assert ToyConfig().global_config == ToyModuleConfig()
        assert ToyConfig(module_type_configs={nn.Linear: None}).global_config == ToyModuleConfig()

    def test_none_is_a_module_config_with_everything_off(self) -> None:
        off = toy_module(0.5, op_input_spec=None, op_output_spec=None, op_state_spec=None)
        config = ToyConfig(
            global_config=None, module_type_configs={nn.Linear: None}, module_name_configs={"head": None}
        )
        assert config.global_config == off
        assert config.module_type_configs == {LINEAR: off}
        assert config.module_name_configs == {"head": off}

    def test_none_for_a_section_is_empty(self) -> None:
        config = ToyConfig(module_type_configs=None, module_name_configs=None)
        assert config.module_type_configs == config.module_name_configs == {}

    def test_classes_become_their_defining_path_and_a_second_spelling_replaces_the_first(self) -> None:
        config = ToyConfig(module_type_configs={nn.Linear: toy_module(1), LINEAR: toy_module(2)})
        assert config.module_type_configs == {LINEAR: toy_module(2)}

    @pytest.mark.parametrize("key", [torch.cat, int, 3])
    def test_a_type_key_that_is_no_module_class_is_refused(self, key: Any) -> None:
        with pytest.raises(ValidationError):
            ToyConfig(module_type_configs={key: None})

    def test_a_type_name_without_dot_is_refused_and_the_class_is_proposed(self) -> None:
        with pytest.raises(ValidationError, match=rf"'Linear'.*Did you mean '{LINEAR}'"):
            ToyConfig(module_type_configs={"Linear": None})

    @pytest.mark.parametrize("field", ["module_input_spec", "module_output_spec", "module_state_spec"])
    def test_global_config_takes_no_module_specs(self, field: str) -> None:
        with pytest.raises(ValidationError, match=f"global_config cannot have .* but sets {field}"):
            ToyConfig(global_config=toy_module(1, **{field: {"x": None}}))

    def test_integer_module_names_are_text(self) -> None:
        """YAML reads the name of a Sequential's child as a number."""
        assert list(ToyConfig(module_name_configs={0: None}).module_name_configs or {}) == ["0"]

    def test_a_number_and_a_text_for_one_module_are_refused(self) -> None:
        with pytest.raises(ValidationError, match="0 and '0' name the same module"):
            ToyConfig(module_name_configs={"0": None, 0: toy_module(1)})

    def test_float_module_names_are_refused(self) -> None:
        """0.10 would have become 0.1."""
        with pytest.raises(ValidationError, match="in quotes"):
            ToyConfig(module_name_configs={0.1: None})

    def test_equality_covers_disabling(self) -> None:
        assert ToyConfig(global_config=None) == ToyConfig().set_global(None)
        assert ToyConfig(global_config=None) != ToyConfig()

    def test_deep_copies_are_equal_and_independent(self) -> None:
        config = ToyConfig(module_name_configs={"head": toy_module(1)})
        for twin in (copy.deepcopy(config), config.model_copy(deep=True)):
            assert twin == config
            twin.module_name_configs["head"].strength = 9
            assert twin != config


class TestUnfinishedClasses:
    """Generic bases that were not told what they hold."""

    def test_bare_bases_cannot_be_built(self) -> None:
        with pytest.raises(TypeError, match="abstract"):
            OpCompressionConfig()
        with pytest.raises(RuntimeError, match="does not say which module config"):
            CompressionConfig()
        with pytest.raises(ValidationError, match="does not say which op config"):
            ModuleCompressionConfig()

    def test_a_class_derived_through_another_still_knows_its_parts(self) -> None:
        class Derived(ToyConfig):
            pass

        assert Derived._get_module_config_class() is ToyModuleConfig
        assert ToyModuleConfig._get_op_config_class() is ToyOpConfig
        assert CompressionConfig._get_module_config_class() is None

    def test_simulators_get_the_fields_that_a_subclass_added(self) -> None:
        assert toy_module(0.25)._get_fake_module_kwargs() == {"strength": 0.25, "mode": "plain"}


class TestWeightOnly:
    """Palettization and pruning take no activation specs."""

    @pytest.mark.parametrize("config_cls", [WeightOnlyOpConfig, WeightOnlyModuleConfig])
    @pytest.mark.parametrize("field", ["op_input_spec", "op_output_spec"])
    def test_active_op_specs_are_refused(self, config_cls: Any, field: str) -> None:
        with pytest.raises(ValidationError, match=f"does not support {field}.*'x'"):
            config_cls(**{field: {"x": ToySpec()}})

    @pytest.mark.parametrize("field", ["module_input_spec", "module_output_spec"])
    def test_active_module_specs_are_refused(self, field: str) -> None:
        with pytest.raises(ValidationError, match=f"does not support {field}"):
            WeightOnlyModuleConfig(**{field: {"*": ToySpec()}})

    @pytest.mark.parametrize("specs", [None, {}, {"*": None}, {0: None}])
    def test_inactive_specs_pass(self, specs: Any) -> None:
        expected = {"*": None} if specs is None else specs
        op = WeightOnlyOpConfig(op_input_spec=specs, op_output_spec=specs)
        assert (op.op_input_spec, op.op_output_spec) == (expected, expected)
        module = WeightOnlyModuleConfig(op_input_spec=specs, module_input_spec=specs)
        assert module.op_input_spec == expected
        assert not any((module.module_input_spec or {}).values())

    def test_assignment_is_checked_too(self) -> None:
        config = WeightOnlyOpConfig()
        before = config.model_copy(deep=True)
        with pytest.raises(ValidationError, match="does not support"):
            config.op_input_spec = {"*": ToySpec()}
        assert config == before


def test_the_look_up_helper_of_coreai_opt_exists() -> None:
    assert get_last_matching_spec(["a", "b"], {"b": None, "*": 1}) == (None, True)
    assert get_last_matching_spec(["c"], {"b": 1}) == (None, False)
