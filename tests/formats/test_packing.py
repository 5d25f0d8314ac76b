"""Bit packing against a stream made with Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.formats import pack, packed_size, unpack

from .slow_formats import bits_of


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_at_every_place(bits: int, signed: bool) -> None:
    """All codes, at each place of a group, pack into the slow stream and come back."""
    low = -(1 << bits) // 2 if signed else 0
    every = list(range(low, low + (1 << bits)))
    for shift in range(8):
        codes = [every[0]] * shift + every
        stored = torch.tensor(codes, dtype=torch.int8 if signed else torch.uint8)
        packed = pack(stored, bits)
        assert packed.tolist() == bits_of(codes, bits)
        assert torch.equal(unpack(packed, bits, len(codes), signed), stored)


@settings(deadline=None)
@given(st.integers(1, 8), st.booleans(), st.data())
def test_any_length(bits: int, signed: bool, data: st.DataObject) -> None:
    """Any number of codes, none included, in any integer dtype and shape."""
    low = -(1 << bits) // 2 if signed else 0
    codes = data.draw(st.lists(st.integers(low, low + (1 << bits) - 1), max_size=70))
    dtype = data.draw(st.sampled_from([torch.int16, torch.int32, torch.int64]))
    tensor = torch.tensor(codes, dtype=dtype)
    packed = pack(tensor.view(1, -1) if codes else tensor, bits)
    assert packed.numel() == packed_size(len(codes), bits)
    assert packed.tolist() == bits_of(codes, bits)
    assert unpack(packed, bits, len(codes), signed).tolist() == codes


def test_two_int4_share_a_byte_low_half_first() -> None:
    """The order inside a byte is fixed."""
    assert pack(torch.tensor([1, 2, -1], dtype=torch.int8), 4).tolist() == [0x21, 0x0F]


def test_non_contiguous_codes_are_read_in_row_major_order() -> None:
    """A transposed tensor packs as its contiguous copy."""
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4).T
    assert torch.equal(pack(codes, 4), pack(codes.contiguous(), 4))


@pytest.mark.parametrize(("codes", "bits"), [([8], 3), ([-5], 3), ([-1, 4], 3), ([2], 1), ([256], 8)])
def test_code_that_does_not_fit(codes: list[int], bits: int) -> None:
    """A code that needs more bits is an error: mixed signs count as signed."""
    with pytest.raises(ValueError, match="do not fit into"):
        pack(torch.tensor(codes), bits)


def test_wrong_arguments() -> None:
    """Bits, dtypes and sizes are checked."""
    with pytest.raises(ValueError, match="1 to 8 bits, got 9"):
        pack(torch.tensor([1]), 9)
    with pytest.raises(ValueError, match="must be integers"):
        pack(torch.tensor([1.0]), 4)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.uint4):
        with pytest.raises(ValueError, match=f"int8 to int64, got {dtype}"):
            pack(torch.zeros(16, dtype=torch.uint8).view(dtype), 4)
    with pytest.raises(ValueError, match="5 codes of 4 bits take 3 bytes"):
        unpack(torch.zeros(2, dtype=torch.uint8), 4, 5, True)
    with pytest.raises(ValueError, match="must not be negative"):
        packed_size(-1, 4)


def test_packing_does_not_share_memory() -> None:
    """The result is a copy, also at eight bits."""
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    packed = pack(codes, 8)
    packed.zero_()
    assert codes.tolist() == [1, 2]
