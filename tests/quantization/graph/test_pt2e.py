"""The configuration as a torchao quantizer, through torchao's own prepare and convert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import PlanError
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.pt2e import pt2e_quantizer
from bitwright.quantization.spec import FakeQuantizeImplBase, PerBlockGranularity, PerChannelGranularity
from tests.lambda_module import Lambda
from tests.measures import sqnr

from .networks import IMAGE, with_statistics

flow = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
pt2e = pytest.importorskip("torchao.quantization.pt2e")


class Net(nn.Module):
    """Convolution, batch norm, concatenation, pooling, linear, sigmoid."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(7, 5)
        self.bn = nn.BatchNorm2d(4) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([F.relu(self.bn(self.conv(x))), x], 1)
        return torch.sigmoid(self.fc(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1)))


def graph_of(model: nn.Module, *inputs: torch.Tensor) -> Any:
    return torch.export.export(model, inputs).module()


def ops(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("is_qat", "norm"),
    [
        pytest.param(False, True, id="ptq"),
        pytest.param(True, False, id="qat"),
        # torchao exports and matches some thirty patterns of batch norms, which takes half a minute
        pytest.param(True, True, id="qat with batch norm", marks=pytest.mark.slow),
    ],
)
def test_through_torchaos_flow(is_qat: bool, norm: bool) -> None:
    """Converted models have torchao's integer ops, no batch norm, and compute nearly what the float model does."""
    model = with_statistics(Net(norm))
    model.train(is_qat)
    prepare = flow.prepare_qat_pt2e if is_qat else flow.prepare_pt2e
    prepared = prepare(graph_of(model, IMAGE), pt2e_quantizer(QuantizerConfig(), model, is_qat=is_qat))
    pt2e.move_exported_model_to_eval(prepared)
    for _ in range(2):
        prepared(IMAGE)
    converted = flow.convert_pt2e(prepared)
    found = ops(converted)
    assert "quantized_decomposed.dequantize_per_channel.default" in found
    assert "quantized_decomposed.quantize_per_tensor.default" in found
    assert not [name for name in found if "batch_norm" in name]
    assert sqnr(model.eval()(IMAGE), converted(IMAGE)) > 25


def test_shared_simulators_are_shared_annotations() -> None:
    """What shares parameters here has one observer there."""
    model = Lambda(lambda s, x: torch.cat([s.l(x), x], 1), l=nn.Linear(4, 4))
    prepared = flow.prepare_pt2e(graph_of(model, torch.randn(2, 4)), pt2e_quantizer(QuantizerConfig(), model))
    called = [prepared.get_submodule(str(n.target)) for n in prepared.graph.nodes if n.op == "call_module"]
    activations = [module for module in called if type(module).__name__ == "MovingAverageMinMaxObserver"]
    assert len(activations) == 3
    assert len({id(module) for module in activations}) == 1


def test_specs_reach_the_observers() -> None:
    """Dtype, range, scheme, axis and averaging constant are the configuration's."""
    weight = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=1))
    activation = {"*": QuantizationSpec(dtype="uint8", qscheme="asymmetric", averaging_constant=0.3)}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec={"weight": weight}, op_input_spec=activation, op_output_spec=None
        )
    )
    model = nn.Linear(4, 4)
    prepared = flow.prepare_pt2e(graph_of(model, torch.randn(2, 4)), pt2e_quantizer(config, model))
    found = {type(m).__name__: m for m in prepared.modules() if "Observer" in type(m).__name__}
    observer = found["PerChannelMinMaxObserver"]
    assert (observer.dtype, observer.quant_min, observer.quant_max, observer.ch_axis) == (torch.int8, -8, 7, 1)
    moving = found["MovingAverageMinMaxObserver"]
    assert (moving.dtype, moving.qscheme, moving.averaging_constant) == (torch.uint8, torch.per_tensor_affine, 0.3)


@pytest.mark.parametrize("calculator", ["static", "accumulated"])
def test_the_range_of_the_latest_tensor(calculator: str) -> None:
    """Simulators with these calculators keep it, and so do the observers."""
    activation = {"*": QuantizationSpec(qscheme="asymmetric", qparam_calculator_cls=calculator)}
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec=activation, op_output_spec=None))
    model, batches = nn.Linear(4, 4), [torch.full((2, 4), 8.0), torch.tensor([[-1.0, 0.0, 1.0, 2.0]] * 2)]
    observed = flow.prepare_pt2e(graph_of(model, batches[0]), pt2e_quantizer(config, model))
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare((batches[0],))
    with quantizer.calibration_mode():
        for batch in batches:
            observed(batch)
            prepared(batch)
    [observer] = [m for m in observed.modules() if type(m).__name__ == "MovingAverageMinMaxObserver"]
    scale, zero_point = observer.calculate_qparams()
    simulators = [m.qparams_calculator for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)]
    [simulator] = [m for m in simulators if type(m).__name__.lower().startswith(calculator) and m.scale.numel() == 1]
    assert scale.item() == pytest.approx(3 / 255)
    assert simulator.scale.item() == pytest.approx(scale.item())
    assert simulator.minval.item() == -1.0 == observer.min_val.item()
    assert zero_point.item() == round(-128 + 1 / scale.item())


def test_names_of_modules_and_types() -> None:
    """Parts by name need only the graph; parts by type need the model."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    by_name = QuantizerConfig.presets.w8().set_module_name("0", None)
    prepared = flow.prepare_pt2e(graph_of(model, x), pt2e_quantizer(by_name))
    assert sum("PerChannel" in type(m).__name__ for m in prepared.modules()) == 1
    by_type = QuantizerConfig.presets.w8().set_module_type(nn.Linear, None)
    prepared = flow.prepare_pt2e(graph_of(model, x), pt2e_quantizer(by_type, model))
    assert not [m for m in prepared.modules() if "Observer" in type(m).__name__]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"qformulation": "minval"}, "minval"),
        ({"granularity": PerBlockGranularity(axis=1, block_size=2)}, "PerBlock"),
        ({"fake_quantize_cls": "lsq"}, "LSQ"),
        ({"range_calculator_cls": "mse"}, "MSE"),
        ({"dtype": "uint8", "qscheme": "asymmetric", "float_range": (None, 6.0)}, "float_range.*one end"),
        ({"granularity": PerChannelGranularity(axis=0), "float_range": (-6.0, 6.0)}, "float_range.*per channel"),
    ],
)
def test_what_pt2e_cannot_hold(fields: dict[str, Any], word: str) -> None:
    """The error names the tensor and what is in the way."""
    spec = QuantizationSpec(**fields)
    part = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    quantizer = pt2e_quantizer(QuantizerConfig(global_config=part))
    with pytest.raises(ValueError, match=rf"weight.*{word}.*Change the spec"):
        quantizer.annotate(graph_of(nn.Linear(4, 4), torch.randn(2, 4)))


def test_problems_of_the_plan_are_errors() -> None:
    """A configuration that cannot be applied stops the annotation."""
    spec = {"*": QuantizationSpec(granularity=PerChannelGranularity())}
    quantizer = pt2e_quantizer(QuantizerConfig(global_config=ModuleQuantizerConfig(op_input_spec=spec)))
    with pytest.raises(PlanError, match="axis"):
        quantizer.annotate(graph_of(nn.Linear(4, 4), torch.randn(2, 4)))
