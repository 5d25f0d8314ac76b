"""Physical removal of channels: the outputs stay, the tensors shrink, and what must stay stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.pruning import MagnitudePruner, PruningSpec, shrink
from bitwright.pruning.spec import ChannelStructured

from .networks import config_of


def channel_pruned(model: nn.Module, example: tuple[torch.Tensor, ...], sparsity: float = 0.5) -> MagnitudePruner:
    """A model in eval mode with lively norms, half of its output channels masked."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.bias)
    model.eval()
    spec = PruningSpec(target_sparsity=sparsity, pruning_scheme=ChannelStructured())
    pruner = MagnitudePruner(model, config_of(spec))
    pruner.prepare(example)
    return pruner


def check(model: nn.Module, *example: torch.Tensor):
    pruner = channel_pruned(model, example)
    before = model(*example)
    report = pruner.shrink(example)
    assert torch.allclose(model(*example), before, atol=1e-5)
    assert not pruner._is_model_prepared(model)
    assert not any("parametrizations" in name for name, _ in model.named_parameters())
    assert report.parameters_after == sum(p.numel() for p in model.parameters())
    return report


def test_linear_layers():
    """Constants of removed outputs, through an activation that is not zero at zero, go into the next bias."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Sigmoid(), nn.Linear(16, 12, bias=False), nn.GELU(), nn.Linear(12, 3))
    report = check(model, torch.randn(5, 10))
    assert report.removed == {"0": (16, 8), "2": (12, 6)}
    assert "output of the model" in report.kept["4"]
    assert (model[0].out_features, model[2].in_features, model[2].out_features, model[4].in_features) == (8, 8, 6, 6)
    assert model[2].bias is not None


def test_convolutions_norms_pools_and_flatten():
    """Each channel is several columns of the linear layer after a flatten."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 4),
    )  # fmt: skip
    report = check(model, torch.randn(5, 3, 8, 8))
    assert report.removed == {"0": (8, 4), "3": (6, 3)}
    assert model[1].num_features == 4
    assert model[6].weight.shape == (4, 12)


def test_a_constant_that_meets_padding_stays():
    """Zeros around the image are not that constant; a channel that is exactly zero can go."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    report = check(model, torch.randn(2, 3, 8, 8))
    assert report.removed == {"1": (4, 2)}
    assert "1 pads" in report.kept["0"]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    assert check(model, torch.randn(2, 3, 8, 8)).removed == {"0": (8, 4)}


class Residual(nn.Module):
    """Two branches that meet, a depthwise convolution, and a head behind average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 1, bias=False)
        self.branch = nn.Conv2d(8, 8, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + torch.relu(self.branch(x))
        x = self.norm(self.depthwise(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_branches_of_a_residual_go_together():
    """Only channels that nobody needs go: constant where the branch reads them, and where the head does."""
    model = Residual()
    with torch.no_grad():
        model.stem.weight[:4] *= 0.01
        model.branch.weight[2:6] *= 0.01
        model.depthwise.weight[2:6] *= 0.01
    report = check(model, torch.randn(3, 1, 6, 6))
    assert report.removed["depthwise"] == (8, 6)
    assert model.stem.out_channels == model.branch.out_channels == model.norm.num_features == 6
    assert (model.depthwise.groups, model.depthwise.in_channels) == (6, 6)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 6, 1, bias=False)
        self.up = nn.ConvTranspose1d(6, 4, 2, stride=2)
        self.out = nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.out(self.up(torch.relu(self.down(x))))


def test_transposed_convolutions_have_inputs_first():
    """Axis 0 of their weight is cut with the layer before, axis 1 with the layer after."""
    model = Transposed()
    report = check(model, torch.randn(2, 2, 5))
    assert report.removed["down"] == (6, 3)
    assert model.up.weight.shape[0] == 3


class Branches(nn.Module):
    """Two branches side by side, a norm and a depthwise convolution over both, slopes for each channel, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(2, 6, 3, padding=1)
        self.right = nn.Conv2d(2, 4, 1)
        self.norm = nn.BatchNorm2d(12)
        self.slopes = nn.PReLU(12)
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = torch.cat([self.left(x), x, self.right(x)], dim=1)
        x = F.interpolate(self.slopes(self.norm(x)), scale_factor=2)
        return self.head(self.depthwise(x).mean((2, 3)))


def test_concatenated_channels_are_cut_where_they_came_from():
    """Each branch loses its own; what is concatenated as it came in stays."""
    model = Branches()
    with torch.no_grad():
        model.depthwise.weight *= torch.tensor([9, 1, 9, 1, 9, 1, 9, 9, 1, 1, 9, 9]).view(-1, 1, 1, 1) / 9
        model.left.weight[1::2] *= 0.01
        model.right.weight[:2] *= 0.01
    report = check(model, torch.randn(2, 2, 6, 6))
    assert report.removed == {"left": (6, 3), "right": (4, 2), "depthwise": (12, 7)}
    assert (model.norm.num_features, model.slopes.num_parameters, model.head.in_features) == (7, 7, 7)
    assert model.depthwise.groups == 7


def test_a_flattened_concatenation():
    """Channels of both parts are several columns of the linear layer."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Conv1d(2, 4, 3), nn.Conv1d(2, 6, 3), nn.Linear(50, 2)

        def forward(self, x):
            return self.head(torch.cat((self.first(x), torch.tanh(self.second(x))), -2).flatten(1))

    report = check(Flat(), torch.randn(3, 2, 7))
    assert report.removed == {"first": (4, 2), "second": (6, 3)}


class Gated(nn.Module):
    """Squeeze and excitation with linear layers."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, bias=bias)
        self.squeeze = nn.Linear(8, 4)
        self.excite = nn.Linear(4, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean(dim=[2, 3])))))
        return self.out(x * gate[:, :, None, None])


def test_gated_channels_go_where_they_are_zero():
    """Zero times any gate is zero; another constant times a gate that moves is none."""
    report = check(Gated(bias=False), torch.randn(2, 1, 6, 6))
    assert report.removed == {"stem": (8, 4), "squeeze": (4, 2), "excite": (8, 4)}
    model = Gated(bias=True)
    nn.init.ones_(model.stem.bias)
    with torch.no_grad():  # the gate is constant in other channels than those that it scales
        model.stem.weight[:4] *= 0.01
        model.excite.weight[4:] *= 0.01
    assert check(model, torch.randn(2, 1, 6, 6)).removed == {"squeeze": (4, 2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """A constant that goes into the next bias is rounded there, which is no reason to refuse."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 8)).to(dtype)
    example = (torch.randn(16, 64, dtype=dtype),)
    pruner = channel_pruned(model, example)
    before = model(*example)
    assert pruner.shrink(example).removed == {"0": (128, 64), "2": (96, 48)}
    assert torch.allclose(model(*example), before, atol=8 * torch.finfo(dtype).eps)


def test_tied_weights_stay_tied():
    """A mask on a weight with two owners becomes one parameter again, not two."""
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 8, bias=False))
    model[3].weight = model[0].weight
    tokens = torch.randint(0, 8, (2, 5))
    pruner = channel_pruned(model, (tokens,))
    before = model(tokens)
    report = pruner.shrink((tokens,))
    assert model[3].weight is model[0].weight
    assert report.parameters_after == report.parameters_before
    assert torch.equal(model(tokens), before)


class Mixing(nn.Module):
    """Softmax over channels, a shared layer, and a layer whose output leaves the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.softmax(self.first(x), -1)
        return self.last(self.shared(torch.relu(self.shared(x))))


def test_channels_stay_where_the_graph_does_not_allow_it():
    """With the reason by layer; nothing changes."""
    model = Mixing()
    report = check(model, torch.randn(3, 4))
    assert report.removed == {}
    assert "softmax" in report.kept["first"]
    assert report.parameters_before == report.parameters_after
    assert "softmax" in str(report)


def test_a_layer_keeps_at_least_one_channel():
    """Even if all are masked."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        model[0].weight.zero_()
    before = model(torch.ones(1, 4))
    report = shrink(model, (torch.ones(1, 4),))
    assert report.removed == {"0": (6, 1)}
    assert torch.allclose(model(torch.ones(1, 4)), before, atol=1e-6)


class Stubborn(nn.Module):
    """Insists on its width in plain Python, which no trace shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if x.shape[-1] != 8:
            raise ValueError("eight, please")
        return self.last(x)


class Deceptive(Stubborn):
    """Computes something else at another width."""

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(x) * x.shape[-1]


class Guessing(Stubborn):
    """Divides by nothing at another width."""

    def forward(self, x):
        x = self.last(torch.relu(self.first(x)))
        return x / (self.first.out_features == 8)


class Foreign(Stubborn):
    """Returns what lies between its layers in an object that no trace looks into."""

    def forward(self, x):
        x = torch.relu(self.first(x))
        return SimpleNamespace(hidden=x, result=self.last(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Stubborn(), "ValueError: eight, please"),
        (Deceptive(), r"output is off by"),
        (Guessing(), "other entries of an output are finite"),
        (Foreign(), r"shape \(3, 4\), and not \(3, 8\)"),
    ],
)
def test_a_failure_names_the_layer_and_leaves_the_model_as_it_was(model, reason):
    """Masks are on, widths are old, outputs are the same."""
    example = (torch.randn(3, 4),)
    pruner = channel_pruned(model, example)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"channels of \['first'\].*{reason}.*keep=\['first'\]"):
        pruner.shrink(example)
    assert pruner._is_model_prepared(model)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert model.first.out_features == 8


def test_layers_to_keep():
    """The one to blame is found among others, and may be kept so that the others shrink."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Sequential(Deceptive()), nn.Linear(2, 6))
    example = (torch.randn(3, 5),)
    pruner = channel_pruned(model, example)
    before = model(*example)
    with pytest.raises(RuntimeError, match=re.escape("keep=['3.0.first']")):
        pruner.shrink(example)
    with pytest.raises(ValueError, match=re.escape("which '3.0.fist' is not")):
        pruner.shrink(example, keep=["3.0.fist"])
    report = pruner.shrink(example, keep=["3"])
    assert report.removed == {"0": (6, 3), "2": (4, 2)}
    assert "keep" in report.kept["3.0.first"]
    assert torch.allclose(model(*example), before, atol=1e-5)


class Between(nn.Module):
    """Something between a layer and the one that reads it."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor], readers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.last = nn.Conv2d(readers, 4, 1)
        self.function = function
        self.register_buffer("gains", torch.arange(8.0).view(8, 1, 1))

    def forward(self, x):
        return self.last(self.function(self, torch.relu(self.first(x))))


ORDER = [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: h[:, ORDER],
        lambda m, h: h[:, tuple(ORDER)],
        lambda m, h: h[:, np.array(ORDER)],
        lambda m, h: h[:, [False] * 4 + [True] * 4],
        lambda m, h: h[:, torch.tensor(ORDER)],
        lambda m, h: h[:, 4:],
        lambda m, h: h[:, ::2],
        lambda m, h: h.split(4, 1)[1],
        lambda m, h: h.narrow(1, 0, 4),
        lambda m, h: h.flip(1),
        lambda m, h: h * m.gains,
        lambda m, h: h.view(len(h), 2, 4, *h.shape[2:]).transpose(1, 2).reshape(h.shape),
        lambda m, h: F.pixel_shuffle(h, 2),
        lambda m, h: F.group_norm(h, 2),
        lambda m, h: F.layer_norm(h, [8, *h.shape[2:]]),
        lambda m, h: torch.where(h > 0, h, -h),
        lambda m, h: F.pad(h, (0, 0, 0, 0, 1, 1)),
        lambda m, h: F.conv2d(h, m.first.weight.mean(1, keepdim=True).view(8, 1, 1, 1), groups=8),
    ],
)
def test_what_mixes_or_picks_channels_keeps_them(function):
    """Nothing is removed where an op, or an index, takes channels by their number."""
    with torch.no_grad():
        model = Between(function, function(Between(function), torch.ones(2, 8, 6, 6)).shape[1])
    report = check(model, torch.randn(2, 3, 6, 6))
    assert report.removed == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: h[:, :, 1:, ::2],
        lambda m, h: h[..., 2:],
        lambda m, h: h[:1, :8],
        lambda m, h: h[:, None, ..., 1][:, 0, :, :, None],
        lambda m, h: h[:, :, :, 0, None],
        lambda m, h: h + 0.5,
        lambda m, h: F.hardtanh(h, 0.5, 2.0),
    ],
)
def test_an_index_or_a_number_that_leaves_channels_alone(function):
    """Cutting and adding other dimensions is no reason to keep channels."""
    assert check(Between(function), torch.randn(2, 3, 6, 6)).removed == {"first": (8, 4)}


def test_averages_with_zeros_around_are_no_constants():
    """A constant that was averaged with padding differs at the border."""
    for padding, width in ((0, 4), (1, 8)):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(3, 1, padding), nn.Conv2d(8, 2, 1))
        check(model, torch.randn(2, 3, 6, 6))
        assert model[0].out_channels == width


def test_weights_that_are_read_twice_stay():
    """Also where the second reader is a function."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(F.relu(self.first(x))) + F.linear(x, self.first.weight).sum(-1, keepdim=True)

    report = check(Twice(), torch.randn(3, 4))
    assert report.removed == {}
    assert "read more than once" in report.kept["first"]


def test_captured_graphs_are_refused():
    """Their sizes are part of the graph."""
    example = (torch.randn(2, 4),)
    graph = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), example).module()
    with pytest.raises(TypeError, match="captured graph"):
        shrink(graph, example)


def test_the_result_is_an_ordinary_model():
    """It trains, and may be pruned again."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    example = (torch.randn(3, 6),)
    channel_pruned(model, example).shrink(example)
    model(*example).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = channel_pruned(model, example)
    assert again.shrink(example).removed == {"0": (4, 2), "2": (2, 1)}


class ByName(nn.Module):
    """Calls a layer with its input as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(input=torch.sigmoid(self.first(input=x)))


def test_layers_called_by_keyword():
    """Their input is found under its name."""
    assert check(ByName(), torch.randn(5, 4)).removed == {"first": (8, 4)}


@pytest.mark.parametrize("inputs", [torch.randn(1, 4), torch.randn(2, 4), [torch.randn(1, 4)]])
def test_inputs_that_are_no_tuple_are_refused(inputs):
    """A tensor would be taken apart into its rows."""
    with pytest.raises(TypeError, match="must be a tuple"):
        shrink(nn.Linear(4, 4), inputs)


def test_a_forward_that_does_not_run_is_a_runtime_error():
    """As documented, also where inputs are missing."""
    with pytest.raises(RuntimeError, match="forward"):
        shrink(nn.Linear(4, 4))


def test_an_empty_batch_says_nothing_about_constants():
    """The error names the layer that would read them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"2 gets an input of shape \(0, 8\).*at least one sample"):
        shrink(model, (torch.randn(0, 4),))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_layers_without_channels_stay():
    """There is nothing to remove from them."""
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4), nn.Linear(4, 3))
    x = torch.randn(2, 4)
    before = model(x)
    shrink(model, (x,))
    assert torch.allclose(model(x), before)
    assert model[0].out_features == 0


def test_states_keep_their_order():
    """A shrunk layer is an ordinary one: weight before bias, and nothing left of the simulators."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    names, attributes = list(model.state_dict()), set(vars(model[0]))
    check(model, torch.randn(5, 4))
    assert list(model.state_dict()) == names
    assert set(vars(model[0])) == attributes


class Scaled(nn.Module):
    """A dead output whose bias comes out times a number that a function gives."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function
        with torch.no_grad():
            self.first.weight[1] = 0
            self.first.bias[1] = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x), x))


@pytest.mark.parametrize(
    ("function", "goes"),
    [
        (lambda y, x: y / x.shape[0], False),
        (lambda y, x: y * x.shape[1], False),
        (lambda y, x: y * x.abs().mean().item(), False),
        (lambda y, x: y.sum(0, keepdim=True), False),
        (lambda y, x: y.sum(1), False),
        (lambda y, x: y.mean(1), True),
        (lambda y, x: torch.sigmoid(y * 0.5) - 3, True),
    ],
)
def test_constants_of_one_input_alone_stay(function, goes):
    """The bias of the next layer holds what is the same for other inputs, however many."""
    torch.manual_seed(0)
    model, x = Scaled(function).eval(), torch.randn(2, 4, 6)
    others = torch.randn(3, 5, 6), torch.randn(1, 2, 6)
    before = [model(other) for other in others]
    report = shrink(model, (x,))
    assert report.removed == ({"first": (8, 7)} if goes else {})
    for other, expected in zip(others, before, strict=True):
        assert torch.allclose(model(other), expected, atol=1e-5)


class Attended(nn.Module):
    """A dead output whose bias comes out times the size of a square mask."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.first, self.second, self.size = nn.Linear(6, 8), nn.Linear(8, 3), size
        with torch.no_grad():
            self.first.weight[1] = 0

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        assert self.size in (None, len(mask))
        assert mask.shape[0] == mask.shape[1]
        return self.second(self.first(mask @ x) * len(mask))


@pytest.mark.parametrize("size", [None, 4])
def test_sizes_of_several_inputs_change_together(size):
    """A size that the model wants as it is belongs to the constant."""
    model, x = Attended(size).eval(), torch.randn(2, 4, 6)
    report = shrink(model, (x,), example_kwargs={"mask": torch.ones(4, 4)})
    assert report.removed == ({} if size is None else {"first": (8, 7)})


def test_averages_over_a_fixed_number_are_no_constants():
    """Windows over the end of a picture have fewer entries, whose sum is divided by the same number."""
    torch.manual_seed(0)
    pool = nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=9)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), pool, nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        model[0].weight[1] = 0
    x = torch.randn(1, 3, 8, 8)
    before = model(x)
    assert shrink(model, (torch.randn(1, 3, 7, 7),)).removed == {}
    assert torch.allclose(model(x), before, atol=1e-6)


def test_models_that_take_no_other_inputs_are_cut():
    """A forward that wants its batch size, and values as they are, runs on the example inputs alone."""

    def strict(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] == 2
        assert bool((x.abs() >= 1).all())
        return y.relu()

    model = Scaled(strict).eval()
    assert shrink(model, (1 + torch.rand(2, 6),)).removed == {"first": (8, 7)}
