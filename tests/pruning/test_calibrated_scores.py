"""Wanda and SparseGPT: statistics of inputs, scores and compensation, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import BitwrightWarning, ConfigMatchWarning
from bitwright.pruning import MagnitudePruner
from bitwright.pruning._matrix_form import LayerInputs, MatrixForm, layer_inputs
from bitwright.pruning._sparsegpt import InverseFactor, compensate
from bitwright.pruning._statistics import GramStatistics, NormStatistics
from bitwright.pruning.config import ConstantSparsitySchedule
from bitwright.pruning.spec import ChannelStructured, NMStructured, PruningSpec

from .networks import SmallCNN, TokenModel, config_of, counted, pruned, zeros

CONVS = [
    (F.conv1d, (2, 4, 9), (6, 4, 3), {"stride": 2, "padding": 1}),
    (F.conv2d, (2, 4, 7, 6), (6, 2, 3, 2), {"groups": 2, "dilation": (2, 1), "padding": (1, 0)}),
    (F.conv2d, (2, 4, 7, 7), (4, 1, 3, 3), {"groups": 4, "padding": "same"}),
    (F.conv3d, (1, 2, 4, 5, 4), (3, 2, 2, 2, 2), {"padding": "valid"}),
    (F.conv2d, (4, 7, 7), (6, 4, 3, 3), {}),
]


@pytest.mark.parametrize(("function", "input_shape", "weight_shape", "options"), CONVS)
def test_a_convolution_is_its_columns_times_its_matrices(function, input_shape, weight_shape, options):
    """Windows · Wᵀ gives what torch computes, for groups, strides, dilation and padding."""
    x, w = torch.randn(input_shape, dtype=torch.float64), torch.randn(weight_shape, dtype=torch.float64)
    weight, read = layer_inputs(function, (x, w), options)
    assert weight is w
    inputs = read()
    product = inputs.columns @ inputs.form.matrices(w).transpose(1, 2)  # [G, N, R]
    expected = function(x, w, **options)
    expected = expected if expected.ndim == w.ndim else expected.unsqueeze(0)
    positions = expected.movedim(1, -1).reshape(-1, w.shape[0])
    assert torch.allclose(product.transpose(0, 1).reshape(positions.shape), positions)
    assert torch.equal(inputs.form.weight(inputs.form.matrices(w), w.shape), w)


def test_linear_addmm_and_attention_columns():
    """The three ways of writing a matrix product; attention with inputs of its own for query, key and value."""
    x, w = torch.randn(5, 4), torch.randn(3, 4)
    _, read = layer_inputs(F.linear, (x, w), {})
    assert torch.allclose((read().columns @ w.T)[0], F.linear(x, w))
    _, read = layer_inputs(torch.addmm, (torch.zeros(3), x, w.T.contiguous()), {})
    form = read().form
    assert torch.equal(form.matrices(w.T.contiguous())[0], w)
    assert torch.equal(form.spread(torch.arange(4.0).view(1, 4), (4, 3)), torch.arange(4.0).view(4, 1))
    bound = {"query": torch.ones(2, 1, 4), "key": torch.ones(3, 1, 4) * 2, "value": torch.ones(3, 1, 4) * 3}
    _, read = layer_inputs(F.multi_head_attention_forward, (), {**bound, "in_proj_weight": torch.randn(12, 4)})
    inputs = read()
    assert inputs.form == MatrixForm(groups=3)
    assert inputs.counts == (2, 3, 3)
    sums = inputs.columns.sum((1, 2)) / 4
    assert (sums / torch.tensor(inputs.counts)).tolist() == [1, 2, 3]


def test_a_transposed_convolution_sees_its_input_channels():
    """Each position contributes channels · W, so the columns are the channels of every position."""
    x, w = torch.randn(2, 4, 3, 3), torch.randn(4, 3, 2, 2)
    _, read = layer_inputs(F.conv_transpose2d, (x, w), {"groups": 2})
    inputs = read()
    assert inputs.columns.shape == (2, 18, 2)
    matrices = inputs.form.matrices(w)
    assert matrices.shape == (2, 12, 2)
    assert torch.equal(inputs.form.weight(matrices, w.shape), w)


@pytest.mark.parametrize("kind", [NormStatistics, GramStatistics])
def test_statistics_merge(kind):
    """Parts add up to the whole, so batches and processes may be split at will."""
    columns = torch.randn(2, 30, 5)
    whole, first, second = kind(), kind(), kind()
    whole.add(LayerInputs(MatrixForm(groups=2), columns))
    first.add(LayerInputs(MatrixForm(groups=2), columns[:, :7]))
    second.add(LayerInputs(MatrixForm(groups=2), columns[:, 7:]))
    first.merge(second)
    assert first.count == whole.count == 30
    assert torch.allclose(first.squares, whole.squares, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("around", [False, True])
def test_autocast_leaves_statistics_in_full_precision(algorithm, around):
    """In the forward of the model, or around the whole calibration with what it ends with."""
    x = torch.randn(64, 32) @ torch.randn(32, 32) * 0.3 + 1
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        pruner = MagnitudePruner(
            nn.Linear(32, 160), config_of(PruningSpec(target_sparsity=0.6, pruning_algo=algorithm))
        )
        model = pruner.prepare((x,))
        scope = torch.autocast("cpu", torch.bfloat16, enabled=on)
        if around:
            with scope, pruner.calibration_mode():
                model(x)
        else:
            with pruner.calibration_mode(), scope:
                model(x)
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_wanda_is_magnitude_times_input_norm_in_each_row():
    """|W|·‖X‖ with half of each row removed (arXiv 2306.11695, equation 1)."""
    torch.manual_seed(0)
    model = nn.Linear(12, 6)
    data = torch.randn(64, 12) * torch.linspace(0.05, 4, 12)
    dense = model.weight.detach().double()
    pruner = pruned(model, (data[:1],), pruning_algo="wanda")
    before = model.weight.detach().clone()
    with pruner.calibration_mode():
        model(data[:20])
        model(data[20:])
    scores = dense.abs() * data.double().norm(dim=0)
    expected = scores >= scores.sort(dim=1).values[:, 6:7]
    assert torch.equal(model.weight != 0, expected)
    assert not torch.equal(before != 0, expected)


@pytest.mark.parametrize("options", [{"scope": "row"}, {"pruning_algo": "wanda"}])
def test_outputs_of_grouped_transposed_convolutions_are_ranked_apart(options):
    """Output 1 of group 0 and output 1 of group 1 stand in one column of the weight, ``[inputs, outputs / groups]``."""
    layer, x = nn.ConvTranspose2d(8, 6, 3, groups=2), torch.randn(1, 8, 4, 4)
    with torch.no_grad():
        layer.weight[4:] *= 100  # all of the first group would go
    pruned(layer, (x,), **options)
    kept = (layer.weight != 0).unflatten(0, (2, 4)).transpose(1, 2).flatten(2)
    assert torch.equal(kept.sum(2), torch.full((2, 3), 18))


def test_wanda_without_data_is_magnitude_in_each_row():
    """Until calibration all inputs count the same."""
    model = nn.Linear(12, 6)
    pruned(model, (torch.randn(1, 12),), pruning_algo="wanda")
    magnitudes = model.parametrizations.weight.original.abs()
    assert torch.equal(model.weight != 0, magnitudes >= magnitudes.sort(dim=1).values[:, 6:7])


def removed_one_by_one(weight: torch.Tensor, gram: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Optimal brain surgeon over the columns that are left, with a matrix inverse at every step."""
    rows = []
    for row, kept in zip(weight, mask, strict=True):
        row = row.clone()
        for column in range(len(row)):
            if not kept[column]:
                inverse = torch.linalg.inv(gram[column:, column:])
                row[column:] -= row[column] / inverse[0, 0] * inverse[:, 0]
                row[column] = 0
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("block", [3, 8, 128])
def test_compensation_is_the_optimal_brain_surgeon(block):
    """The Cholesky form gives what inverting at every step gives (arXiv 2301.00774, section 3), in any block size."""
    torch.manual_seed(1)
    data = torch.randn(200, 16, dtype=torch.float64) @ torch.randn(16, 16, dtype=torch.float64)
    gram = data.T @ data / 200
    weight, mask = torch.randn(5, 16, dtype=torch.float64), torch.rand(5, 16) > 0.5
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    factor = InverseFactor(gram)
    assert torch.allclose(factor.diagonal.double(), torch.linalg.inv(damped).diagonal(), rtol=1e-4)
    adjusted, kept = compensate(weight.float(), factor, mask, block)
    assert torch.equal(kept, mask)
    assert torch.allclose(adjusted.double(), removed_one_by_one(weight, damped, mask), atol=2e-3)


def test_the_factor_gives_the_inverse_back():
    """U'U is the inverse of the damped Gram matrix, at its own scale."""
    x = 50 * torch.randn(300, 12)
    gram = x.T @ x
    factor = InverseFactor(gram)
    damped = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(12, dtype=torch.float64)
    upper = factor.upper.double()
    assert torch.equal(factor.upper, factor.upper.triu())
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(12, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(factor.diagonal.double(), damped.inverse().diagonal(), rtol=1e-5)


def test_inputs_too_small_to_be_multiplied_are_taken_as_independent():
    """Products of tiny inputs round to a matrix that no damping makes definite."""
    gram = torch.full((4, 4), -3e-45)
    gram.fill_diagonal_(1e-45)
    factor = InverseFactor(gram)
    weight, mask = compensate(torch.randn(3, 4), factor, torch.tensor([True, False, True, False]).expand(3, 4))
    assert weight.isfinite().all()
    assert mask.sum() == 6


def test_inputs_that_are_always_zero_are_pruned_first_and_harm_nothing():
    """A gram matrix without rank has a damped inverse all the same."""
    gram = torch.zeros(4, 4)
    gram[:2, :2] = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    factor = InverseFactor(gram)
    assert factor.diagonal[2:].isinf().all()
    assert factor.upper.isfinite().all()
    assert InverseFactor(torch.zeros(3, 3)).upper.isfinite().all()


def output_error(algorithm: str, **spec: object) -> float:
    """Error of a linear layer's output on fresh data, with correlated inputs."""
    torch.manual_seed(2)
    data = torch.randn(600, 8) @ torch.randn(8, 48) + 0.3 * torch.randn(600, 48)
    data *= torch.linspace(0.2, 2, 48)
    model = nn.Linear(48, 32)
    dense = model(data).detach()
    pruner = pruned(model, (data[:1],), pruning_algo=algorithm, **spec)
    if algorithm != "default":
        with pruner.calibration_mode():
            model(data[:300])
    return (model(data[300:]) - dense[300:]).square().mean().item()


@pytest.mark.parametrize("spec", [{"target_sparsity": 0.6}, {"pruning_scheme": NMStructured(n=2, m=4)}])
def test_data_helps(spec):
    """SparseGPT beats Wanda, and Wanda beats magnitude, on data that calibration has not seen."""
    magnitude, wanda, sparsegpt = (output_error(name, **spec) for name in ("default", "wanda", "sparsegpt"))
    assert sparsegpt < 0.7 * wanda
    assert wanda < magnitude


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"pruning_scheme": ChannelStructured()},
        {"scope": "global", "target_sparsity": 0.2},
        {"pruning_scheme": NMStructured(n=1, m=2)},
    ],
)
def test_calibration_of_every_kind_of_layer(algorithm, spec):
    """Plain, grouped and transposed convolutions, in every scheme: finite, as sparse as asked, and copies agree."""
    torch.manual_seed(3)
    model = SmallCNN().eval()
    model.stem = nn.Conv2d(4, 8, 3, padding=1)
    with torch.no_grad():
        model.head.weight *= 4  # its few inputs are small: a common ranking would leave nothing of it
    example = (torch.randn(8, 4, 8, 8),)
    pruner = pruned(model, example, pruning_algo=algorithm, **spec)
    masked = zeros(torch.cat([p.flatten() for p in (model.stem.weight, model.grouped.weight, model.up.weight)]))
    with pruner.calibration_mode():
        assert not model.training
        assert not torch.is_grad_enabled()
        model(*example)
    after = zeros(torch.cat([p.flatten() for p in (model.stem.weight, model.grouped.weight, model.up.weight)]))
    assert model(*example).isfinite().all()
    assert after == pytest.approx(masked, abs=0.05)


def test_attention_and_token_models():
    """The joint projection is calibrated; weights without collectable inputs fall back to magnitude, with a warning."""
    torch.manual_seed(4)
    model = TokenModel().eval()
    tokens = (torch.randint(0, 12, (4, 6)),)
    config = config_of(PruningSpec(pruning_algo="wanda"))
    config.global_config.op_state_spec = {"*": PruningSpec(pruning_algo="wanda"), "in_proj_bias": None, "bias": None}
    pruner = MagnitudePruner(model, config)
    with pytest.warns(ConfigMatchWarning) as warnings:
        pruner.prepare(tokens)
    named = "".join(str(warning.message) for warning in warnings)
    assert "no-inputs] embed.weight" in named
    assert "no-inputs] attention.out_proj.weight" in named
    assert "attention.in_proj_weight" not in named
    with pruner.calibration_mode():
        model(*tokens)
    impl = model.attention.parametrizations.in_proj_weight[0]
    assert impl.input_scale is not None


def calibrate_and_fail(pruner, model, example):
    with pruner.calibration_mode():
        model(*example)
        raise ZeroDivisionError


def test_calibration_that_fails_changes_nothing():
    """Masks, weights and modes are as before."""
    model = SmallCNN().train()
    example = (torch.randn(4, 3, 8, 8),)
    pruner = pruned(model, example, pruning_algo="sparsegpt")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        calibrate_and_fail(pruner, model, example)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert zeros(model.stem.weight) > 0


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_data_that_is_not_finite_is_an_error_that_names_the_weights(algorithm):
    """Nothing is learnt from it: weights and masks are as before."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    pruner = pruned(model, (torch.randn(4, 6),), pruning_algo=algorithm)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = torch.randn(16, 6)
    data[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"'0\.weight', '2\.weight'.*NaN or infinite"), pruner.calibration_mode():
        model(data)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[key], value) for key, value in after.items())


def test_calibration_without_data_or_purpose():
    """No data is an error; nothing to calibrate is a warning."""
    pruner = pruned(counted(4, 4), (torch.randn(1, 4),), pruning_algo="wanda")
    with pytest.raises(RuntimeError, match="saw no inputs"), pruner.calibration_mode():
        pass
    model = counted(4, 4)
    pruner = pruned(model, (torch.randn(1, 4),))
    with pytest.warns(BitwrightWarning, match="nothing to calibrate"), pruner.calibration_mode():
        model(torch.randn(1, 4))


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_scores_that_never_saw_data_are_told_at_the_end(algorithm):
    """By name; a weight that calibration reached is not among them."""
    model = nn.ModuleDict({"seen": nn.Linear(8, 8), "unseen": nn.Linear(8, 8)})

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.both = model, True

        def forward(self, x):
            x = self.layers["seen"](x)
            return self.layers["unseen"](x) if self.both else x

    network, x = Switched(), torch.randn(16, 8)
    pruner = MagnitudePruner(network, config_of(PruningSpec(pruning_algo=algorithm)))
    pruner.prepare((x,))
    network.both = False
    with pruner.calibration_mode():
        network(x)
    with pytest.warns(BitwrightWarning, match=r"^'layers\.unseen\.weight' is pruned by magnitude"):
        pruner.finalize(backend="_torch")


def test_calibrated_scores_outlive_the_calibration():
    """A schedule that removes more later on goes by what calibration found, also after loading."""
    torch.manual_seed(5)
    config = config_of(PruningSpec(pruning_algo="wanda"), sparsity_schedule=ConstantSparsitySchedule(begin_step=1))
    data = torch.randn(32, 8) * torch.linspace(0.1, 3, 8)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    pruners = [MagnitudePruner(model, config) for model in (first, second)]
    for pruner in pruners:
        pruner.prepare((data,))
    with pruners[0].calibration_mode():
        first(data)
    assert zeros(first.weight) == 0.0
    second.load_state_dict(first.state_dict())
    for pruner in pruners:
        pruner.step()
    scores = first.parametrizations.weight.original.abs() * data.norm(dim=0)
    expected = scores >= scores.sort(dim=1).values[:, 4:5]
    assert torch.equal(first.weight != 0, expected)
    assert torch.equal(second.weight, first.weight)


def test_tied_weights_learn_from_all_their_uses():
    """Inputs of both layers are merged."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    pruner = pruned(model, (torch.randn(4, 6),), pruning_algo="wanda")
    data = torch.randn(16, 6)
    with pruner.calibration_mode():
        model(data)
    hidden = torch.tanh(F.linear(data, model[0].parametrizations.weight.original, model[0].bias))
    squares = data.square().sum(0) + hidden.square().sum(0)
    found = model[0].parametrizations.weight[0].input_scale
    assert torch.allclose(found, (squares / 32).sqrt().view(1, 6), rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_calibration_of_an_exported_graph(algorithm):
    """ATen ops are convolutions and linear layers like any other: the same masks and weights as in eager mode."""
    torch.manual_seed(8)
    model, data = SmallCNN().eval(), torch.randn(4, 3, 8, 8)
    graph = torch.export.export(model, (data,)).module()
    for subject in (model, graph):
        pruner = pruned(subject, (data,), pruning_algo=algorithm)
        with pruner.calibration_mode():
            subject(data)
    assert zeros(model.stem.weight) > 0.4
    torch.testing.assert_close(graph(data), model(data), rtol=1e-4, atol=1e-5)
    assert graph.stem.parametrizations.weight[0].input_scale is not None


def test_a_global_ranking_by_compensated_loss_is_of_all_weights_together():
    """Small weights go first, and what is kept makes up for them, as with a mask that was chosen beforehand."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[1].weight[4:] *= 1e-3
    dense = [layer.weight.detach().clone() for layer in model]
    data = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    inputs = [data, data @ dense[0].T]
    pruner = pruned(model, (data[:2],), pruning_algo="sparsegpt", scope="global", target_sparsity=0.25)
    with pruner.calibration_mode():
        model(data)
    factors = [InverseFactor(x.T @ x / 256) for x in inputs]
    scores = [weight.abs() * factor.diagonal.rsqrt() for weight, factor in zip(dense, factors, strict=True)]
    threshold = torch.cat(scores).flatten().sort().values[31]
    for layer, weight, score, factor in zip(model, dense, scores, factors, strict=True):
        expected, mask = compensate(weight, factor, score > threshold)
        assert torch.equal(layer.weight != 0, mask)
        assert torch.allclose(layer.weight, expected, atol=1e-5)
    assert zeros(model[0].weight) < 0.1
    assert zeros(model[1].weight) > 0.4


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_calibration_that_fails_while_it_is_applied_changes_nothing(monkeypatch):
    """Nor the weights that were adjusted by then, their masks, and what calibration found about them."""
    torch.manual_seed(10)
    model, data = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), torch.randn(64, 8)
    pruner = pruned(model, (data,), pruning_algo="sparsegpt")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    monkeypatch.setattr(model[1].parametrizations.weight[0], "set_mask", interrupt)
    with pytest.raises(KeyboardInterrupt), pruner.calibration_mode():
        model(data)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[key], value) for key, value in after.items())
    assert not model[0].parametrizations.weight[0].is_stale


def test_expanded_weights_are_not_adjusted():
    """One place in memory cannot hold several values."""
    model, data = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), torch.randn(64, 8)
    model[1].weight = nn.Parameter(torch.randn(4, 1).expand(4, 4))
    pruner = pruned(model, (data,), pruning_algo="sparsegpt")
    before = model[0].parametrizations.weight.original.clone()
    with pytest.raises(ValueError, match=r"'1\.weight' cannot be adjusted.*clone"), pruner.calibration_mode():
        model(data)
    assert torch.equal(model[0].parametrizations.weight.original, before)


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_scales_of_large_inputs_outlive_a_cast(algorithm):
    """Their dtype is not the model's, in which they would be infinite."""
    model, data = nn.Linear(8, 8), torch.randn(64, 8)
    pruner = pruned(model, (data,), pruning_algo=algorithm)
    with pruner.calibration_mode():
        model(data * 1e6)
    impl = model.parametrizations.weight[0]
    scale = impl.input_scale.clone()
    model.half()
    assert torch.equal(impl.input_scale, scale)
    impl.sparsity = 0.75
    assert zeros(model.weight) == 0.75
    fresh = nn.Linear(8, 8).half()
    pruned(fresh, (data.half(),), pruning_algo=algorithm)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.parametrizations.weight[0].input_scale, scale)


def test_a_checkpoint_from_before_calibration_loads():
    """What calibration found goes with the weights it belongs to."""
    model, data = nn.Linear(8, 8), torch.randn(64, 8)
    pruner = pruned(model, (data,), pruning_algo="sparsegpt")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pruner.calibration_mode():
        model(data)
    model.load_state_dict(before)
    assert model.parametrizations.weight[0].input_scale is None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_cross_attention_learns_from_all_its_keys(algorithm):
    """However few the queries are: each of the three projections has its own number of positions."""
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    queries, keys = torch.randn(1, 1, 6), torch.randn(1, 300, 6) * 6
    keys[:, 0] = 0
    example = (queries, keys, keys)
    pruner = MagnitudePruner(attention, config_of(PruningSpec(pruning_algo=algorithm)))
    pruner._config.global_config.op_state_spec = {"in_proj_weight": PruningSpec(pruning_algo=algorithm)}
    pruner.prepare(example)
    with pruner.calibration_mode():
        attention(*example)
        attention(*example)
    scale = attention.parametrizations.in_proj_weight[0].input_scale.unflatten(0, (3, 6))
    if algorithm == "wanda":
        means = [x.square().mean((0, 1)).sqrt() for x in example]
    else:
        means = [InverseFactor(x[0].T @ x[0] / x.shape[1]).diagonal.rsqrt() for x in example]
    torch.testing.assert_close(scale, torch.stack(means).unsqueeze(1).expand(3, 6, 6), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_a_simulator_that_was_switched_off_stays_off(fails):
    """Calibration looks at the dense model, and leaves the switch as it was."""
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(64, 8)
    pruner = pruned(model, (data,), pruning_algo="wanda")
    off, on = (layer.parametrizations.weight[0] for layer in model)
    off.enabled = False
    if fails:
        with pytest.raises(ZeroDivisionError):
            calibrate_and_fail(pruner, model, (data,))
    else:
        with pruner.calibration_mode():
            model(data)
    assert (off.enabled, on.enabled) == (False, True)


@pytest.mark.parametrize("algorithm", ["wanda", "sparsegpt"])
def test_inputs_too_large_to_be_squared_are_called_so(algorithm):
    """They are finite."""
    model, data = nn.Linear(8, 8), torch.randn(16, 8)
    pruner = pruned(model, (data,), pruning_algo=algorithm)
    with pytest.raises(ValueError, match=r"'weight' had.*too large for float32"), pruner.calibration_mode():
        model(data * 1e20)
