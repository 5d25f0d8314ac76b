"""A histogram of float32 values in one pass: every power of two is cut into 1,024 bins of equal width.

That is fine enough for small palettes of what weights usually look like, and nothing has to be known before. How much
of the squared error may hide inside the bins is told; where that is too much, ``_bins.py`` cuts finer where needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import compiled
from bitwright.palettization.clustering._bins import cell_start_and_step

__all__ = ["MOST_AT_ONCE", "N_BINS", "atoms_of_octaves", "fill_octaves"]

_Floats = npt.NDArray[np.float64]
_Bins = npt.NDArray[np.uint64]

_DEPTH = 3  # a cell of _bins is cut into 2^3
_SHIFT = np.uint32(16 - _DEPTH)
_LOW = np.uint32((1 << (16 - _DEPTH)) - 1)
_RUN = 32  # bins looked at together
N_BINS = 65536 << _DEPTH
MOST_AT_ONCE = 1 << 23
"""Values between two readings of the bins, whose counts have 24 bits."""


@compiled
def fill_octaves(codes: npt.NDArray[np.uint32], bins: _Bins) -> None:
    """Add ``2^40 + lower bits`` of each float32 pattern to its bin; four places are read in turn as in ``_bins``."""
    quarter = codes.size // 4
    one = np.uint64(0x10000000000)
    for i in range(quarter):
        for stream in range(4):
            code = codes[i + stream * quarter]
            bins[code >> _SHIFT] += one + np.uint64(code & _LOW)
    for i in range(4 * quarter, codes.size):
        bins[codes[i] >> _SHIFT] += one + np.uint64(codes[i] & _LOW)


@compiled
def atoms_of_octaves(parts: _Bins) -> tuple[_Floats, _Floats, float]:
    """Mean and count of every bin that holds something, ascending, from ``[parts, N_BINS]``.

    Returns:
        means, counts, and an upper bound of the squared error between the values and the means of their bins: the
        variance of values in [a, b] with mean m is at most (m - a) (b - m) (Bhatia and Davis 2000). It is infinite
        where a value is not finite.
    """
    values = np.empty(N_BINS)
    counts = np.empty(N_BINS)
    size = 0
    inside = 0.0
    for place in range(0, N_BINS, _RUN):
        backwards = place < N_BINS // 2
        first = N_BINS - _RUN - place if backwards else place - N_BINS // 2
        seen = np.uint64(0)
        for part in range(parts.shape[0]):
            for i in range(_RUN):
                seen |= parts[part, first + i]
        if seen == 0:
            continue
        cell = first >> _DEPTH
        if (cell >> 7) & 255 == 255:
            return values[:0].copy(), counts[:0].copy(), np.inf
        for i in range(_RUN):
            at = first + (_RUN - 1 - i if backwards else i)
            count, total = 0.0, 0.0
            for part in range(parts.shape[0]):
                count += float(parts[part, at] >> np.uint64(40))
                total += float(parts[part, at] & np.uint64(0xFFFFFFFFFF))
            if count == 0.0:
                continue
            start, step = cell_start_and_step(at >> _DEPTH)
            mean = total / count
            if count > 1.0:
                inside += count * step * step * mean * (float(_LOW) - mean)
            value = start + step * (float((at & ((1 << _DEPTH) - 1)) << (16 - _DEPTH)) + mean)
            if size > 0 and value <= values[size - 1]:  # negative and positive zero
                counts[size - 1] += count
            else:
                values[size] = value
                counts[size] = count
                size += 1
    return values[:size].copy(), counts[:size].copy(), inside
