"""Activation quantizers as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bitwright.formats import format_of
from bitwright.quantization.spec import PerBlockGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .encode import check_storable
from .errors import ArtifactError
from .layouts import ActivationLayout

__all__ = ["QuantizedActivation"]


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """How one activation is quantized at run time.

    Attributes:
        layout: format, range, formulation and granularity.
        parts: ``scale``, and ``zero_point`` (int32) or ``minval``; empty for dynamic quantization.
    """

    layout: ActivationLayout
    parts: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        wanted = self.layout.parts()
        found = {name: (tuple(part.shape), part.dtype) for name, part in self.parts.items()}
        if wanted != found:
            raise ArtifactError(f"An activation's parameters must be {wanted}, got {found}.")

    @classmethod
    def from_simulator(cls, simulator: FakeQuantizeImplBase, name: str) -> QuantizedActivation:
        """Read the parameters of an activation's simulator.

        Raises:
            ArtifactError: it was never calibrated, or its scales are not positive finite numbers.
        """
        problems = simulator.check_health()
        if problems:
            raise ArtifactError(
                f"{name!r} cannot be exported: {'; '.join(problems)}. Calibrate the model first; leave a call that "
                "calibration does not reach out of the configuration, by its name."
            )
        check_storable(format_of(simulator.dtype))
        calculator, granularity = simulator.qparams_calculator, simulator.granularity
        layout = ActivationLayout(
            format=str(simulator.dtype).removeprefix("torch."),
            quant_min=simulator.quant_min,
            quant_max=simulator.quant_max,
            formulation="minval" if simulator._current_grid().formulation == "minval" else "zp",
            scheme=simulator.qscheme.value,
            granularity=type(granularity).registry_key(),
            axis=granularity.axis,
            block_size=granularity.block_size if isinstance(granularity, PerBlockGranularity) else None,
            dynamic=simulator.is_stateless,
            scale_dtype="float32" if calculator.scale_dtype is None else "float8_e8m0fnu",
            counts=() if simulator.is_stateless else tuple(simulator.calculate_qparams()[0].shape),
        )
        return cls(layout, {} if layout.dynamic else _parts(simulator, layout))

    def check_values(self) -> None:
        """Check that scales are positive and finite and zero points are codes.

        Raises:
            ArtifactError: a value is out of range.
        """
        scale, minval, zero_point = (self.parts.get(name) for name in ("scale", "minval", "zero_point"))
        if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ArtifactError("A scale is not a positive finite number.")
        if minval is not None and not bool(torch.isfinite(minval).all()):
            raise ArtifactError("A minval is not a finite number.")
        low, high = self.layout.quant_min, self.layout.quant_max
        if zero_point is not None and bool(((zero_point < low) | (zero_point > high)).any()):
            raise ArtifactError(f"A zero point lies outside the codes [{low}, {high}].")


def _parts(simulator: FakeQuantizeImplBase, layout: ActivationLayout) -> dict[str, torch.Tensor]:
    scale, zero_point, minval = simulator.calculate_qparams()
    found = {"scale": scale.detach().float(), "zero_point": zero_point, "minval": minval}
    if layout.grid.is_integer and zero_point is None and minval is None:
        found["zero_point"] = torch.zeros_like(scale, dtype=torch.int32)
    return {
        name: found[name].detach().to("cpu", dtype).reshape(shape).clone()  # type: ignore[union-attr]
        for name, (shape, dtype) in layout.parts().items()
    }
