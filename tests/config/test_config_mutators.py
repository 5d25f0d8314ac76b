"""Setters change what they say, return the config, and leave it as it was when they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from .toy_configs import ToyConfig, ToyModuleConfig, ToySpec, toy_module

OFF = ToyModuleConfig(op_input_spec=None, op_output_spec=None, op_state_spec=None)
LINEAR = "torch.nn.modules.linear.Linear"
CONV = "torch.nn.modules.conv.Conv2d"


def rich_config() -> ToyConfig:
    """A config with an entry in every section."""
    return ToyConfig(
        global_config=toy_module(1),
        module_type_configs={nn.Linear: toy_module(2)},
        module_name_configs={"head": toy_module(3), "body": None},
    )


def test_setters_chain_and_set() -> None:
    config = ToyConfig()
    assert (
        config.set_global(toy_module(1)).set_module_type(nn.Linear, None).set_module_name("a", toy_module(2)) is config
    )
    assert config.global_config == toy_module(1)
    assert config.module_type_configs == {LINEAR: OFF}
    assert config.module_name_configs == {"a": toy_module(2)}


def test_setters_take_fields_in_place_of_a_config() -> None:
    config: Any = ToyConfig().set_module_name("a", {"strength": 4})  # type: ignore[arg-type]
    assert config.module_name_configs == {"a": toy_module(4)}


def test_resetting_a_key_keeps_its_rank() -> None:
    config = rich_config().set_module_name("head", None)
    assert list(config.module_name_configs or {}) == ["head", "body"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: c.set_global(toy_module(9, module_state_spec={"weight": ToySpec()})), ValidationError),
        (lambda c: c.set_global(5), ValidationError),
        (lambda c: c.set_module_name("x", 5), ValidationError),
        (lambda c: c.set_module_name("x", {"strenght": 5}), ValidationError),
        (lambda c: c.set_module_name(5, None), TypeError),
        (lambda c: c.set_module_name(nn.Linear, None), TypeError),
        (lambda c: c.set_module_type("Linear", None), ValueError),
        (lambda c: c.set_module_type(int, None), TypeError),
        (lambda c: c.set_module_type(nn.Linear(1, 1), None), TypeError),
        (lambda c: c.set_module_type(nn.Linear, "off"), ValidationError),
        (lambda c: setattr(c, "global_config", toy_module(9, module_input_spec={0: None})), ValidationError),
        (lambda c: setattr(c, "module_name_configs", [1]), ValidationError),
        (lambda c: c.only_for(nn.Conv2d, 42, "a"), TypeError),
        (lambda c: c.only_for(int), TypeError),
        (lambda c: c.only_for(), ValueError),
        (lambda c: c.without("a", 42), TypeError),
    ],
)
def test_a_failing_setter_changes_nothing(change: Callable[[Any], Any], error: type[Exception]) -> None:
    config, before = rich_config(), rich_config()
    with pytest.raises(error):
        change(config)
    assert config == before
    assert config.model_fields_set == before.model_fields_set


class TestOnlyFor:
    """only_for moves the global config onto targets."""

    @pytest.mark.parametrize("as_list", [False, True])
    def test_targets_get_copies_and_the_rest_is_off(self, as_list: bool) -> None:
        targets: list[Any] = [nn.Linear, nn.Conv2d, "head"]
        config = rich_config()
        config = config.only_for(targets) if as_list else config.only_for(*targets)
        assert config.global_config == OFF
        assert config.module_type_configs == {LINEAR: toy_module(1), CONV: toy_module(1)}
        assert config.module_name_configs == {"head": toy_module(1), "body": OFF}
        assert config.module_type_configs is not None
        assert config.module_type_configs[LINEAR] is not config.module_type_configs[CONV]

    def test_a_string_is_one_target(self) -> None:
        assert list(ToyConfig().only_for("abc").module_name_configs or {}) == ["abc"]

    @pytest.mark.parametrize(
        "switched_off",
        [
            lambda: ToyConfig().only_for(nn.Linear),
            lambda: ToyConfig().set_global(None),
            lambda: ToyConfig(global_config=None),
            lambda: ToyConfig.from_dict(ToyConfig(global_config=None).to_dict()),
        ],
    )
    def test_needs_a_global_config_that_is_on(self, switched_off: Callable[[], ToyConfig]) -> None:
        """Also after a dump and a load."""
        config = switched_off()
        with pytest.raises(ValueError, match="non-disabled global_config"):
            config.only_for(nn.Conv2d)
        assert config == switched_off()

    @pytest.mark.parametrize("assign", [True, False])
    def test_a_new_global_config_makes_it_usable_again(self, assign: bool) -> None:
        config = ToyConfig(global_config=None)
        if assign:
            config.global_config = toy_module(8)
        else:
            config.set_global(toy_module(8))
        assert config.only_for("a").module_name_configs == {"a": toy_module(8)}

    def test_a_nested_list_is_refused(self) -> None:
        with pytest.raises(TypeError, match="module types or name strings, got list"):
            ToyConfig().only_for(nn.Linear, [nn.Conv2d])  # type: ignore[list-item]


class TestWithout:
    """without switches targets off."""

    def test_targets_are_off_and_the_rest_stays(self) -> None:
        config = rich_config().without(nn.Conv2d, "head")
        assert config.global_config == toy_module(1)
        assert config.module_type_configs == {LINEAR: toy_module(2), CONV: OFF}
        assert config.module_name_configs == {"head": OFF, "body": OFF}

    @pytest.mark.parametrize("arguments", [(), ([],)])
    def test_no_targets_is_no_change(self, arguments: tuple[Any, ...]) -> None:
        assert rich_config().without(*arguments) == rich_config()

    def test_errors_tell_what_a_target_is(self) -> None:
        with pytest.raises(TypeError, match="must be module types or name strings, got int: 42"):
            ToyConfig().without(42)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"must be nn\.Module subclasses or name strings, got int"):
            ToyConfig().without(int)  # type: ignore[arg-type]
