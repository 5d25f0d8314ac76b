"""QuantizationSpec: what it accepts, refuses, computes, and how it travels."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from pydantic import ValidationError, computed_field

from bitwright.common import CompressionType
from bitwright.quantization.spec import (
    DynamicQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationFormulation,
    QuantizationScheme,
    QuantizationSpec,
    StaticQParamsCalculator,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)

from .spec_strategies import FLOATS, INTEGERS, specs


def test_defaults_are_int8_symmetric_per_tensor() -> None:
    spec = QuantizationSpec()
    assert (spec.dtype, spec.qscheme, spec.qformulation) == (torch.int8, "symmetric", "zp")
    assert spec.granularity == PerTensorGranularity()
    assert spec.float_range == [None, None]
    assert (spec.scale_dtype, spec.averaging_constant) == (None, None)
    assert spec.get_compression_type() is CompressionType.QUANTIZATION


def test_default_specs_of_weights_and_activations() -> None:
    weight, activation = default_weight_quantization_spec(), default_activation_quantization_spec()
    assert weight.granularity == PerChannelGranularity(axis=0)
    assert weight.qparam_calculator_cls is StaticQParamsCalculator
    assert activation == QuantizationSpec(qparam_calculator_cls="moving_average")


@pytest.mark.parametrize(
    ("given_name", "dtype"),
    [
        ("int4", torch.int4),
        (torch.uint2, torch.uint2),
        ("float8_e4m3", torch.float8_e4m3fn),
        ("float4_e2m1fn", torch.float4_e2m1fn_x2),
        ("uint7", torch.uint7),
    ],
)
def test_dtypes_are_taken_by_name_alias_and_object(given_name: Any, dtype: torch.dtype) -> None:
    assert QuantizationSpec(dtype=given_name).dtype is dtype


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("dtpye", "dtype"),
        ("granulairty", "granularity"),
        ("qschema", "qscheme"),
        ("averaging_const", "averaging_constant"),
    ],
)
def test_misspelled_field_is_refused_and_the_nearest_proposed(field: str, nearest: str) -> None:
    with pytest.raises(ValidationError, match=f"no field '{field}'; did you mean '{nearest}'"):
        QuantizationSpec(**{field: "int8"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int9"}, "Unsupported dtype: 'int9'; did you mean 'int8'"),
        ({"dtype": "torch.int4"}, "did you mean 'int4'"),
        ({"dtype": torch.float16}, "Unsupported dtype: torch.float16. Allowed dtypes: .*torch.int8"),
        ({"dtype": 8}, "dtype"),
        ({"qscheme": "symetric"}, "'symmetric', 'asymmetric' or 'symmetric_with_clipping'"),
        ({"qformulation": "min_val"}, "'minval' or 'zp'"),
        ({"granularity": "per_tensor"}, "granularity"),
        ({"granularity": {"axis": 1}}, "'type' key"),
        ({"granularity": {"type": "per_row"}}, "'per_row' in QuantizationGranularity.*per_block.*per_token"),
        ({"granularity": {"type": "per_channel", "axis": 0, "block_size": 2}}, "block_size"),
        ({"granularity": {"type": "per_block", "axis": 0, "block_size": 0}}, "greater than 0"),
        ({"qparam_calculator_cls": "defualt"}, "'defualt' in QParamsCalculatorBase.*'static'"),
        ({"range_calculator_cls": int}, "int is not registered in RangeCalculatorBase"),
        ({"fake_quantize_cls": 3}, "got int: 3"),
        ({"float_range": 1.0}, "list or tuple"),
        ({"float_range": [0.0]}, "length 2"),
        ({"float_range": [0, True]}, "got True"),
        ({"float_range": [1.0, 2.0]}, "min must be at most 0"),
        ({"float_range": [-2.0, -1.0]}, "max must be at least 0"),
        ({"float_range": [0.0, 0.0]}, "min < max"),
        ({"float_range": [float("nan"), 1.0]}, "min < max"),
        ({"float_range": [float("-inf"), float("inf")]}, "must be finite, got -inf; None leaves a side"),
        ({"scale_dtype": "float32"}, "Unsupported scale_dtype"),
        ({"dtype": "int8", "scale_dtype": "float8_e8m0fnu"}, "scale_dtype must be None for dtype=torch.int8"),
        ({"dtype": "float8_e5m2", "qscheme": "asymmetric"}, "FP quantization .*requires symmetric"),
        ({"dtype": "float8_e5m2", "qformulation": "minval"}, "requires zero-point quantization formulation"),
        (
            {"qscheme": "symmetric_with_clipping", "qparam_calculator_cls": "dynamic"},
            "SYMMETRIC_WITH_CLIPPING is not supported with a dynamic",
        ),
        (
            {"fake_quantize_cls": "lsq", "qparam_calculator_cls": "dynamic"},
            "LSQFakeQuantize learns one range.*Leave out",
        ),
        ({"dtype": "int1", "qscheme": "symmetric_with_clipping"}, "leaves int1 only the code 0"),
        ({"averaging_constant": 0.0}, "greater than 0"),
        ({"averaging_constant": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_values_are_refused_with_the_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QuantizationSpec(**fields)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_ranges_are_those_of_twos_complement(name: str) -> None:
    bits = int(name.lstrip("uint"))
    spec = QuantizationSpec(dtype=name)
    low = 0 if name.startswith("u") else -(2 ** (bits - 1))
    assert (spec.n_bits, spec.quant_min, spec.quant_max) == (bits, low, low + 2**bits - 1)
    assert spec.target_dtype == (torch.uint8 if name.startswith("u") else torch.int8)
    assert type(spec.quant_min) is int


@pytest.mark.parametrize("name", [name for name in INTEGERS if name != "int1"])
def test_clipping_leaves_signed_integers_as_many_codes_on_both_sides(name: str) -> None:
    spec = QuantizationSpec(dtype=name, qscheme="symmetric_with_clipping")
    whole = QuantizationSpec(dtype=name)
    assert spec.quant_max == whole.quant_max
    assert spec.quant_min == (0 if name.startswith("u") else -whole.quant_max)


@pytest.mark.parametrize(("name", "largest", "bits", "storage"), [
    ("float8_e4m3fn", 448.0, 8, torch.float8_e4m3fn),
    ("float8_e5m2", 57344.0, 8, torch.float8_e5m2),
    ("float4_e2m1fn_x2", 6.0, 4, torch.float8_e4m3fn),
])  # fmt: skip
def test_float_formats(name: str, largest: float, bits: int, storage: torch.dtype) -> None:
    spec = QuantizationSpec(dtype=name)
    assert (spec.quant_min, spec.quant_max, spec.n_bits, spec.target_dtype) == (-largest, largest, bits, storage)


def test_fp4_always_has_power_of_two_scales() -> None:
    assert QuantizationSpec(dtype="float4_e2m1fn").scale_dtype is torch.float8_e8m0fnu
    assert QuantizationSpec(dtype=torch.float4_e2m1fn_x2, scale_dtype=None).scale_dtype is torch.float8_e8m0fnu
    assert QuantizationSpec(dtype="float8_e4m3").scale_dtype is None


def test_float_range_becomes_a_list_of_floats() -> None:
    assert QuantizationSpec(float_range=(-5, 5)).float_range == [-5.0, 5.0]
    assert isinstance(QuantizationSpec(float_range=(None, 5)).float_range[1], float)


def test_spec_is_frozen() -> None:
    spec = QuantizationSpec()
    with pytest.raises(ValidationError, match="frozen"):
        spec.dtype = torch.int4


def test_construction_leaves_the_callers_mapping_alone() -> None:
    data = {"dtype": "float4_e2m1fn", "granularity": {"type": "per_block", "axis": 1, "block_size": 32}}
    before = copy.deepcopy(data)
    QuantizationSpec(**data)
    QuantizationSpec.from_dict(data)
    assert data == before


@settings(deadline=None)
@given(specs())
def test_specs_survive_every_way_of_travelling(spec: QuantizationSpec) -> None:
    """Python values, JSON, YAML, copies and pickles give an equal spec with an equal hash."""
    travelled = [
        QuantizationSpec(**spec.model_dump()),
        QuantizationSpec(**spec.model_dump(mode="json")),
        QuantizationSpec.model_validate_json(spec.model_dump_json()),
        QuantizationSpec.from_dict(json.loads(json.dumps(spec.to_dict()))),
        QuantizationSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))),
        QuantizationSpec(**yaml.safe_load(yaml.safe_dump(spec.model_dump(mode="json")))),
        copy.deepcopy(spec),
        pickle.loads(pickle.dumps(spec)),
    ]
    for other in travelled:
        assert other == spec
        assert hash(other) == hash(spec)


def test_json_form_has_plain_names() -> None:
    spec = QuantizationSpec(
        dtype="float8_e4m3", scale_dtype="float8_e8m0", granularity=PerBlockGranularity(block_size=(1, 32))
    )
    assert spec.to_dict() == {
        "dtype": "float8_e4m3fn",
        "qscheme": "symmetric",
        "qformulation": "zp",
        "granularity": {"type": "per_block", "axis": None, "block_size": [1, 32]},
        "fake_quantize_cls": "default",
        "qparam_calculator_cls": "default",
        "range_calculator_cls": "minmax",
        "float_range": [None, None],
        "scale_dtype": "float8_e8m0fnu",
        "averaging_constant": None,
    }


def test_computed_fields_are_in_the_dump_and_accepted_back() -> None:
    dumped = QuantizationSpec(dtype="int4").model_dump()
    assert {"n_bits": 4, "target_dtype": torch.int8, "_quant_range": (-8, 7), "quant_min": -8, "quant_max": 7} == {
        name: dumped[name] for name in ("n_bits", "target_dtype", "_quant_range", "quant_min", "quant_max")
    }
    assert QuantizationSpec(**dumped) == QuantizationSpec(dtype="int4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_bits": 4}, r"has n_bits=8, not 4\..* write dtype='int4', qscheme='symmetric' instead"),
        ({"n_bits": 2, "dtype": "uint8"}, r"has n_bits=8, not 2\..* write dtype='uint2'"),
        ({"n_bits": 8, "dtype": "float4_e2m1fn"}, r"has n_bits=4, not 8\..* write dtype='float8_e4m3fn'"),
        ({"n_bits": 1, "dtype": "int4"}, r"has n_bits=4, not 1\..* write dtype='int1', qscheme='symmetric' instead"),
        (
            {"quant_min": -7, "quant_max": 7},
            r"quant_min=-128, not -7; quant_max=127, not 7\..* dtype='int4', qscheme='symmetric_with_clipping' instead",
        ),
        ({"quant_min": -127, "n_bits": 8}, "quant_min=-128, not -127.* qscheme='symmetric_with_clipping' instead"),
        ({"quant_min": -100}, r"quant_min=-128, not -100\..* leave them out.*float_range limits"),
        ({"target_dtype": "uint8"}, "has target_dtype=torch.int8, not 'uint8'.* write dtype='uint8'"),
        ({"_quant_range": [0, 255]}, r"has _quant_range=\(-128, 127\), not \[0, 255\]"),
    ],
)
def test_computed_values_that_contradict_the_dtype_are_refused_with_the_remedy(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        QuantizationSpec(**fields)


@pytest.mark.parametrize("fields", [{"n_bits": 8}, {"n_bits": None}, {"quant_max": 127, "target_dtype": "int8"}])
def test_computed_values_that_agree_or_say_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert QuantizationSpec(**fields) == QuantizationSpec()


@pytest.mark.parametrize("mode", ["python", "json"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_a_dump_can_be_edited(dtype: str, mode: str) -> None:
    """The computed values of the dump are those of the old dtype; one that was edited itself is refused."""
    dumped = QuantizationSpec(dtype="uint5").model_dump(mode=mode)
    assert QuantizationSpec(**dumped | {"dtype": dtype}) == QuantizationSpec(dtype=dtype)
    with pytest.raises(ValidationError, match=r"has n_bits=5, not 4.* write dtype='uint4'"):
        QuantizationSpec(**dumped | {"n_bits": 4})


def test_computed_fields_of_a_subclass_are_taken_whatever_they_say() -> None:
    class Named(QuantizationSpec):
        @computed_field  # type: ignore[prop-decorator]
        @property
        def label(self) -> str:
            return f"{self.n_bits} bits"

    assert Named(**Named().model_dump() | {"label": "mine"}) == Named()
    with pytest.raises(ValidationError, match="has n_bits=8, not 4"):
        Named(n_bits=4)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int2", (2, torch.int8, (-2, 1), -2, 1)),
        ("uint4", (4, torch.uint8, (0, 15), 0, 15)),
        ("float8_e5m2", (8, torch.float8_e5m2, (-57344.0, 57344.0), -57344.0, 57344.0)),
        ("float4_e2m1fn_x2", (4, torch.float8_e4m3fn, (-6.0, 6.0), -6.0, 6.0)),
    ],
)
def test_dumps_of_coreai_opt_are_read(dtype: str, values: tuple[Any, ...]) -> None:
    """The values are what coreai-opt 0.3.0 writes."""
    computed = dict(zip(("n_bits", "target_dtype", "_quant_range", "quant_min", "quant_max"), values, strict=True))
    assert QuantizationSpec(dtype=dtype, **computed) == QuantizationSpec(dtype=dtype)


def test_different_specs_are_different_keys() -> None:
    distinct = {QuantizationSpec(dtype=name) for name in (*INTEGERS, *FLOATS)}
    assert len(distinct) == len(INTEGERS) + len(FLOATS)
    assert QuantizationSpec(float_range=[0, 1]) not in {QuantizationSpec(float_range=[0, 2])}


def test_computed_values_follow_a_changed_copy() -> None:
    assert QuantizationSpec().model_copy(update={"dtype": torch.int4}).quant_max == 7


def test_json_schema_lists_dtypes_registered_classes_and_granularities() -> None:
    schema = QuantizationSpec.model_json_schema()
    fields = schema["properties"]
    assert "int3" in fields["dtype"]["enum"]
    assert fields["dtype"]["default"] == "int8"
    assert {"static", "dynamic", "moving_average"} <= set(fields["qparam_calculator_cls"]["enum"])
    kinds = schema["$defs"]["QuantizationGranularity"]["oneOf"]
    assert {kind["properties"]["type"]["const"] for kind in kinds} >= {
        "per_tensor",
        "per_channel",
        "per_block",
        "per_token",
    }


def test_subclass_fields_are_extra_arguments() -> None:
    class Extended(QuantizationSpec):
        epsilon: float
        averaging_constant: float = 0.95

    spec = Extended(epsilon=0.5, dtype="int4")
    assert spec.get_extra_args() == {"averaging_constant": 0.95, "epsilon": 0.5}
    assert QuantizationSpec(averaging_constant=0.5).get_extra_args() == {}
    assert hash(spec) == hash(Extended(**spec.model_dump()))
    assert spec != Extended(epsilon=0.25, dtype="int4")


def test_specs_with_sets_are_hashable() -> None:
    class Tagged(QuantizationSpec):
        tags: set[str]

    assert hash(Tagged(tags={"a", "b"})) == hash(Tagged(tags={"b", "a"}))


def test_a_range_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="float_range entries must be finite"):
        QuantizationSpec(float_range=[-(10**400), 1])


def test_spec_and_its_equal_subclass_instance_differ() -> None:
    class Same(QuantizationSpec):
        pass

    assert Same() != QuantizationSpec()


def test_helpers_work_on_the_class() -> None:
    assert QuantizationSpec.get_n_bits_from_dtype(torch.uint1) == 1
    assert QuantizationSpec.get_n_bits_from_dtype("float4_e2m1fn") == 4
    assert QuantizationSpec.get_n_bits_from_dtype(torch.float16) == 16
    assert QuantizationSpec.get_target_dtype(torch.int1) is torch.int8
    assert QuantizationSpec.get_target_dtype(torch.float16) is torch.float16
    assert QuantizationSpec.get_quant_range(torch.int4, "symmetric_with_clipping") == (-7, 7)


def test_enumerations_are_strings() -> None:
    assert QuantizationScheme("asymmetric") is QuantizationScheme.ASYMMETRIC
    assert f"{QuantizationFormulation.MINVAL}" == "minval"


def test_schemes_map_to_torchaos_mapping_types() -> None:
    from torchao.quantization import MappingType

    assert [QuantizationScheme._to_mapping_type(scheme) for scheme in QuantizationScheme] == [
        MappingType.SYMMETRIC,
        MappingType.ASYMMETRIC,
        MappingType.SYMMETRIC,
    ]


def test_class_objects_are_taken_like_their_keys() -> None:
    assert QuantizationSpec(qparam_calculator_cls=DynamicQParamsCalculator) == QuantizationSpec(
        qparam_calculator_cls="dynamic"
    )
