"""The simulator of palettization by k-means: palettes, indices, and the weight that they decode to."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from bitwright.kernels.dispatch import is_plain_torch
from bitwright.palettization.config.vector_kmeans import VectorKMeansConfig
from bitwright.palettization.spec import DefaultTrainingSpec, PalettizationGranularity, TrainingStrategySpec
from bitwright.palettization.spec.errors import _IncompatibleClusterDimError, _IncompatibleGranularityError
from bitwright.palettization.spec.fake_palettize import _FakePalettizeImplBase
from bitwright.quantization.spec import QuantizationSpec

from ._assignment import Assignment
from ._lut_quantizer import is_observed, quantize_frozen
from ._palette_state import PaletteState
from ._palettes import find_palettes, fit_to_quantized, means_of_members, nearest_entries
from .kmeans_support_mixins import _PalettizationSupportMixin
from .supported_ops_registry import _KMeansPalettizerSupportedOpsRegistry

__all__: list[str] = []

_logger = logging.getLogger(__name__)

_FEW_BITS = 4
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of a palette's range that are tried where a code has few bits."""


class _Snapshot(NamedTuple):
    """State of a simulator at one moment."""

    buffers: dict[str, torch.Tensor]
    sensitivities: torch.Tensor | None
    initialized: bool
    stale: bool
    unchecked: bool
    assignment: Assignment | None
    followed: torch.Tensor | None


class _KMeansFakePalettize(PaletteState):
    """Palettizes a weight by k-means.

    The palettes are found at the first call and stay, with the indices, until ``invalidate``, new ``sensitivities`` or
    a training strategy change them. In eval mode the dense result is kept until indices, palettes or scale change.
    Where a training strategy moves weights, each vector is assigned anew after ``load_state_dict``, and once the weight
    or its palettes are others than those of the assignment, as in an average of the weights.

    Args:
        n_bits: bits of an index.
        lut_qspec: how palettes are quantized; None for not.
        granularity: which part of a weight has a palette of its own.
        cluster_dim: entries of a vector, D; vectors run along dimension 0.
        enable_per_channel_scale: divide each output channel by its largest magnitude before clustering.
        sensitivities: importance of each entry, not negative, in the weight's shape.
        enable_fast_kmeans_mode: cluster scalars from a histogram.
        rounding_precision: without effect.
        op_to_optimize: the function that consumes the weight; gives the axis of output channels.
        training_strategy_spec: what stands for the weight in training.
        sparsity_detection_threshold: share of zeros from which on the zeros of the first weight stay zeros, as with
            ``preserve_zeros``, whatever training does to them; None for no such share.
        vector_kmeans_config: how palettes of vectors are sought, also as a dict; None for the defaults.
        output_axis: dimension of output channels, 0 or 1; None for that of ``op_to_optimize``.
        preserve_zeros: entries that come in as zero leave as zero, and have no part in clustering.
        seed: of vector clustering.
    """

    _assignment: Assignment | None = None
    _sparsity_mask: torch.Tensor | None

    def __init__(
        self,
        n_bits: int,
        lut_qspec: QuantizationSpec | None,
        granularity: PalettizationGranularity,
        cluster_dim: int,
        enable_per_channel_scale: bool,
        sensitivities: torch.Tensor | None = None,
        enable_fast_kmeans_mode: bool = True,
        rounding_precision: int = 4,
        op_to_optimize: Callable[..., Any] | None = None,
        training_strategy_spec: TrainingStrategySpec | None = None,
        sparsity_detection_threshold: float | None = None,
        vector_kmeans_config: VectorKMeansConfig | Mapping[str, Any] | None = None,
        *,
        output_axis: int | None = None,
        preserve_zeros: bool = False,
        seed: int = 0,
    ) -> None:
        support = _KMeansPalettizerSupportedOpsRegistry.get_registry_entry_for_func(op_to_optimize)
        super().__init__(
            n_bits, lut_qspec, granularity, cluster_dim, (support or _PalettizationSupportMixin)(), output_axis
        )
        self.enable_per_channel_scale = enable_per_channel_scale
        self.enable_fast_kmeans_mode = enable_fast_kmeans_mode
        self.rounding_precision = rounding_precision
        self.preserve_zeros = preserve_zeros
        self.sparsity_detection_threshold = sparsity_detection_threshold
        self.vector_kmeans_config = VectorKMeansConfig.model_validate(vector_kmeans_config or {})
        self._sparsity_detected = False
        self.register_buffer("_sparsity_mask", None, persistent=False)
        self.seed = seed
        self._training_strategy = (training_strategy_spec or DefaultTrainingSpec()).build_strategy()
        self._sensitivities = sensitivities
        self._followed: torch.Tensor | None = None  # a copy: writes through ``data`` advance no version

    @property
    def sensitivities(self) -> torch.Tensor | None:
        """Importance of each entry of the weight; setting it makes the palettes anew at the next call."""
        return self._sensitivities

    @sensitivities.setter
    def sensitivities(self, sensitivities: torch.Tensor | None) -> None:
        self._sensitivities = sensitivities
        self.invalidate()

    def restore_sensitivities(self, sensitivities: torch.Tensor | None) -> None:
        """Set those that the palettes were made with: unlike new ones they leave the palettes as they are."""
        self._sensitivities = sensitivities

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the palettized weight, or ``weight`` itself while palettization is off.

        Args:
            weight: floating point, of the shape that it had at the first call.

        Raises:
            ValueError: the weight has entries that are not finite.
        """
        if self._disabled:
            return weight
        weight = self.with_zeros_kept(weight)
        self.ensure_initialized(weight)
        if self._disabled or not self.is_on:
            return weight
        palettized = self.forward_enabled(weight)
        return torch.where(weight != 0, palettized, 0.0) if self.preserve_zeros else palettized

    def forward_enabled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what palettes, which exist, make of a weight: in training the strategy's, else the assigned entries.

        Args:
            tensor: floating point, of the shape that palettes were made for.
        """
        if self.training:
            return self._training_strategy.train_forward(self, tensor)
        return self.hard_assign(tensor)

    def with_zeros_kept(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with those entries at zero that were zero in the first one, if it was sparse enough."""
        share = self.sparsity_detection_threshold
        if share is None:
            return weight
        if not self._sparsity_detected:
            is_kept = weight.detach() != 0
            zeros = weight.numel() - int(is_kept.sum())
            self._sparsity_mask = is_kept if zeros > 0 and zeros >= share * weight.numel() else None
            self._sparsity_detected = True
            self.preserve_zeros |= self._sparsity_mask is not None
        mask = self._sparsity_mask
        return weight if mask is None else torch.where(mask, weight, 0.0)

    def ensure_initialized(self, weight: torch.Tensor) -> None:
        """Find palettes if there are none. A granularity that does not fit puts the simulator out of use.

        Raises:
            ValueError: the weight has entries that are not finite.
        """
        if self._centroids_initialized:
            return
        try:
            self._initialize(weight)
        except (_IncompatibleGranularityError, _IncompatibleClusterDimError) as error:
            self._disabled = True
            _logger.warning("Skipping palettization of %r: %s.", self.tensor_fqn, error)

    def settle(self, weight: torch.Tensor) -> None:
        """Bring palettes and indices up to date with ``weight``, as far as they are not.

        Raises:
            ValueError: the weight has entries that are not finite.
        """
        weight = self.with_zeros_kept(weight)
        self.ensure_initialized(weight)
        if not self._disabled:
            self._update_assignment(weight)

    def is_unsaved_for(self, original: torch.Tensor) -> bool:
        """Whether :meth:`settle_saved` has to bring indices up to date, and can, with a weight that training moves.

        It cannot for parts of a weight, as in sharded training, nor where numbers cannot be looked at.

        Args:
            original: the parameter, of which the simulators below make what this one is given.
        """
        if self._disabled or not (self._training_strategy.follows_weight and self.is_on):
            return False
        if not self._centroids_initialized or self.indices is None:
            return False
        is_whole = original.numel() == self.indices.numel() * self.cluster_dim
        is_plain = type(original) in (torch.Tensor, nn.Parameter) and not original.is_meta
        return is_whole and is_plain and is_plain_torch()

    def settle_saved(self, weight: torch.Tensor) -> None:
        """Bring indices up to date with a weight that training moves, since a checkpoint is about to hold both.

        A model that loads it may have no training strategy, and takes indices as they are. Nothing is done where
        entries are not finite.

        Args:
            weight: what the simulator is given.
        """
        with suppress(ValueError):
            self._update_assignment(self.with_zeros_kept(weight))

    def expect_moved_weight(self) -> None:
        """Assign each vector anew at the next call if training moves the weight while it follows it."""
        if self._training_strategy.follows_weight:
            self._indices_stale, self._followed = True, None

    def expect_new_weight(self) -> None:
        """Make the palettes anew at the next call: PEFT's adapters that merge write to the weight."""
        if self._sparsity_mask is not None:
            self._sparsity_mask, self.preserve_zeros = None, False
        self._sparsity_detected = False
        self.invalidate()

    def snapshot(self) -> _Snapshot:
        """Return the state, to which :meth:`restore` goes back."""
        buffers = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        flags = self._centroids_initialized, self._indices_stale, self._indices_unchecked
        return _Snapshot(buffers, self._sensitivities, *flags, self._assignment, self._followed)

    def restore(self, snapshot: _Snapshot) -> None:
        """Go back to an earlier state."""
        self.load_state_dict(snapshot.buffers)
        self._sensitivities = snapshot.sensitivities
        self._centroids_initialized, self._indices_stale = snapshot.initialized, snapshot.stale
        self._indices_unchecked = snapshot.unchecked
        self._assignment, self._followed = snapshot.assignment, snapshot.followed

    def _initialize(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            centroids, indices = self._cluster_to_centroids(weight.detach())
            self.centroids, self.indices = centroids.to(weight.dtype), indices
            self._centroids_initialized = True
            if self._lut_fake_quantizer is not None:
                self.quantize_lut(self._raw_lut(self.centroids))
                self.indices = self._assign_indices(weight, self.centroids)
            self._note_assignment(weight)

    def _cluster_to_centroids(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return palettes ``[P, K, D]`` and indices for ``weight``; sets the channel scale.

        Where palettes are quantized, they are those whose quantized form fits best.
        """
        scaled = self._scale_by_per_channel_scale(weight) if self.enable_per_channel_scale else weight
        matrix = self._reordered(scaled)
        vectors = self._blocks_to_cluster(matrix, self.granularity.axis)
        weights = self.importance_of(weight)
        fast, measured = self.enable_fast_kmeans_mode, self._lut_fake_quantizer is not None
        try:
            found = find_palettes(
                vectors, 1 << self.n_bits, weights, fast=fast, seed=self.seed, measured=measured,
                restarts=self.vector_kmeans_config.n_init,
            )  # fmt: skip
        except ValueError as error:
            raise self._named(error) from error
        palettes = found.centroids
        if self._lut_fake_quantizer is not None:
            shares = _SHARES if self._lut_fake_quantizer.n_bits <= _FEW_BITS else (1.0,)
            palettes = fit_to_quantized(vectors, found, self.quantize_lut, shares, weights)
        indices = self._layout(matrix.shape).join_indices(found.indices).contiguous()
        return palettes.to(vectors.dtype), indices

    def _named(self, error: ValueError) -> ValueError:
        return ValueError(f"Cannot cluster {self.tensor_fqn!r}: {error}")

    def importance_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return how much each entry counts in clustering, float32 ``[P, N, D]``; None where all count alike.

        Raises:
            ValueError: the sensitivities have another shape than ``weight``.
        """
        importance = self._sensitivities
        if self.preserve_zeros:
            kept = (weight != 0).float()
            importance = kept if importance is None else importance.float() * kept
        if importance is None:
            return None
        if importance.shape != weight.shape:
            raise ValueError(
                f"sensitivities of shape {tuple(importance.shape)} do not fit the weight of shape {tuple(weight.shape)}"
            )
        importance = self._reordered(importance.detach().to(weight.device))
        return self._layout(importance.shape).split(importance.float())

    def hard_assign(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with each vector replaced by its palette entry; no gradient reaches ``weight``."""
        self._update_assignment(weight)
        return self.decode(weight)

    def _update_assignment(self, weight: torch.Tensor) -> None:
        if not self._is_assigned(weight):
            assert self.centroids is not None
            self.indices = self._assign_indices(weight, self.centroids)
            self._note_assignment(weight)

    def _is_assigned(self, weight: torch.Tensor) -> bool:
        if self._indices_stale:
            return False
        if torch.compiler.is_compiling() or not is_plain_torch():  # where numbers cannot be looked at
            return True
        if self._indices_unchecked:
            return False
        return self._assignment is None or self._assignment.holds(weight, self.centroids, self.indices)

    def _note_assignment(self, weight: torch.Tensor) -> None:
        self._indices_stale = self._indices_unchecked = False
        if self._training_strategy.follows_weight and self.centroids is not None and self.indices is not None:
            self._assignment = Assignment(weight, self.centroids, self.indices)

    def _assign_indices(self, weight: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        """Return the index of the nearest palette entry, after quantization, of each vector."""
        with torch.inference_mode(False), torch.no_grad():  # averages and checkpoints write to the indices in place
            vectors, context = self.vectorize(weight.detach())
            if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(vectors):
                raise RuntimeError(
                    f"{self.tensor_fqn!r}: torch.func transforms (grad, vmap) cannot look for the nearest palette "
                    "entries. Run the model with these weights once before, outside of the transform."
                )
            luts = self._raw_lut(centroids)
            if self._lut_fake_quantizer is not None and is_observed(self._lut_fake_quantizer):
                luts = quantize_frozen(self._lut_fake_quantizer, luts)[1]
            try:
                found = nearest_entries(vectors, luts)
            except ValueError as error:
                raise self._named(error) from error
            return context.layout.join_indices(found).contiguous()

    def follow(self, weight: torch.Tensor, *, refit: bool) -> None:
        """Assign each vector anew if ``weight`` has changed since the last time.

        Args:
            weight: the dense weight.
            refit: also move each palette entry to the mean of its members, a step of Lloyd's algorithm.
        """
        if self.is_settled and _is_copy(self._followed, weight):
            return
        assert self.centroids is not None
        with torch.no_grad():
            self.indices = self._assign_indices(weight, self.centroids)
            if refit:
                vectors, context = self.vectorize(weight.detach())
                places = context.layout.split_indices(self.indices)
                weights = self.importance_of(weight.detach())
                self.centroids = means_of_members(vectors, places, self.centroids, weights)
                self.quantize_lut(self._raw_lut(self.centroids))
        self._followed = weight.detach().clone()
        self._note_assignment(weight)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode."""
        if mode:
            self._dense.clear()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self._training_strategy.follows_weight:  # the state may have been saved in the middle of training
            self._indices_unchecked, self._followed = True, None
        elif prefix + "indices" in state_dict and self._vectors_lie_otherwise():
            self._indices_unchecked = True

    def _vectors_lie_otherwise(self) -> bool:
        """Whether coreai-opt, whose checkpoints look alike, makes other vectors: across the kernel of a convolution."""
        kernel = () if self.indices is None else self.indices.shape[2:]
        return self.cluster_dim > 1 and self.granularity.axis == 1 and math.prod(kernel) > 1

    def _blocks_to_cluster(self, weight_2d: torch.Tensor, axis: int | None) -> torch.Tensor:
        """Return the vectors of each group, ``[P, N, D]``.

        Raises:
            ValueError: groups or vectors do not divide the shape.
        """
        return self._layout(weight_2d.shape).split(weight_2d)

    def extra_repr(self) -> str:
        """Return the settings as text."""
        words = [f"n_bits={self.n_bits}", f"granularity={self.granularity.describe()}"]
        words += [f"cluster_dim={self.cluster_dim}"] if self.cluster_dim > 1 else []
        words += ["per_channel_scale"] if self.enable_per_channel_scale else []
        return ", ".join(words)


_FakePalettizeImplBase.register("default")(_KMeansFakePalettize)


def _is_copy(known: torch.Tensor | None, weight: torch.Tensor) -> bool:
    alike = known is not None and (known.dtype, known.device) == (weight.dtype, weight.device)
    return alike and torch.equal(known, weight)  # type: ignore[arg-type]
