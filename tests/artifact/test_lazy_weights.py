"""Packed weights in use: layers with few vectors, embeddings, and everything else that is done with a weight."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from bitwright.artifact import pack_model
from bitwright.artifact.lazy import FEW_VECTORS, MANY_VECTORS, LazyWeight
from bitwright.export.torch_program import packed_copy
from bitwright.kernels.packed import PackedMatrix
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity
from tests.artifact.weight_per_input import TILED, RowPerInput
from tests.measures import sqnr

pytest.importorskip("numba")


class Tied(nn.Module):
    """A vocabulary that is embedding and head, two layers between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


@pytest.fixture(scope="module", params=["eager", "graph"])
def models(request):
    """The prepared model, and its copy with packed weights."""
    torch.manual_seed(0)
    spec = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32))
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=module, execution_mode=request.param)
    shapes = {"tokens": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    tokens = torch.randint(0, 512, (2, 5))
    prepared = Quantizer(Tied().eval(), config).prepare((tokens,), dynamic_shapes=shapes)
    return prepared, packed_copy(prepared)


@torch.no_grad()
def test_few_tokens_are_multiplied_with_codes(models, monkeypatch):
    """Close to the prepared model, and no weight is decoded for it but the rows that are looked up."""
    prepared, packed = models
    decoded = []
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: decoded.append(self))
    for count in range(1, FEW_VECTORS + 1):
        tokens = torch.randint(0, 512, (1, count))
        assert sqnr(prepared(tokens), packed(tokens)) > 120
    assert not decoded


@torch.no_grad()
@pytest.mark.parametrize("fast", [True, False])
def test_many_tokens(models, fast, monkeypatch):
    """Multiplied with codes where the processor is fast at it, close then; else the same bits."""
    prepared, packed = models
    decoded = []
    plain = LazyWeight.decoded
    monkeypatch.setattr(PackedMatrix, "multiplies_many", lambda self: fast)
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: decoded.append(self) or plain(self))
    tokens = torch.randint(0, 512, (2, 5))
    if fast:
        assert sqnr(prepared(tokens), packed(tokens)) > 120
        assert not decoded
    else:
        assert torch.equal(packed(tokens), prepared(tokens))


@torch.no_grad()
@pytest.mark.parametrize("first", [nn.Linear, RowPerInput])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_models_with_quantized_activations_are_exact(mode, first, monkeypatch):
    """No order of sums moves a code, on any processor."""
    for name in ("multiplies_many", "multiplies_columns"):
        monkeypatch.setattr(PackedMatrix, name, lambda self: True)
    for name in ("multiply", "multiply_columns", "times"):
        monkeypatch.setattr(PackedMatrix, name, lambda *args: pytest.fail("in another order"))
    torch.manual_seed(0)
    weight = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32))
    activations = {"*": QuantizationSpec(dtype="int8")}
    module = ModuleQuantizerConfig(
        op_input_spec=activations, op_output_spec=activations, op_state_spec={"weight": weight}
    )
    model = nn.Sequential(first(1024, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    quantizer = Quantizer(model, QuantizerConfig(global_config=module, execution_mode=mode))
    x = torch.randn(64, 1024)
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    prepared.eval()
    assert torch.equal(packed_copy(prepared)(x), prepared(x))
    if mode == "eager":
        expected = prepared(x)
        assert torch.equal(pack_model(prepared)(x), expected)


@torch.no_grad()
def test_copies_and_changed_buffers(models):
    """What was made of the buffers is not copied, and is made anew when they change."""
    _, packed = models
    tokens = torch.randint(0, 512, (1, 2))
    expected = packed(tokens)
    twin = copy.deepcopy(packed)
    assert torch.equal(twin(tokens), expected)
    for name, buffer in twin.named_buffers():
        if name.endswith("scale"):
            buffer.mul_(2)
    assert not torch.equal(twin(tokens), expected)
    assert torch.equal(packed(tokens), expected)
    bare = copy.deepcopy(packed)
    assert all("_kept" not in module.__dict__ for module in bare.modules())


def _weight(models):
    prepared, packed = models
    if not hasattr(packed, "parametrizations") and not isinstance(packed.get_submodule("up"), nn.Linear):
        pytest.skip("the graph has no layer to read a weight of")
    return prepared.up.weight.detach(), packed.up.weight


def test_a_weight_is_used_like_a_tensor(models):
    plain, lazy = _weight(models)
    assert isinstance(lazy, LazyWeight)
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy)) == (plain.shape, plain.dtype, 2, len(plain))
    for result in (lazy + 0, lazy[:], lazy.clone(), torch.stack([lazy])[0], lazy.T.T, pickle.loads(pickle.dumps(lazy))):
        assert type(result) is torch.Tensor
        assert torch.equal(result, plain)
    assert copy.deepcopy(lazy).equal(plain)
    assert lazy.tolist() == plain.tolist()
    assert lazy.numpy().shape == tuple(plain.shape)
    assert "LazyWeight" not in repr(lazy)


def test_gradients_reach_the_input(models):
    """The codes are used for inference alone."""
    plain, lazy = _weight(models)
    x = torch.randn(2, 256, requires_grad=True)
    F.linear(x, lazy).sum().backward()
    assert torch.allclose(x.grad, plain.sum(0).expand(2, -1), atol=1e-4)


def test_what_a_look_up_refuses_is_refused(models):
    _, packed = models
    with pytest.raises((IndexError, RuntimeError)):
        packed(torch.tensor([[512]]))


REFUSED_IDS = {
    "fractions": (torch.tensor([1.7]), {}),
    "bool": (torch.tensor([True]), {}),
    "uint8": (torch.tensor([1], dtype=torch.uint8), {}),
    "int16": (torch.tensor([1], dtype=torch.int16), {}),
    "padding behind the end": (torch.tensor([1]), {"padding_idx": 512}),
    "padding before the start": (torch.tensor([1]), {"padding_idx": -513}),
}


@pytest.mark.parametrize("name", REFUSED_IDS)
def test_ids_that_torch_refuses_are_refused(name):
    """With torch's own words."""
    ids, options = REFUSED_IDS[name]
    plain, lazy = (getattr(model, "0").weight for model in _vocabularies())
    assert isinstance(lazy, LazyWeight)
    with pytest.raises((RuntimeError, AssertionError)) as expected:
        F.embedding(ids, plain, **options)
    with pytest.raises(expected.type) as raised:
        F.embedding(ids, lazy, **options)
    assert str(raised.value) == str(expected.value)


def test_ids_of_both_types_and_paddings_are_looked_up():
    plain, lazy = (getattr(model, "0").weight for model in _vocabularies())
    for dtype in (torch.int32, torch.int64):
        for padding in (None, 511, -512):
            ids = torch.tensor([[1, 511]], dtype=dtype)
            assert torch.equal(F.embedding(ids, lazy, padding), F.embedding(ids, plain, padding))


def _vocabularies():
    """A prepared embedding, and its copy with packed weights."""
    torch.manual_seed(0)
    module = ModuleQuantizerConfig(
        op_input_spec=None, op_output_spec=None, op_state_spec={"weight": QuantizationSpec(dtype="int8")}
    )
    config = QuantizerConfig(global_config=module, execution_mode="eager")
    prepared = Quantizer(nn.Sequential(nn.Embedding(512, 256)).eval(), config).prepare((torch.tensor([1]),))
    return prepared, packed_copy(prepared)


@torch.no_grad()
@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_are_decoded_in_parts(name, bias, monkeypatch):
    """The numbers of the prepared model, without ever decoding the whole weight."""
    torch.manual_seed(0)
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": TILED[name]})
    config = QuantizerConfig(global_config=module, execution_mode="eager")
    prepared = Quantizer(nn.Linear(256, 1000, bias=bias).eval(), config).prepare((torch.randn(1, 256),))
    packed = packed_copy(prepared)
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: pytest.fail("decoded at once"))
    for x in (torch.randn(FEW_VECTORS + 1, 256), torch.randn(2, 3, 17, 256), torch.randn(256, MANY_VECTORS).t()):
        assert sqnr(prepared(x), packed(x)) > 130


def test_biases_that_want_gradients_get_them():
    """Decoding in parts writes into memory that autograd cannot follow."""
    dense, packed = _layer()
    x = torch.randn(9, 256)
    packed[0].bias.requires_grad_()
    packed(x).sum().backward()
    assert torch.equal(packed[0].bias.grad, torch.full((512,), 9.0))
    assert sqnr(packed(x).detach(), dense(x).detach()) > 120


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of torch, about TorchScript itself
@pytest.mark.parametrize(
    "spec",
    [
        QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32)),
        QuantizationSpec(dtype="int8", qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)),
        QuantizationSpec(dtype="int1"),
        QuantizationSpec(
            dtype="float4_e2m1fn",
            scale_dtype="float8_e8m0fnu",
            granularity=PerBlockGranularity(axis=1, block_size=32),
        ),
    ],
)
def test_traces_of_torchscript_hold_the_codes(spec):
    """A packed model is traced, gives the same bits for any number of vectors, and the file stays small."""
    torch.manual_seed(0)
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=module, execution_mode="eager")
    prepared = Quantizer(nn.Linear(256, 512).eval(), config).prepare((torch.randn(1, 256),))
    traced = torch.jit.trace(packed_copy(prepared), (torch.randn(3, 256),))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    assert file.tell() < 256 * 512 * 2
    file.seek(0)
    x = torch.randn(40, 256)
    assert torch.equal(torch.jit.load(file)(x), prepared(x))


@torch.no_grad()
def test_autocast_sets_the_type_of_the_output():
    """Under autocast a packed layer computes in bfloat16 like the layer that it was made of."""
    dense, packed = _layer()
    x = torch.randn(1, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = dense(x), packed(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_forward_mode_derivatives_reach_the_input():
    """A tangent of the input passes through a packed layer."""
    dense, packed = _layer()
    x, tangent = torch.randn(1, 256), torch.randn(1, 256)
    with torch.no_grad():
        _, expected = torch.func.jvp(dense, (x,), (tangent,))
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(packed(forward_ad.make_dual(x, tangent))).tangent
    assert found is not None
    assert sqnr(expected, found) > 120


def _layer():
    """A finalized linear layer with dense weights, and the same packed."""
    torch.manual_seed(0)
    spec = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32))
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    config = QuantizerConfig(global_config=module, execution_mode="eager")
    prepared = Quantizer(nn.Sequential(nn.Linear(256, 512)).eval(), config).prepare((torch.randn(1, 256),))
    return prepared, packed_copy(prepared)


@torch.no_grad()
@pytest.mark.parametrize("read", [lambda weight: weight.sum(), lambda weight: weight.T])
def test_weights_of_modules_that_torch_compile_leaves_alone(read):
    """They are read as without it: it compiles nothing of what is between a call and the codes."""
    _, packed = _vocabularies()
    lazy = getattr(packed, "0").weight
    assert isinstance(lazy, LazyWeight)

    def broken(weight):
        for _ in range(2):
            torch._dynamo.graph_break()
            result = read(weight), weight.dtype, weight.device
        return result

    torch.compiler.reset()
    result, dtype, device = torch.compile(broken, backend="eager")(lazy)
    assert torch.equal(result, read(lazy.decoded()))
    assert (dtype, device) == (torch.float32, torch.device("cpu"))
