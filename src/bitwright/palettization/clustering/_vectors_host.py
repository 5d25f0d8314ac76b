"""Vector clustering on the CPU: subsamples, restarts, and Lloyd's algorithm over all vectors in pieces."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _chains, _lloyd
from bitwright.palettization.clustering._pieces import NO_WEIGHTS, Sweep, as_numpy, in_turn, slices_of
from bitwright.palettization.clustering._threads import run_all
from bitwright.palettization.clustering._vector_labels import label_groups, vector_errors
from bitwright.palettization.clustering.result import ClusterResult

_Floats = npt.NDArray[np.float64]
_Real = npt.NDArray[np.floating]

_PIECE = 1 << 15
_MANY = 1 << 18
_SAMPLE_PER_CLUSTER = 128
_LEAST_SAMPLE = 4096
_GROWTH = 8
_CHEAP = 1 << 16  # products of vectors and entries that chains may add up to whatever the number of restarts
_MOST_CHAINS = 16
_TRIAL = 3  # steps of Lloyd's algorithm that tell good seeds from bad ones
_BREATH = 4  # steps between two changes of the number of centroids
_STEPS = 60  # steps over all vectors, fewer when there are very many
_TOLERANCE = 1e-4
_REACH = 50  # squares of vectors 2^-110 of the largest are still normal numbers


def stream_of(seed: int, group: int, run: int) -> npt.NDArray[np.uint64]:
    """The random stream of one run in one group."""
    digest = hashlib.blake2b(f"{seed}/{group}/{run}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64).copy()


@dataclass(frozen=True)
class _Group:
    """Vectors of one group and how they are brought to the size of one.

    Attributes:
        points: ``[N, D]``.
        weights: ``[N]``, or empty.
        centre: float64 ``[D]``.
        scale: applied after subtracting the centre.
    """

    points: Tensor
    weights: _Real
    centre: _Floats
    scale: float

    def taken(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Some of the vectors, centred and scaled, float32."""
        points = self.points[torch.from_numpy(places)].double().numpy()
        return np.ascontiguousarray(((points - self.centre) * self.scale).astype(np.float32))


def strata(size: int, stream: npt.NDArray[np.uint64]) -> _Floats:
    """One random number from each of ``size`` equal parts of [0, 1)."""
    offsets = np.random.Generator(np.random.Philox(key=int(stream[0]))).random(size)
    return (np.arange(size) + offsets) / size


def _subsample(length: int, weights: _Real, size: int, stream: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """``size`` places, one from each of as many strata of equal weight; heavy ones may come several times."""
    at = strata(size, stream)
    if weights.size == 0:
        places = (at * length).astype(np.int64)
    else:
        along = np.cumsum(weights, dtype=np.float64)
        places = np.searchsorted(along, at * along[-1], side="right").astype(np.int64)
    return np.minimum(places, length - 1)


def _chain(
    group: _Group, n_clusters: int, size: int, seedings: int, state: npt.NDArray[np.uint64]
) -> tuple[_Real, float]:
    """The best of some seedings on a subsample, improved there; with its squared error, over all vectors if few."""
    length = group.points.shape[0]
    points = group.taken(_subsample(length, group.weights, size, state))
    best, error = _chains.best_chain(points, NO_WEIGHTS, n_clusters, seedings, _TRIAL, _breaths(n_clusters), 0, state)
    if length <= _MANY:
        masses, sums = np.zeros(n_clusters), np.zeros(best.shape)
        error, _, _ = _lloyd.gather_step(
            as_numpy(group.points), group.weights, group.centre, group.scale, best, masses, sums
        )
    return best, error


def _breaths(n_clusters: int) -> tuple[int, int]:
    """How many centroids breathing begins with, and the steps between two changes of their number."""
    return max(n_clusters // 8, min(n_clusters // 2, 8)), _BREATH


def _whole_chains(
    group: _Group, n_clusters: int, seedings: int, states: npt.NDArray[np.uint64], sweep: Sweep
) -> list[tuple[_Real, float]]:
    """Centroids from chains over all vectors, and their squared errors; one call in a single thread."""
    length = group.points.shape[0]
    points = group.taken(np.arange(length))
    steps = _STEPS if length * n_clusters <= _CHEAP else 0
    batches = [states] if sweep is in_turn else np.split(states, states.size)
    return sweep(
        lambda some: _chains.best_chain(
            points, group.weights, n_clusters, seedings, _TRIAL, _breaths(n_clusters), steps, some
        ),
        batches,
    )


def _started(group: _Group, n_clusters: int, seed: int, number: int, restarts: int, sweep: Sweep) -> tuple[_Real, int]:
    """Centroids to go on from, and the size of the subsamples they come from.

    Small palettes have few, distinct optima, which whole chains tell apart; of a large one all optima are alike. Few
    vectors have optima that are far apart, and chains over them cost next to nothing.
    """
    length = group.points.shape[0]
    size = min(max(_SAMPLE_PER_CLUSTER * n_clusters, _LEAST_SAMPLE), length)
    chains = min(max(1, restarts * 32 // n_clusters), restarts)
    seedings = -(-restarts // chains)
    if size == length:
        chains = max(chains, min(_MOST_CHAINS, _CHEAP // (size * n_clusters)))
    streams = [stream_of(seed, number, turn) for turn in range(chains)]
    if size == length:
        found = _whole_chains(group, n_clusters, seedings, np.concatenate(streams), sweep)
    else:
        found = sweep(lambda stream: _chain(group, n_clusters, size, seedings, stream), streams)
    return min(found, key=lambda chain: chain[1])[0], size


def _descend(group: _Group, centroids: _Real, sweep: Sweep) -> _Floats:
    """Lloyd's algorithm over all vectors of ``group``; returns centred and scaled means, float64 ``[K, D]``."""
    length = group.points.shape[0]
    pieces = slices_of(length, _PIECE)
    before = np.inf

    def step(piece: slice) -> tuple[_Floats, _Floats, float, float, int]:
        masses, sums = np.zeros(centroids.shape[0]), np.zeros(centroids.shape)
        points, weights = as_numpy(group.points[piece]), group.weights[piece]
        found = _lloyd.gather_step(points, weights, group.centre, group.scale, centroids, masses, sums)
        return masses, sums, *found

    means = centroids.astype(np.float64)
    for _ in range(max(4, _STEPS * _MANY // max(length, _MANY))):
        parts = sweep(step, pieces)
        masses = np.sum([part[0] for part in parts], axis=0)[:, None]
        sums = np.sum([part[1] for part in parts], axis=0)
        error = float(np.sum([part[2] for part in parts]))
        means = np.where(masses > 0, sums / np.where(masses > 0, masses, 1.0), means)
        empty = np.flatnonzero(masses == 0)
        worst = int(np.argmax([part[3] for part in parts]))
        if empty.size > 0 and parts[worst][3] > 0:
            means[empty[0]] = group.taken(np.array([pieces[worst].start + parts[worst][4]]))[0]
        elif before - error <= _TOLERANCE * error:
            break
        before = error
        centroids = means.astype(np.float32)
    return means


def _improved(group: _Group, centroids: _Real, size: int, state: npt.NDArray[np.uint64], sweep: Sweep) -> _Floats:
    """Go on from a subsample of ``size`` over larger ones to all vectors; returns centroids as in the result."""
    length = group.points.shape[0]
    while size * _GROWTH < length:
        size *= _GROWTH
        places = torch.from_numpy(_subsample(length, group.weights, size, state))
        state += np.uint64(1)
        sample = _Group(group.points[places], NO_WEIGHTS, group.centre, group.scale)
        centroids = _descend(sample, centroids, sweep).astype(np.float32)
    return _descend(group, centroids, sweep) / group.scale + group.centre


def _group_of(points: Tensor, weights: _Real) -> _Group:
    """Centre on the mean of some vectors and scale to where squares of float32 neither overflow nor vanish."""
    centre = points[:: max(1, points.shape[0] // _PIECE)].double().mean(0).numpy()
    low, high = torch.aminmax(points, dim=0)
    reach = float(np.abs(np.stack([low.double().numpy(), high.double().numpy()]) - centre).max())
    scale = float(np.ldexp(1.0, _REACH - int(np.frexp(max(reach, 1e-290))[1]))) if reach > 0 else 1.0
    return _Group(points, weights, centre, scale)


def tidy(centroids: _Floats, n_clusters: int) -> _Floats:
    """Different centroids in ascending order, the last one repeated up to ``n_clusters``."""
    different = np.unique(centroids, axis=0)
    padding = np.repeat(different[-1:], n_clusters - different.shape[0], axis=0)
    return np.concatenate([different, padding])


def palette_of(
    values: Tensor, weights: _Real, n_clusters: int, seed: int, number: int, restarts: int, sweep: Sweep
) -> _Floats:
    """The palette ``[K, D]`` of one group ``[N, D]``."""
    points = as_numpy(values)
    few = _lloyd.few_vectors(points, weights, n_clusters)
    if few.size <= n_clusters:
        return tidy(points[few].astype(np.float64), n_clusters)
    group = _group_of(values, weights)
    centroids, size = _started(group, n_clusters, seed, number, restarts, sweep)
    state = stream_of(seed, number, restarts + 1)
    return tidy(_improved(group, centroids, size, state, sweep), n_clusters)


def cluster_on_host(values: Tensor, weights: Tensor | None, n_clusters: int, seed: int, restarts: int) -> ClusterResult:
    """:func:`~.vectors.cluster_vectors` for checked CPU tensors."""
    groups, length, _ = values.shape
    array = None if weights is None else weights.numpy()
    one_by_one = groups == 1 or length >= 2 * _MANY

    def palette(number: int) -> _Floats:
        some = NO_WEIGHTS if array is None else array[number]
        sweep = run_all if one_by_one else in_turn
        return palette_of(values[number], some, n_clusters, seed, number, restarts, sweep)

    found = [palette(number) for number in range(groups)] if one_by_one else run_all(palette, range(groups))
    palettes = np.stack(found)
    labels = label_groups(values, palettes)
    errors = vector_errors(values, array, palettes, labels)
    return ClusterResult(torch.from_numpy(palettes), torch.from_numpy(labels), torch.from_numpy(errors))
