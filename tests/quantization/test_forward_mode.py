"""Forward-mode differentiation of prepared models: the tangents are those of reverse mode, never silently zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


def prepared_model(config: QuantizerConfig) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A calibrated model in eval mode, an input that its ranges clip in part, and a direction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    return prepared.eval(), x * 1.5, torch.randn(3, 4)


def dual_level(model: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent: Any = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent  # type: ignore[no-untyped-call]
    assert isinstance(tangent, torch.Tensor)
    return tangent.detach()


def transformed(model: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = torch.func.jvp(model, (x,), (direction,))[1]
    return tangent.detach()


@both_modes
@pytest.mark.parametrize("preset", ["w8a8", "w4a4", "fp8"])
@pytest.mark.parametrize("forward", [dual_level, transformed])
@pytest.mark.parametrize("grad", [True, False])
def test_tangents_are_those_of_reverse_mode(mode: str, preset: str, forward: Any, grad: bool) -> None:
    """Also under ``no_grad``, and after calls that left prepared kernels and kept weights behind."""
    model, x, direction = prepared_model(getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    jacobian = torch.autograd.functional.jacobian(model, x)
    expected = torch.einsum("bidj,dj->bi", jacobian, direction)
    with torch.no_grad():
        for _ in range(3):
            y = model(x)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(forward(model, x, direction), expected)
    assert expected.count_nonzero() > 3
    with torch.no_grad():
        assert torch.equal(model(x), y)


@both_modes
def test_jacobians_and_hessians(mode: str) -> None:
    """Forward mode over a batch of directions, and over reverse mode."""
    model, x, _ = prepared_model(QuantizerConfig.presets.w8a8(execution_mode=mode))
    torch.testing.assert_close(torch.func.jacfwd(model)(x), torch.func.jacrev(model)(x))

    def loss(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y.square().sum()

    torch.testing.assert_close(torch.func.hessian(loss)(x), torch.autograd.functional.hessian(loss, x))


@both_modes
def test_tangents_of_weights(mode: str) -> None:
    """A weight that somebody gives a tangent, as ``torch.func.functional_call`` does, passes it on."""
    model, x, _ = prepared_model(QuantizerConfig.presets.w8a8(execution_mode=mode))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def run(values: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, values, (x,))
        return y.square().sum()

    directions = {name: torch.randn_like(value) for name, value in parameters.items()}
    gradients = torch.func.grad(run)(parameters)
    expected = sum((gradients[name] * directions[name]).sum() for name in parameters)
    tangent = torch.func.jvp(run, (parameters,), (directions,))[1]
    torch.testing.assert_close(tangent, expected)


@both_modes
@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
def test_learned_ranges_refuse_and_reverse_mode_works(mode: str, kind: str) -> None:
    """The error names the simulator and the way out, which gives what plain autograd gives."""
    weight = QuantizationSpec(dtype="int4", fake_quantize_cls="lsq" if kind == "pact" else kind)
    activation = QuantizationSpec(dtype="uint4", qscheme="asymmetric", fake_quantize_cls=kind)
    rule = ModuleQuantizerConfig(
        op_input_spec={"*": activation}, op_output_spec={"*": activation}, op_state_spec={"weight": weight}
    )
    model, x, direction = prepared_model(QuantizerConfig(global_config=rule, execution_mode=mode))
    names = [s.tensor_fqn for s in model.modules() if isinstance(s, FakeQuantizeImplBase)]
    for forward in (dual_level, transformed):
        with pytest.raises(NotImplementedError, match="jacrev") as caught:
            forward(model, x, direction)
        assert str(caught.value).startswith(tuple(f"{name}: " for name in names))
    torch.testing.assert_close(torch.func.jacrev(model)(x), torch.autograd.functional.jacobian(model, x))
