"""Simulators to compressed tensors: what a prepared model computes for a weight, in packed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn

from bitwright._utils.packed_weights import is_packed
from bitwright.quantization.spec import QuantizationScheme
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .encode import dense_tensor, quantized_tensor
from .errors import ArtifactError
from .sites import refuse_meta
from .tensors import CompressedTensor

__all__ = ["Encoder", "compress_tensor", "register_encoder", "simulate"]

Encoder: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor | None], CompressedTensor[Any]]
"""``encoder(simulator, tensor, mask)`` returns the compressed form of what the simulator makes of the tensor."""

_ENCODERS: dict[type, Encoder] = {}
_MASKS: dict[type, Callable[[Any], torch.Tensor]] = {}
_HOLES: dict[type, Callable[[Any], torch.Tensor | None]] = {}
_SWITCHED_ON: dict[type, Callable[[Any], AbstractContextManager[None]]] = {}


def register_encoder(simulator_class: type, encoder: Encoder) -> None:
    """Say how tensors under simulators of a class, and of classes derived from it, are stored.

    Args:
        simulator_class: the class.
        encoder: called with the simulator, the tensor that enters it and a mask of entries that are kept (or None).
            Entries outside the mask must decode to zero if the mask is used.
    """
    _ENCODERS[simulator_class] = encoder


def simulate(tensor: torch.Tensor, simulators: Sequence[nn.Module]) -> torch.Tensor:
    """Return what the simulators make of a tensor, whatever their switches say; nothing is observed."""
    with torch.no_grad():
        for simulator in simulators:
            tensor = _apply(simulator, tensor)
    return tensor


def compress_tensor(tensor: torch.Tensor, simulators: Sequence[nn.Module], name: str) -> CompressedTensor[Any]:
    """Return the compressed form of a tensor under a stack of simulators.

    The last simulator that maps to codes decides on the form; pruning anywhere in the stack makes it sparse where that
    is smaller. The result is decoded and compared with the simulators' output, bit for bit.

    Args:
        tensor: the dense tensor.
        simulators: in the order in which they are applied.
        name: the tensor's name, for messages.

    Raises:
        ArtifactError: the tensor holds NaN or infinity or is on the meta device, a simulator has no parameters yet, or
            it is of a class that computes something which no stored form decodes to.
    """
    refuse_meta(name, tensor)
    tensor = tensor.detach()
    active = [simulator for simulator in simulators if not _is_out_of_use(simulator)]
    if active and not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"{name!r} holds NaN or infinity and cannot be compressed; repair it before exporting.")
    wanted = simulate(tensor, active)
    mask = _kept_entries(active, tensor, wanted)
    coders = [i for i, simulator in enumerate(active) if not _is_pruner(simulator)]
    with torch.no_grad():
        if not coders:
            compressed: CompressedTensor[Any] = dense_tensor(wanted, mask)
        else:
            last = coders[-1]
            entering = simulate(tensor, active[:last])
            encode = _encoder_of(active[last], name)
            compressed = encode(active[last], entering, mask)
            if mask is not None and last + 1 < len(active):
                compressed = _with_zeros(compressed, encode(active[last], entering * mask, mask), wanted)
            if not _decodes_to(compressed, wanted):
                compressed = dense_tensor(wanted, mask) if last + 1 < len(active) else compressed
    if not _decodes_to(compressed, wanted):
        kinds = ", ".join(type(simulator).__name__ for simulator in active)
        remedy = (
            "A custom class must keep the formulas of its base class, or register an encoder with "
            "bitwright.artifact.register_encoder."
        )
        if is_packed(active):
            remedy = f"It was packed and then cast to {wanted.dtype}: cast the model back first."
        raise ArtifactError(
            f"{name!r}: what {kinds} computes is not what its codes, scales and zero points decode to, so it cannot be "
            f"stored. {remedy}"
        )
    return compressed


def _with_zeros(
    compressed: CompressedTensor[Any], zeroed: CompressedTensor[Any], wanted: torch.Tensor
) -> CompressedTensor[Any]:
    """Return the form whose dropped entries have the code of zero, where that is smaller than dropping them."""
    return zeroed if zeroed.nbytes < compressed.nbytes and _decodes_to(zeroed, wanted) else compressed


def _decodes_to(compressed: CompressedTensor[Any], wanted: torch.Tensor) -> bool:
    decoded = compressed.decode()
    return decoded.dtype == wanted.dtype and torch.equal(decoded, wanted)


def _encoder_of(simulator: nn.Module, name: str) -> Encoder:
    for cls in type(simulator).__mro__:
        if cls in _ENCODERS:
            return _ENCODERS[cls]
    raise ArtifactError(
        f"{name!r}: no stored form is known for the simulator {type(simulator).__name__}; register one with "
        "bitwright.artifact.register_encoder."
    )


def _is_pruner(simulator: nn.Module) -> bool:
    return _mask_of(simulator) is not None


def _mask_of(simulator: nn.Module) -> torch.Tensor | None:
    return next((_MASKS[cls](simulator) for cls in type(simulator).__mro__ if cls in _MASKS), None)


def _holes_of(simulator: nn.Module) -> torch.Tensor | None:
    """The mask of a simulator that is not there to prune but keeps zeros."""
    return next((_HOLES[cls](simulator) for cls in type(simulator).__mro__ if cls in _HOLES), None)


def _kept_entries(simulators: Sequence[nn.Module], tensor: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """Entries that no mask drops; None if nothing is dropped or dropped entries do not end as zero."""
    found = (find(simulator) for simulator in simulators for find in (_mask_of, _holes_of))
    masks = [mask for mask in found if mask is not None]
    if not masks:
        return None
    kept = torch.ones_like(tensor, dtype=torch.bool)
    for mask in masks:
        kept &= mask != 0
    return kept if not bool((wanted[~kept] != 0).any()) else None


def _is_out_of_use(simulator: nn.Module) -> bool:
    disabled = getattr(simulator, "is_disabled", None)
    return bool(disabled()) if callable(disabled) else bool(getattr(simulator, "_disabled", False))


def _apply(simulator: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(simulator, FakeQuantizeImplBase):
        if simulator.is_stateless:
            scale, zero_point, minval = simulator.qparams_calculator(tensor)
        else:
            scale, zero_point, minval = simulator._stored(simulator.qparams_calculator)
        return simulator._fake_quantize(tensor, scale, zero_point, minval)
    switched_on = next((_SWITCHED_ON[cls] for cls in type(simulator).__mro__ if cls in _SWITCHED_ON), nullcontext)
    modes = [(module, module.training) for module in simulator.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with switched_on(simulator):
            result: torch.Tensor = simulator(tensor)
    finally:
        for module, mode in modes:
            module.training = mode
    return result


def _encode_quantized(
    simulator: FakeQuantizeImplBase, tensor: torch.Tensor, mask: torch.Tensor | None
) -> CompressedTensor[Any]:
    calculator = simulator.qparams_calculator
    qparams = calculator(tensor) if simulator.is_stateless else simulator._stored(calculator)
    scale, zero_point, minval = qparams
    codes = simulator.quantize(tensor, scale, zero_point, minval, cast_to_target_dtype=True)
    return quantized_tensor(
        codes,
        scale,
        zero_point,
        minval,
        block_size=simulator.get_block_size(tensor.shape),
        grid=simulator._current_grid(),
        dtype=tensor.dtype,
        power_of_two=calculator.scale_dtype is not None,
        zero_point_per_block=simulator.qscheme == QuantizationScheme.ASYMMETRIC,
        mask=mask,
    )


register_encoder(FakeQuantizeImplBase, _encode_quantized)
