"""What each target holds, asked of the exporters' own checks: for a plan, and as a table of typical specs."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bitwright.artifact import CompressedTensor, PalettizedTensor, QuantizedTensor
from bitwright.config.spec import CompressionSpec, CompressionTargetTensor
from bitwright.palettization import PalettizationSpec
from bitwright.planning import Plan, PlanRow, Problem, Severity
from bitwright.pruning import PruningSpec
from bitwright.quantization.spec import QuantizationComponentFactory, QuantizationSpec
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .arithmetic import fits_arithmetic
from .coreml_weights import NO_BFLOAT16
from .samples import SAMPLES, sample_weight
from .targets import TARGETS, target_named

__all__ = ["Capability", "Form", "Support", "activation_support", "capabilities", "check_plan", "weight_support"]


_HALF = PruningSpec(target_sparsity=0.5)


class Form(enum.StrEnum):
    """How a target holds a tensor: PACKED in its own quantized types, as plain ARITHMETIC, DENSE, or not at all."""

    PACKED = "packed"
    ARITHMETIC = "arithmetic"
    DENSE = "dense"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Support:
    """What a target makes of a tensor.

    Attributes:
        form: how it holds it. DENSE and ARITHMETIC compute the same, without being smaller or faster.
        reason: why it is not packed; empty where it is.
    """

    form: Form
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of the table.

    Attributes:
        label: the spec in words.
        kind: ``"weight"`` or ``"activation"``.
        spec: the spec; several where techniques are combined, in the order of use.
        targets: what each target makes of it, by name.
    """

    label: str
    kind: str
    spec: tuple[CompressionSpec, ...]
    targets: dict[str, Support]


def weight_support(target: str, tensor: CompressedTensor[Any], *, linear: bool = True) -> Support:
    """Return what a target makes of a compressed weight.

    Args:
        target: its name in :data:`~bitwright.export.targets.TARGETS`.
        tensor: the weight.
        linear: whether a linear layer multiplies with it; checkpoint formats pack only those.
    """
    if target in ("artifact", "torch", "aot-inductor"):
        return Support(Form.PACKED)
    if target in ("onnx", "onnx-nbits"):
        return _onnx_weight(tensor)
    return _WEIGHTS[target](tensor, linear)


def activation_support(target: str, spec: QuantizationSpec) -> Support:
    """Return what a target makes of a quantized activation.

    Args:
        target: its name in :data:`~bitwright.export.targets.TARGETS`.
        spec: how it is quantized.
    """
    simulator = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.ACTIVATION)
    if target in ("artifact", "torch", "aot-inductor"):
        return Support(Form.PACKED if target == "artifact" else Form.ARITHMETIC)
    if target in ("compressed-tensors", "gguf"):
        return Support(Form.REFUSED, "the format holds weights only")
    return _ACTIVATIONS[target](simulator)


def check_plan(plan: Plan, target: str) -> list[Problem]:
    """Return what of a plan a target cannot hold, before anything is prepared.

    Args:
        plan: from ``compressor.plan(example_inputs)``.
        target: its name in :data:`~bitwright.export.targets.TARGETS`.

    Returns:
        An error for each tensor that the target refuses, a warning for each weight that it stores dense.

    Raises:
        KeyError: there is no such target.
    """
    title = target_named(target).title
    problems = []
    for row in plan:
        if row.spec is None:
            continue
        support = _row_support(row, target)
        if support.form == Form.REFUSED or (support.form == Form.DENSE and row.kind == "weight"):
            severity = Severity.ERROR if support.form == Form.REFUSED else Severity.WARNING
            fate = "cannot hold it" if support.form == Form.REFUSED else "stores it dense"
            problems.append(Problem("target", row.tensor, f"{title} {fate}: {support.reason}.", severity))
    return problems


def capabilities() -> Iterator[Capability]:
    """Yield the table: typical specs of weights and activations with every target's answer."""
    for label, kind, specs in SAMPLES:
        if kind == "weight":
            tensor = sample_weight(specs, (64, 64), "float32")
            answers = {name: weight_support(name, tensor) for name in TARGETS}
        else:
            spec = specs[0]
            assert isinstance(spec, QuantizationSpec)
            answers = {name: activation_support(name, spec) for name in TARGETS}
        yield Capability(label, kind, specs, answers)


def _row_support(row: PlanRow, target: str) -> Support:
    if row.kind != "weight":
        assert isinstance(row.spec, QuantizationSpec)
        if target == "coreml" and row.dtype == "bfloat16":
            return Support(Form.REFUSED, NO_BFLOAT16)
        return activation_support(target, row.spec)
    assert row.spec is not None
    if isinstance(row.spec, PruningSpec):
        return weight_support(target, sample_weight((_HALF,), (8, 8), row.dtype), linear=row.linear)
    specs = (_HALF, row.spec) if row.masked else (row.spec,)
    return weight_support(target, sample_weight(specs, _sample_shape(row), row.dtype), linear=row.linear)


def _sample_shape(row: PlanRow) -> tuple[int, ...]:
    """Sizes of a smaller weight whose compressed form is of the same kind: at most two blocks along a dimension.

    Nine along the first: up to eight zero points of 4 bits are one word, which matters to compressed-tensors.
    """
    if isinstance(row.spec, PalettizationSpec):
        unit = row.spec.cluster_dim * getattr(row.spec.granularity, "group_size", 1)
        return tuple(min(size, max(2, 64 // unit) * unit) for size in row.shape)
    most = (9, *(2 for _ in row.shape[1:]))
    shape = tuple(
        size * min(limit, count // size) for limit, size, count in zip(most, row.block_size, row.shape, strict=False)
    )
    return shape if len(shape) == len(row.shape) and all(shape) else row.shape


def _onnx_weight(tensor: CompressedTensor[Any]) -> Support:
    if isinstance(tensor, QuantizedTensor):
        dense = tensor.is_sparse and tensor.minval() is not None
        return Support(Form.DENSE, "a mask with the 'minval' formulation") if dense else Support(Form.PACKED)
    if isinstance(tensor, PalettizedTensor):
        dense = tensor.is_sparse and tensor.layout.entries == 256
        return Support(Form.DENSE, "a mask beside 256 values") if dense else Support(Form.PACKED)
    return Support(Form.DENSE, "ONNX Runtime has no sparse weights")


def _coreai_weight(tensor: CompressedTensor[Any], linear: bool) -> Support:
    from .coreai_weights import dense_weight, unsupported_weight

    problem = unsupported_weight(tensor)
    if problem is not None:
        return Support(Form.REFUSED, problem)
    dense = dense_weight(tensor)
    return Support(Form.PACKED) if dense is None else Support(Form.DENSE, dense)


def _coreml_weight(tensor: CompressedTensor[Any], linear: bool) -> Support:
    from .coreml_weights import check_weight

    return _unless(check_weight, tensor)


def _executorch_weight(tensor: CompressedTensor[Any], linear: bool) -> Support:
    from .executorch.weights import fits_int8, stays_int8

    if stays_int8(tensor):
        return Support(Form.PACKED)
    if fits_int8(tensor):
        return Support(Form.DENSE, "it packs weights of models in float32; convert the model to float32 before")
    return Support(Form.DENSE, "it packs symmetric signed integers, per tensor or channel; in convolutions int8")


def _compressed_tensors_weight(tensor: CompressedTensor[Any], linear: bool) -> Support:
    from .checkpoints.compressed_tensors import unreadable, unsupported_weight

    problem = unsupported_weight(tensor, linear) or unreadable(tensor)
    return Support(Form.PACKED) if problem is None else Support(Form.REFUSED, problem)


def _gguf_weight(tensor: CompressedTensor[Any], linear: bool) -> Support:
    from .checkpoints.gguf import too_many_dimensions, type_of

    kind, problem = type_of(tensor, True)
    problem = too_many_dimensions(tensor.layout.shape) or problem
    if kind and problem is None:
        return Support(Form.PACKED)
    return Support(Form.REFUSED, problem or "no type of ggml holds it")


_WEIGHTS = {
    "coreai": _coreai_weight,
    "coreml": _coreml_weight,
    "executorch": _executorch_weight,
    "compressed-tensors": _compressed_tensors_weight,
    "gguf": _gguf_weight,
}


def _onnx_activation(simulator: FakeQuantizeImplBase) -> Support:
    from .onnx.activations import has_nodes

    if has_nodes(simulator):
        fp8 = simulator.dtype.is_floating_point
        return Support(Form.ARITHMETIC, "FP8 is rounded by casts") if fp8 else Support(Form.PACKED)
    return _as_arithmetic(simulator)


def _as_arithmetic(simulator: FakeQuantizeImplBase) -> Support:
    if fits_arithmetic(simulator) or not simulator._is_fused():
        return Support(Form.ARITHMETIC, "quantize operators cannot hold it")
    return Support(Form.REFUSED, "a custom class, or a search for its range, computes its parameters at run time")


def _coreai_activation(simulator: FakeQuantizeImplBase) -> Support:
    from bitwright.quantization._export_utils import unsupported_activation

    if simulator.is_stateless:
        return Support(Form.REFUSED, "its parameters would have to be computed at run time")
    problem = unsupported_activation(simulator)
    return Support(Form.PACKED) if problem is None else Support(Form.REFUSED, problem)


def _coreml_activation(simulator: FakeQuantizeImplBase) -> Support:
    from .coreml import check_activation_form

    if simulator.is_stateless:
        return Support(Form.REFUSED, "its parameters would have to be computed at run time")
    return _unless(check_activation_form, simulator)


def _executorch_activation(simulator: FakeQuantizeImplBase) -> Support:
    from .executorch.activations import activation_form

    if simulator.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return Support(Form.REFUSED, "ExecuTorch has no FP8 numbers")
    return _as_arithmetic(simulator) if activation_form(simulator) == "arithmetic" else Support(Form.PACKED)


_ACTIVATIONS = {
    "onnx": _onnx_activation,
    "onnx-nbits": _onnx_activation,
    "coreai": _coreai_activation,
    "coreml": _coreml_activation,
    "executorch": _executorch_activation,
}


def _unless(check: Any, subject: Any) -> Support:
    """PACKED if a check passes, REFUSED with its message if it raises."""
    try:
        check(subject)
    except ValueError as error:
        return Support(Form.REFUSED, str(error).rstrip("."))
    return Support(Form.PACKED)
