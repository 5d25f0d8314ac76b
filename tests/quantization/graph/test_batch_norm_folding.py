"""Batch norm behind a layer: the folded weight is fake-quantized, and evaluation equals the finalized model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.artifact import Artifact, ArtifactError
from bitwright.inspection import bits_per_weight
from bitwright.kernels import channel_scales
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._graph import batch_norm
from bitwright.quantization.spec import PerTensorGranularity
from tests.lambda_module import Lambda
from tests.measures import sqnr

from .networks import calibrated, simulators, train_steps, with_statistics

INPUTS = {1: torch.randn(4, 4, 9), 2: torch.randn(4, 4, 7, 6), 3: torch.randn(4, 4, 5, 4, 3)}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
W8 = QuantizerConfig.presets.w8()


def layers() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A layer with its batch norm, and an input, for every kind of layer that can be folded."""
    found: dict[str, tuple[nn.Module, torch.Tensor]] = {}
    for dims in (1, 2, 3):
        for kind in ("Conv", "ConvTranspose"):
            for groups in (1, 2):
                for bias, affine in ((True, True), (False, False)):
                    layer = getattr(nn, f"{kind}{dims}d")(4, 6, 3, groups=groups, bias=bias, padding=1)
                    norm = NORMS[dims](6, affine=affine)
                    name = f"{kind}{dims}d groups={groups} bias={bias} affine={affine}"
                    found[name] = nn.Sequential(layer, norm), INPUTS[dims]
    for bias in (True, False):
        found[f"Linear bias={bias}"] = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6)), torch.randn(8, 4)
    found["Conv2d bias=False"] = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), INPUTS[2]
    found["Conv2d affine=False"] = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), INPUTS[2]
    same = nn.Sequential(nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    found["Conv2d same, relu"] = same, INPUTS[2]
    return found


LAYERS = layers()


@pytest.mark.parametrize("name", LAYERS)
def test_folding(name: str) -> None:
    """Prepared in evaluation = finalized, close to the float model; the simulator sees the folded weight."""
    torch.manual_seed(0)
    model, x = copy.deepcopy(LAYERS[name][0]), LAYERS[name][1]
    with_statistics(model).eval()
    layer, norm = model[0], model[1]
    quantizer = Quantizer(model, W8)
    prepared = calibrated(quantizer, (x,))
    finalized: Any = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(x), finalized(x))
    assert sqnr(model(x), finalized(x)) > 30
    scale = torch.rsqrt(norm.running_var.double() + norm.eps) * (1.0 if norm.weight is None else norm.weight.double())
    if "Transpose" in name:
        grouped = layer.weight.double().unflatten(0, (layer.groups, -1))
        folded = (grouped * scale.view(layer.groups, 1, -1, *[1] * (layer.weight.ndim - 2))).flatten(0, 1)
    else:
        folded = layer.weight.double() * scale.view(-1, *[1] * (layer.weight.ndim - 1))
    torch.testing.assert_close(getattr(finalized, "0").weight.double(), folded, rtol=1e-5, atol=1e-6)
    (simulator,) = simulators(finalized)
    assert simulator.granularity.axis == (1 if "Transpose" in name else 0)


@pytest.mark.parametrize("name", [name for name in LAYERS if "2d" in name or "Linear" in name])
def test_training(name: str) -> None:
    """With fake quantization off, training computes what the float model computes; afterwards folding still holds."""
    torch.manual_seed(0)
    model, x = copy.deepcopy(LAYERS[name][0]), LAYERS[name][1]
    with_statistics(model).train()
    expected = copy.deepcopy(model)
    quantizer = Quantizer(model, W8)
    prepared: Any = quantizer.prepare((x,))
    quantizer.disable_fake_quant()
    prepared.train()
    torch.testing.assert_close(prepared(x), expected(x), rtol=1e-4, atol=1e-5)
    mine, theirs = getattr(prepared, "1"), expected[1]
    torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-4, atol=1e-5)
    assert mine.num_batches_tracked == theirs.num_batches_tracked
    quantizer.enable_fake_quant()
    train_steps(quantizer, prepared, (x,), (x * 1.5,), (x - 1,))
    prepared.eval()
    finalized = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(x), finalized(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_a_mean_over_all_batches(folded: bool, training: bool) -> None:
    """``momentum=None`` counts every batch the same, in whichever mode the model was when it was captured."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=None)
    model = nn.Sequential(nn.Conv2d(4, 4, 3) if folded else nn.ReLU(), norm, nn.Conv2d(4, 2, 1)).train(training)
    expected = copy.deepcopy(model).train()
    quantizer = Quantizer(model, W8)
    prepared: Any = quantizer.prepare((torch.randn(5, 4, 6, 6),))
    assert norm.momentum is None
    quantizer.disable_fake_quant()
    prepared.train()
    for batch in torch.randn(3, 5, 4, 6, 6) * torch.arange(1, 4).view(3, 1, 1, 1, 1):
        torch.testing.assert_close(prepared(batch), expected(batch), rtol=1e-4, atol=1e-5)
    mine, theirs = getattr(prepared, "1"), expected[1]
    assert mine.num_batches_tracked == 3
    torch.testing.assert_close(mine.running_mean, theirs.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_raw_weight_through_the_fold() -> None:
    """Without quantization the gradients are those of the float model."""
    torch.manual_seed(0)
    model = with_statistics(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))).train()
    expected, x = copy.deepcopy(model), INPUTS[2]
    quantizer = Quantizer(model, W8)
    prepared: Any = quantizer.prepare((x,))
    quantizer.disable_fake_quant()
    prepared.train()
    loss = torch.linspace(-1, 1, 5 * 4).view(5, 4)
    (prepared(x) * loss).sum().backward()
    (expected(x) * loss).sum().backward()
    for mine, theirs in (
        (getattr(prepared, "0").weight, expected[0].weight),
        (getattr(prepared, "1").weight, expected[1].weight),
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("simulated", [True, False])
def test_the_scale_is_made_once_and_copies_go_on_without(simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those of a scale made twice, and a forward that broke off between the two leaves nothing behind."""
    made: list[object] = []
    plain = batch_norm.FoldLayout.divisible_scale
    counted = staticmethod(lambda *given: (made.append(given), plain(*given))[1])
    monkeypatch.setattr(batch_norm.FoldLayout, "divisible_scale", counted)
    torch.manual_seed(0)
    model = with_statistics(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    config = W8 if simulated else QuantizerConfig.presets.w8().set_module_name("0", None)
    quantizer = Quantizer(model, config)
    prepared = calibrated(quantizer, (INPUTS[2],))
    with quantizer.training_mode():
        fold = next(m for m in prepared.modules() if isinstance(m, batch_norm.WeightFold))
        norm = next(m for m in prepared.modules() if getattr(m, "running_var", None) is not None)
        fold(torch.randn(6, 4, 3, 3), norm.weight, norm.running_var)
        twice, found = copy.deepcopy(prepared), []
        made.clear()
        for each in (prepared, twice):
            each.zero_grad()
            each(INPUTS[2]).square().mean().backward()
            found.append([p.grad for p in each.parameters()])
            monkeypatch.setattr(batch_norm._FoldInUse, "take", lambda *_: None)
    assert len(made) == 1 + 2
    for once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, again, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeros", [0, 1, 6])
def test_scales_are_those_that_do_not_ask_for_zeros(zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether any gain is 0 is asked before the operations that see to it; scale and gradient are the same bits."""
    gamma, deviation = torch.randn(6), torch.rand(6) + 0.5
    gamma[:zeros] = 0
    found = []
    for asks in (True, False):
        if not asks:
            monkeypatch.setattr(batch_norm, "_is_nonzero", lambda _: False)
        leaf = gamma.clone().requires_grad_()
        scale = batch_norm.FoldLayout.divisible_scale(leaf, deviation)
        scale.square().sum().backward()
        found.append((scale, leaf.grad))
    assert bool(found[0][0].all())
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_gain_of_zero_trains() -> None:
    """Zero-initialised gains of residual branches give numbers; torchao's form divides by zero."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).train()
    nn.init.zeros_(model[1].weight)
    quantizer = Quantizer(model, W8)
    prepared: Any = quantizer.prepare((INPUTS[2],))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    with quantizer.training_mode():
        for _ in range(2):
            prepared(INPUTS[2]).sum().backward()
            optimizer.step()
    assert all(p.isfinite().all() for p in prepared.parameters())
    assert getattr(prepared, "1").running_var.isfinite().all()
    assert not torch.equal(getattr(prepared, "1").bias, torch.zeros(6))


def test_a_pair_called_twice() -> None:
    """One weight and one batch norm, two calls: one simulator, one folded weight (the peer raises KeyError)."""
    conv, norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    model = with_statistics(Lambda(lambda s, x: s.n(s.c(F.relu(s.n(s.c(x))))), c=conv, n=norm)).eval()
    quantizer = Quantizer(model, QuantizerConfig())
    prepared = calibrated(quantizer, (INPUTS[2],))
    train_steps(quantizer, prepared, (INPUTS[2],))
    finalized: Any = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared.eval()(INPUTS[2]), finalized(INPUTS[2]))
    assert len([s for s in simulators(finalized) if s.tensor_fqn == "c.weight"]) == 1
    assert [name for name in finalized.state_dict() if "weight" in name] == ["c.weight"]


class Named(nn.Module):
    """A convolution and its batch norm, which have two names each."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.ModuleList([self.conv, self.norm])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_pair_with_two_names_is_folded_under_both(bias: bool) -> None:
    """Nothing of what was folded is left, neither in the state, nor in an artifact, nor in the count of bits."""
    torch.manual_seed(0)
    model = with_statistics(Named(bias)).eval()
    quantizer = Quantizer(model, W8)
    prepared = calibrated(quantizer, (INPUTS[2],))
    finalized: Any = quantizer.finalize(backend="_torch")
    expected = finalized(INPUTS[2])
    names = {f"{path}.{tensor}" for path in ("conv", "layers.0") for tensor in ("weight", "bias")}
    assert {name for name in finalized.state_dict() if "simulator" not in name and "process" not in name} == names
    assert finalized.conv.weight is getattr(finalized.layers, "0").weight
    count = bits_per_weight(prepared)
    assert count.total_weights == model.conv.weight.numel() + model.norm.num_features
    artifact = Artifact.from_model(prepared)
    for load in (artifact.load_into, artifact.packed_model):
        torch.testing.assert_close(load(copy.deepcopy(model)).eval()(INPUTS[2]), expected, atol=1e-5, rtol=1e-5)


def test_the_plan_says_that_folded_biases_are_stored_in_full() -> None:
    """Whatever name the graph knows them by."""
    every = {"*": QuantizationSpec(dtype="int8", granularity=PerTensorGranularity())}
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_state_spec=every))
    plan = Quantizer(Named(True), config).plan((INPUTS[2],))
    rows = {row.tensor: row for row in plan if row.kind == "weight"}
    assert rows["conv.bias"].compressed_bytes == 8 * 4
    assert "stored in full" in rows["conv.bias"].note


def test_one_weight_with_two_batch_norms_and_without() -> None:
    """A shared convolution gets a folded weight for each batch norm, and keeps its own for the plain call."""
    conv = nn.Conv2d(4, 4, 3, padding=1)
    function = lambda s, x: s.a(s.c(x)) + s.b(s.c(x)) + s.c(x)  # noqa: E731
    model = with_statistics(Lambda(function, c=conv, a=nn.BatchNorm2d(4), b=nn.BatchNorm2d(4))).eval()
    quantizer = Quantizer(model, W8)
    prepared = calibrated(quantizer, (INPUTS[2],))
    finalized = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(INPUTS[2]), finalized(INPUTS[2]))
    assert sqnr(model(INPUTS[2]), finalized(INPUTS[2])) > 30
    assert len({tuple(s.calculate_qparams()[0].flatten().tolist()) for s in simulators(finalized)}) == 3


class Functional(nn.Module):
    """A convolution without bias, called as a function, and its batch norm; with ``offset``, a sum with ``bias``."""

    def __init__(self, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.bn = nn.BatchNorm2d(6)
        if offset:
            self.bias = nn.Parameter(torch.full((6,), 5.0))
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn(F.conv2d(x, self.weight))
        return y + self.bias.view(1, -1, 1, 1) if self.offset else y


def test_a_parameter_that_is_called_bias_and_is_none_stays() -> None:
    """The folded bias of a layer that has none takes another name where the module has a ``bias`` of its own."""
    model, x = with_statistics(Functional(offset=True)).eval(), INPUTS[2]
    quantizer = Quantizer(model, W8)
    quantizer.prepare((x,))
    finalized: Any = quantizer.finalize(backend="_torch")
    assert sqnr(model(x), finalized(x)) > 30
    assert torch.equal(finalized.bias, model.bias)


@pytest.mark.parametrize("offset", [False, True])
def test_artifacts_say_that_a_folded_bias_has_no_place(offset: bool) -> None:
    """The model is not another one; nothing is written to it."""
    model, x = with_statistics(Functional(offset)).eval(), INPUTS[2]
    expected = model(x)
    artifact = Artifact.from_model(Quantizer(model, W8).prepare((x,)))
    for load in (artifact.load_into, artifact.packed_model):
        with pytest.raises(ArtifactError, match="Batch norms were folded into layers"):
            load(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("config", [W8, QuantizerConfig()])
def test_a_half_precision_layer_without_bias_takes_a_float32_batch_norm(config: QuantizerConfig) -> None:
    """The folded bias has the dtype of the layer's weight, also after a cast of the prepared model."""
    model = with_statistics(nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6))).bfloat16().eval()
    model[1].float()
    x = INPUTS[2].bfloat16()
    quantizer = Quantizer(model, config)
    prepared = calibrated(quantizer, (x,))
    finalized: Any = quantizer.finalize(backend="_torch")
    assert sqnr(model(x), prepared(x)) > 25
    assert torch.equal(finalized(x), prepared(x))
    assert prepared.float()(x.float()).dtype == torch.float32


def test_a_small_eps_is_not_lost_in_half_precision() -> None:
    """A channel whose variance and eps are 0 in float16 is finite in the float model, and stays so."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=1e-8)).half().eval()
    model[1].running_var[1] = 0
    x = INPUTS[2].half()
    prepared = Quantizer(model, W8).prepare((x,))
    assert sqnr(model(x), prepared(x)) > 25
    assert prepared.train()(x).isfinite().all()


def test_a_path_that_holds_the_word_weight() -> None:
    """Names of modules do not matter (the peer replaces text in the path)."""
    branch = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    model = with_statistics(Lambda(lambda s, x: s.weight_net(x), weight_net=branch)).eval()
    quantizer = Quantizer(model, W8)
    prepared = calibrated(quantizer, (INPUTS[2],))
    finalized = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(INPUTS[2]), finalized(INPUTS[2]))
    assert "weight_net.0.bias" in finalized.state_dict()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(3)), torch.randn(5, 3, 4)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)), INPUTS[2]),
        (Lambda(lambda s, x: (lambda y: s.n(y) + y)(s.c(x)), c=nn.Conv2d(4, 6, 3), n=nn.BatchNorm2d(6)), INPUTS[2]),
        (nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)), INPUTS[2]),
    ],
    ids=["over another dimension", "without statistics", "another reader", "in front"],
)
def test_batch_norms_that_cannot_be_folded_stay(model: nn.Module, x: torch.Tensor) -> None:
    """They compute as in the float model, also in training."""
    with_statistics(model).eval()
    quantizer = Quantizer(model, W8)
    prepared = calibrated(quantizer, (x,))
    train_steps(quantizer, prepared, (x,))
    prepared.eval()
    finalized = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(x), finalized(x))
    assert [n for n in finalized.graph.nodes if "batch_norm" in str(n.name)]


def test_a_layer_that_is_not_quantized_is_folded_exactly() -> None:
    """Folding does not depend on the configuration; without simulators the outputs are those of the float model."""
    config = QuantizerConfig.presets.w8().set_module_name("c", None)
    model = with_statistics(
        Lambda(lambda s, x: s.d(s.n(s.c(x))), c=nn.Conv2d(4, 6, 3), n=nn.BatchNorm2d(6), d=nn.Conv2d(6, 6, 1))
    ).eval()
    quantizer = Quantizer(model, config)
    prepared = calibrated(quantizer, (INPUTS[2],))
    finalized = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(INPUTS[2]), finalized(INPUTS[2]))
    assert [s.tensor_fqn for s in simulators(prepared)] == ["d.weight"]


def gradients(model: nn.Module, x: torch.Tensor, config: QuantizerConfig, steps: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients of training steps of a prepared copy."""
    torch.manual_seed(0)
    quantizer = Quantizer(copy.deepcopy(model), config)
    prepared, found = calibrated(quantizer, (x,)), []
    with quantizer.training_mode():
        for _ in range(steps):
            prepared.zero_grad()
            y = prepared(x)
            y.square().mean().backward()
            found += [y.detach(), *(p.grad for p in prepared.parameters() if p.grad is not None)]
    return found


def clipping(layer: nn.Module) -> nn.Sequential:
    """A layer and its batch norm, one gain of which is negative and one is zero."""
    model = with_statistics(nn.Sequential(layer, nn.BatchNorm2d(layer.weight.shape[0])))
    model[1].weight.data[:2] = torch.tensor([-0.7, 0.0])
    return model


@pytest.mark.parametrize(
    ("layer", "suits"),
    [
        (nn.Conv2d(3, 6, 3), False),
        (nn.Conv2d(16, 6, 1), True),
        (nn.Conv2d(64, 256, 3), True),
        (nn.Conv2d(16, 8, 3, groups=8), False),
    ],
    ids=["short rows", "whole vectors", "large", "depthwise"],
)
@pytest.mark.parametrize("setting", ["int8", "int4 blocks", "per tensor"])
def test_one_gradient_for_scale_simulator_and_division(
    layer: nn.Module, suits: bool, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of the three one after the other, as with hooks, and is torch's but for rounding."""
    granularity = {"int8": {"type": "per_channel", "axis": 0}, "per tensor": {"type": "per_tensor"}}.get(
        setting, {"type": "per_block", "axis": 1, "block_size": 1}
    )
    weight = {"dtype": "int4" if "int4" in setting else "int8", "granularity": granularity}
    config = QuantizerConfig.from_dict(
        {"quantization_config": {"global_config": {"op_state_spec": {"weight": weight}, "op_input_spec": None,
         "op_output_spec": None}}}
    )  # fmt: skip
    model, x = clipping(layer), torch.randn(2, layer.in_channels, 5, 5)
    calls = {name: watched(monkeypatch, name) for name in ("unfolded", "scaled", "divided")}
    ways = [gradients(model, x, config)]
    assert len(calls["unfolded"]) == 2 * suits
    assert not calls["divided"]
    monkeypatch.setattr(channel_scales, "unfolded", lambda *_: None)
    ways.append(gradients(model, x, config))
    assert len(calls["divided"]) == 2 * suits
    monkeypatch.setattr(channel_scales, "suits", lambda *_: False)
    ways.append(gradients(model, x, config))
    assert len(calls["scaled"]) == 4 * suits
    assert torch.equal(ways[0][0], ways[2][0])
    for one, three, plain in zip(*ways, strict=True):
        assert torch.equal(one, three)
        torch.testing.assert_close(one, plain, rtol=2e-5, atol=2e-6 * float(plain.abs().max()))


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Calls of a function of ``channel_scales`` from now on."""
    calls: list[object] = []
    function = getattr(channel_scales, name)
    monkeypatch.setattr(channel_scales, name, lambda *given: (calls.append(given), function(*given))[1])
    return calls


def test_second_derivatives_pass_through_the_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a penalty on the gradients are what torch's functions give."""
    x, found = torch.randn(2, 16, 5, 5), []
    for replaced in (None, "unfolded", "suits"):
        if replaced is not None:
            monkeypatch.setattr(channel_scales, replaced, lambda *_: None)
        torch.manual_seed(0)
        quantizer = Quantizer(clipping(nn.Conv2d(16, 6, 1)), W8)
        prepared = calibrated(quantizer, (x,))
        with quantizer.training_mode():
            parameters = list(prepared.parameters())
            first = torch.autograd.grad(prepared(x).pow(3).sum(), parameters, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters, allow_unused=True)
        found.append([*first, *second])
    largest = max(float(plain.detach().abs().max()) for plain in found[2] if plain is not None)
    for one, three, plain in zip(*found, strict=True):
        assert (one is None) == (three is None) == (plain is None)
        if one is not None:  # that of the layer's bias is zero but for rounding
            torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-6 * largest)
            torch.testing.assert_close(three, plain, rtol=1e-4, atol=1e-6 * largest)


def test_gradients_in_another_order_of_memory() -> None:
    """They are copied, and nothing that somebody holds is overwritten."""
    torch.manual_seed(0)
    weight, scale = torch.randn(6, 16, 2, requires_grad=True), torch.rand(6, requires_grad=True)
    grad = torch.randn(6, 2, 16).transpose(1, 2)
    for function, plain in ((channel_scales.scaled, torch.mul), (channel_scales.divided, torch.div)):
        for given in (grad, grad.contiguous(), torch._neg_view(grad)):
            before = given.clone()
            found = torch.autograd.grad(function(weight, scale), (weight, scale), given)
            expected = torch.autograd.grad(plain(weight, scale.view(6, 1, 1)), (weight, scale), given)
            assert torch.equal(given, before)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1])


def test_a_hook_on_the_simulator_sees_the_folded_weight() -> None:
    """Then scale, simulator and division are functions of their own."""
    torch.manual_seed(0)
    quantizer = Quantizer(clipping(nn.Conv2d(16, 6, 1)), W8)
    x = torch.randn(2, 16, 5, 5)
    prepared = calibrated(quantizer, (x,))
    with quantizer.training_mode():
        seen: list[torch.Tensor] = []
        simulator = next(iter(simulators(prepared)))
        simulator.register_forward_hook(lambda _, given, made: seen.extend((*given, made)))
        prepared(x).sum().backward()
    folded, quantized = seen
    assert folded.requires_grad
    assert quantized.requires_grad
    weight, norm = next(p for p in prepared.parameters() if p.ndim == 4), prepared.get_submodule("1")
    assert folded.shape == weight.shape
    assert sqnr(folded.detach(), quantized.detach()) > 30
    assert weight.grad is not None
    assert norm.weight.grad is not None
