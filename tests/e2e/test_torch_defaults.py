"""What ``torch.set_default_dtype`` and ``torch.set_default_device`` say is for new tensors of the user's, not for ours.

A float32 model is prepared, trained and written bit for bit alike whatever they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright import kernels
from bitwright.artifact import Artifact
from bitwright.formats import decode, encode
from bitwright.kernels import Grid
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig
from bitwright.pruning.spec import PruningSpec
from bitwright.quantization import QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import ModuleQuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity
from tests.matrix import each_value

DTYPES = [torch.float64, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_device = pytest.mark.parametrize("device", ["cpu", "meta"])
Tensors = dict[str, torch.Tensor]


@contextmanager
def defaults(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """Make new tensors of ``dtype`` and on ``device`` unless they say otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


class Network(nn.Module):
    """A convolution with a batch norm, and linear layers with rows long enough for several words of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.first, self.last = nn.Linear(16 * 16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.avg_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.last(nn.functional.gelu(self.first(x.flatten(1))))


def network_and_batches() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Network().eval(), list(torch.randn(2, 4, 3, 8, 8))


def trained(
    make: Callable[[nn.Module], Any], network: nn.Module, batches: list[torch.Tensor], calibrate: bool = True
) -> tuple[Any, Tensors]:
    """Prepare a copy, calibrate and train it; return it with its outputs, gradients and state."""
    compressor = make(copy.deepcopy(network))
    model = compressor.prepare((batches[0],))
    if calibrate:
        with compressor.calibration_mode(), torch.no_grad():
            for batch in batches:
                model(batch)
    found = {"calibrated": model(batches[0]).detach()}
    with compressor.training_mode():
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return model, {**found, **state, "trained": model(batches[0]).detach()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    """The same tensors, in dtype and in every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num()), name


def in_files(folder: Path) -> Tensors:
    """The bytes of what was written."""
    return {
        str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size
    }


def of_kernels() -> Tensors:
    """What kernels make of tensors of float32, large and small."""
    found, generator = list[torch.Tensor](), torch.Generator().manual_seed(0)
    for shape, block in (((6, 32), (1, 32)), ((3, 20_000), (3, 20_000)), ((4, 40, 300), (4, 1, 300))):
        x, gradient = torch.randn(2, *shape, generator=generator, dtype=torch.float32, device="cpu")
        for grid in (Grid(torch.int8, -128, 127), Grid(torch.int4, -8, 7), Grid(torch.float8_e4m3fn, -448.0, 448.0)):
            options = {"block_size": block, "grid": grid}
            made = kernels.choose_qparams(*kernels.min_max(x, block), grid=grid, scheme="symmetric")
            leaf = x.clone().requires_grad_()
            y = kernels.fake_quantize(leaf, *made, **options)
            y.backward(gradient)
            codes = kernels.quantize(x, *made, **options)
            found += [*(one for one in made if one is not None), y.detach(), leaf.grad, codes.float()]
            found += [
                one for one in kernels.observe_and_fake_quantize(x, scheme="symmetric", **options) if one is not None
            ]
            if made[1] is not None:
                with torch.no_grad():
                    found += kernels.learned_gradient(gradient, x, made[0] / 2, *made[1:], anchored=True, **options)
    values = torch.randn(64, generator=generator, dtype=torch.float32, device="cpu")
    codes = encode(values, "float4_e2m1fn_x2")
    found += [codes, decode(codes, "float4_e2m1fn_x2")]
    return dict(zip(map(str, range(len(found))), found, strict=True))


@every_dtype
def test_kernels_compute_the_same(dtype: torch.dtype) -> None:
    """Among them the sums of learned steps, which compiled code adds up in memory that is asked for from torch."""
    expected = of_kernels()
    with defaults(dtype):
        assert_same(of_kernels(), expected)


@every_device
def test_kernels_compute_on_the_device_of_their_tensors(device: str) -> None:
    """Memory that compiled code writes to is the CPU's."""
    expected = of_kernels()
    with defaults(device=device):
        assert_same(of_kernels(), expected)


def preset(name: str, mode: str) -> Callable[[nn.Module], Quantizer]:
    return lambda model: Quantizer(model, getattr(QuantizerConfig.presets, name)(execution_mode=mode))


PRESETS = ["w4", "w8a8", "w2a4", "fp8", "mxfp4", "w8a8_dynamic"]


@pytest.mark.filterwarnings("ignore:.*Skipping quantization")
@pytest.mark.parametrize(("name", "mode"), each_value(PRESETS, ["eager", "graph"]))
def test_presets_are_the_same_under_any_dtype(name: str, mode: str, tmp_path: Path) -> None:
    """Outputs, gradients, trained weights, scales and the artifact."""
    network, batches = network_and_batches()
    model, expected = trained(preset(name, mode), network, batches)
    Artifact.from_model(model).save(tmp_path / "float32")
    for dtype in DTYPES:
        with defaults(dtype):
            model, found = trained(preset(name, mode), network, batches)
            Artifact.from_model(model).save(tmp_path / str(dtype))
        assert_same(found, expected)
        assert_same(in_files(tmp_path / str(dtype)), in_files(tmp_path / "float32"))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", ["w8a8", "w2a4"])
@every_device
def test_presets_are_the_same_on_any_device(name: str, mode: str, device: str) -> None:
    """The tensors are on the CPU, and so are the simulators."""
    network, batches = network_and_batches()
    _, expected = trained(preset(name, mode), network, batches)
    with defaults(device=device):
        _, found = trained(preset(name, mode), network, batches)
    assert_same(found, expected)


def activations(**fields: Any) -> Callable[[nn.Module], Quantizer]:
    """A quantizer of weights with learned steps, and of activations as ``fields`` say."""
    fields["float_range"] = fields.get("float_range", (None, None))
    weight = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0), qparam_calculator_cls="lsq")
    activation = QuantizationSpec(dtype="uint4", qscheme="asymmetric", **fields)
    config = ModuleQuantizerConfig(
        op_state_spec={"weight": weight}, op_input_spec={"*": activation}, op_output_spec=None
    )
    return lambda model: Quantizer(model, QuantizerConfig(execution_mode="eager", global_config=config))


@every_dtype
@pytest.mark.parametrize(
    "fields",
    [
        {"float_range": (-1.0, 1.0)},
        {"float_range": (None, 2.0)},
        {"qparam_calculator_cls": "moving_average", "range_calculator_cls": "mse"},
        {"qparam_calculator_cls": "global_minmax", "range_calculator_cls": "percentile"},
        {"qparam_calculator_cls": "accumulated", "range_calculator_cls": "histogram"},
        {"qparam_calculator_cls": "static"},
        {"qparam_calculator_cls": "lsq"},
        {"qparam_calculator_cls": "lsq_plus", "range_calculator_cls": "mse"},
        {"qparam_calculator_cls": "pact"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_ranges_are_the_same(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Those that are found, those that run along and those that are learned."""
    network, batches = network_and_batches()
    _, expected = trained(activations(**fields), network, batches)
    with defaults(dtype):
        _, found = trained(activations(**fields), network, batches)
    assert_same(found, expected)


def palettizer(model: nn.Module) -> KMeansPalettizer:
    return KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4())


def pruner(algorithm: str) -> Callable[[nn.Module], MagnitudePruner]:
    rule = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(pruning_algo=algorithm)})
    return lambda model: MagnitudePruner(model, MagnitudePrunerConfig(global_config=rule))


@pytest.mark.filterwarnings("ignore:Skipping palettization")
@pytest.mark.parametrize(
    ("make", "calibrate"),
    [(palettizer, False), (pruner("default"), False), (pruner("wanda"), True), (pruner("sparsegpt"), True)],
    ids=["palettizer", "magnitudes", "wanda", "sparsegpt"],
)
def test_other_techniques_are_the_same(make: Any, calibrate: bool) -> None:
    """Palettes, masks and what training makes of them."""
    network, batches = network_and_batches()
    _, expected = trained(make, network, batches, calibrate)
    for one in [*({"dtype": dtype} for dtype in DTYPES), {"device": "meta"}]:
        with defaults(**one):
            _, found = trained(make, network, batches, calibrate)
        assert_same(found, expected)


@every_dtype
@pytest.mark.parametrize("name", ["w4", "w8a8", "fp8"])
def test_onnx_files_are_the_same(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Constants that the exporter adds are float32."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from bitwright.export.onnx import export_onnx

    network, batches = network_and_batches()
    model, _ = trained(preset(name, "eager"), network, batches)
    export_onnx(model, (batches[0],), tmp_path / "float32" / "model.onnx")
    with defaults(dtype):
        export_onnx(model, (batches[0],), tmp_path / "other" / "model.onnx")
    assert_same(in_files(tmp_path / "other"), in_files(tmp_path / "float32"))
