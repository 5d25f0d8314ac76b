"""Quantizer configs: defaults, checks, files, execution modes, schedules, key-value caches."""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import nn

from bitwright.quantization.config import (
    ExecutionMode,
    InvalidExecutionModeError,
    KVCacheQuantConfig,
    ModuleQuantizerConfig,
    OpQuantizerConfig,
    QATSchedule,
    QuantizerConfig,
)
from bitwright.quantization.spec import (
    PerTokenGranularity,
    QuantizationGranularity,
    QuantizationSpec,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)

LINEAR = "torch.nn.modules.linear.Linear"
SCHEMA = Path(__file__).parents[3] / "docs" / "schema" / "quantization.json"

GUIDE = """
quantization_spec:
  weight: &weight
    dtype: int4
    qscheme: symmetric
    qformulation: zp
    granularity: {type: per_block, axis: 1, block_size: 32}
    fake_quantize_cls: default
    qparam_calculator_cls: default
    range_calculator_cls: minmax
  activation: &activation
    dtype: uint8
    qscheme: asymmetric
    qformulation: minval
    granularity: {type: per_tensor}
    qparam_calculator_cls: moving_average
quantization_config:
  execution_mode: eager
  preserved_attributes: [vocabulary]
  global_config:
    op_input_spec: {"*": *activation}
    op_output_spec: null
    op_state_spec: {weight: *weight}
    op_type_config:
      matmul: null
      add: {op_state_spec: null}
    qat_schedule: {enable_fake_quant: 100, disable_observer: 500}
  module_type_configs:
    torch.nn.modules.linear.Linear:
      op_state_spec:
        weight: {<<: *weight, granularity: {type: per_block, block_size: [1, 16]}}
      module_output_spec: {0: *activation}
  module_name_configs:
    model.layers.[0-3]: null
    lm_head: {}
"""


class TestDefaults:
    """What omitted fields mean."""

    @pytest.mark.parametrize("config_cls", [OpQuantizerConfig, ModuleQuantizerConfig])
    def test_int8_for_activations_and_weight(self, config_cls: Any) -> None:
        config = config_cls()
        assert config.op_input_spec == config.op_output_spec == {"*": default_activation_quantization_spec()}
        assert config.op_state_spec == {"weight": default_weight_quantization_spec()}

    def test_whole_config(self) -> None:
        config = QuantizerConfig()
        assert config.global_config == ModuleQuantizerConfig()
        assert config.execution_mode is ExecutionMode.GRAPH
        assert config.preserved_attributes is None
        assert config.kv_cache_quant_configs is None

    def test_the_config_classes_are_final(self) -> None:
        for final in (ModuleQuantizerConfig, QuantizerConfig):
            with pytest.raises(TypeError, match=f"cannot subclass {final.__name__}"):
                type("Derived", (final,), {})


class TestFiles:
    """Config files as the guide of coreai-opt writes them."""

    def test_a_file_with_every_section(self) -> None:
        weight = QuantizationSpec(dtype="int4", granularity={"type": "per_block", "axis": 1, "block_size": 32})
        wide = QuantizationSpec(dtype=torch.int4, granularity={"type": "per_block", "block_size": (1, 16)})
        activation = QuantizationSpec(
            dtype=torch.uint8, qscheme="asymmetric", qformulation="minval", qparam_calculator_cls="moving_average"
        )
        assert QuantizerConfig.from_yaml(io.StringIO(GUIDE)) == QuantizerConfig(
            execution_mode=ExecutionMode.EAGER,
            preserved_attributes=["vocabulary"],
            global_config=ModuleQuantizerConfig(
                op_input_spec={"*": activation},
                op_output_spec=None,
                op_state_spec={"weight": weight},
                op_type_config={"matmul": None, "add": OpQuantizerConfig(op_state_spec=None)},
                qat_schedule=QATSchedule(enable_fake_quant=100, disable_observer=500),
            ),
            module_type_configs={
                nn.Linear: ModuleQuantizerConfig(op_state_spec={"weight": wide}, module_output_spec={0: activation})
            },
            module_name_configs={"model.layers.[0-3]": None, "lm_head": ModuleQuantizerConfig()},
        )

    def test_every_way_out_leads_back(self) -> None:
        config = QuantizerConfig.from_yaml(io.StringIO(GUIDE))
        assert config is not None
        assert QuantizerConfig.from_yaml(config.to_yaml()) == config
        assert QuantizerConfig.from_json(config.to_json()) == config
        assert QuantizerConfig.from_dict(config.to_dict()) == config

    def test_keys_of_granularities_that_no_anchor_can_have(self) -> None:
        @QuantizationGranularity.register("mylib.row of tokens")
        class Row(PerTokenGranularity):
            pass

        try:
            spec = QuantizationSpec(granularity=Row())
            config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_state_spec={"weight": spec}))
            text = config.to_yaml()
            assert "&int8_mylib_row_of_tokens" in text
            assert QuantizerConfig.from_yaml(text) == config
        finally:
            del QuantizationGranularity.REGISTRY["mylib.row of tokens"]

    def test_to_dict_keeps_live_objects(self) -> None:
        dumped = QuantizerConfig.presets.w4_per_block().to_dict()["quantization_config"]
        assert dumped["execution_mode"] is ExecutionMode.GRAPH
        weight = dumped["global_config"]["op_state_spec"]["weight"]
        assert weight["dtype"] is torch.int4
        assert weight["granularity"] == {"type": "per_block", "axis": None, "block_size": 32}
        assert weight["n_bits"] == 4

    def test_from_dict_leaves_nested_mappings_alone(self) -> None:
        content = yaml.safe_load(GUIDE)
        before = copy.deepcopy(content)
        QuantizerConfig.from_dict(content)
        assert content == before

    def test_a_null_section_is_refused(self) -> None:
        with pytest.raises(TypeError, match="'quantization_config' must be a mapping, got NoneType"):
            QuantizerConfig.from_yaml(io.StringIO("quantization_config:\n"))

    @pytest.mark.parametrize(
        ("path", "wrong", "right"),
        [
            (("global_config",), "globl_config", "global_config"),
            (("global_config", "op_state_spec"), "op_state_specs", "op_state_spec"),
            (("global_config", "op_state_spec", "weight", "qscheme"), "qsheme", "qscheme"),
            (("global_config", "qat_schedule", "enable_fake_quant"), "enable_fakequant", "enable_fake_quant"),
        ],
    )
    def test_a_misspelt_key_at_any_depth_proposes_the_nearest(
        self, path: tuple[str, ...], wrong: str, right: str
    ) -> None:
        content = yaml.safe_load(GUIDE)
        parent = content["quantization_config"]
        for key in path[:-1]:
            parent = parent[key]
        parent[wrong] = parent.pop(right)
        with pytest.raises(ValidationError, match=f"id you mean '{right}'"):
            QuantizerConfig.from_dict(content)

    @pytest.mark.skipif(pydantic.VERSION < "2.12", reason="older pydantic words the same schema in another way")
    def test_the_published_schema_is_current(self) -> None:
        """In a fresh process, since registering a class adds to the schema."""
        code = (
            "import json; from bitwright.quantization.config import QuantizerConfig; "
            "print(json.dumps(QuantizerConfig.json_schema(), indent=2))"
        )
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert json.loads(made) == json.loads(SCHEMA.read_text()), (
            f"Renew it: python -c '{code}' > docs/schema/{SCHEMA.name}"
        )

    def test_the_schema_lists_formats_and_forbids_unknown_keys(self) -> None:
        definitions = QuantizerConfig.json_schema()["$defs"]
        spec = definitions["QuantizationSpec"]
        assert {"int4", "uint8", "float8_e4m3fn"} <= set(spec["properties"]["dtype"]["enum"])
        assert set(spec["properties"]) == set(QuantizationSpec.model_fields)
        closed = ("QuantizerConfig", "ModuleQuantizerConfig", "OpQuantizerConfig", "QATSchedule", "QuantizationSpec")
        assert all(definitions[name]["additionalProperties"] is False for name in closed)


class TestExecutionMode:
    """Front ends."""

    def test_values_are_strings(self) -> None:
        assert ExecutionMode("eager") is ExecutionMode.EAGER
        assert ExecutionMode.GRAPH == "graph"
        assert QuantizerConfig(execution_mode="eager").execution_mode is ExecutionMode.EAGER  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("get", "written"),
        [
            (lambda: ExecutionMode.PT2E, r"ExecutionMode\.PT2E"),
            (lambda: ExecutionMode("pt2e"), r"ExecutionMode\('pt2e'\)"),
            (lambda: QuantizerConfig(execution_mode="pt2e").execution_mode, r"ExecutionMode\('pt2e'\)"),
        ],
    )
    def test_the_old_name_works_with_a_warning(self, get: Any, written: str) -> None:
        """The warning quotes what was written."""
        with pytest.warns(DeprecationWarning, match=rf"^{written} is deprecated, use ExecutionMode\.GRAPH instead"):
            assert get() is ExecutionMode.GRAPH

    def test_set_execution_mode(self) -> None:
        config = QuantizerConfig()
        assert config.set_execution_mode("eager") is config
        assert config == QuantizerConfig(execution_mode=ExecutionMode.EAGER)
        with pytest.raises(ValueError, match=r"'GRAPH' is not a valid ExecutionMode.* Expected 'graph' or 'eager'"):
            config.set_execution_mode("GRAPH")
        assert config.execution_mode is ExecutionMode.EAGER

    def test_the_error_for_quantizers_names_the_choices(self) -> None:
        error = InvalidExecutionModeError("foo")
        assert isinstance(error, ValueError)
        assert str(error) == "Unknown execution_mode foo. Expected 'graph' or 'eager'."


class TestQATSchedule:
    """Steps of observers and fake quantization."""

    @pytest.mark.parametrize(
        "schedule",
        [
            QATSchedule(enable_observer=start, enable_fake_quant=start + wait, disable_observer=stop)
            for start, wait, stop in itertools.product((0, 2), (0, 3), (None, 5, 9))
        ],
    )
    def test_state_at_every_step(self, schedule: QATSchedule) -> None:
        """Walked step by step, switching at the named steps."""
        observing = quantizing = False
        for step in range(12):
            observing = (observing or step == schedule.enable_observer) and step != schedule.disable_observer
            quantizing = quantizing or step == schedule.enable_fake_quant
            assert schedule._compute_state(step) == (observing, quantizing)
            assert schedule._compute_state(step).obs_on == observing
            assert schedule._compute_state(step).fq_on == quantizing

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"enable_observer": -1}, "greater than or equal to 0"),
            ({"enable_observer": 10, "enable_fake_quant": 5}, r"enable_fake_quant \(5\) must be >= enable_observer"),
            ({"enable_observer": 5, "enable_fake_quant": 5, "disable_observer": 5}, r"\(5\) must be > enable_observer"),
            ({"enable_fake_quant": 10, "disable_observer": 5}, r"\(5\) must be >= enable_fake_quant"),
            ({"disable_observer": 0}, "greater than 0"),
            ({"enable_fakequant": 5}, "id you mean 'enable_fake_quant'"),
        ],
    )
    def test_refused(self, fields: dict[str, int], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            QATSchedule(**fields)

    def test_equal_schedules_have_equal_hashes(self) -> None:
        assert hash(QATSchedule(least_bits={0: 8, 5: 4})) == hash(QATSchedule(least_bits={5: 4, 0: 8}))
        assert hash(QATSchedule(least_bits={0: 8})) != hash(QATSchedule(least_bits={0: 7}))

    def test_frozen(self) -> None:
        schedule = QATSchedule()
        with pytest.raises(ValidationError, match="frozen"):
            schedule.enable_observer = 3
        assert schedule == QATSchedule()


def cache_op(**fields: Any) -> OpQuantizerConfig:
    """An op config as a key-value cache needs it, with changes."""
    base: dict[str, Any] = {"op_input_spec": {1: QuantizationSpec()}, "op_output_spec": None, "op_state_spec": None}
    return OpQuantizerConfig(**{**base, **fields})


class TestKVCache:
    """Quantization of what enters a key-value cache."""

    def test_the_input_position(self) -> None:
        assert KVCacheQuantConfig(op_quantizer_config=cache_op()).quant_input_idx == 1
        assert KVCacheQuantConfig(op_quantizer_config=cache_op(op_input_spec={"3": {}})).quant_input_idx == 3

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"op_input_spec": {"*": QuantizationSpec()}}, r"exactly one key.*got keys \['\*'\]"),
            ({"op_input_spec": {"k": QuantizationSpec()}}, "exactly one key"),
            ({"op_input_spec": {-1: QuantizationSpec()}}, "non-negative"),
            ({"op_input_spec": {0: QuantizationSpec(), 1: QuantizationSpec()}}, r"got keys \[0, 1\]"),
            ({"op_input_spec": {}}, r"got keys \[\]"),
            ({"op_input_spec": {0: None}}, "non-None QuantizationSpec"),
            ({"op_output_spec": {"*": QuantizationSpec()}}, "op_output_spec must be empty or None"),
            ({"op_state_spec": {"weight": QuantizationSpec()}}, "op_state_spec must be empty or None"),
        ],
    )
    def test_refused_forms(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            KVCacheQuantConfig(op_quantizer_config=cache_op(**fields))

    def test_omitted_fields_are_active_and_hence_refused(self) -> None:
        with pytest.raises(ValidationError, match="Set it to None explicitly"):
            KVCacheQuantConfig(op_quantizer_config=OpQuantizerConfig(op_input_spec={0: QuantizationSpec()}))

    def test_graph_mode_only_and_transactional(self) -> None:
        caches = {"update": KVCacheQuantConfig(op_quantizer_config=cache_op())}
        with pytest.raises(ValidationError, match=r"only supported with ExecutionMode\.GRAPH"):
            QuantizerConfig(execution_mode=ExecutionMode.EAGER, kv_cache_quant_configs=caches)
        config = QuantizerConfig(kv_cache_quant_configs=caches)
        with pytest.raises(ValidationError, match="only supported with"):
            config.set_execution_mode("eager")
        assert config == QuantizerConfig(kv_cache_quant_configs=caches)
        eager = QuantizerConfig(execution_mode=ExecutionMode.EAGER)
        with pytest.raises(ValidationError, match="only supported with"):
            eager.kv_cache_quant_configs = caches
        assert eager.kv_cache_quant_configs is None

    @pytest.mark.parametrize("section", ["global_config", "module_type_configs", "module_name_configs"])
    def test_an_op_type_that_is_configured_twice_is_logged(
        self, section: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        module = ModuleQuantizerConfig(op_type_config={"update": None})
        fields: dict[str, Any] = {section: module if section == "global_config" else {"a.B": module}}
        with caplog.at_level(logging.WARNING):
            QuantizerConfig(
                kv_cache_quant_configs={"update": KVCacheQuantConfig(op_quantizer_config=cache_op())}, **fields
            )
        assert "'update' is in kv_cache_quant_configs and in an op_type_config" in caplog.text

    def test_files(self) -> None:
        config = QuantizerConfig(
            kv_cache_quant_configs={"update": KVCacheQuantConfig(op_quantizer_config=cache_op(op_state_spec={}))}
        )
        assert QuantizerConfig.from_yaml(config.to_yaml()) == config
        assert QuantizerConfig.from_json(config.to_json()) == config


def test_schedules_stand_at_every_level_and_in_files() -> None:
    schedules = [QATSchedule(enable_fake_quant=step) for step in (1, 2, 3)]
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(qat_schedule=schedules[0]),
        module_type_configs={nn.Linear: ModuleQuantizerConfig(qat_schedule=schedules[1])},
        module_name_configs={"head": ModuleQuantizerConfig(qat_schedule=schedules[2])},
    )
    twin = QuantizerConfig.from_yaml(config.to_yaml())
    assert twin == config
    assert twin.module_type_configs is not None
    assert twin.module_type_configs[LINEAR] == ModuleQuantizerConfig(qat_schedule=schedules[1])
