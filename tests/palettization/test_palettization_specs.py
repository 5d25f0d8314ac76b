"""Specs, configs and presets of palettization: defaults, errors, and the way through files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bitwright.artifact import Artifact, PalettizedTensor
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.config import OpKMeansPalettizerConfig, PATSchedule, VectorKMeansConfig
from bitwright.palettization.spec import (
    DefaultTrainingSpec,
    DKMTrainingSpec,
    PerGroupedChannelGranularity,
    PerTensorGranularity,
    STETrainingSpec,
    TrainingStrategySpec,
    default_weight_palettization_spec,
)
from bitwright.quantization.spec import (
    PerChannelGranularity,
    QuantizationFormulation,
    QuantizationScheme,
    QuantizationSpec,
)
from bitwright.quantization.spec import PerTensorGranularity as TensorGranularity


def test_defaults():
    """4 bit, one palette, for plain weights and joint attention projections."""
    spec = PalettizationSpec()
    assert spec == default_weight_palettization_spec()
    assert (spec.n_bits, spec.lut_qspec, spec.cluster_dim, spec.enable_per_channel_scale) == (4, None, 1, False)
    assert spec.granularity == PerTensorGranularity()
    assert spec.training_strategy_spec == DefaultTrainingSpec()
    config = KMeansPalettizerConfig().global_config
    assert config.op_state_spec == {"weight": spec, "in_proj_weight": spec}
    assert (config.enable_fast_kmeans_mode, config.rounding_precision, config.pat_schedule) == (True, 4, None)


@pytest.mark.parametrize("n_bits", range(1, 9))
def test_all_bits_from_one_to_eight(n_bits):
    """5 and 7 among them."""
    assert PalettizationSpec(n_bits=n_bits).n_bits == n_bits


@pytest.mark.parametrize("n_bits", [4.0, np.int64(4), np.float32(4)])
def test_whole_numbers_of_other_types_are_bits(n_bits):
    """YAML's ``4.0`` among them, as in coreai-opt."""
    spec = PalettizationSpec(n_bits=n_bits)
    assert spec.n_bits == 4
    assert type(spec.n_bits) is int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_bits": 0}, "greater than or equal to 1"),
        ({"n_bits": 9}, "less than or equal to 8"),
        ({"n_bits": True}, "valid integer"),
        ({"n_bits": 4.5}, "valid integer"),
        ({"n_bits": "4"}, "valid integer"),
        ({"n_bits": float("inf")}, "valid integer"),
        ({"n_bits": 9.0}, "less than or equal to 8"),
        ({"cluster_dim": 0}, "greater than 0"),
        ({"n_bit": 4}, "did you mean 'n_bits'"),
        ({"enable_per_channel_scale": "perhaps"}, "boolean"),
        ({"granularity": {"type": "per_grouped_channel", "group_size": 0}}, "greater than 0"),
        ({"granularity": {"type": "per_grouped_channel", "axis": 2, "group_size": 4}}, "less than or equal to 1"),
        ({"granularity": {"type": "per_row"}}, "Available keys"),
        ({"lut_qspec": QuantizationSpec(dtype=torch.int2)}, "lut_qspec.dtype must be one of"),
        (
            {"lut_qspec": QuantizationSpec(granularity=PerChannelGranularity(axis=0))},
            "lut_qspec.granularity must be PerTensorGranularity",
        ),
        (
            {"lut_qspec": QuantizationSpec(qscheme="asymmetric", qformulation=QuantizationFormulation.MINVAL)},
            "qformulation=MINVAL is not supported",
        ),
        ({"training_strategy_spec": {"type": "dkm", "temperature": 0}}, "greater than 0"),
    ],
)
def test_bad_specs_are_refused(fields, message):
    """A typo or a value out of range says so at construction."""
    with pytest.raises(ValidationError, match=message):
        PalettizationSpec(**fields)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_palettes_can_be_quantized_to(dtype):
    """int4 too, which halves the tables of many small groups."""
    assert PalettizationSpec(lut_qspec={"dtype": dtype}).lut_qspec.dtype == getattr(torch, dtype)


class _OneForAll(TensorGranularity):
    """A subclass, as a user's own package may have one."""


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_palettes_can_have_scales_that_are_powers_of_two(dtype):
    """As in coreai-opt, which also takes a subclass of the granularity; the artifact is as large as planned."""
    table = QuantizationSpec(dtype=dtype, scale_dtype="float8_e8m0fnu", granularity=_OneForAll())
    spec = PalettizationSpec(n_bits=4, lut_qspec=table)
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    inputs = (torch.randn(2, 32),)
    palettizer = KMeansPalettizer(nn.Linear(32, 16), config)
    planned = palettizer.plan(inputs).compressed_bytes
    prepared = palettizer.prepare(inputs)
    artifact = Artifact.from_model(prepared)
    stored = artifact["weight"]
    assert isinstance(stored, PalettizedTensor)
    assert stored.lut.parts["scale"].dtype == torch.uint8
    assert torch.equal(stored.decode(), prepared.weight)
    assert artifact.compressed_nbytes == planned


SPECS = [
    PalettizationSpec(n_bits=5, granularity=PerGroupedChannelGranularity(axis=1, group_size=8)),
    PalettizationSpec(lut_qspec=QuantizationSpec(dtype="uint8", qscheme=QuantizationScheme.ASYMMETRIC)),
    PalettizationSpec(cluster_dim=2, enable_per_channel_scale=True, training_strategy_spec=DKMTrainingSpec()),
    PalettizationSpec(training_strategy_spec=STETrainingSpec(refit_palette=False)),
]


@pytest.mark.parametrize("spec", SPECS)
def test_specs_survive_a_dump(spec):
    """As Python data and as JSON; frozen and hashable."""
    assert PalettizationSpec(**spec.model_dump()) == spec
    assert PalettizationSpec(**spec.model_dump(mode="json")) == spec
    assert hash(spec) == hash(PalettizationSpec(**spec.model_dump()))
    with pytest.raises(ValidationError):
        spec.n_bits = 3


@pytest.mark.parametrize("spec", SPECS)
def test_configs_come_from_files_and_go_back(spec):
    """Through YAML, JSON and dicts, with a schedule."""
    config = KMeansPalettizerConfig(
        global_config=ModuleKMeansPalettizerConfig(
            op_state_spec={"weight": spec},
            enable_fast_kmeans_mode=False,
            pat_schedule=PATSchedule(enable_fake_palettize=7),
        )
    )
    assert KMeansPalettizerConfig.from_yaml(config.to_yaml()) == config
    assert KMeansPalettizerConfig.from_json(config.to_json()) == config
    assert KMeansPalettizerConfig.from_dict(config.to_dict()) == config


def test_dump_with_objects():
    """Nested specs stay objects, for constructors."""
    spec = SPECS[1]
    dumped = spec.model_dump_preserve_objects()
    assert dumped["lut_qspec"] is spec.lut_qspec
    assert dumped["granularity"] is spec.granularity
    assert dumped["n_bits"] == 4


@pytest.mark.parametrize(("name", "n_bits"), [("w2", 2), ("w3", 3), ("w4", 4), ("w6", 6)])
def test_grouped_presets(name, n_bits):
    """Groups of 16 along axis 0 unless said otherwise; None follows the op."""
    spec = getattr(KMeansPalettizerConfig.presets, name)().global_config.op_state_spec["weight"]
    assert (spec.n_bits, spec.granularity) == (n_bits, PerGroupedChannelGranularity(axis=0, group_size=16))
    module = getattr(ModuleKMeansPalettizerConfig.presets, name)(axis=None, group_size=4)
    assert module.op_state_spec["in_proj_weight"].granularity == PerGroupedChannelGranularity(group_size=4)


def test_per_tensor_preset():
    """8 bit needs no groups."""
    spec = KMeansPalettizerConfig.presets.w8().global_config.op_state_spec["weight"]
    assert spec == PalettizationSpec(n_bits=8)


def test_vectors_want_the_exact_mode():
    """The fast mode is for scalars; the error names the key and the remedy."""
    spec = PalettizationSpec(cluster_dim=2)
    with pytest.raises(ValidationError, match=r"op_state_spec\['weight'\].*enable_fast_kmeans_mode=False"):
        ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec})
    ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}, enable_fast_kmeans_mode=False)


def test_activation_specs_and_subclasses_are_refused():
    """Only weights are palettized, and the configs are final."""
    with pytest.raises(ValueError, match="does not support op_input_spec"):
        OpKMeansPalettizerConfig(op_input_spec={0: PalettizationSpec()})
    for base in (KMeansPalettizerConfig, ModuleKMeansPalettizerConfig):
        with pytest.raises(TypeError, match="final"):
            type("Mine", (base,), {})


def test_schedule():
    """Active from its step on; frozen; not negative."""
    schedule = PATSchedule(enable_fake_palettize=5)
    assert [schedule._compute_state(step) for step in (0, 4, 5, 6)] == [False, False, True, True]
    with pytest.raises(ValidationError):
        schedule.enable_fake_palettize = 3
    with pytest.raises(ValidationError):
        PATSchedule(enable_fake_palettize=-1)


def test_strategies_are_built_from_their_fields():
    """The registry's key picks the spec, the spec's fields reach the strategy."""
    strategy = TrainingStrategySpec.maybe_build_from_dict({"type": "dkm", "temperature": 0.2}).build_strategy()
    assert (strategy.temperature, strategy.iterations) == (0.2, 3)
    for error in (ValueError, KeyError):  # coreai-opt raises the latter
        with pytest.raises(error, match=r"^No class is registered with key 'adam'.*Available keys"):
            TrainingStrategySpec.maybe_build_from_dict({"type": "adam"})


def test_granularity_names_what_does_not_fit():
    """Shape, axis and size are in the message."""
    weight = torch.zeros(6, 4)
    groups = PerGroupedChannelGranularity(axis=0, group_size=4)
    with pytest.raises(ValueError, match=r"dimension 0 of a tensor of shape \(6, 4\).*group_size 4"):
        groups.num_blocks_to_cluster(weight)
    with pytest.raises(ValueError, match="axis=None"):
        PerGroupedChannelGranularity(group_size=2).num_blocks_to_cluster(weight)
    with pytest.raises(ValueError, match="has no axis 1"):
        PerGroupedChannelGranularity(axis=1, group_size=2).num_blocks_to_cluster(weight[0])
    blocks = PerGroupedChannelGranularity(axis=1, group_size=2).get_blocks_to_cluster(weight)
    assert [block.shape for block in blocks] == [(6, 2), (6, 2)]


def test_settings_of_vectors_need_vectors():
    """``vector_kmeans_config`` of coreai-opt 0.4: its number of seedings is used, the rest accepted."""
    spec = {"n_bits": 2, "cluster_dim": 2}
    whole = {"op_state_spec": {"weight": spec}, "enable_fast_kmeans_mode": False}
    with pytest.raises(ValueError, match="no spec of this module config has cluster_dim"):
        ModuleKMeansPalettizerConfig(vector_kmeans_config={"n_init": 2})
    with pytest.raises(ValueError, match="n_inits"):
        ModuleKMeansPalettizerConfig(**whole, vector_kmeans_config={"n_inits": 2})
    nested = ModuleKMeansPalettizerConfig(
        enable_fast_kmeans_mode=False,
        op_type_config={"linear": {"op_state_spec": {"weight": spec}}},
        vector_kmeans_config=VectorKMeansConfig(n_init=1, n_local_trials=1, max_iter=1, tol=0.0),
    )
    assert nested.vector_kmeans_config.n_init == 1
    config = KMeansPalettizerConfig(global_config={**whole, "vector_kmeans_config": {"n_init": 3}})
    assert KMeansPalettizerConfig.from_dict(config.to_dict()) == config
    prepared = KMeansPalettizer(nn.Linear(8, 8), config).prepare((torch.randn(1, 8),))
    assert prepared.parametrizations.weight[0].vector_kmeans_config.n_init == 3
