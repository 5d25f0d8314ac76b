"""Layers between quantized activations, one at a time: the codes of each runtime beside exact arithmetic.

The input is on its grid, so that all have the same codes in front of them. A runtime may add in another order than
torch, which moves a sum by some 1e-6 of a step, and fused kernels round a bias to whole products of two scales. So a
code is one of those nearest to the exact value, up to that error; it differs from the prepared model's only where the
exact value is that close to a rounding bound, and by one. Averages of few codes lie on such a bound often.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from bitwright.config.spec import CompressionTargetTensor
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.export.targets import TARGETS
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.matrix import each_value

from .models import W8

FLOAT_ERROR = 1e-4
"""In steps of the output: of sums in float32, and of the scales' float32."""


class _OfHalves(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(*x.chunk(2, 1))


WIDE = {
    "wide convolution": lambda: nn.Conv2d(48, 16, 3, padding=1),
    "wide convolution, batch norm, relu": lambda: nn.Sequential(
        nn.Conv2d(48, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    ),
    "wide convolution, uneven": lambda: nn.Conv2d(48, 16, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
    "wide convolution, single places": lambda: nn.Conv2d(48, 16, 1, stride=2),
    "wide convolution, one axis": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(48, 16, 5, padding=2)),
}
LAYERS = WIDE | {
    "convolution": lambda: nn.Conv2d(8, 16, 3, padding=1),
    "convolution, batch norm, relu": lambda: nn.Sequential(
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    ),
    "convolution without bias": lambda: nn.Conv2d(8, 16, 3, bias=False),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8),
    "linear": lambda: nn.Linear(8, 64),
    "linear, relu": lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU()),
    "add": lambda: _OfHalves(torch.add),
    "mul": lambda: _OfHalves(torch.mul),
    "matmul": lambda: _OfHalves(torch.matmul),
    "softmax": lambda: nn.Softmax(1),
    "sigmoid": nn.Sigmoid,
    "leaky relu": lambda: nn.LeakyReLU(0.1),
    "average of 4": lambda: nn.AvgPool2d(2),
    "average of all": lambda: nn.AdaptiveAvgPool2d(1),
}
AVERAGES = ("average of 4", "average of all")
ACTIVATIONS = {"int8": QuantizationSpec(), "uint8": QuantizationSpec(dtype="uint8", qscheme="asymmetric")}


class _BeforeLast(fx.Interpreter):
    """Keeps what goes into the simulator of the output."""

    def run_node(self, n):
        if n.op == "output":
            last = n.all_input_nodes[0]
            self.simulator, self.value = self.module.get_submodule(last.target), self.env[last.args[0]]
        return super().run_node(n)


def _in_steps(prepared, x):
    """The exact output in steps of its quantizer, which that rounds to whole numbers; the step and the zero point."""
    interpreter = _BeforeLast(copy.deepcopy(prepared).double(), garbage_collect_values=False)
    interpreter.run(x.double())
    scale, zero_point, _ = interpreter.simulator.calculate_qparams()
    offset = 0 if zero_point is None else int(zero_point)
    grid = interpreter.simulator._current_grid()
    steps = (interpreter.value / scale.double() + offset).clamp(grid.quant_min, grid.quant_max)
    return steps, float(scale), offset


def _bias_error(prepared, step):
    """Half of the unit that integer kernels round biases to, in steps of the output."""
    simulators = [module for module in prepared.modules() if isinstance(module, FakeQuantizeImplBase)]
    weights = [one for one in simulators if one.quantization_target == CompressionTargetTensor.WEIGHT]
    first = next(one for one in simulators if one not in weights)
    if not weights:
        return 0.0
    return float(0.5 * weights[0].calculate_qparams()[0].max() * first.calculate_qparams()[0] / step)


def _prepared(name, activation):
    torch.manual_seed(0)
    model, x = LAYERS[name]().eval(), torch.randn(8, 48 if name in WIDE else 8, 8, 8)
    for bias in (module.bias for module in model.modules() if isinstance(getattr(module, "bias", None), nn.Parameter)):
        nn.init.normal_(bias)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    specs = {"*": activation}
    module = ModuleQuantizerConfig(op_input_spec=specs, op_output_spec=specs, op_state_spec={"weight": W8})
    quantizer = Quantizer(model, QuantizerConfig(global_config=module, execution_mode="graph"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    ready = quantizer.finalize(backend="_torch")
    first = next(node for node in ready.graph.nodes if node.op == "placeholder").next
    while first.op != "call_module":
        first = first.next
    return ready, ready.get_submodule(first.target)(x).detach()


def _check(name, activation, run, rounds_biases):
    ready, x = _prepared(name, ACTIVATIONS[activation])
    with torch.no_grad():
        expected = ready(x)
        exact, step, offset = _in_steps(ready, x)
    found = run(ready, x).reshape(expected.shape)
    codes, theirs = (torch.round(y.double() / step + offset) for y in (expected, found))
    allowed = FLOAT_ERROR + (_bias_error(ready, step) if rounds_biases else 0)
    assert float((found.double() / step + offset - theirs).abs().max()) < 1e-3
    assert float((codes - exact).abs().max()) <= 0.5 + FLOAT_ERROR
    assert float((theirs - exact).abs().max()) <= 0.5 + allowed
    assert float((codes - theirs).abs().max()) <= 1
    assert float((codes == theirs).double().mean()) >= (0.75 if name in AVERAGES else 0.995)


def _in_onnx(tmp_path, **options):
    return lambda ready, x: run_onnx(export_onnx(ready, (x,), tmp_path / "m.onnx", **options), (x,))[0]


@pytest.mark.parametrize(("name", "activation"), each_value(list(LAYERS), list(ACTIVATIONS)))
def test_onnx_runtime(name, activation, tmp_path):
    """Its fused kernels round biases, and are left where the exact form would be slow; nothing else is rounded."""
    pytest.importorskip("onnxruntime")
    narrow = name in ("convolution", "convolution, batch norm, relu", "depthwise")
    _check(name, activation, _in_onnx(tmp_path), rounds_biases=narrow)


WITH_BIAS = [*WIDE, "convolution", "depthwise", "linear", "linear, relu"]


@pytest.mark.parametrize("name", [*WITH_BIAS, "softmax"])
def test_onnx_runtime_on_request(name, tmp_path):
    """With and without integer products, biases can be kept from rounding whatever that costs."""
    pytest.importorskip("onnxruntime")
    for kernels in (False, "exact"):
        _check(name, "int8", _in_onnx(tmp_path, integer_kernels=kernels), rounds_biases=False)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_onnx_runtime_with_whole_layers(name, tmp_path):
    pytest.importorskip("onnxruntime")
    _check(name, "uint8", _in_onnx(tmp_path, integer_kernels="fused"), rounds_biases=True)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("target", ["torch", "coreai", "executorch"])
def test_other_runtimes(target, name, activation, tmp_path):
    """XNNPACK rounds biases as well."""
    target = TARGETS[target]
    if target.missing() is not None:
        pytest.skip(target.missing())

    def run(ready, x):
        return target.run(target.write(ready, (x,), tmp_path / f"m{target.suffix}", {}, None), [x])[0]

    _check(name, activation, run, rounds_biases=target.name == "executorch")
