"""Matrices in packed integer codes, decoded or multiplied in one pass over their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import reference
from .dispatch import form_of
from .layout import LANES, SMALL

__all__ = ["TILE_ROWS", "PackedMatrix"]

TILE_ROWS = 384
"""Rows for each thread that ``PackedMatrix.linear`` decodes at a time: few enough to stay in a cache, and as many as a
matrix product wants, which arranges its other factor anew for each part."""

_ENOUGH_FOR_A_GROUP = 4
"""Vectors for which a group of eight, some of them zeros, takes less time than one vector after the other."""

_ENOUGH_FOR_A_GROUP_OF_COLUMNS = 3
"""The same where the weight has a row for each element of a vector."""

_BITS = (2, 4, 8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, slots=True)
class PackedMatrix:
    """A weight as rows of packed codes: dimension 0 by all others.

    Attributes:
        codes: the bytes; the first code of a byte lies in its lowest bits.
        bits: bits of a code: 2, 4 or 8.
        flip: the sign bit where codes are in two's complement, else 0.
        common: what is subtracted from every code, ``flip`` included.
        scale: float32, shape ``(rows / rows_in_block, length / block)``.
        points: zero points of the blocks as int32, None for ``common`` alone.
        origins: float32 minvals of the blocks, None for none.
        shape: shape of the weight.
        rows_in_block: rows that share a scale.
        block: neighbours in a row that share a scale.
    """

    codes: torch.Tensor
    bits: int
    flip: int
    common: int
    scale: torch.Tensor
    points: torch.Tensor | None
    origins: torch.Tensor | None
    shape: tuple[int, ...]
    rows_in_block: int
    block: int

    @staticmethod
    def blocks_of(shape: tuple[int, ...], block_size: tuple[int, ...], bits: int) -> tuple[int, int] | None:
        """Return rows and neighbours that share a scale, or None where the loops do not fit the blocks.

        Args:
            shape: shape of the weight.
            block_size: shape of one block.
            bits: bits of a code.
        """
        if bits not in _BITS or len(shape) < 2 or not math.prod(shape) or block_size[2:] != shape[2:]:
            return None
        block = math.prod(block_size[1:])
        whole = math.prod(shape[1:]) if block == 1 else block
        return (block_size[0], block) if whole % (LANES * 8 // bits) == 0 else None

    def runs_to(self, dtype: torch.dtype) -> bool:
        """Return whether ``decode`` can be used here and now: tensors on the CPU, a usual dtype, nothing traces."""
        return dtype in _FLOATS and self.scale.is_cpu and form_of(self.scale) is not reference

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as float32, bfloat16 or float16; the numbers are those of ``kernels.dequantize``."""
        out = self.scale.new_empty(self.shape, dtype=dtype)
        self._decode_into(out)
        return out

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` with ``TILE_ROWS`` rows of the weight decoded at a time.

        Args:
            x: shape (vectors, length), of a dtype that ``decode`` knows, without gradient like the bias.
            bias: shape (rows,), of the dtype of ``x``, or None.

        Returns:
            Shape (vectors, rows), the dtype of ``x``.
        """
        from .cpu.threads import thread_count

        rows, length = self.shape
        out = x.new_empty(x.shape[0], rows)
        tiles = list(self._tiles(TILE_ROWS * thread_count()))
        buffer = x.new_empty(max(end - begin for begin, end in tiles), length)
        for begin, end in tiles:
            weight, target = buffer[: end - begin], out[:, begin:end]
            self._decode_into(weight, begin)
            if bias is None:
                torch.mm(x, weight.t(), out=target)
            else:
                torch.addmm(bias[begin:end], x, weight.t(), out=target)
        return out

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ weight + bias`` with ``TILE_ROWS`` rows of the weight decoded at a time.

        A part of the rows gives a part of every sum, so sums are added in another order than torch's.

        Args:
            x: shape (vectors, rows), of a dtype that ``decode`` knows, without gradient like the bias.
            bias: shape (length,), of the dtype of ``x``, or None.

        Returns:
            Shape (vectors, length), the dtype of ``x``.
        """
        from .cpu.threads import thread_count

        length = self.shape[1]
        out = x.new_zeros(x.shape[0], length) if bias is None else bias.repeat(x.shape[0], 1)
        tiles = list(self._tiles(TILE_ROWS * thread_count()))
        buffer = x.new_empty(max(end - begin for begin, end in tiles), length)
        for begin, end in tiles:
            weight = buffer[: end - begin]
            self._decode_into(weight, begin)
            out.addmm_(x[:, begin:end], weight)
        return out

    def _tiles(self, most: int) -> Iterator[tuple[int, int]]:
        """First row and end of parts of the matrix, which hold whole blocks or lie in one block."""
        rows, size = self.shape[0], self.rows_in_block
        step, region = (most // size * size, rows) if size <= most else (most, size)
        for start in range(0, rows, region):
            stop = min(start + region, rows)
            for begin in range(start, stop, step):
                yield begin, min(begin + step, stop)

    def _decode_into(self, out: torch.Tensor, begin: int = 0) -> None:
        from .cpu.native import DTYPES
        from .cpu.packed import decode_packed_part

        self._run(decode_packed_part, out, DTYPES[out.dtype], begin=begin, rows=out.shape[0])

    def multiplies(self) -> bool:
        """Return whether ``multiply`` knows the blocks: those that neighbours share."""
        return self.block > 1

    def multiplies_many(self) -> bool:
        """Return whether ``multiply`` is faster than a product with the decoded weight for more than a few vectors.

        Codes of 2 and 4 bits, and a processor with registers for sixteen sums of sixteen numbers.
        """
        from .cpu.compiling import has_feature

        return self.multiplies() and self.bits < 8 and has_feature("avx512f")

    def multiplies_columns(self) -> bool:
        """Return whether ``multiply_columns`` knows the codes and is faster than ``times`` on this processor."""
        from .cpu.compiling import has_feature

        return self.bits == 4 and has_feature("avx512f")

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``; sums are added in another order than torch's.

        Args:
            x: float32, shape (vectors, length).

        Returns:
            float32, shape (vectors, rows).
        """
        from .cpu.packed import multiply_packed_part

        vectors, rows = x.shape[0], self.shape[0]
        if vectors >= _ENOUGH_FOR_A_GROUP and self.multiplies_many():
            return self._multiply_groups(x)
        planes = x.reshape(vectors, -1, LANES, 8 // self.bits).transpose(2, 3).contiguous()
        out = x.new_empty(vectors, rows)
        self._run(multiply_packed_part, out, planes.data_ptr(), vectors, alive=planes)
        return out

    def _multiply_groups(self, x: torch.Tensor) -> torch.Tensor:
        """``multiply`` with groups of vectors, for which codes are decoded once; missing vectors are zeros."""
        from .cpu.packed_groups import GROUP, multiply_packed_groups_part

        groups = -(-x.shape[0] // GROUP)
        padded = torch.nn.functional.pad(x, (0, 0, 0, groups * GROUP - x.shape[0]))
        ordered = padded.reshape(groups, GROUP, -1, LANES, 8 // self.bits).permute(0, 2, 4, 1, 3).contiguous()
        out = x.new_empty(groups * GROUP, self.shape[0])
        self._run(multiply_packed_groups_part, out, ordered.data_ptr(), groups, alive=ordered)
        return out[: x.shape[0]]

    def multiply_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight``; sums are added in the order of the rows, whatever the number of threads.

        Args:
            x: float32, shape (vectors, rows).

        Returns:
            float32, shape (vectors, length).
        """
        from .cpu.packed_columns import GROUP, LINE, multiply_columns_groups_part, multiply_columns_part

        vectors, length = x.shape[0], self.shape[1]
        if vectors < _ENOUGH_FOR_A_GROUP_OF_COLUMNS and length >= LINE:
            out, x = x.new_empty(vectors, length), x.contiguous()
            self._run(multiply_columns_part, out, x.data_ptr(), vectors, alive=x)
            return out
        groups = -(-vectors // GROUP)
        missing = groups * GROUP - vectors
        padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        ordered = padded.reshape(groups, GROUP, -1).transpose(1, 2).contiguous()
        out = x.new_empty(groups * GROUP, length)
        self._run(multiply_columns_groups_part, out, ordered.data_ptr(), groups, alive=ordered)
        return out[:vectors]

    def rows(self, numbers: torch.Tensor) -> PackedMatrix:
        """Return the matrix of some rows.

        Args:
            numbers: their numbers, int64, one-dimensional, each at least 0 and less than the number of rows.
        """
        blocks = numbers if self.rows_in_block == 1 else numbers // self.rows_in_block
        codes = self.codes.view(self.shape[0], -1).index_select(0, numbers)
        scale, points, origins = (
            None if part is None else part.index_select(0, blocks) for part in (self.scale, self.points, self.origins)
        )
        assert scale is not None
        shape = (numbers.numel(), *self.shape[1:])
        return replace(self, codes=codes, scale=scale, points=points, origins=origins, shape=shape, rows_in_block=1)

    def _run(
        self, kernel: Any, out: torch.Tensor, *more: int, begin: int = 0, rows: int | None = None, alive: Any = None
    ) -> None:
        """Call a kernel with all rows, or with some: whole blocks of rows, or a part of one block."""
        from .cpu.threads import run_parts, thread_count

        rows, length = self.shape[0] if rows is None else rows, math.prod(self.shape[1:])
        skipped = 4 * (begin // self.rows_in_block) * (length // self.block)
        arguments = (
            self.codes.data_ptr() + begin * (length // 8 * self.bits), self.bits, self.flip, self.common,
            self.scale.data_ptr() + skipped,
            0 if self.points is None else self.points.data_ptr() + skipped,
            0 if self.origins is None else self.origins.data_ptr() + skipped,
            rows, length, self.rows_in_block, self.block, out.data_ptr(), *more,
        )  # fmt: skip
        threads = thread_count() if rows * length >= SMALL else 1
        run_parts(kernel, arguments, threads, (self, out, alive))
