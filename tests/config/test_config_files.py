"""Configs as dicts, YAML and JSON: what is read, what is refused, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import enum
import io
import json
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError, field_serializer, model_serializer

from bitwright.config import CompressionConfig

from .toy_configs import ToyConfig, ToyModuleConfig, ToyOpConfig, ToySpec, toy_module

TEXT = """
toy_spec:
  strong: &strong
    level: 9
toy_config:
  global_config:
    strength: 0.9
    op_input_spec:
    op_state_spec: {weight: *strong}
  module_type_configs:
    torch.nn.modules.linear.Linear:
      op_input_spec:
        0: *strong
        "1": {<<: *strong}
  module_name_configs:
    head:
    layers.0: {}
"""

EXPECTED = ToyConfig(
    global_config=toy_module(0.9, op_input_spec=None, op_state_spec={"weight": ToySpec(level=9)}),
    module_type_configs={
        "torch.nn.modules.linear.Linear": ToyModuleConfig(op_input_spec={0: ToySpec(level=9), 1: ToySpec(level=9)})
    },
    module_name_configs={"head": None, "layers.0": ToyModuleConfig()},
)


class FinerSpec(ToySpec):
    """A user's spec with one more setting."""

    detail: str = "none"


class TestReading:
    """from_dict, from_yaml, from_json."""

    def test_yaml_with_anchors_merges_nulls_and_quoted_positions(self) -> None:
        assert ToyConfig.from_yaml(io.StringIO(TEXT)) == EXPECTED

    @pytest.mark.parametrize("form", ["str", "path", "text file", "binary file", "text"])
    def test_yaml_from_every_kind_of_source(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(TEXT)
        if form in ("text file", "binary file"):
            with path.open("r" if form == "text file" else "rb") as file:
                assert ToyConfig.from_yaml(file) == EXPECTED
        else:
            source = {"str": str(path), "path": path, "text": TEXT}[form]
            assert ToyConfig.from_yaml(source) == EXPECTED

    def test_json_from_path_file_and_text(self, tmp_path: Path) -> None:
        text = json.dumps(yaml.safe_load(TEXT))
        path = tmp_path / "config.json"
        path.write_text(text)
        for source in (path, str(path), io.StringIO(text), text):
            assert ToyConfig.from_json(source) == EXPECTED

    def test_an_empty_document_warns_and_gives_none(self) -> None:
        with pytest.warns(UserWarning, match="empty"):
            assert ToyConfig.from_yaml(io.StringIO("# nothing\n")) is None

    @pytest.mark.parametrize("text", ["- 1", "5", "text"])
    def test_a_document_that_is_no_mapping_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected a mapping, got"):
            ToyConfig.from_yaml(io.StringIO(text))
        with pytest.raises(ValueError, match="expected an object, got list"):
            ToyConfig.from_json(io.StringIO("[1]"))

    def test_a_missing_file_is_reported_as_such(self) -> None:
        with pytest.raises(FileNotFoundError):
            ToyConfig.from_yaml("no_such_file.yaml")

    @pytest.mark.parametrize("section", [None, [1], "x"])
    def test_a_section_that_is_no_mapping_is_refused_with_the_remedy(self, section: Any) -> None:
        with pytest.raises(TypeError, match=r"'toy_config' must be a mapping.*Write \{\} for the defaults"):
            ToyConfig.from_dict({"toy_config": section})

    def test_sections_are_checked(self) -> None:
        with pytest.raises(RuntimeError, match=r"Found unexpected key 'toy_confg'.*Did you mean 'toy_config'"):
            ToyConfig.from_dict({"toy_confg": {}})
        with pytest.raises(RuntimeError, match="Did not find 'toy_config'"):
            ToyConfig.from_dict({"toy_spec": {}})
        with pytest.raises(TypeError, match="got NoneType"):
            ToyConfig.from_dict(None)  # type: ignore[arg-type]

    def test_a_json_key_written_twice_is_an_error(self) -> None:
        """As in YAML: which one counts would be up to the reader."""
        with pytest.raises(ValueError, match="'head' stands there twice"):
            ToyConfig.from_json('{"toy_config": {"head": 1, "head": 2}}')

    def test_a_key_written_twice_is_an_error(self) -> None:
        """Plain YAML keeps the last and says nothing."""
        text = "toy_config:\n  module_name_configs:\n    head: null\n    head: {}\n"
        with pytest.raises(yaml.YAMLError, match="'head' twice") as caught:
            ToyConfig.from_yaml(text)
        assert "line 4" in str(caught.value)

    def test_merged_keys_are_no_second_writing(self) -> None:
        """A mapping that is merged before its own turn holds the keys of those that it merges itself."""
        text = (
            "toy_config:\n  module_name_configs:\n    a: &a {strength: 1, op_input_spec: null}\n"
            "    b: &b\n      <<: *a\n      strength: 2\n  global_config:\n    <<: *b\n    op_output_spec: null\n"
        )
        found = ToyConfig.from_yaml(text)
        assert found == ToyConfig.from_dict(yaml.safe_load(text))
        with pytest.raises(yaml.YAMLError, match="'strength' twice"):
            ToyConfig.from_yaml(text.replace("strength: 2", "strength: 2\n      strength: 3"))

    def test_a_tag_that_does_not_fit_is_a_yaml_error(self) -> None:
        with pytest.raises(yaml.YAMLError, match="expected a mapping"):
            ToyConfig.from_yaml("toy_config: !!map foo\n")

    @pytest.mark.parametrize("text", ["", "  "])
    def test_empty_text_is_an_empty_document(self, text: str) -> None:
        """Not the folder that ``Path("")`` is."""
        with pytest.warns(UserWarning, match="empty"):
            assert ToyConfig.from_yaml(text) is None
        with pytest.raises(json.JSONDecodeError):
            ToyConfig.from_json(text)

    def test_errors_in_a_file_name_it(self, tmp_path: Path) -> None:
        """With the line, where YAML knows it."""
        path = tmp_path / "toy.yaml"
        path.write_text("toy_config: [1, 2\n")
        with pytest.raises(yaml.YAMLError, match=r'toy\.yaml", line 1'):
            ToyConfig.from_yaml(path)
        path.write_text("- 3\n")
        with pytest.raises(ValueError, match=r"toy\.yaml: expected a mapping, got list"):
            ToyConfig.from_yaml(path)

    def test_yaml_cannot_build_python_objects(self) -> None:
        with pytest.raises(yaml.YAMLError):
            ToyConfig.from_yaml("toy_config:\n  global_config: !!python/object/apply:os.getcwd []\n")

    def test_the_argument_is_left_alone(self) -> None:
        content = yaml.safe_load(TEXT)
        before = copy.deepcopy(content)
        ToyConfig.from_dict(content)
        assert content == before

    @pytest.mark.parametrize("missing", ["_CONFIG_KEY", "_SPEC_KEY"])
    def test_a_class_without_file_keys_says_so(self, missing: str) -> None:
        class Unnamed(CompressionConfig[ToyModuleConfig]):
            if missing != "_CONFIG_KEY":
                _CONFIG_KEY: ClassVar[str] = "toy_config"
            if missing != "_SPEC_KEY":
                _SPEC_KEY: ClassVar[str] = "toy_spec"

        for use in (lambda: Unnamed.from_dict({"toy_config": {}}), lambda: Unnamed().to_yaml(), Unnamed.json_schema):
            with pytest.raises(RuntimeError, match=f"must define {missing}"):
                use()


class TestWriting:
    """to_dict, to_yaml, to_json."""

    def test_to_dict_holds_every_field_as_live_objects(self) -> None:
        dumped = EXPECTED.to_dict()
        assert dumped == {"toy_config": EXPECTED.model_dump()}
        assert dumped["toy_config"]["global_config"]["op_state_spec"] == {"weight": {"level": 9}}
        assert dumped["toy_config"]["global_config"]["module_input_spec"] == {}

    def test_yaml_writes_equal_specs_once_under_a_name(self) -> None:
        text = EXPECTED.to_yaml()
        assert text.count("level: 9") == 1
        assert text.count("&spec\n") == 1
        assert text.count("*spec\n") == 3
        assert list(yaml.safe_load(text)) == ["toy_spec", "toy_config"]

    def test_what_says_nothing_is_left_out(self) -> None:
        assert yaml.safe_load(ToyConfig(global_config=toy_module(0.5, op_input_spec={})).to_yaml())["toy_config"] == {
            "global_config": {
                "op_input_spec": {},
                "op_output_spec": {0: {"level": 2}},
                "op_state_spec": {"weight": {"level": 3}},
            }
        }

    def test_files_are_written_too(self, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        assert EXPECTED.to_yaml(path) == path.read_text()
        assert EXPECTED.to_json(str(tmp_path / "config.json")) == (tmp_path / "config.json").read_text()

    def test_settings_of_a_subclass_go_through_their_serializers(self) -> None:
        """Enumerations, dtypes, and polymorphic parts that name their type."""

        class Ramp(BaseModel):
            steps: int = 3

            @model_serializer(mode="wrap")
            def _with_type(self, handler: Any) -> Any:
                return {"type": "ramp", **handler(self)}

        class Extended(ToyModuleConfig):
            compute: Any = None
            ramp: Any = None

            @field_serializer("compute", when_used="json")
            def _write_dtype(self, dtype: Any) -> str:
                return str(dtype)

        class Whole(CompressionConfig[Extended]):
            _CONFIG_KEY: ClassVar[str] = "c"
            _SPEC_KEY: ClassVar[str] = "s"

        config = Whole(global_config=Extended(compute=torch.float16, ramp=Ramp(steps=3)))
        section = json.loads(config.to_json())["c"]["global_config"]
        assert section["compute"] == "torch.float16"
        assert section["ramp"] == {"type": "ramp", "steps": 3}

    def test_enumerations_are_written_as_their_values(self) -> None:
        class Colour(enum.StrEnum):
            RED = "red"
            BLUE = "blue"

        class Coloured(CompressionConfig[ToyModuleConfig]):
            _CONFIG_KEY: ClassVar[str] = "c"
            _SPEC_KEY: ClassVar[str] = "s"
            colour: Colour = Colour.RED
            colours: list[Colour]

        config = Coloured(colour=Colour.BLUE, colours=[Colour.RED])
        section = json.loads(config.to_json())["c"]
        assert (section["colour"], section["colours"]) == ("blue", ["red"])
        assert Coloured.from_yaml(config.to_yaml()) == config


class TestSpecSubclasses:
    """A user's subclass of a spec keeps its class and fields."""

    def config(self) -> ToyConfig:
        spec = FinerSpec(level=4, detail="fine")
        return ToyConfig(global_config=ToyModuleConfig(op_state_spec={"weight": spec, "bias": ToySpec(level=4)}))

    def test_they_survive_every_form(self) -> None:
        config = self.config()
        for twin in (
            ToyConfig.from_dict(config.to_dict()),
            ToyConfig.from_yaml(config.to_yaml()),
            ToyConfig.from_json(config.to_json()),
            ToyConfig.model_validate(json.loads(config.model_dump_json())),
        ):
            assert twin is not None
            assert twin.global_config is not None
            assert twin == config
            weight = (twin.global_config.op_state_spec or {})["weight"]
            assert type(weight) is FinerSpec
            assert weight.detail == "fine"

    def test_no_warning_is_emitted_while_dumping(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dumped = self.config().to_dict()
            text = self.config().model_dump_json()
        assert ToyConfig.from_dict(dumped) == self.config()
        assert ToyConfig.model_validate_json(text) == self.config()

    def test_an_unknown_class_is_refused_and_not_imported(self) -> None:
        with pytest.raises(ValidationError, match=r"'evil\.Spec' is loaded; import the module"):
            ToyModuleConfig(op_state_spec={"weight": {"spec_class": "evil.Spec", "level": 1}})

    def test_a_class_of_another_technique_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="instance of DifferentSpec"):
            _other_technique().model_validate({"op_state_spec": {"weight": {"spec_class": _class_path(), "level": 1}}})


def _class_path() -> str:
    return f"{FinerSpec.__module__}.{FinerSpec.__qualname__}"


def _other_technique() -> Any:
    from bitwright.config import CompressionSpec, OpCompressionConfig

    class DifferentSpec(CompressionSpec):
        pass

    class DifferentOp(OpCompressionConfig[DifferentSpec]):
        @classmethod
        def get_default_input_spec(cls) -> dict[str | int, DifferentSpec | None]:
            return {}

        @classmethod
        def get_default_output_spec(cls) -> dict[str | int, DifferentSpec | None]:
            return {}

        @classmethod
        def get_default_state_spec(cls) -> dict[str, DifferentSpec | None]:
            return {}

    return DifferentOp


# Round trips of random configs.

SPECS = (
    st.none()
    | st.builds(ToySpec, level=st.integers(-3, 3))
    | st.builds(FinerSpec, level=st.integers(0, 2), detail=st.sampled_from(["null", "yes", "1", "&x", "-", "ü"]))
)
STATE = st.none() | st.dictionaries(st.sampled_from(["weight", "*", "0", "null"]), SPECS, max_size=3)
ACTIVATION = st.none() | st.dictionaries(st.sampled_from(["x", "*", 0, 1, "-1", "é"]), SPECS, max_size=3)
OP_FIELDS = {"op_input_spec": ACTIVATION, "op_output_spec": ACTIVATION, "op_state_spec": STATE}
OPS = st.none() | st.fixed_dictionaries({}, optional=OP_FIELDS).map(ToyOpConfig.model_validate)
OP_ENTRIES = st.none() | st.dictionaries(st.sampled_from(["linear", "add_1", r"a\d", "true"]), OPS, max_size=2)
GLOBAL_FIELDS = {
    **OP_FIELDS,
    "op_type_config": OP_ENTRIES,
    "op_name_config": OP_ENTRIES,
    "strength": st.floats(allow_nan=False, allow_infinity=False),
    "mode": st.sampled_from(["plain", "no", "1e3", ""]),
}
MODULE_FIELDS = {
    **GLOBAL_FIELDS,
    "module_input_spec": ACTIVATION,
    "module_output_spec": ACTIVATION,
    "module_state_spec": STATE,
}
GLOBALS = st.none() | st.fixed_dictionaries({}, optional=GLOBAL_FIELDS).map(ToyModuleConfig.model_validate)
MODULES = st.none() | st.fixed_dictionaries({}, optional=MODULE_FIELDS).map(ToyModuleConfig.model_validate)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "global_config": GLOBALS,
        "module_type_configs": st.dictionaries(st.sampled_from(["torch.nn.Linear", "a.B"]), MODULES, max_size=2),
        "module_name_configs": st.dictionaries(
            st.sampled_from(["", "0", "1.0", r".*\.\d", "null", "true", "a b", "é"]), MODULES, max_size=3
        ),
    },
).map(ToyConfig.model_validate)


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS)
def test_nothing_is_lost_on_any_way_and_back(config: ToyConfig) -> None:
    """Equality covers every field, key and the order-free content of all levels; key order decides precedence."""
    for twin in (
        ToyConfig.from_dict(config.to_dict()),
        ToyConfig.from_yaml(config.to_yaml()),
        ToyConfig.from_json(config.to_json()),
        ToyConfig.from_yaml(config.to_json()),
    ):
        assert twin == config
        assert list(twin.module_name_configs or {}) == list(config.module_name_configs or {})


def test_the_schema_covers_the_file_and_describes_its_fields() -> None:
    schema = ToyConfig.json_schema()
    assert schema["required"] == ["toy_config"]
    assert set(schema["properties"]) == {"toy_config", "toy_spec"}
    definitions = schema["$defs"]
    assert set(definitions["ToyConfig"]["properties"]) == set(ToyConfig.model_fields)
    assert set(definitions["ToyModuleConfig"]["properties"]) == set(ToyModuleConfig.model_fields)
    assert not definitions["ToyModuleConfig"]["additionalProperties"]
    field = definitions["ToyModuleConfig"]["properties"]["op_input_spec"]
    assert {"type": "null"} in field["anyOf"]
    assert field["description"] == "default for inputs of ops in this module."
    json.dumps(schema)
