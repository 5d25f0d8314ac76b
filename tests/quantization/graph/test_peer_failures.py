"""What coreai-opt 0.3 gets wrong or cannot do in graph mode works here, one test for each."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from tests.lambda_module import Lambda
from tests.measures import sqnr

from .networks import IMAGE, calibrated, net, simulators


def finished(model: nn.Module, *inputs: torch.Tensor, config: QuantizerConfig | None = None) -> tuple[Any, Any]:
    """Return the prepared and the finalized model, whose results are checked to be equal and finite."""
    quantizer = Quantizer(model.eval(), QuantizerConfig() if config is None else config)
    prepared = calibrated(quantizer, inputs)
    finalized: Any = quantizer.finalize(backend="_torch")
    assert torch.equal(prepared(*inputs), finalized(*inputs))
    assert finalized(*inputs).isfinite().all()
    return prepared, finalized


def test_operator_and_function_in_one_model() -> None:
    """``a + b`` and ``torch.add``, ``@`` and ``torch.matmul`` do not collide."""

    def both(s: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.add(s.l(x) + x, x) + torch.matmul(s.l(x) @ x.T, x)

    prepared, _ = finished(Lambda(both, l=nn.Linear(8, 8)), torch.randn(4, 8))
    read = [n.name for n in prepared.graph.nodes if n.op == "call_function" and "activation" in n.args[0].name]
    assert {"add", "add_1", "add_2", "matmul", "matmul_1"} <= set(read)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_same_is_quantized(dims: int) -> None:
    """String padding is another overload of the same op."""
    conv = getattr(nn, f"Conv{dims}d")(3, 4, 3, padding="same")
    prepared, _ = finished(nn.Sequential(conv, nn.ReLU()), torch.randn(1, 3, *[6] * dims))
    assert len(simulators(prepared)) == 3


@pytest.mark.parametrize("preset", ["w8", "w4"])
def test_norm_gains_do_not_break_presets(preset: str) -> None:
    """A weight that is only multiplied in is left alone."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    config = getattr(QuantizerConfig.presets, preset)()
    prepared, _ = finished(nn.Sequential(nn.Linear(8, 8), Norm()), torch.randn(2, 8), config=config)
    assert [s.tensor_fqn for s in simulators(prepared)] == ["0.weight"]


def test_in_place_activation_behind_a_linear_layer() -> None:
    """The peer drops the whole layer from quantization."""
    prepared, _ = finished(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), torch.randn(2, 8))
    assert [s.tensor_fqn for s in simulators(prepared)] == ["linear[input]", "0.weight", "relu_[output 0]"]


def test_int8_relu_in_front_of_an_fp8_layer() -> None:
    """The peer raises a TypeError about nothing."""
    fp8 = {"*": QuantizationSpec(dtype=torch.float8_e4m3fn)}
    config = QuantizerConfig(module_name_configs={"2": ModuleQuantizerConfig(op_input_spec=fp8)})
    finished(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8), config=config)


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Tanh(), nn.ReLU6()])
def test_dynamic_activation_behind_a_known_range(last: nn.Module) -> None:
    """The peer refuses the fixed range that it proposed itself."""
    dynamic = {"*": QuantizationSpec(qparam_calculator_cls="dynamic")}
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec=dynamic, op_output_spec=dynamic))
    finished(nn.Sequential(nn.Linear(8, 8), last), torch.randn(2, 8), config=config)


def test_four_bit_activations_run() -> None:
    """Finalized models with int4 activations compute."""
    int4 = {"*": QuantizationSpec(dtype=torch.int4)}
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec=int4, op_output_spec=int4))
    finished(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8), config=config)


def test_two_readers_with_different_schemes() -> None:
    """Each gets what its configuration says; in the peer the second one silently gets the first one's scheme."""
    asymmetric = {"*": QuantizationSpec(qscheme="asymmetric")}
    config = QuantizerConfig(module_name_configs={"m": ModuleQuantizerConfig(op_input_spec=asymmetric)})
    model = Lambda(lambda s, x: s.l(x) + s.m(x), l=nn.Linear(8, 8), m=nn.Linear(8, 8))
    prepared, _ = finished(model, torch.randn(2, 8), config=config)
    schemes = {s.tensor_fqn: s.qscheme.value for s in simulators(prepared)}
    assert (schemes["linear[input]"], schemes["linear_1[input]"]) == ("symmetric", "asymmetric")


def test_masked_attention_keeps_its_scores() -> None:
    """A mask of the smallest numbers does not set the scale of the scores."""

    def attend(s: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = s.q(x) @ s.k(x).transpose(-1, -2) + (1.0 - mask) * torch.finfo(torch.float32).min
        return torch.softmax(scores, -1) @ x

    torch.manual_seed(0)
    model = Lambda(attend, q=nn.Linear(16, 16), k=nn.Linear(16, 16)).eval()
    x, mask = torch.randn(1, 6, 16) * 3, torch.tril(torch.ones(6, 6))
    _, finalized = finished(model, x, mask)
    assert sqnr(model(x, mask), finalized(x, mask)) > 20


def test_attention_and_recurrent_layers_are_quantized() -> None:
    """Weights of ``nn.MultiheadAttention`` and ``nn.LSTM`` are among those that presets quantize."""
    w8 = QuantizerConfig.presets.w8()
    x = torch.randn(2, 3, 8)
    attention = Lambda(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(8, 2, batch_first=True))
    prepared, _ = finished(attention, x, config=w8)
    assert {s.tensor_fqn for s in simulators(prepared)} >= {"m.out_proj.weight"}
    prepared, _ = finished(Lambda(lambda s, x: s.m(x)[0], m=nn.LSTM(8, 6, 2, batch_first=True)), x, config=w8)
    assert {s.tensor_fqn for s in simulators(prepared)} == {f"m.weight_{k}_l{i}" for k in ("ih", "hh") for i in (0, 1)}


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: torch.softmax(s.l(x), -1),
        lambda s, x: s.n(s.l(x)),
        lambda s, x: F.rms_norm(s.l(x), (8,)),
        lambda s, x: F.group_norm(s.l(x), 2),
        lambda s, x: torch.bmm(s.l(x)[None], x.T[None]),
        lambda s, x: s.l(x) / (x.abs() + 1),
        lambda s, x: torch.stack([s.l(x), x]),
        lambda s, x: torch.cat(s.l(x).split(4, -1)),
        lambda s, x: F.interpolate(s.l(x)[None], scale_factor=2.0),
        lambda s, x: F.relu(s.n(x)),
        lambda s, x: F.scaled_dot_product_attention(s.l(x)[None], x[None], x[None]),
        lambda s, x: 1 - s.l(x),
    ],
    ids=[
        *("softmax", "layer_norm", "rms_norm", "group_norm", "bmm", "div"),
        *("stack", "split", "interpolate", "act", "sdpa", "rsub"),
    ],
)
def test_ops_that_the_peer_leaves_alone(function: Any) -> None:
    """Results of these ops are simulated by default."""
    prepared, _ = finished(Lambda(function, l=nn.Linear(8, 8), n=nn.LayerNorm(8)), torch.randn(4, 8))
    (result,) = [node.args[0] for node in prepared.graph.nodes if node.op == "output"]
    assert all(node.name.startswith("activation_post_process") for node in result)


def test_prepared_models_are_pickled() -> None:
    """The peer ends in a recursion error."""
    prepared, finalized = finished(net(), IMAGE)
    for model in (prepared, finalized):
        assert torch.equal(pickle.loads(pickle.dumps(model))(IMAGE), model(IMAGE))


def test_tied_embedding_and_head_share_one_simulator() -> None:
    """Whatever the names, one tensor has one set of parameters."""
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    prepared, finalized = finished(Lambda(lambda s, i: s.h(s.e(i)), e=embedding, h=head), torch.tensor([[1, 2, 3]]))
    weights = [s for s in simulators(prepared) if s.quantization_target.value == "weight"]
    assert len(weights) == 1
    assert finalized.e.weight is finalized.h.weight


def test_example_inputs_by_keyword() -> None:
    """Prepare takes keyword inputs, and calibrates with them."""
    model = Lambda(lambda s, x, *, scale: s.l(x) * scale, l=nn.Linear(8, 8))
    quantizer = Quantizer(model, QuantizerConfig())
    kwargs = {"scale": torch.randn(2, 8)}
    prepared = quantizer.prepare((torch.randn(2, 8),), example_kwargs=kwargs)
    assert prepared(torch.randn(2, 8), **kwargs).shape == (2, 8)
