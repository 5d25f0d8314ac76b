"""What a misspelt value of a spec proposes: something that would be accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bitwright.palettization import PalettizationSpec
from bitwright.quantization import QuantizationSpec


@pytest.mark.parametrize(
    ("written", "proposed"),
    [
        ("float8", ("float8_e4m3fn", "float8_e5m2")),
        ("fp8", ("float8_e4m3fn", "float8_e5m2")),
        ("float4", ("float4_e2m1fn_x2",)),
        ("FP4", ("float4_e2m1fn_x2",)),
        ("INT8", ("int8",)),
        ("torch.int4", ("int4",)),
        ("i8", ("int8",)),
        ("unit4", ("uint4",)),
    ],
)
def test_dtypes(written: str, proposed: tuple[str, ...]) -> None:
    """Families list their members; every proposal can be used as it stands."""
    with pytest.raises(ValidationError, match="did you mean " + " or ".join(map(repr, proposed))):
        QuantizationSpec(dtype=written)
    for name in proposed:
        QuantizationSpec(dtype=name, scale_dtype="float8_e8m0fnu" if name.startswith("float4") else None)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"type": "per_channel", "axs": 0}, "has no field 'axs'; did you mean 'axis'?"),
        ({"type": "per_block", "axis": 0, "blocksize": 32}, "did you mean 'block_size'?"),
        ({"type": "per_channel", "group": 3}, r"the keys are \['axis', 'type'\]"),
        ("per_chanel", r"written as a mapping, for example {'type': 'per_channel'}"),
    ],
)
def test_keys_of_granularities(written: Any, message: str) -> None:
    """The nearest key, or all there are; a bare name is shown as a mapping."""
    with pytest.raises(ValidationError, match=message.replace("?", r"\?").replace("{", r"\{").replace("}", r"\}")):
        QuantizationSpec(granularity=written)


@pytest.mark.parametrize(
    "fields", [{"granularity": {"type": "per_chanel", "axis": 0}}, {"range_calculator_cls": "minmix"}]
)
def test_keys_of_registries(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"did you mean '(per_channel|minmax)'\?"):
        QuantizationSpec(**fields)


def test_other_registries_propose_too() -> None:
    """Granularities of palettes are found by the same code."""
    with pytest.raises(ValidationError, match="did you mean 'group_size'"):
        PalettizationSpec(granularity={"type": "per_grouped_channel", "groupsize": 16})
