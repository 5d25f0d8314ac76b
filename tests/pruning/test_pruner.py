"""The pruner: which weights it touches, its life cycle, schedules, and what survives saving and copying."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import BitwrightWarning, ConfigMatchWarning, PlanError
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import ConstantSparsitySchedule, OpMagnitudePrunerConfig, PolynomialDecaySchedule
from bitwright.pruning.spec import BlockStructured, ChannelStructured, NMStructured, PruneImplBase, PruningScheme

from .networks import SmallCNN, TokenModel, config_of, counted, pruned, zeros


def impl_of(module: nn.Module, name: str = "weight") -> PruneImplBase:
    return module.parametrizations[name][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_default_is_half_of_everything(dtype):
    """The smaller half goes, dtype and the larger half stay."""
    model = counted(10, 20).to(dtype)
    pruned(model, (torch.randn(1, 20, dtype=dtype),))
    assert model.weight.dtype == dtype
    assert zeros(model.weight) == 0.5
    assert model.weight[model.weight != 0].min() > 100 - 1


@pytest.mark.parametrize("target", [0.0, 0.25, 1 / 3, 0.96])
def test_exactly_the_smallest_magnitudes_go(target):
    """Signs have no part in it."""
    model = counted(10, 30)
    with torch.no_grad():
        model.weight[::2] *= -1
    dense = model.weight.detach().clone()
    pruned(model, (torch.randn(1, 30),), target_sparsity=target)
    threshold = int(300 * target + 1e-9)
    assert torch.equal(model.weight, torch.where(dense.abs() > threshold, dense, 0.0))


def test_a_mask_that_removes_everything_is_a_named_warning():
    """It is done, as asked, and said."""
    model = counted(4, 4)
    with pytest.warns(ConfigMatchWarning, match=r"empty-weight.*removes all"):
        pruned(model, (torch.randn(1, 4),), target_sparsity=1.0)
    assert zeros(model.weight) == 1.0
    with pytest.raises(PlanError, match="empty-weight"):
        MagnitudePruner(counted(4, 4), config_of(PruningSpec(target_sparsity=1.0))).prepare(
            (torch.randn(1, 4),), strict=True
        )


@pytest.mark.parametrize("fields", [{}, {"scope": "row"}, {"pruning_scheme": ChannelStructured()}])
def test_a_share_that_is_everything_but_for_rounding_is_so_too(fields):
    """The count is that of the mask, not the number that was written."""
    model = counted(4, 4)
    with pytest.warns(ConfigMatchWarning, match=r"empty-weight\] weight.*target_sparsity=0.99999999999 removes all"):
        pruned(model, (torch.randn(1, 4),), target_sparsity=1 - 1e-11, **fields)
    assert zeros(model.weight) == 1.0


def test_fewer_entries_than_output_channels_are_a_named_warning():
    """Some channels are empty then, whatever the weights; with a rank in rows each keeps one."""
    model = nn.Sequential(nn.Linear(40, 50), nn.ConvTranspose1d(50, 20, 1))
    example = (torch.randn(50, 40),)
    with pytest.warns(ConfigMatchWarning) as caught:
        pruned(model, example, target_sparsity=0.99)
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert "empty-channels] 0.weight" in told[0]
    assert "keeps 20 of 2000 entries, fewer than the 50 output channels, so at least 30" in told[0]
    assert "keeps 10 of 1000 entries, fewer than the 20 output channels" in told[1]
    assert int((model[0].weight == 0).all(1).sum()) >= 30
    assert int((model[1].weight == 0).all(0).all(1).sum()) >= 10
    for fields in ({"scope": "row"}, {"scope": "global"}, {"target_sparsity": 0.975}):
        pruned(nn.Linear(40, 40), (torch.randn(1, 40),), **{"target_sparsity": 0.99, **fields})


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error_that_names_them(broken):
    """And the model is as it was."""
    model = nn.Sequential(counted(4, 4), counted(4, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = broken
    with pytest.raises(PlanError, match=r"\[not-finite\] 1\.weight"):
        MagnitudePruner(model).prepare((torch.randn(1, 4),))
    assert not hasattr(model[0], "parametrizations")
    model[1].weight.data.zero_()


def test_a_constant_weight_is_a_named_warning():
    """There is nothing to rank; exactly half goes all the same."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    with pytest.warns(ConfigMatchWarning, match="constant-weight"):
        MagnitudePruner(model).prepare((torch.randn(1, 8),))
    assert zeros(model.weight) == 0.5


def test_config_errors_name_types():
    """Neither a number nor another compressor's config passes as a model or config."""
    with pytest.raises(TypeError, match="int"):
        MagnitudePruner(3)
    with pytest.raises(TypeError, match="MagnitudePrunerConfig"):
        MagnitudePruner(counted(2, 2), {"global_config": None})
    with pytest.raises(TypeError, match="tuple"):
        MagnitudePruner(counted(2, 2)).prepare(torch.randn(1, 2))


def test_order_of_prepare_and_finalize():
    """Twice is an error, so is finalize without prepare."""
    model = counted(4, 4)
    pruner = MagnitudePruner(model)
    with pytest.raises(RuntimeError, match="must be prepared"):
        pruner.finalize()
    pruner.prepare((torch.randn(1, 4),))
    with pytest.raises(RuntimeError, match="already been prepared"):
        pruner.prepare((torch.randn(1, 4),))
    with pytest.raises(NotImplementedError, match="no backend 'tpu'"):
        pruner.finalize(backend="tpu")
    with pytest.raises(ValueError, match="mmap_dir is only supported"):
        pruner.finalize(backend="_torch", mmap_dir="anywhere")


def test_torch_finalize_keeps_masks_and_clears_the_marker():
    """Afterwards another compressor may prepare the model."""
    model = counted(4, 4)
    pruner = pruned(model, (torch.randn(1, 4),))
    weight = model.weight.detach().clone()
    assert pruner.finalize(backend="_torch") is model
    assert torch.equal(model.weight, weight)
    assert not pruner._is_model_prepared(model)


def test_levels_of_the_config():
    """Name beats type beats global; op names and types decide within a module."""
    model = nn.Sequential(counted(8, 8), counted(8, 8), nn.Conv1d(8, 8, 1))
    config = MagnitudePrunerConfig(
        global_config=None,
        module_type_configs={nn.Linear: ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec()})},
        module_name_configs={
            "1": ModuleMagnitudePrunerConfig(
                op_state_spec=None,
                op_type_config={
                    "linear": OpMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(target_sparsity=0.75)})
                },
            )
        },
    )
    MagnitudePruner(model, config).prepare((torch.randn(8, 8, 8)[0],))
    assert [zeros(layer.weight) for layer in model] == [0.5, 0.75, 0.0]


class Functional(nn.Module):
    """Weights of the module itself, used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.arange(1.0, 37).view(4, 1, 3, 3))
        self.matrix = nn.Parameter(torch.arange(1.0, 17).view(4, 4))

    def forward(self, x):
        return F.linear(F.conv2d(x, self.kernel).mean((2, 3)), self.matrix)


def test_functional_weights_by_op_name():
    """An op's name beats the module's own specs."""
    model = Functional()
    config = config_of(
        op_name_config={"linear": OpMagnitudePrunerConfig(op_state_spec={"matrix": PruningSpec(target_sparsity=0.75)})}
    )
    config.global_config.op_state_spec = {"kernel": PruningSpec(target_sparsity=0.25)}
    MagnitudePruner(model, config).prepare((torch.randn(1, 1, 4, 4),))
    assert (zeros(model.kernel), zeros(model.matrix)) == (0.25, 0.75)


def test_embeddings_rnns_and_attention():
    """Weights that sit in lists or under other names are found."""
    model = TokenModel().eval()
    tokens = (torch.randint(0, 12, (2, 5)),)
    dense = model(*tokens)
    MagnitudePruner(model).prepare(tokens)
    for weight in (model.embed.weight, model.rnn.weight_ih_l0, model.rnn.weight_hh_l0, model.attention.in_proj_weight):
        assert zeros(weight) == 0.5
    assert zeros(model.attention.out_proj.weight) == 0.5
    assert not torch.allclose(model(*tokens), dense)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*tokens), model(*tokens))


def test_tied_weights_share_one_mask():
    """One simulator, one mask, at every place."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    MagnitudePruner(model).prepare((torch.randn(2, 6),))
    assert impl_of(model[0]) is impl_of(model[2])
    assert model[0].parametrizations.weight.original is model[2].parametrizations.weight.original


def test_global_ranking_spends_sparsity_where_weights_are_small():
    """The smallest entries of both weights together go; checked against a sort of all."""
    small, large = counted(4, 4), counted(4, 4)
    with torch.no_grad():
        small.weight.mul_(0.5)
    model = nn.Sequential(small, large)
    together = torch.cat([small.weight.flatten(), large.weight.flatten()]).detach().clone()
    pruned(model, (torch.randn(1, 4),), scope="global")
    kept = torch.cat([small.weight.flatten(), large.weight.flatten()]).detach()
    assert int((kept == 0).sum()) == 16
    assert kept[kept != 0].min() >= together.sort().values[15]
    assert zeros(small.weight) > zeros(large.weight)


def test_global_ranking_of_channels_compares_means():
    """A long channel is not favoured over a short one."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 6, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 1.0], [5.0, 5.0]]))
        second.weight.copy_(torch.tensor([[3.0, 3.0]] * 5 + [[2.0, 2.0]]))
    model = nn.Sequential(first, second)
    pruned(model, (torch.randn(1, 2),), scope="global", target_sparsity=0.25, pruning_scheme=ChannelStructured())
    assert first.weight[0].eq(0).all()
    assert second.weight[5].eq(0).all()


def test_global_ranking_that_empties_a_weight_is_a_named_warning():
    """It may well be meant, but nobody should find out by accuracy."""
    tiny, large = counted(2, 2), counted(2, 2)
    with torch.no_grad():
        tiny.weight.mul_(1e-3)
    with pytest.warns(BitwrightWarning, match=r"removes all of '0\.weight'"):
        pruned(nn.Sequential(tiny, large), (torch.randn(1, 2),), scope="global")


@pytest.mark.parametrize(
    "fields",
    [
        {"scope": "row", "pruning_scheme": ChannelStructured()},
        {"scope": "global", "pruning_scheme": NMStructured()},
    ],
)
def test_scopes_without_meaning_are_errors_of_the_plan(fields):
    """All of them at once, before anything is changed."""
    model = nn.Sequential(counted(8, 8), counted(8, 8))
    with pytest.raises(PlanError, match="2 problem"):
        pruned(model, (torch.randn(1, 8),), **fields)


def test_a_pattern_that_does_not_divide_leaves_the_weight_dense():
    """With a warning; strict makes it an error."""
    model = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Conv1d(8, 8, 1))
    config = config_of(PruningSpec(pruning_scheme=NMStructured()))
    with pytest.raises(PlanError, match=r"0\.weight: dimension 1"):
        MagnitudePruner(model, config).prepare((torch.randn(1, 3, 4),), strict=True)
    with pytest.warns(ConfigMatchWarning, match="block-size"):
        MagnitudePruner(model, config).prepare((torch.randn(1, 3, 4),))
    assert zeros(model[0].weight) == 0.0
    assert zeros(model[1].weight) == 0.5


def test_the_input_axis_of_a_transposed_convolution():
    """A pattern without an axis follows the op: dimension 0 there."""
    model = nn.ConvTranspose2d(8, 3, 2)
    pruned(model, (torch.randn(1, 8, 4, 4),), pruning_scheme=NMStructured(n=2, m=4))
    groups = model.weight.movedim(0, -1).reshape(-1, 4)
    assert ((groups == 0).sum(1) == 2).all()


def test_a_sparsity_that_a_pattern_ignores_is_said():
    """2:4 is one half, whatever the target says."""
    with pytest.warns(ConfigMatchWarning, match=r"target-sparsity.*2:4 removes 0\.5"):
        pruned(counted(4, 8), (torch.randn(1, 8),), target_sparsity=0.9, pruning_scheme=NMStructured())


def test_gradients_reach_what_is_kept_only():
    """Removed entries keep their dense value and get no gradient."""
    model = counted(6, 6)
    pruned(model, (torch.randn(1, 6),))
    dense = model.parametrizations.weight.original
    model(torch.randn(4, 6)).square().sum().backward()
    assert torch.equal(dense.grad != 0, impl_of(model).mask)


def test_a_schedule_prunes_step_by_step_and_lets_weights_return():
    """Masks are made from the dense weight, so an entry that grew comes back."""
    model = counted(10, 10)
    config = config_of(sparsity_schedule=PolynomialDecaySchedule(total_iters=5, power=1.0))
    pruner = MagnitudePruner(model, config)
    pruner.prepare((torch.randn(1, 10),))
    assert zeros(model.weight) == 0.0
    pruner.step()
    assert zeros(model.weight) == pytest.approx(0.12)
    assert model.weight[0, 0] == 0
    with torch.no_grad():
        model.parametrizations.weight.original[0, 0] = 1000.0
    for _ in range(4):
        pruner.step()
    assert zeros(model.weight) == 0.5
    assert model.weight[0, 0] == 1000.0
    assert pruner._step_count == 5


def test_each_module_follows_its_own_schedule():
    """Resolved like every other part of the config."""
    model = nn.Sequential(counted(8, 8), counted(8, 8))
    config = config_of(sparsity_schedule=ConstantSparsitySchedule(begin_step=2))
    config.set_module_name("1", ModuleMagnitudePrunerConfig(sparsity_schedule=ConstantSparsitySchedule()))
    pruner = MagnitudePruner(model, config)
    pruner.prepare((torch.randn(1, 8),))
    seen = []
    for _ in range(3):
        seen.append((impl_of(model[0]).sparsity, impl_of(model[1]).sparsity))
        pruner.step()
    assert seen == [(0.0, 0.5), (0.0, 0.5), (0.5, 0.5)]


def test_steps_without_a_schedule_count_and_change_nothing():
    """step() is harmless in a loop that serves several configs."""
    model = counted(6, 6)
    pruner = pruned(model, (torch.randn(1, 6),))
    mask = impl_of(model).mask.clone()
    for _ in range(3):
        pruner.step()
    assert pruner._step_count == 3
    assert torch.equal(impl_of(model).mask, mask)


def test_a_run_resumes_in_the_middle_of_a_schedule():
    """Step, sparsity and mask are in the state_dict."""
    config = config_of(sparsity_schedule=PolynomialDecaySchedule(total_iters=9, update_frequency=3))
    first, second = counted(8, 8), counted(8, 8)
    pruner = MagnitudePruner(first, config)
    pruner.prepare((torch.randn(1, 8),))
    for _ in range(4):
        pruner.step()
    resumed = MagnitudePruner(second, config)
    resumed.prepare((torch.randn(1, 8),))
    second.load_state_dict(first.state_dict())
    assert resumed._step_count == 4
    assert torch.equal(second.weight, first.weight)
    for _ in range(5):
        pruner.step()
        resumed.step()
        assert torch.equal(second.weight, first.weight)
        assert impl_of(second).sparsity == impl_of(first).sparsity


def test_a_checkpoint_without_steps_loads():
    """As coreai-opt writes it: a mask in the weight's dtype, and no count."""
    model, other = counted(4, 4), counted(4, 4)
    pruned(model, (torch.randn(1, 4),))
    pruned(other, (torch.randn(1, 4),), target_sparsity=0.25)
    state = model.state_dict()
    prefix = "parametrizations.weight.0."
    state[prefix + "mask"] = state[prefix + "mask"].float()
    del state[prefix + "step_count"], state[prefix + "sparsity_state"]
    other.load_state_dict(state)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(copier):
    """Deep copies and pickles are whole."""
    model = SmallCNN().eval()
    example = (torch.randn(2, 3, 8, 8),)
    pruned(model, example)
    assert torch.equal(copier(model)(*example), model(*example))


def test_training_mode_trains_and_restores():
    """Train mode inside, whatever it was outside; not nested."""
    model = SmallCNN().eval()
    pruner = pruned(model, (torch.randn(2, 3, 8, 8),))
    with pruner.training_mode() as entered:
        assert entered is pruner
        assert model.training
        with pytest.raises(RuntimeError, match="Cannot enter training_mode"), pruner.training_mode():
            pass
        with pytest.raises(RuntimeError, match="inside training mode"):
            pruner.finalize(backend="_torch")
    assert not model.training
    unprepared = MagnitudePruner(counted(2, 2))
    with pytest.raises(RuntimeError, match="must be prepared before entering"), unprepared.training_mode():
        pass


def test_prepare_leaves_statistics_and_modes_alone():
    """The traced forward runs in eval mode and puts everything back."""
    model = SmallCNN().train()
    before = copy.deepcopy(model.norm.state_dict())
    pruned(model, (torch.randn(2, 3, 8, 8),))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.norm.state_dict().items())


def test_plan_counts_masks_and_values():
    """Half of the float32 entries and a bit for each."""
    model = counted(8, 16)
    plan = MagnitudePruner(model).plan((torch.randn(1, 16),))
    assert not hasattr(model, "parametrizations")
    (row,) = plan.rows
    assert (row.dense_bytes, row.compressed_bytes) == (512, 256 + 16)
    assert "50% sparse unstructured" in str(plan)


def test_keys_that_match_nothing_are_said():
    """A misspelt module name is a warning that proposes the nearest."""
    config = config_of()
    config.set_module_name("hed", None)
    with pytest.warns(ConfigMatchWarning, match="nearest: 'head'"):
        MagnitudePruner(SmallCNN(), config).prepare((torch.randn(2, 3, 8, 8),))


class TiedAutoencoder(nn.Module):
    """One weight, used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return torch.addmm(self.bias, F.linear(x, self.weight), self.weight)


@pytest.mark.parametrize(
    "fields",
    [{}, {"pruning_scheme": NMStructured(axis=1)}, {"pruning_scheme": ChannelStructured()}, {"scope": "global"}],
)
def test_a_weight_used_both_ways_is_pruned(fields):
    """Only a ranking of each output channel by itself asks which dimension these have."""
    model = TiedAutoencoder()
    pruned(model, (torch.randn(2, 8),), **fields)
    assert zeros(model.weight) == 0.5


@pytest.mark.parametrize("fields", [{"scope": "row"}, {"pruning_algo": "wanda"}])
def test_a_weight_used_both_ways_has_no_rows(fields):
    """The plan says so, with what helps."""
    model = TiedAutoencoder()
    pruner = MagnitudePruner(model, config_of(PruningSpec(**fields)))
    (problem,) = pruner.plan((torch.randn(2, 8),)).problems
    assert problem.code == "scope"
    with pytest.raises(PlanError, match=r"linear.* and addmm.*different dimensions.*scope='tensor'"):
        pruner.prepare((torch.randn(2, 8),))
    pruned(model, (torch.randn(2, 8),), scope="tensor", pruning_algo=fields.get("pruning_algo", "default"))


@pytest.mark.parametrize("scope", ["global", "row"])
@pytest.mark.parametrize("base", ["none", "wanda"])
def test_a_ranking_of_an_algorithm_without_scores_is_an_error_of_the_plan(base, scope):
    """It would be by magnitude or by another algorithm's scores, whatever the algorithm's masks are."""
    of = PruneImplBase if base == "none" else PruneImplBase.get_class(base)

    @PruneImplBase.register(f"last_entries_{base}_{scope}")
    class LastEntries(of):
        @staticmethod
        def compute_mask(weight, sparsity, pruning_scheme):
            return (torch.arange(weight.numel()).view(weight.shape) < weight.numel() * (1 - sparsity)).to(weight.dtype)

    model = counted(4, 4)
    with pytest.raises(PlanError, match=r"LastEntries does not define.*scope='tensor'"):
        pruned(model, (torch.randn(1, 4),), pruning_algo=LastEntries, scope=scope)
    pruned(model, (torch.randn(1, 4),), pruning_algo=LastEntries)
    assert model.weight[2:].eq(0).all()


@pytest.mark.parametrize("key", ["default", "wanda", "sparsegpt"])
def test_a_subclass_with_a_mask_of_its_own_is_asked_for_it(key):
    """An algorithm that overrides ``compute_mask`` alone, also after calibration."""

    @PruneImplBase.register(f"first_row_{key}")
    class FirstRow(PruneImplBase.get_class(key)):
        @staticmethod
        def compute_mask(weight, sparsity, pruning_scheme):
            mask = torch.ones_like(weight)
            mask[0] = 0
            return mask

    model = counted(4, 4)
    pruner = pruned(model, (torch.randn(1, 4),), pruning_algo=FirstRow)
    expected = [True, False, False, False]
    assert model.weight.eq(0).all(1).tolist() == expected
    if key != "default":
        with pruner.calibration_mode():
            model(torch.randn(16, 4))
        assert model.weight.eq(0).all(1).tolist() == expected
    assert zeros(model.weight) == 0.25


def test_a_scheme_of_ones_own_is_its_fields():
    """The algorithm that comes with it reads them; to the one by magnitude it is every entry on its own."""

    @PruningScheme.register("first_rows")
    class FirstRows(PruningScheme):
        rows: int = 1

    @PruneImplBase.register("first_rows")
    class PruneRows(PruneImplBase):
        @staticmethod
        def compute_mask(weight, sparsity, pruning_scheme):
            return (torch.arange(len(weight)) >= pruning_scheme.rows).to(weight.dtype).unsqueeze(1).expand_as(weight)

    scheme, model = {"type": "first_rows", "rows": 2}, counted(4, 4)
    pruned(model, (torch.randn(1, 4),), pruning_algo="first_rows", pruning_scheme=scheme)
    assert model.weight.eq(0).all(1).tolist() == [True, True, False, False]
    by_magnitude = counted(4, 4)
    pruned(by_magnitude, (torch.randn(1, 4),), pruning_scheme=FirstRows(), target_sparsity=0.25)
    assert zeros(by_magnitude.weight) == 0.25


def test_channels_of_a_bias_are_its_entries():
    """What ``"*"`` names besides the weight of a convolution."""
    conv = nn.Conv2d(3, 4, 1)
    with torch.no_grad():
        conv.bias.copy_(torch.tensor([1.0, -3.0, 0.5, 4.0]))
    spec = {"*": PruningSpec(pruning_scheme=ChannelStructured())}
    config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec=spec))
    MagnitudePruner(conv, config).prepare((torch.randn(1, 3, 2, 2),), strict=True)
    assert conv.bias.tolist() == [0.0, -3.0, 0.0, 4.0]
    assert int(conv.weight.flatten(1).eq(0).all(1).sum()) == 2


class Channelwise(nn.Module):
    """A forward that needs the convolution's output laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        return y.permute(0, 2, 3, 1).view(len(y), -1)


@pytest.mark.parametrize("fields", [{}, {"scope": "global"}, {"pruning_algo": "sparsegpt"}])
def test_weights_keep_their_memory_layout(fields):
    """Also under masks that were loaded, or ranked together, or came with calibration."""
    model, x = Channelwise().to(memory_format=torch.channels_last), torch.randn(2, 4, 8, 8)
    stride = model.conv.weight.stride()
    pruner = pruned(model, (x,), **fields)
    if "pruning_algo" in fields:
        with pruner.calibration_mode():
            model(x)
    expected = model(x)
    assert model.conv.weight.stride() == stride
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_masks_of_blocks_as_long_as_the_dimension_load(axis):
    """Their entries do not share memory."""
    model = nn.Linear(8, 8)
    pruned(model, (torch.randn(1, 8),), pruning_scheme=BlockStructured(axis=axis, block_size=8))
    before = model.weight.detach().clone()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model.weight, before)
    assert zeros(model.weight) == 0.5


def test_the_target_outlives_a_cast_of_the_model():
    """0.7 is not a number of bfloat16."""
    model, fresh = counted(10, 10), counted(10, 10).bfloat16()
    pruned(model, (torch.randn(1, 10),), target_sparsity=0.7)
    pruned(fresh, (torch.randn(1, 10).bfloat16(),), target_sparsity=0.7)
    model.bfloat16()
    assert impl_of(model).sparsity_state.item() == 0.7
    fresh.load_state_dict(model.state_dict())
    assert impl_of(fresh).sparsity == 0.7


def test_loading_something_else_does_not_make_a_mask_up_to_date():
    """A mask that the sparsity has left behind is made anew all the same."""
    model = counted(4, 4)
    pruned(model, (torch.randn(1, 4),))
    impl_of(model).sparsity = 0.75
    model.load_state_dict({}, strict=False)
    assert impl_of(model).is_stale
    assert zeros(model.weight) == 0.75
