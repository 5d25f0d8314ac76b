"""Which entry of a config owns a module, an op, a tensor; and what is said of keys that own nothing."""

from __future__ import annotations

import logging
import re
import sys
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from bitwright.config._module_index import ModuleIndex
from bitwright.config.matching import (
    ConfigLevel,
    OpLevel,
    lookup_spec,
    resolve_module_rules,
    resolve_op_rule,
)

from .toy_configs import Block, ToyConfig, ToyModel, ToyModuleConfig, ToyOpConfig, ToySpec, toy_module

LINEAR = "torch.nn.modules.linear.Linear"


def strengths(config: ToyConfig, model: nn.Module) -> dict[str, float]:
    """Module name to the strength of the config that owns it."""
    return {name: rule.config.strength for name, rule in resolve_module_rules(config, model).items()}


class TestModuleRules:
    """Precedence and inheritance."""

    def test_every_module_has_one_rule_under_its_canonical_name(self) -> None:
        model = ToyModel()
        rules = resolve_module_rules(ToyConfig(), model)
        assert set(rules) == {name for name, _ in model.named_modules()}
        assert len(rules) == 12
        assert all(rule.level is ConfigLevel.GLOBAL and rule.key is None for rule in rules.values())

    def test_names_beat_types_beat_global(self) -> None:
        config = ToyConfig(
            global_config=toy_module(1),
            module_type_configs={nn.Linear: toy_module(2)},
            module_name_configs={r"layers\.0\.up": toy_module(3)},
        )
        found = strengths(config, ToyModel())
        assert found["layers.0.up"] == 3
        assert found["layers.0.down"] == found["head"] == 2
        assert found["layers.0.act"] == found["embed"] == found[""] == 1

    def test_the_last_listed_entry_wins_over_a_more_specific_one(self) -> None:
        both = {"layers.1": toy_module(1), "layers": toy_module(2)}
        assert strengths(ToyConfig(module_name_configs=both), ToyModel())["layers.1"] == 2
        swapped = dict(reversed(both.items()))
        assert strengths(ToyConfig(module_name_configs=swapped), ToyModel())["layers.1"] == 1

    def test_descendants_inherit_without_module_specs(self) -> None:
        config = toy_module(4, module_state_spec={"weight": ToySpec()}, module_input_spec={0: None})
        rules = resolve_module_rules(ToyConfig(module_name_configs={"layers.0": config}), ToyModel())
        owner, child = rules["layers.0"], rules["layers.0.up"]
        assert not owner.inherited
        assert owner.module_state_spec == {"weight": ToySpec()}
        assert owner.module_input_spec == {0: None}
        assert child.inherited
        assert child.owner == "layers.0"
        assert child.module_state_spec == child.module_input_spec == child.module_output_spec == {}
        assert child.config is owner.config

    def test_a_pattern_that_matches_parent_and_child_gives_both_the_module_specs(self) -> None:
        config = toy_module(4, module_state_spec={"weight": ToySpec()})
        rules = resolve_module_rules(ToyConfig(module_name_configs={r"layers\.0.*": config}), ToyModel())
        assert [name for name, rule in rules.items() if rule.module_state_spec] == [
            "layers.0.down",
            "layers.0.act",
            "layers.0.up",
            "layers.0",
        ]

    @pytest.mark.parametrize("key", ["head", "output"])
    def test_a_shared_module_is_found_under_any_of_its_names(self, key: str) -> None:
        rules = resolve_module_rules(ToyConfig(module_name_configs={key: None}), ToyModel())
        assert rules["head"].describe() == f"module_name_configs[{key!r}]"
        assert "output" not in rules
        assert rules.unmatched == ()

    def test_a_shared_module_keeps_its_module_specs_where_the_key_matches_it_too(self) -> None:
        """Although a later parent hands the same config down to it first."""
        shared = nn.ReLU()
        model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
        config = toy_module(1, module_input_spec={0: ToySpec()})
        rules = resolve_module_rules(ToyConfig(module_name_configs={".*": config}), model)
        assert rules["0.0"].module_input_spec == {0: ToySpec()}

    def test_patterns_match_whole_names_only(self) -> None:
        rules = resolve_module_rules(ToyConfig(module_name_configs={"layer": None, "ayers": None}), ToyModel())
        assert all(rule.level is ConfigLevel.GLOBAL for rule in rules.values())

    def test_a_dot_is_a_wildcard_in_a_plain_key_too(self) -> None:
        model = nn.Module()
        for name in ("a_b", "ab", "axb"):
            model.add_module(name, nn.ReLU())
        rules = resolve_module_rules(ToyConfig(module_name_configs={"a.b": None}), model)
        assert {name for name, rule in rules.items() if rule.key} == {"a_b", "axb"}

    def test_the_empty_name_is_the_root(self) -> None:
        rules = resolve_module_rules(ToyConfig(module_name_configs={"": toy_module(3)}), ToyModel())
        assert {rule.owner for rule in rules.values()} == {""}

    def test_types_match_exactly(self) -> None:
        class MyLinear(nn.Linear):
            pass

        model = nn.Sequential(MyLinear(2, 2), nn.Linear(2, 2))
        assert strengths(ToyConfig(module_type_configs={nn.Linear: toy_module(9)}), model) == {
            "": 0.5,
            "0": 0.5,
            "1": 9,
        }

    def test_the_public_path_of_a_type_matches(self) -> None:
        found = strengths(ToyConfig(module_type_configs={"torch.nn.Linear": toy_module(9)}), ToyModel())
        assert found["head"] == 9
        assert found["embed"] == 0.5

    def test_an_import_that_is_forbidden_matches_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "blocked", None)
        rules = resolve_module_rules(ToyConfig(module_type_configs={"blocked.Layer": None}), ToyModel())
        assert [unmatched.key for unmatched in rules.unmatched] == ["blocked.Layer"]

    def test_a_class_written_past_validation_is_a_type_key(self) -> None:
        config = ToyConfig()
        config.module_type_configs[nn.Linear] = toy_module(9)  # type: ignore[index]
        assert strengths(config, ToyModel())["head"] == 9
        config.module_type_configs[nn.Linear] = 5  # type: ignore[index, assignment]
        with pytest.raises(TypeError, match=rf"module_type_configs\['{re.escape(LINEAR)}'\] is 5"):
            resolve_module_rules(config, ToyModel())

    def test_siblings_that_stand_there_twice_are_indexed_once(self) -> None:
        children = [nn.Identity() for _ in range(300)]
        [root, *rest] = ModuleIndex(nn.ModuleList([*children, *children])).modules
        assert root.children == list(range(1, 301))
        assert [entry.names for entry in rest] == [[str(at), str(at + 300)] for at in range(300)]

    def test_a_public_path_is_not_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A config file must not run code: only namespaces of loaded modules are read."""
        lazy = types.ModuleType("lazy_namespace")
        lazy.__getattr__ = lambda name: pytest.fail("looked up lazily")  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "lazy_namespace", lazy)
        config = ToyConfig(module_type_configs={"lazy_namespace.Linear": None, "antigravity.Linear": None})
        assert len(resolve_module_rules(config, ToyModel()).unmatched) == 2
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize("section", ["module_name_configs", "module_type_configs"])
    def test_entries_written_past_validation_are_named(self, section: str) -> None:
        """``config.module_name_configs["a.b"] = 5`` is nothing that pydantic sees."""
        config = ToyConfig()
        getattr(config, section)["a.b"] = 5
        with pytest.raises(TypeError, match=rf"{section}\['a\.b'\] is 5, not a ToyModuleConfig or None"):
            resolve_module_rules(config, ToyModel())

    def test_a_parametrized_module_counts_as_its_own_class(self) -> None:
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
        assert strengths(ToyConfig(module_type_configs={nn.Linear: toy_module(9)}), model)["0"] == 9

    def test_priority_ranks_sections_then_later_entries(self) -> None:
        config = ToyConfig(module_type_configs={nn.ReLU: None}, module_name_configs={"embed": None, "head": None})
        order = [name for name, _ in resolve_module_rules(config, ToyModel()).by_priority()]
        assert order[:4] == ["head", "embed", "layers.1.act", "layers.0.act"]

    def test_a_module_that_contains_itself_is_walked_once(self) -> None:
        model = Block()
        model.up.add_module("parent", model)
        rules = resolve_module_rules(ToyConfig(module_name_configs={"up": toy_module(3)}), model)
        assert set(rules) == {"", "up", "act", "down"}

    def test_modules_that_compare_equal_are_told_apart(self) -> None:
        class Equal(nn.Module):
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = None  # type: ignore[assignment]

        model = nn.Sequential(Equal(), Equal())
        assert set(resolve_module_rules(ToyConfig(), model)) == {"", "0", "1"}

    @pytest.mark.parametrize("where", ["module_name_configs", "op_name_config"])
    def test_an_invalid_pattern_names_key_and_position(self, where: str) -> None:
        if where == "module_name_configs":
            config = ToyConfig(module_name_configs={"layers(": None})
            expected = r"module_name_configs['layers(']: the key is not a valid regular expression: missing )"
        else:
            config = ToyConfig(global_config=toy_module(1, op_name_config={"add(": None}))
            expected = r"global_config.op_name_config['add(']: the key is not a valid regular expression: missing )"
        with pytest.raises(ValueError, match=re.escape(expected) + r".* at position \d+") as caught:
            resolve_op_rule(resolve_module_rules(config, ToyModel())[""], "add", "add")
        assert isinstance(caught.value.__cause__, re.error)

    def test_many_modules_share_one_config_object(self) -> None:
        """Cost per module is a rule, not a copy of the config."""
        model = nn.Sequential(*[Block() for _ in range(500)])
        config = ToyConfig(module_name_configs={r"\d+": toy_module(1, module_state_spec={"weight": None})})
        rules = resolve_module_rules(config, model)
        assert len(rules) == 2001
        assert len({id(rule.config) for rule in rules.values()}) == 2
        built = config.build_module_config_dict(model)
        assert len({id(value) for value in built[ConfigLevel.MODULE_NAME].values()}) == 2


class TestBuildModuleConfigDict:
    """The form that coreai-opt gives the result."""

    def test_each_module_stands_in_one_section(self) -> None:
        config = ToyConfig(
            module_type_configs={nn.Linear: toy_module(2)}, module_name_configs={"layers.0": toy_module(3)}
        )
        built = config.build_module_config_dict(ToyModel())
        assert set(built) == set(ConfigLevel)
        assert set(built[ConfigLevel.MODULE_NAME]) == {"layers.0", "layers.0.up", "layers.0.act", "layers.0.down"}
        assert set(built[ConfigLevel.MODULE_TYPE]) == {"layers.1.up", "layers.1.down", "head"}
        assert set(built[ConfigLevel.GLOBAL]) == {"", "embed", "layers", "layers.1", "layers.1.act"}

    def test_inherited_configs_have_no_module_specs_and_the_original_keeps_its_own(self) -> None:
        original = toy_module(4, module_input_spec={0: ToySpec()}, op_type_config={"linear": None})
        config = ToyConfig(module_name_configs={"layers.0": original})
        built = config.build_module_config_dict(ToyModel())[ConfigLevel.MODULE_NAME]
        assert built["layers.0"] == original
        assert built["layers.0.up"] == toy_module(4, op_type_config={"linear": None})
        assert original.module_input_spec == {0: ToySpec()}

    def test_direct_look_up_ignores_ancestors(self) -> None:
        model = ToyModel()
        config = ToyConfig(
            module_type_configs={"torch.nn.Linear": toy_module(2)},
            module_name_configs={"layers.0": toy_module(3), r"layers\.\d": toy_module(4)},
        )
        assert config.get_module_config("layers.0", model.layers[0]) == toy_module(4)
        assert config.get_module_config("layers.0.up", model.layers[0].up) == toy_module(2)
        assert config.get_module_config("layers.0.up", None) == ToyModuleConfig()


class TestKeysWithoutEffect:
    """Nothing passes in silence."""

    def test_unmatched_names_and_types_propose_the_nearest(self) -> None:
        config = ToyConfig(
            module_type_configs={"torch.nn.Lineer": None, nn.Conv2d: None},
            module_name_configs={r"layer\.0\.up": None, "zzzzzz": None, "head": None},
        )
        unmatched = resolve_module_rules(config, ToyModel()).unmatched
        assert [key.where for key in unmatched] == [
            r"module_name_configs['layer\\.0\\.up']",
            "module_name_configs['zzzzzz']",
            "module_type_configs['torch.nn.Lineer']",
            "module_type_configs['torch.nn.modules.conv.Conv2d']",
        ]
        by_key = {key.key: key for key in unmatched}
        assert by_key[r"layer\.0\.up"].nearest[0] == "layers.0.up"
        assert LINEAR in by_key["torch.nn.Lineer"].nearest
        assert by_key["zzzzzz"].nearest == ()
        assert str(by_key["zzzzzz"]) == "module_name_configs['zzzzzz'] matches nothing."
        assert "nearest: 'layers.0.up'" in str(by_key[r"layer\.0\.up"])

    def test_a_type_key_proposes_subclasses_in_the_model(self) -> None:
        class Projection(nn.Linear):
            pass

        config = ToyConfig(module_type_configs={"torch.nn.Linear": None})
        (unmatched,) = resolve_module_rules(config, nn.Sequential(Projection(2, 2))).unmatched
        assert unmatched.nearest[0].endswith(".Projection")

    def test_shadowed_entries_name_what_stands_over_them(self) -> None:
        config = ToyConfig(
            module_type_configs={nn.Embedding: None},
            module_name_configs={"layers.1": None, "layers": None, "embed": None},
        )
        shadowed = resolve_module_rules(config, ToyModel()).shadowed
        assert [(entry.where, entry.by) for entry in shadowed] == [
            ("module_name_configs['layers.1']", ("module_name_configs['layers']",)),
            ("module_type_configs['torch.nn.modules.sparse.Embedding']", ("module_name_configs['embed']",)),
        ]
        assert "has no effect" in str(shadowed[0])

    def test_op_keys_that_no_op_asked_for(self) -> None:
        config = ToyConfig(
            global_config=toy_module(
                1, op_type_config={"linear": None, "matmull": None}, op_name_config={"lin_1": None}
            ),
            module_name_configs={
                "head": toy_module(2, op_type_config={"add": None}),
                "gone": toy_module(3, op_type_config={"x": None}),
            },
        )
        rules = resolve_module_rules(config, ToyModel())
        assert len(rules.unmatched_op_keys()) == 4
        for name, op_type in (("lin", "linear"), ("mm", "matmul")):
            resolve_op_rule(rules[""], name, op_type)
        keys = {key.where: key.nearest for key in rules.unmatched_op_keys()}
        assert keys == {
            "global_config.op_type_config['matmull']": ("matmul",),
            "global_config.op_name_config['lin_1']": ("lin",),
            "module_name_configs['head'].op_type_config['add']": (),
        }

    def test_an_op_key_that_only_other_modules_have(self) -> None:
        """Its nearest name would be the key itself; the message says where it is in place of that."""
        head = toy_module(2, op_type_config={"add": None, "linera": None}, op_name_config={r"mm_\d": None})
        rules = resolve_module_rules(ToyConfig(module_name_configs={"head": head}), ToyModel())
        resolve_op_rule(rules[""], ("mm_1",), ("add", "sum"))
        resolve_op_rule(rules["head"], "lin", "linear")
        elsewhere = "is in the model, but not in the modules that belong to module_name_configs['head']."
        assert [str(key).partition(" matches nothing; ")[2] for key in rules.unmatched_op_keys()] == [
            rf"'mm_\\d' {elsewhere}",
            f"'add' {elsewhere}",
            "nearest: 'linear'.",
        ]
        assert rules.unmatched_op_keys()[1].nearest == ()

    def test_a_name_that_is_no_pattern_for_itself(self) -> None:
        model = nn.Sequential(nn.ModuleDict({"a+b": nn.Linear(2, 2)}))
        (unmatched,) = resolve_module_rules(ToyConfig(module_name_configs={"0.a+b": None}), model).unmatched
        assert str(unmatched).endswith(rf"keys are regular expressions, so write {re.escape('0.a+b')!r}.")
        escaped = ToyConfig(module_name_configs={re.escape("0.a+b"): None})
        assert resolve_module_rules(escaped, model).unmatched == ()

    def test_a_key_that_a_stronger_key_overrides_still_counts_as_matched(self) -> None:
        config = ToyConfig(global_config=toy_module(1, op_type_config={"add": None}, op_name_config={"add": None}))
        rules = resolve_module_rules(config, ToyModel())
        resolve_op_rule(rules[""], "add", "add")
        assert rules.unmatched_op_keys() == ()


class TestOpRules:
    """op_name_config, then op_type_config, then the module's fields."""

    def rule(self, **fields: Any) -> Any:
        return resolve_module_rules(ToyConfig(global_config=toy_module(1, **fields)), nn.ReLU())[""]

    def test_default_is_the_modules_own_fields(self) -> None:
        rule = self.rule(op_input_spec={0: {"level": 5}})
        found = resolve_op_rule(rule, "add_1", "add")
        assert found.op_input_spec == {0: ToySpec(level=5)}
        assert (found.level, found.key, found.describe()) == (OpLevel.DEFAULT, None, "global_config")

    def test_type_beats_default_and_name_beats_type(self) -> None:
        rule = self.rule(op_type_config={"add": {"op_input_spec": {}}}, op_name_config={r"add_\d": None})
        by_type, by_name = resolve_op_rule(rule, "add", "add"), resolve_op_rule(rule, "add_1", "add")
        assert (by_type.level, by_type.op_input_spec) == (OpLevel.OP_TYPE, {})
        assert by_type.op_state_spec == ToyOpConfig.get_default_state_spec()
        assert by_type.describe() == "global_config.op_type_config['add']"
        assert (by_name.level, by_name.op_input_spec) == (OpLevel.OP_NAME, {"*": None})
        assert by_name.describe() == r"global_config.op_name_config['add_\\d']"

    def test_the_last_matching_name_wins_and_must_match_whole(self) -> None:
        rule = self.rule(op_name_config={"add_1": {"op_input_spec": {}}, "add.*": None, "dd_1": {}})
        assert resolve_op_rule(rule, "add_1", "add").key == "add.*"

    def test_types_are_exact(self) -> None:
        rule = self.rule(op_type_config={"ad.": None, "add": None})
        assert resolve_op_rule(rule, "x", "add_").level is OpLevel.DEFAULT
        assert resolve_op_rule(rule, "x", "add").key == "add"

    def test_several_spellings_and_the_last_declared_wins(self) -> None:
        rule = self.rule(op_type_config={"add_": None, "add": {}, "aten.add.Tensor": None})
        assert resolve_op_rule(rule, "x", ["add", "add_"]).key == "add"
        assert resolve_op_rule(rule, ["x", "y"], ["aten.add.Tensor", "add_"]).key == "aten.add.Tensor"

    def test_several_names(self) -> None:
        rule = self.rule(op_name_config={"block.add": None})
        assert resolve_op_rule(rule, ["add_7", "block.add"], "add").level is OpLevel.OP_NAME


def test_none_that_was_written_past_validation_means_off() -> None:
    config = ToyConfig(global_config=toy_module(1))
    assert config.module_name_configs is not None
    config.module_name_configs["head"] = None
    assert config.global_config is not None
    assert config.global_config.op_type_config is not None
    config.global_config.op_type_config["add"] = None
    rules = resolve_module_rules(config, ToyModel())
    assert rules["head"].config.op_state_spec == {"*": None}
    assert resolve_op_rule(rules[""], "add", "add").op_input_spec == {"*": None}


class TestLookupSpec:
    """Keys of a spec dictionary."""

    def test_exact_beats_wildcard_and_none_is_found(self) -> None:
        specs = {"*": "all", "weight": None}
        assert (lookup_spec(specs, ["weight"]).spec, lookup_spec(specs, ["weight"]).found) == (None, True)
        assert lookup_spec(specs, ["bias"]).spec == "all"
        assert lookup_spec(specs, ["bias"]).key == "*"

    def test_nothing_named_differs_from_opted_out(self) -> None:
        assert not lookup_spec({"weight": None}, ["bias"]).found
        assert not lookup_spec({}, []).found

    def test_the_last_declared_of_several_wins_with_a_log_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert lookup_spec({0: "position", "x": "name", "*": "all"}, ["x", 0]).spec == "name"
        assert "[0, 'x']" in caplog.text

    def test_one_match_logs_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            lookup_spec({"x": 1, "*": 2}, ["x", "y"])
        assert not caplog.records


# An independent, slow definition of who owns what, over random trees.


@st.composite
def module_trees(draw: st.DrawFn) -> nn.Module:
    """A random tree of three leaf types and two containers, in which modules may be shared."""
    pool: list[nn.Module] = []

    def build(depth: int) -> nn.Module:
        if pool and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(pool))
        if depth == 0 or draw(st.booleans()):
            module = draw(st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity]))()
        else:
            module = draw(st.sampled_from([nn.Sequential, nn.ModuleList]))()
            for index in range(draw(st.integers(1, 3))):
                module.add_module(str(index), build(depth - 1))
        pool.append(module)
        return module

    root = nn.Sequential()
    for index in range(draw(st.integers(1, 3))):
        root.add_module(draw(st.sampled_from(["a", "b", "c"])) + str(index), build(3))
    return root


KEYS = st.sampled_from(
    [
        "a0",
        "b0",
        "c1",
        r"a0\..*",
        r".*\.0",
        r".*\.1",
        "",
        ".*",
        "a0.0",
        "b1.1.0",
        "..",
        "a0..",
        r"[ab]\d",
        "c.",
        r".*\.1\.0",
        "nope",
    ]
)
TYPES = st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity, nn.Sequential, nn.ModuleList, nn.Linear])


def parents_of(model: nn.Module) -> dict[int, set[int]]:
    """Module id to the ids of the modules that hold it."""
    parents: dict[int, set[int]] = {id(module): set() for module in model.modules()}
    for module in model.modules():
        for child in module.children():
            parents[id(child)].add(id(module))
    return parents


def ancestors(module_id: int, parents: dict[int, set[int]]) -> set[int]:
    """Ids of everything above a module."""
    found: set[int] = set()
    todo = list(parents[module_id])
    while todo:
        parent = todo.pop()
        if parent not in found:
            found.add(parent)
            todo.extend(parents[parent])
    return found


def slow_owner(config: ToyConfig, model: nn.Module, module: nn.Module) -> tuple[ConfigLevel, str | None, bool]:
    """Section, key and directness for one module: the strongest entry that matches it or anything above it."""
    above = ancestors(id(module), parents_of(model))
    aliases = list(model.named_modules(remove_duplicate=False))
    for key in reversed(list(config.module_name_configs or {})):
        hits = {id(hit) for name, hit in aliases if re.fullmatch(key, name)}
        if id(module) in hits or hits & above:
            return ConfigLevel.MODULE_NAME, key, id(module) in hits
    for key in reversed(list(config.module_type_configs or {})):
        hits = {id(hit) for _, hit in aliases if f"{type(hit).__module__}.{type(hit).__qualname__}" == key}
        if id(module) in hits or hits & above:
            return ConfigLevel.MODULE_TYPE, str(key), id(module) in hits
    return ConfigLevel.GLOBAL, None, True


@settings(max_examples=120, deadline=None)
@given(
    model=module_trees(),
    names=st.lists(KEYS, unique=True, max_size=5),
    classes=st.lists(TYPES, unique=True, max_size=3),
)
def test_rules_equal_a_slow_definition(model: nn.Module, names: list[str], classes: list[type[nn.Module]]) -> None:
    """The strongest matching entry owns a module, directly exactly when the key matches the module itself."""
    config = ToyConfig(
        module_type_configs={cls: toy_module(at) for at, cls in enumerate(classes)},
        module_name_configs={name: toy_module(10 + at) for at, name in enumerate(names)},
    )
    rules = resolve_module_rules(config, model)
    for name, module in model.named_modules():
        rule = rules[name]
        assert (rule.level, rule.key, not rule.inherited) == slow_owner(config, model, module)
    assert sorted(rule.priority for rule in rules.values()) == list(range(len(rules)))
    levels = [rule.level for _, rule in rules.by_priority()]
    assert levels == sorted(levels)


class TestMisspeltStates:
    """Keys of state specs that name no tensor: said where they look like a mistake, and only there."""

    @staticmethod
    def mistakes(*keys: str) -> dict[str, tuple[str, ...]]:
        specs = dict.fromkeys(keys, ToySpec())
        config = ToyConfig(global_config=ToyModuleConfig(op_state_spec=specs))
        rules = resolve_module_rules(config, nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))
        return {key.key: key.nearest for key in rules.unmatched_state_keys()}

    def test_a_key_that_resembles_a_name(self) -> None:
        assert self.mistakes("wieght") == {"wieght": ("weight",)}
        assert self.mistakes("weight", "bais") == {"bais": ("bias",)}

    def test_a_dictionary_that_names_nothing(self) -> None:
        assert self.mistakes("kernel") == {"kernel": ()}

    @pytest.mark.parametrize(
        "keys", [("*",), ("weight", "in_proj_weight"), ("in_proj_weight",), ("weight", "kernel"), ("weight_ih_l1",), ()]
    )
    def test_keys_that_other_models_have(self, keys: tuple[str, ...]) -> None:
        assert self.mistakes(*keys) == {}
