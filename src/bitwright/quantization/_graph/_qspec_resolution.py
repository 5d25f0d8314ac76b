"""From the fields that slots agreed on to a spec that PT2E understands."""

from __future__ import annotations

from typing import Any

from bitwright import _torchao
from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import QuantizationComponentFactory, QuantizationSpec

from ._qspec_types import FieldName, ProvisionalQSpec, ReconciliationError

__all__ = ["torchao_spec"]


def torchao_spec(spec: QuantizationSpec, target: CompressionTargetTensor) -> Any:
    """Return a torchao ``QuantizationSpec`` whose constructor builds the simulator of ``spec``.

    Its own scheme is left open, because the simulator's calculator has it.
    """
    return _torchao.pt2e_quantizer().QuantizationSpec(
        dtype=spec.target_dtype,
        observer_or_fake_quant_ctr=QuantizationComponentFactory.create_fake_quantizer_partial(spec, target),
        quant_min=spec.quant_min,
        quant_max=spec.quant_max,
    )


def _build_concrete_spec(qspec: ProvisionalQSpec) -> Any:
    """Return the torchao spec of a group of slots, None for a group that nobody wants to quantize.

    Raises:
        ReconciliationError: some fields are missing; lists them.
    """
    if qspec.declined or not qspec.fields:
        return None
    missing = [field.value for field in FieldName if field not in qspec.fields]
    if missing:
        raise ReconciliationError(
            f"Cannot rebuild a quantization spec without {', '.join(missing)}. A constraint gave fields to a slot that "
            "no configuration speaks about; only change slots that have all fields, or share an observer."
        )
    values = {field.value: entry.value for field, entry in qspec.fields.items()}
    target = CompressionTargetTensor(values.pop(FieldName.QUANTIZATION_TARGET.value))
    return torchao_spec(QuantizationSpec(**values), target)
