"""Dense bit packing: codes of 1 to 8 bits as one little-endian bit stream, without padding between codes."""

from __future__ import annotations

import math

import torch

__all__ = ["pack", "packed_size", "unpack"]

_CODE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes of ``bits`` bits take.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or ``count`` is negative.
    """
    _check_bits(bits)
    if count < 0:
        raise ValueError(f"The number of codes must not be negative, got {count!r}.")
    return (count * bits + 7) // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into bytes.

    Code ``i`` takes the stream's bits ``i * bits`` to ``i * bits + bits - 1``, lowest bit first, and bit ``k`` of the
    stream is bit ``k % 8`` of byte ``k // 8``. Two 4-bit codes share a byte (the first in the low half), eight 3-bit
    codes take three bytes. The last byte is filled with zeros.

    Args:
        codes: integer tensor of any shape, read in row-major order; negative codes in two's complement.
        bits: bits of one code, 1 to 8. Higher bits of a code are ignored beyond its sign.

    Returns:
        1-D ``uint8`` tensor of ``packed_size(codes.numel(), bits)`` bytes.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or the dtype is not ``uint8`` or ``int8`` to ``int64``, or a code does not
            fit.
    """
    _check_bits(bits)
    if codes.dtype not in _CODE_DTYPES:
        raise ValueError(f"Codes to pack must be integers: uint8, or int8 to int64, got {codes.dtype}.")
    flat = codes.detach().reshape(-1)
    _check_fits(flat, bits)
    flat = flat.view(torch.uint8) if flat.dtype == torch.int8 else flat.to(torch.uint8)
    if bits == 8:
        return flat.clone()
    group, width = _group(bits)
    full = -(-flat.numel() // group)
    if full * group != flat.numel():
        flat = torch.nn.functional.pad(flat, (0, full * group - flat.numel()))
    table = (flat & ((1 << bits) - 1)).view(full, group)
    out = torch.zeros((full, width), dtype=torch.uint8, device=flat.device)
    for code in range(group):
        byte, shift = divmod(code * bits, 8)
        out[:, byte] |= table[:, code] << shift
        if shift + bits > 8:
            out[:, byte + 1] |= table[:, code] >> (8 - shift)
    return out.view(-1)[: packed_size(codes.numel(), bits)]


def unpack(packed: torch.Tensor, bits: int, count: int, signed: bool) -> torch.Tensor:
    """Unpack what ``pack`` made.

    Args:
        packed: 1-D ``uint8`` tensor.
        bits: bits of one code, 1 to 8.
        count: number of codes.
        signed: whether the highest bit of a code is its sign.

    Returns:
        1-D tensor of ``count`` codes: ``int8`` when signed, else ``uint8``.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or ``packed`` does not hold exactly the bytes of ``count`` codes.
    """
    need = packed_size(count, bits)
    if packed.dtype != torch.uint8 or packed.ndim != 1 or packed.numel() != need:
        raise ValueError(
            f"{count} codes of {bits} bits take {need} bytes in a 1-D uint8 tensor, "
            f"got shape {tuple(packed.shape)} of {packed.dtype}."
        )
    if bits == 8:
        return packed.clone().view(torch.int8) if signed else packed.clone()
    group, width = _group(bits)
    full = -(-count // group)
    table = torch.nn.functional.pad(packed, (0, full * width - need)).view(full, width)
    out = torch.empty((full, group), dtype=torch.uint8, device=packed.device)
    # A code is moved to the top of its byte, so that the shift back down also extends the sign.
    top = 8 - bits
    for code in range(group):
        byte, shift = divmod(code * bits, 8)
        value = table[:, byte] << (top - shift) if shift <= top else table[:, byte] >> (shift - top)
        if shift + bits > 8:
            value = value | (table[:, byte + 1] << (8 - (shift - top)))
        out[:, code] = value
    mask = 0xFF & ~((1 << top) - 1)
    flat = (out & mask).view(-1)[:count]
    return flat.view(torch.int8) >> top if signed else flat >> top


def _group(bits: int) -> tuple[int, int]:
    """Smallest number of codes that fill whole bytes, and that number of bytes."""
    group = 8 // math.gcd(8, bits)
    return group, group * bits // 8


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"A code has 1 to 8 bits, got {bits!r}.")


def _check_fits(flat: torch.Tensor, bits: int) -> None:
    if flat.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(flat))
    limit_low, limit_high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if low < 0 else (0, (1 << bits) - 1)
    if low < limit_low or high > limit_high:
        raise ValueError(f"Codes from {low} to {high} do not fit into {bits} bits.")
