"""Specs, configs and schedules: defaults, errors, and the way through files."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import (
    ConstantSparsitySchedule,
    CosineDecaySchedule,
    OpMagnitudePrunerConfig,
    PolynomialDecaySchedule,
    SparsityScheduleBase,
)
from bitwright.pruning.spec import (
    BlockStructured,
    ChannelStructured,
    NMStructured,
    PruneImplBase,
    Unstructured,
    _MagnitudePruneImpl,
    default_weight_pruning_spec,
)


def test_defaults():
    """Half of the entries by magnitude, for plain weights and joint attention projections."""
    spec = PruningSpec()
    assert spec == default_weight_pruning_spec()
    assert (spec.target_sparsity, spec.pruning_scheme, spec.pruning_algo) == (0.5, Unstructured(), _MagnitudePruneImpl)
    config = MagnitudePrunerConfig().global_config
    assert config.op_state_spec == {"weight": spec, "in_proj_weight": spec}
    assert config.sparsity_schedule is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_sparsity": 1.5}, "less than or equal to 1"),
        ({"target_sparsity": -0.1}, "greater than or equal to 0"),
        ({"target_sparcity": 0.9}, "did you mean 'target_sparsity'"),
        ({"pruning_algo": "magic"}, "No class is registered"),
        ({"pruning_algo": 3}, "registry key or a class"),
        ({"scope": "layer"}, "global"),
    ],
)
def test_bad_specs_are_refused(fields, message):
    """A typo or a value out of range says so at construction."""
    with pytest.raises(ValidationError, match=message):
        PruningSpec(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        PruningSpec(target_sparsity=0.75, pruning_scheme=ChannelStructured(axis=1)),
        PruningSpec(pruning_scheme=BlockStructured(block_size=(2, 4)), scope="global"),
        PruningSpec(pruning_scheme=NMStructured(n=1, m=8), pruning_algo="wanda"),
        PruningSpec(pruning_algo=_MagnitudePruneImpl, scope="row"),
    ],
)
def test_specs_survive_a_dump(spec):
    """As Python data and as JSON."""
    assert PruningSpec(**spec.model_dump()) == spec
    assert PruningSpec(**spec.model_dump(mode="json")) == spec
    assert hash(spec) == hash(PruningSpec(**spec.model_dump()))


def test_a_registered_algorithm_is_found_by_key_and_class():
    """The registry is the extension point for scores of one's own."""

    @PruneImplBase.register("every_other")
    class EveryOther(PruneImplBase):
        @staticmethod
        def compute_mask(weight, sparsity, pruning_scheme):
            mask = weight.new_ones(weight.shape)
            mask[:, ::2] = 0
            return mask

    try:
        assert PruningSpec(pruning_algo="every_other").pruning_algo is EveryOther
        assert PruningSpec(pruning_algo=EveryOther) == PruningSpec(pruning_algo="every_other")
    finally:
        PruneImplBase.unregister("every_other")


def test_activation_specs_are_refused():
    """Only weights are pruned; None is no opinion and passes."""
    for field in ("op_input_spec", "op_output_spec"):
        with pytest.raises(ValueError, match=f"does not support {field}"):
            OpMagnitudePrunerConfig(**{field: {"*": PruningSpec()}})
        OpMagnitudePrunerConfig(**{field: None})
    with pytest.raises(ValueError, match="module_input_spec"):
        ModuleMagnitudePrunerConfig(module_input_spec={0: PruningSpec()})


@pytest.mark.parametrize(
    "schedule",
    [
        ConstantSparsitySchedule(begin_step=3),
        PolynomialDecaySchedule(total_iters=7, power=1.5, update_frequency=2),
        CosineDecaySchedule(begin_step=1, total_iters=5, initial_sparsity=0.25),
    ],
)
def test_schedules_come_from_yaml_and_go_back(schedule):
    """A config with a schedule round-trips through YAML, JSON and dicts."""
    config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(sparsity_schedule=schedule.model_dump()))
    assert config.global_config.sparsity_schedule == schedule
    assert MagnitudePrunerConfig.from_yaml(config.to_yaml()) == config
    assert MagnitudePrunerConfig.from_json(config.to_json()) == config
    assert MagnitudePrunerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "member",
    [
        ConstantSparsitySchedule(begin_step=3),
        PolynomialDecaySchedule(total_iters=7, power=1.5, update_frequency=2),
        ChannelStructured(axis=1),
        NMStructured(n=1, m=8),
    ],
)
def test_schedules_and_schemes_are_built_from_their_own_dump(member):
    """The class takes the ``type`` key that it wrote, and no other."""
    kind = type(member)
    assert kind.model_validate(member.model_dump()) == member
    assert kind(**member.model_dump(mode="json")) == member
    with pytest.raises(ValidationError, match=f"written with type '{kind.registry_key()}', got 'linear'"):
        kind.model_validate(member.model_dump() | {"type": "linear"})


def test_schema_lists_schemes_and_schedules():
    """Editors can complete the ``type`` keys."""
    text = str(MagnitudePrunerConfig.json_schema())
    for key in ("unstructured", "n_m_structured", "cosine_decay", "target_sparsity"):
        assert key in text


def test_constant_schedule():
    """Dense before the first step, the target from then on."""
    schedule = ConstantSparsitySchedule(begin_step=5)
    assert [schedule.compute_sparsity(step, 0.8) for step in (0, 4, 5, 100)] == [0.0, 0.0, 0.8, 0.8]


@pytest.mark.parametrize("frequency", [1, 3, 4])
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_polynomial_schedule_is_its_formula(frequency, power):
    """s = target + (initial - target)(1 - t)^power at updates, held between, target at the last update and after."""
    schedule = PolynomialDecaySchedule(
        begin_step=2, total_iters=10, power=power, initial_sparsity=0.1, update_frequency=frequency
    )
    last = (10 - 1) // frequency
    previous = None
    for step in range(15):
        offset = step - 2
        if offset < 0:
            expected = 0.1
        elif offset >= 10:
            expected = 0.9
        elif offset % frequency:
            expected = previous
        else:
            t = (offset // frequency) / max(last, 1)
            expected = 0.9 + (0.1 - 0.9) * (1 - t) ** power
        got = schedule.compute_sparsity(step, 0.9, previous)
        assert got == pytest.approx(expected)
        previous = got


def test_cosine_schedule_is_half_a_cosine():
    """Half-way in time is half-way in sparsity; it starts and ends flat."""
    schedule = CosineDecaySchedule(total_iters=21)
    values = [schedule.compute_sparsity(step, 0.6) for step in range(21)]
    expected = [0.6 * 0.5 * (1 - math.cos(math.pi * step / 20)) for step in range(21)]
    assert values == pytest.approx(expected)


def test_own_schedules_may_do_without_the_previous_sparsity():
    """Those written for coreai-opt 0.4 have no such parameter, and keyword-only ones of their own have defaults."""

    @SparsityScheduleBase.register("own_halves")
    class Halves(SparsityScheduleBase):
        def compute_sparsity(self, step_count: int, target_sparsity: float) -> float:  # type: ignore[override]
            return target_sparsity * (1 - 0.5**step_count)

    try:
        weight = nn.Linear(16, 16)
        whole = {"op_state_spec": {"weight": {"target_sparsity": 0.5}}, "sparsity_schedule": {"type": "own_halves"}}
        pruner = MagnitudePruner(weight, MagnitudePrunerConfig(global_config=whole))
        pruner.prepare((torch.randn(1, 16),))
        shares = []
        for _ in range(3):
            shares.append(float((weight.weight == 0).float().mean()))
            pruner.step()
        assert shares == [0.0, 0.25, 0.375]
    finally:
        SparsityScheduleBase.unregister("own_halves")


def test_between_updates_the_previous_sparsity_is_needed():
    """Otherwise the schedule cannot know it."""
    with pytest.raises(ValueError, match="prev_sparsity"):
        PolynomialDecaySchedule(total_iters=9, update_frequency=3).compute_sparsity(1, 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "polynomial_decay"}, "Field required"),
        ({"type": "cosine_decay", "total_iters": 0}, "greater than 0"),
        ({"type": "linear"}, "Available keys"),
        ({"total_iters": 3}, "needs a 'type'"),
    ],
)
def test_bad_schedules_are_refused(fields, message):
    """An unknown type, a missing field, a number out of range."""
    with pytest.raises(ValueError, match=message):
        SparsityScheduleBase.maybe_build_from_dict(fields)
