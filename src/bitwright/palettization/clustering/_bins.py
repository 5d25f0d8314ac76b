"""A histogram that resolves any float32 distribution, at one integer addition per value.

The upper 16 bits of a float32 (sign, exponent, 7 mantissa bits) name one of 65,536 cells, narrow where values
are small. A first pass counts the cells; each occupied cell is then cut into a power of two of bins, as many as
a good quantizer would want there, down to one bin per float. A second pass adds ``2^40 + lower 16 bits`` to the
bin of each value, so one 64-bit integer holds both the count and the exact sum. Integer sums do not depend on
their order. 16-bit dtypes need only the first pass: every cell is one value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled, inlined
from bitwright.palettization.clustering._cuts import cube_roots, spread_unit

_Floats = npt.NDArray[np.float64]
_Codes = npt.NDArray[np.uint32]
_Bins = npt.NDArray[np.uint64]

N_CELLS = 65536
_HASH_SIZE = 1024
_RUN = 32  # cells looked at together
_EMPTY = np.int64(-1)
_NEGATIVE_ZERO = np.int64(0x80000000)
_STEPS = 2.0 ** (np.arange(256) - 150)  # one unit in the last place of a float32, by exponent


@compiled
def count_cells(codes: npt.NDArray[np.unsignedinteger], shift: int, counts: npt.NDArray[np.uint32]) -> None:
    """Add to ``counts[code >> shift]`` for every code.

    Here and below, four places are read in turn: the memory system follows several streams better than one.
    """
    quarter = codes.size // 4
    for i in range(quarter):
        counts[codes[i] >> shift] += np.uint32(1)
        counts[codes[i + quarter] >> shift] += np.uint32(1)
        counts[codes[i + 2 * quarter] >> shift] += np.uint32(1)
        counts[codes[i + 3 * quarter] >> shift] += np.uint32(1)
    for i in range(4 * quarter, codes.size):
        counts[codes[i] >> shift] += np.uint32(1)


@compiled
def weigh_cells(
    codes: npt.NDArray[np.unsignedinteger], weights: npt.NDArray[np.floating], shift: int, masses: _Floats
) -> None:
    """Add the weights to ``masses[code >> shift]``."""
    for i in range(codes.size):
        masses[codes[i] >> shift] += weights[i]


@compiled
def few_values(codes: _Codes, weights: npt.NDArray[np.floating], most: int) -> npt.NDArray[np.uint32]:
    """The different float32 bit patterns among values of positive weight, or ``most + 1`` of them.

    Stops as soon as there are more than ``most`` <= 256. ``weights`` is empty where there are none. Negative
    zero counts as zero.
    """
    table = np.full(_HASH_SIZE, _EMPTY)
    found = np.empty(most + 1, np.uint32)
    size = 0
    for i in range(codes.size):
        if weights.size > 0 and not weights[i] > 0.0:
            continue
        code = np.int64(codes[i])
        if code == _NEGATIVE_ZERO:
            code = np.int64(0)
        slot = ((code * 0x9E3779B1) >> 16) & (_HASH_SIZE - 1)
        while table[slot] != _EMPTY and table[slot] != code:
            slot = (slot + 1) & (_HASH_SIZE - 1)
        if table[slot] == _EMPTY:
            table[slot] = code
            found[size] = code
            size += 1
            if size > most:
                break
    return found[:size]


@compiled
def occupied_cells(
    counts: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.uint32], _Floats]:
    """Cells that hold something and their counts, by ascending value: the negative ones run backwards.

    ``counts`` is ``[parts, 65536]``; the parts are added.
    """
    cells = np.empty(N_CELLS, np.uint32)
    totals = np.empty(N_CELLS)
    size = 0
    for place in range(0, N_CELLS, _RUN):
        backwards = place < N_CELLS // 2
        first = N_CELLS - _RUN - place if backwards else place - N_CELLS // 2
        seen = np.uint32(0)
        for part in range(counts.shape[0]):
            for i in range(_RUN):
                seen |= counts[part, first + i]
        if seen == 0:
            continue
        for i in range(_RUN):
            cell = first + (_RUN - 1 - i if backwards else i)
            total = np.int64(0)
            for part in range(counts.shape[0]):
                total += counts[part, cell]
            if total > 0:
                cells[size] = cell
                totals[size] = total
                size += 1
    return cells[:size].copy(), totals[:size].copy()


@called
def cell_start_and_step(cell: int) -> tuple[float, float]:
    """Value of the cell's pattern with zero lower bits, and what one unit in the last place adds to it."""
    exponent = (cell >> 7) & 255
    mantissa = float((cell & 127) << 16)
    if exponent > 0:
        mantissa += 8388608.0
    step: float = _STEPS[max(exponent, 1)]
    if cell >= N_CELLS // 2:
        step = -step
    return mantissa * step, step


@compiled
def plan_bins(
    cells: npt.NDArray[np.uint32], masses: _Floats, counts: _Floats, target: int
) -> tuple[npt.NDArray[np.uint32], int]:
    """Cut the cells into about ``target`` to ``2 · target`` bins (more when there are that many cells).

    Args:
        cells: occupied cells, ascending.
        masses: what each of them weighs.
        counts: how many values each of them holds; it needs no more bins than that.
        target: number of bins wanted.

    Returns:
        table uint32 ``[65536]`` of ``first_bin << 5 | shift``: a pattern lies in bin
        ``first_bin + ((pattern & 0xFFFF) >> shift)``; and the number of bins.
    """
    measure = np.empty(cells.size)
    for place in range(cells.size):
        _, step = cell_start_and_step(cells[place])
        width = step * 65536.0
        measure[place] = masses[place] * width * width
    cube_roots(measure)
    unit = spread_unit(measure, counts, target)
    for place in range(cells.size):
        measure[place] = max(min(measure[place] / unit, counts[place]), 1.0)
    bits = measure.view(np.int64)
    table = np.zeros(N_CELLS, np.uint32)
    first = 0
    for place in range(cells.size):
        depth = min(((bits[place] - 1) >> 52) - 1022, 16)  # the logarithm rounded up
        table[cells[place]] = np.uint32((first << 5) | (16 - depth))
        first += 1 << depth
    return table, first


@inlined
def _drop(code: np.uint32, table: _Codes, bins: _Bins) -> None:
    entry = table[code >> np.uint32(16)]
    low = code & np.uint32(0xFFFF)
    place = (entry >> np.uint32(5)) + (low >> (entry & np.uint32(31)))
    bins[place] += np.uint64(0x10000000000) + np.uint64(low)


@compiled
def fill_bins(codes: _Codes, table: _Codes, bins: _Bins) -> None:
    """Add ``2^40 + (code & 0xFFFF)`` to each code's bin; at most 2^24 - 1 codes between two readings."""
    quarter = codes.size // 4
    for i in range(quarter):
        _drop(codes[i], table, bins)
        _drop(codes[i + quarter], table, bins)
        _drop(codes[i + 2 * quarter], table, bins)
        _drop(codes[i + 3 * quarter], table, bins)
    for i in range(4 * quarter, codes.size):
        _drop(codes[i], table, bins)


@compiled
def read_bins(parts: _Bins) -> tuple[_Floats, _Floats]:
    """Counts and sums of lower bits (whole numbers, exact) that :func:`fill_bins` left in ``[parts, bins]``."""
    counts = np.zeros(parts.shape[1])
    sums = np.zeros(parts.shape[1])
    for part in range(parts.shape[0]):
        for i in range(parts.shape[1]):
            counts[i] += float(parts[part, i] >> np.uint64(40))
            sums[i] += float(parts[part, i] & np.uint64(0xFFFFFFFFFF))
    return counts, sums


@compiled
def weigh_bins(codes: _Codes, weights: npt.NDArray[np.floating], table: _Codes, masses: _Floats, sums: _Floats) -> None:
    """Like :func:`fill_bins` with weights: their sums, and the sums of weight · lower bits."""
    for i in range(codes.size):
        code = codes[i]
        entry = table[code >> np.uint32(16)]
        low = code & np.uint32(0xFFFF)
        place = (entry >> np.uint32(5)) + (low >> (entry & np.uint32(31)))
        masses[place] += weights[i]
        sums[place] += np.float64(weights[i]) * np.float64(low)


@compiled
def atoms_of_bins(
    cells: npt.NDArray[np.uint32], table: _Codes, masses: _Floats, sums: _Floats
) -> tuple[_Floats, _Floats, float]:
    """Mean and mass of every bin that holds something, ascending, and a bound of the squared error inside of them: the
    variance of values in [a, b] with mean m is at most (m - a) (b - m) (Bhatia and Davis 2000)."""
    values = np.empty(masses.size)
    weights = np.empty(masses.size)
    size = 0
    inside = 0.0
    for cell in cells:
        start, step = cell_start_and_step(cell)
        first = table[cell] >> np.uint32(5)
        shift = table[cell] & np.uint32(31)
        length = 1 << (16 - shift)
        for turn in range(length):
            place = first + (turn if step > 0.0 else length - 1 - turn)
            if not masses[place] > 0.0:
                continue
            mean = sums[place] / masses[place]
            low = float((place - first) << shift)
            inside += masses[place] * step * step * (mean - low) * (low + float((1 << shift) - 1) - mean)
            value = start + step * mean
            if size > 0 and value <= values[size - 1]:  # negative and positive zero
                weights[size - 1] += masses[place]
            else:
                values[size] = value
                weights[size] = masses[place]
                size += 1
    return values[:size].copy(), weights[:size].copy(), inside


@compiled
def first_labels(
    cells: npt.NDArray[np.uint32], table: _Codes, n_bins: int, thresholds: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint8], int]:
    """For every bin the label of its lowest value, and the most thresholds that lie inside one bin.

    ``thresholds`` ascends and ends with infinity; label l holds values up to and including ``thresholds[l]``.
    """
    labels = np.zeros(n_bins, np.uint8)
    label = 0
    most = 0
    for cell in cells:
        start, step = cell_start_and_step(cell)
        first = table[cell] >> np.uint32(5)
        shift = table[cell] & np.uint32(31)
        length = 1 << (16 - shift)
        for turn in range(length):
            at = turn if step > 0.0 else length - 1 - turn
            near = at << shift
            far = near + (1 << shift) - 1
            lowest = start + step * (near if step > 0.0 else far)
            highest = start + step * (far if step > 0.0 else near)
            while lowest > thresholds[label]:
                label += 1
            labels[first + at] = label
            inside = 0
            while highest > thresholds[label + inside]:
                inside += 1
            most = max(most, inside)
    return labels, most


WHOLE_CELLS: npt.NDArray[np.uint32] = (np.arange(N_CELLS, dtype=np.uint32) << np.uint32(5)) | np.uint32(16)
"""The table of :func:`plan_bins` with one bin for every cell."""


@compiled
def finite_cells() -> npt.NDArray[np.uint32]:
    """All cells of finite values, ascending."""
    counts = np.zeros((1, N_CELLS), np.uint32)
    for cell in range(N_CELLS):
        counts[0, cell] = (cell >> 7) & 255 != 255
    return occupied_cells(counts)[0]


@compiled
def plan_bins_for(thresholds: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint32], int]:
    """Cut the cells so finely that a bin seldom holds two of the ascending thresholds; see :func:`plan_bins`."""
    counts = np.zeros(N_CELLS, np.uint32)
    codes = thresholds.view(np.uint32)
    for i in range(codes.size):
        counts[codes[i] >> np.uint32(16)] += np.uint32(1)
    table = np.empty(N_CELLS, np.uint32)
    first = 0
    for cell in range(N_CELLS):
        depth = 0
        while depth < 16 and counts[cell] > 1 and (1 << depth) < 8 * counts[cell]:
            depth += 1
        table[cell] = np.uint32((first << 5) | (16 - depth))
        first += 1 << depth
    return table, first
