"""Prepared models on a GPU: what they do on the CPU, without waiting for the GPU in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.artifact import Artifact
from bitwright.config.spec import CompressionTargetTensor
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec import FakeQuantizeImplBase, QuantizationComponentFactory, QuantizationSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])
presets = pytest.mark.parametrize("preset", ["w8a8", "w4_per_block", "w4a4"])


class Net(nn.Module):
    """Convolutions with norms, attention, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Conv1d(64, 64, 3, padding=1, bias=False), nn.BatchNorm1d(64), nn.ReLU())
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.body(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v))


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """TF32 would move codes."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.cuda.set_sync_debug_mode("default")


def start(mode, preset="w8a8", device="cuda"):
    torch.manual_seed(0)
    model, tokens = Net().eval(), torch.randint(0, 32, (4, 16))
    model, tokens = model.to(device), tokens.to(device)
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    prepared = quantizer.prepare((tokens,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(tokens)
    return quantizer, prepared.eval(), tokens


def sqnr(expected, actual):
    expected, actual = expected.detach().double().cpu(), actual.detach().double().cpu()
    return float(10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()))


@both_modes
@presets
def test_as_on_the_cpu(mode, preset):
    """Up to values half-way between two codes, that another order of sums moves."""
    (_, expected, x), (_, actual, y) = start(mode, preset, "cpu"), start(mode, preset)
    with torch.no_grad():
        assert sqnr(expected(x), actual(y)) > 25


@both_modes
@presets
def test_nothing_waits(mode, preset):
    """Neither steps nor evaluation read the GPU; a step that one would repeat can be captured."""
    quantizer, prepared, tokens = start(mode, preset)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    with quantizer.training_mode():
        for step in range(5):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            optimizer.zero_grad()
            F.cross_entropy(prepared(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    prepared.eval()
    with torch.no_grad():
        prepared(tokens)
        expected = prepared(tokens)
        torch.cuda.set_sync_debug_mode("error")
        prepared(tokens)
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prepared(tokens)
        graph.replay()
    assert torch.equal(captured, expected)


@both_modes
@presets
def test_where_simulators_are(mode, preset):
    """What a prepared model has is where the model is, as DDP wants it, and training takes the short ways."""
    quantizer, prepared, tokens = start(mode, preset)
    assert [name for name, tensor in prepared.named_buffers() if not tensor.is_cuda] == []
    with quantizer.training_mode():
        for _ in range(2):
            prepared(tokens).sum().backward()
        simulators = [m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)]
        assert simulators
        assert [m.tensor_fqn for m in simulators if m._shortcut.call is None and not m.is_disabled()] == []


@pytest.mark.parametrize("technique", ["pruning", "palettization"])
def test_where_other_simulators_are(technique):
    """Likewise for those of weights alone."""
    model = Net().cuda().eval()
    compressor = (
        MagnitudePruner(model, MagnitudePrunerConfig())
        if technique == "pruning"
        else KMeansPalettizer(model, KMeansPalettizerConfig())
    )
    prepared = compressor.prepare((torch.randint(0, 32, (4, 16)).cuda(),))
    assert [name for name, tensor in prepared.named_buffers() if not tensor.is_cuda] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("calculator", ["moving_average", "global_minmax"])
def test_ranges_of_large_tensors(dtype, calculator):
    """The last of many programs sees what all others have found, at every call."""
    spec = QuantizationSpec(dtype="int8", qscheme="asymmetric", qparam_calculator_cls=calculator)
    make = QuantizationComponentFactory.create_fake_quantizer
    simulators = [make(spec, CompressionTargetTensor.ACTIVATION).to(device) for device in ("cpu", "cuda")]
    for step in range(60):
        x = torch.randn((1 << 21) + 7 * (step % 3), dtype=dtype)
        x[step::100_003] *= 10
        on_cpu, on_gpu = simulators
        assert torch.equal(on_cpu(x), on_gpu(x.cuda()).cpu())


@both_modes
def test_moves_and_checkpoints(mode):
    """To the GPU, to another model there, and back."""
    _, prepared, tokens = start(mode, device="cpu")
    prepared, tokens = prepared.cuda(), tokens.cuda()
    _, other, _ = start(mode)
    other.load_state_dict({key: value.cpu() for key, value in prepared.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(prepared(tokens), other(tokens))
        assert sqnr(prepared(tokens), prepared.cpu()(tokens.cpu())) > 25


@both_modes
@presets
def test_packed_and_written(mode, preset, tmp_path):
    """Packed weights go to where the model is; an exporter leaves it there."""
    _, prepared, tokens = start(mode, preset)
    with torch.no_grad():
        expected = prepared(tokens)
    artifact = Artifact.from_model(prepared)
    if mode == "eager" and preset == "w4_per_block":
        packed = artifact.packed_model(Net().cuda().eval())
        assert sqnr(expected, packed(tokens)) > 100
    onnx = pytest.importorskip("bitwright.export.onnx")
    pytest.importorskip("onnxscript")
    onnx.export_onnx(prepared, (tokens,), tmp_path / "model.onnx")
    (actual,) = onnx.run_onnx(tmp_path / "model.onnx", (tokens,))
    assert sqnr(expected, actual) > 25
    assert all(tensor.is_cuda for tensor in prepared.parameters())
    with torch.no_grad():
        assert torch.equal(prepared(tokens), expected)


@both_modes
def test_compiled(mode):
    """By Inductor, in one graph."""
    _, prepared, tokens = start(mode)
    torch._dynamo.reset()
    with torch.no_grad():
        assert sqnr(prepared(tokens), torch.compile(prepared, fullgraph=True)(tokens)) > 25


@pytest.mark.parametrize("calculator", ["moving_average", "global_minmax"])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", [{"type": "per_tensor"}, {"type": "per_channel", "axis": 1}])
def test_ranges_under_autocast(calculator, scheme, granularity):
    """A simulator that has seen float32 takes bfloat16 as it does on the CPU, bit for bit, without waiting."""
    options = {"qscheme": scheme, "granularity": granularity, "qparam_calculator_cls": calculator}
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        spec = QuantizationSpec(dtype="int8", **options)
        simulator = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.ACTIVATION)
        tensors = [torch.randn(3, 8, 50).mul(1 + step).to(device) for step in range(4)]
        found = [simulator(tensors[0])]
        torch.cuda.set_sync_debug_mode("error")
        found += [simulator(tensor) for tensor in [t.bfloat16() for t in tensors[1:]]]
        torch.cuda.set_sync_debug_mode("default")
        results.append([*found, *simulator.qparams_calculator.buffers()])
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual.cpu())


@both_modes
@pytest.mark.parametrize("preset", ["w8a8", "w4a4"])
def test_saved_as_codes(mode, preset):
    """Steps keep activations as bytes without waiting for the GPU, in less memory and with the same gradients."""
    peaks, gradients = [], []
    for codes in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
        model, x = nn.Sequential(*layers).cuda(), torch.randn(16384, 256, device="cuda")
        quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
        prepared = quantizer.prepare((x,))
        with quantizer.calibration_mode(), torch.no_grad():
            prepared(x)
        with quantizer.training_mode(save_as_codes=codes):
            for step in range(3):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
                prepared.zero_grad()
                prepared(x).square().mean().backward()
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append([parameter.grad for parameter in prepared.parameters()])
    assert peaks[1] < 0.8 * peaks[0]
    for expected, actual in zip(*gradients, strict=True):
        assert torch.equal(expected, actual)


LIVES = {
    "tensor": ({"dtype": "int8"}, "ACTIVATION"),
    "extremes": ({"dtype": "int8", "qscheme": "asymmetric", "qparam_calculator_cls": "global_minmax"}, "ACTIVATION"),
    "channels": ({"dtype": "int4", "granularity": {"type": "per_channel", "axis": 1}}, "ACTIVATION"),
    "float8": ({"dtype": "float8_e4m3fn"}, "ACTIVATION"),
    "minval": ({"dtype": "uint8", "qscheme": "asymmetric", "qformulation": "minval"}, "WEIGHT"),
    "blocks": ({"dtype": "int4", "granularity": {"type": "per_block", "axis": 1, "block_size": 16}}, "WEIGHT"),
    "rows": ({"dtype": "int8", "granularity": {"type": "per_channel", "axis": 0}}, "WEIGHT"),
}


def lead(name, device):
    """What a simulator returns, passes back and keeps in a life of calls, switches and writes."""
    spec, target = LIVES[name]
    simulator = QuantizationComponentFactory.create_fake_quantizer(
        QuantizationSpec(**spec), CompressionTargetTensor[target]
    ).to(device)
    generator, seen = torch.Generator().manual_seed(0), []
    weight = nn.Parameter(torch.randn(32, 64, generator=generator).to(device))

    def tensor(step):
        if target == "WEIGHT":
            return weight
        shape = [(2, 8, 16, 16), (2, 8, 16, 16), (3, 8, 4, 4), (2, 8, 96, 96)][step % 4]
        x = torch.randn(shape, generator=generator).mul(1 + step).to(device)
        return x.to(memory_format=torch.channels_last) if step % 5 == 3 else x

    def call(step):
        x = tensor(step)
        if step % 3 and x is not weight:
            x.requires_grad_()
        y = simulator(x)
        seen.append(y.detach())
        if y.requires_grad:
            (passed,) = torch.autograd.grad(y, x, torch.randn(x.shape, generator=generator).to(device))
            seen.append(passed)

    def write():
        with torch.no_grad():
            weight.mul_(1.1)
            simulator.qparams_calculator.scale.mul_(1.5)

    events = [
        lambda: None,
        simulator.disable_observer,
        write,
        simulator.eval,
        simulator.enable_observer,
        lambda: simulator.observer_enabled.fill_(0),
        simulator.train,
        simulator.disable_fake_quant,
        lambda: simulator.load_state_dict({k: v.clone() for k, v in simulator.state_dict().items()}),
        simulator.enable_fake_quant,
        lambda: simulator.observer_enabled.fill_(1),
        simulator.eval,
        simulator.disable_observer,
        write,
    ]
    for event in events:
        event()
        for step in range(6):
            call(step)
        with torch.no_grad():
            call(0)
    return [*seen, *simulator.qparams_calculator.buffers()]


@pytest.mark.parametrize("name", LIVES)
def test_a_simulators_life(name):
    """Calls prepared for a GPU notice what those for the CPU notice, bit for bit."""
    for expected, actual in zip(lead(name, "cpu"), lead(name, "cuda"), strict=True):
        assert torch.equal(expected, actual.cpu())
        assert expected.stride() == actual.stride()
