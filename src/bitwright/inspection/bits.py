"""Bits per weight: how small a model is once it is packed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ._sizes import stored_sizes

__all__ = ["BitsPerWeightResult", "bits_per_weight"]


@dataclass(frozen=True)
class BitsPerWeightResult:
    """Packed size of a model, in bits per element.

    Attributes:
        bpw: bits of all parameters and buffers over the number of their elements.
        per_module_map: the same by path of the module that owns them.
        total_bits: all bits; what a packed artifact holds, apart from padding to whole bytes, and the buffers that are
            not persistent, which it does not hold.
        total_weights: all elements.
    """

    bpw: float
    per_module_map: dict[str, float]
    total_bits: int
    total_weights: int

    def __repr__(self) -> str:
        return (
            f"BitsPerWeightResult(bpw={self.bpw:.4f}, total_bits={self.total_bits}, total_weights={self.total_weights})"
        )


def bits_per_weight(model: nn.Module) -> BitsPerWeightResult:
    """Return how many bits each weight of a model takes on average when it is packed.

    Codes, scales, zero points, look-up tables and masks of compressed weights are counted as the packed artifact stores
    them, but without the bits that fill up the last byte of a tensor. Every other parameter, and every buffer whether
    persistent or not, counts at the size of its dtype. What several modules share counts once. Parameters of activation
    quantizers do not count.

    Args:
        model: a float model, one that a compressor prepared (eager or graph mode), one loaded from an artifact, or a
            finalized one.

    Raises:
        TypeError: ``model`` is no module.
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes.

    Example:
        >>> import torch
        >>> bits_per_weight(torch.nn.Linear(8, 8)).bpw
        32.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bits_per_weight needs a torch.nn.Module, got {type(model).__name__}.")
    bits: dict[str, int] = {}
    elements: dict[str, int] = {}
    for size in stored_sizes(model, carried=True):
        bits[size.module] = bits.get(size.module, 0) + size.bits
        elements[size.module] = elements.get(size.module, 0) + size.elements
    total_bits, total = sum(bits.values()), sum(elements.values())
    per_module = {path: bits[path] / elements[path] for path in bits if elements[path]}
    return BitsPerWeightResult(total_bits / total if total else 0.0, per_module, total_bits, total)
