"""A stranger's models through eager W8A8, FP8, weights only and QAT."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitwright import ExportBackend
from bitwright.artifact import Artifact
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.measures import sqnr

from .networks import GroupedCNN, TinyTransformer

MODELS = {
    "transformer": (TinyTransformer, lambda: (torch.randint(0, 64, (2, 12)),)),
    "cnn": (GroupedCNN, lambda: (torch.randn(4, 3, 16, 16),)),
    "lstm": (lambda: nn.LSTM(8, 16, num_layers=2), lambda: (torch.randn(5, 2, 8),)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda: (torch.randn(2, 5, 16),),
    ),
}
CONFIGS = {
    "default": (QuantizerConfig, 18.0),
    "w8a8": (QuantizerConfig.presets.w8a8, 18.0),
    "fp8": (QuantizerConfig.presets.fp8, 12.0),
    "w8": (QuantizerConfig.presets.w8, 30.0),
    "w8a8_dynamic": (QuantizerConfig.presets.w8a8_dynamic, 18.0),
}


def _first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    make, inputs = MODELS[request.param]
    return make().eval(), inputs()


@pytest.mark.parametrize("name", CONFIGS)
def test_calibrated_model_stays_close_and_finalized_equals_prepared(case, name):
    """SQNR above a bound; finalize(_TORCH) computes what the prepared model computed."""
    model, inputs = case
    make, bound = CONFIGS[name]
    with torch.no_grad():
        reference = _first(model(*inputs))
    quantizer = Quantizer(copy.deepcopy(model), make().set_execution_mode("eager"))
    prepared = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        for _ in range(3):
            prepared(*inputs)
    prepared.eval()
    output = _first(prepared(*inputs)).detach()
    assert sqnr(reference, output) > bound
    finalized = quantizer.finalize(backend=ExportBackend._TORCH)
    assert torch.equal(_first(finalized(*inputs)), output)


def test_training_lowers_the_loss(case):
    """Three optimizer steps with fake quantization lower the loss, and gradients reach every weight."""
    model, inputs = case
    torch.manual_seed(1)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare(inputs)
    target = torch.randn_like(_first(prepared(*inputs)))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    losses = []
    with quantizer.training_mode():
        for module in prepared.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for _ in range(3):
            optimizer.zero_grad()
            loss = (_first(prepared(*inputs)) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for n, p in prepared.named_parameters() if n.endswith("original"))


def test_tied_embedding_has_one_simulator():
    """Embedding and head share the weight, so they share its scale."""
    model = TinyTransformer()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    prepared = quantizer.prepare((torch.randint(0, 64, (1, 4)),))
    assert prepared.embed.parametrizations.weight[0] is prepared.head.parametrizations.weight[0]
    assert prepared.embed.parametrizations.weight.original is prepared.head.parametrizations.weight.original


@pytest.mark.parametrize("name", ["w8", "w4", "default"])
def test_norm_gains_are_left_alone(name):
    """A one-dimensional weight that is multiplied in stays float, and the plan says why."""
    config = QuantizerConfig() if name == "default" else getattr(QuantizerConfig.presets, name)()
    quantizer = Quantizer(TinyTransformer(), config.set_execution_mode("eager"))
    plan = quantizer.plan((torch.randint(0, 64, (1, 4)),))
    rows = {row.tensor: row for row in plan if row.kind == "weight"}
    assert rows["norm.weight"].spec is None
    assert "gain" in rows["norm.weight"].note
    assert rows["blocks.0.qkv.weight"].spec is not None
    assert not plan.problems


def test_lstm_weights_are_quantized():
    """Weights that an LSTM passes as a list take effect in its output."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 16), torch.randn(5, 2, 8)
    reference = model(x)[0]
    quantizer = Quantizer(model, QuantizerConfig.presets.w4(execution_mode="eager"))
    prepared = quantizer.prepare((x,)).eval()
    simulators = [m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)]
    assert len(simulators) == 2
    assert 5 < sqnr(reference, prepared(x)[0]) < 60
    decoded = nn.LSTM(8, 16)
    decoded.load_state_dict({name: getattr(prepared, name).detach() for name in decoded.state_dict()})
    assert torch.equal(decoded(x)[0], prepared(x)[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_that_another_thread_calls_meanwhile_keeps_its_weights(kind, packed):
    """The list of weights that a call uses is not the dense one, nor that of a call that ends before."""
    torch.manual_seed(0)
    model, x = kind(8, 16, num_layers=2).eval(), torch.randn(5, 2, 8)
    prepared = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w4(execution_mode="eager")).prepare((x,)).eval()
    layer = Artifact.from_model(prepared).packed_model(model) if packed else prepared
    expected = prepared(x)[0]
    checked = layer.check_forward_args
    first, ended, found = threading.Event(), threading.Event(), []

    def check(*arguments):  # in the middle of a forward, just before it uses the weights
        checked(*arguments)
        if threading.current_thread() is waiting:
            first.set()
            assert ended.wait(60)

    layer.check_forward_args = check
    waiting = threading.Thread(target=lambda: found.append(layer(x)[0]))
    waiting.start()
    assert first.wait(60)
    meanwhile = layer(x)[0]
    dense = list(layer._flat_weights)
    ended.set()
    waiting.join()
    assert torch.equal(meanwhile, expected)
    assert torch.equal(found[0], expected)
    for name, weight in zip(layer._flat_weights_names, dense, strict=True):
        assert weight is (layer.parametrizations[name].original if "weight" in name else getattr(layer, name))


def test_a_recurrent_layer_that_calls_itself_or_fails_keeps_its_weights():
    """A call within a call and one that ends with an error leave the outer call's weights and the dense ones."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8)
    prepared = Quantizer(nn.LSTM(8, 16), QuantizerConfig.presets.w4(execution_mode="eager")).prepare((x,)).eval()
    expected, checked, found = prepared(x)[0], prepared.check_forward_args, []

    def check(*arguments):
        checked(*arguments)
        prepared.check_forward_args = checked
        found.append(prepared(x)[0])
        with pytest.raises(ValueError, match="dtype"):
            prepared(x.double())

    prepared.check_forward_args = check
    assert torch.equal(prepared(x)[0], expected)
    assert torch.equal(found[0], expected)
    assert prepared._flat_weights[0] is prepared.parametrizations.weight_ih_l0.original


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_of_recurrent_layers_are_quantized(kind):
    """States that the caller gives and gets, an LSTM's as a pair, are simulated as planned."""
    torch.manual_seed(0)
    states = tuple(torch.randn(1, 2, 16) for _ in range(2 if kind is nn.LSTM else 1))
    inputs = (torch.randn(5, 2, 8), states if kind is nn.LSTM else states[0])
    model = kind(8, 16)
    expected = tree_leaves(model(*inputs))
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    planned = {row.tensor for row in quantizer.plan(inputs) if row.kind == "activation" and row.spec is not None}
    prepared = quantizer.prepare(inputs).eval()
    with quantizer.calibration_mode():
        prepared(*inputs)
    seen = []
    for name, module in prepared.named_modules():
        if isinstance(module, FakeQuantizeImplBase) and "_quantize_" in name:
            module.register_forward_hook(lambda _, entries, result: seen.append((entries[0], result)))
    found = tree_leaves(prepared(*inputs))
    assert len(seen) == len(planned)
    assert all(any(torch.equal(state, entry) for entry, _ in seen) for state in states)
    for one, other in zip(expected, found, strict=True):
        assert any(other is result for _, result in seen)
        assert 25 < sqnr(one, other) < 70


def test_a_recurrent_layer_that_torch_compile_leaves_alone_computes_the_same():
    """It runs as it is, with the function mode: torch.compile must not take one attribute's getter for another's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.GRU(4, 4)).eval(), torch.randn(3, 2, 4)
    prepared = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare((x,)).eval()
    with torch.no_grad():
        assert torch.equal(torch.compile(prepared, backend="eager")(x)[0], prepared(x)[0])
