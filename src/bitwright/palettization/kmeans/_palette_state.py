"""State of a palettized weight: indices, palettes, scales, and the dense weight that they decode to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from bitwright._utils.derived_tensor import DerivedTensor
from bitwright.kernels.dispatch import is_plain_torch
from bitwright.palettization.spec import PalettizationGranularity, PerGroupedChannelGranularity
from bitwright.palettization.spec._vector_layout import VectorLayout
from bitwright.palettization.spec.fake_palettize import _FakePalettizeImplBase
from bitwright.planning.packed_sizes import table_bytes
from bitwright.quantization.spec import FakeQuantizeImplBase, QuantizationSpec

from ._lut_quantizer import build_lut_quantizer, frozen_qparams, is_observed, observe_and_quantize, quantize_frozen
from .kmeans_support_mixins import _PalettizationSupportMixin

__all__ = ["PaletteState", "VectorContext"]

_STATE_BUFFERS = ("indices", "centroids", "per_channel_scale")


class VectorContext(NamedTuple):
    """What ``devectorize`` needs to undo ``vectorize``."""

    layout: VectorLayout
    weight: torch.Tensor


class PaletteState(_FakePalettizeImplBase):
    """Indices into palettes, and everything that follows from them.

    Args:
        n_bits: bits of an index.
        lut_qspec: how palettes are quantized; None for not.
        granularity: which part of a weight has a palette of its own.
        cluster_dim: entries of a vector, D; vectors run along dimension 0.
        support: the order in which the weight is cut, and its default axis.
        output_axis: dimension of output channels; None for the default.

    Attributes:
        indices: uint8 buffer, the weight's shape with dimension 0 divided by D; None before the first call.
        centroids: buffer ``[P, K, D]`` in the weight's dtype, palettes before their quantization; None likewise.
        per_channel_scale: buffer ``[C, 1]``, or ``[1, C]`` for output channels in dimension 1, or None.
        keep_dense_weight: keep the dense result in eval mode; False saves its memory and decodes at every call.
    """

    keep_dense_weight: bool = True

    indices: torch.Tensor | None
    centroids: torch.Tensor | None
    per_channel_scale: torch.Tensor | None

    _indices_unchecked = False  # whether they were loaded, and may be those of another weight

    def __init__(
        self,
        n_bits: int,
        lut_qspec: QuantizationSpec | None,
        granularity: PalettizationGranularity,
        cluster_dim: int,
        support: _PalettizationSupportMixin,
        output_axis: int | None,
    ) -> None:
        super().__init__()
        self.reshape_strategy = support
        self.output_axis = support.default_axis if output_axis is None else output_axis
        if isinstance(granularity, PerGroupedChannelGranularity) and granularity.axis is None:
            granularity = granularity.model_copy(update={"axis": self.output_axis})
        self.n_bits = n_bits
        self.lut_qspec = lut_qspec
        self.granularity = granularity
        self.cluster_dim = cluster_dim
        self._centroids_initialized = False
        self._indices_stale = True
        self._dense = DerivedTensor()
        for name in _STATE_BUFFERS:
            self.register_buffer(name, None)
        self._lut_fake_quantizer: FakeQuantizeImplBase | None = (
            None if lut_qspec is None else build_lut_quantizer(lut_qspec)
        )

    def invalidate(self) -> None:
        """Make the palettes anew at the next call."""
        self._centroids_initialized = False
        self._indices_stale = True

    @property
    def is_outdated(self) -> bool:
        """Whether the palettes will be made anew at the next call."""
        return not self._disabled and not self._centroids_initialized

    @property
    def is_settled(self) -> bool:
        """Whether palettes exist and the indices belong to them."""
        stale = self._indices_stale or self._indices_unchecked
        return self._disabled or (self._centroids_initialized and not stale)

    def set_centroids(self, centroids: torch.Tensor) -> None:
        """Take over palettes ``[P, K, D]``; indices are assigned anew when next needed."""
        assert self.centroids is not None
        self.centroids = centroids.detach().to(self.centroids.dtype)
        self._indices_stale = True

    def decode(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what indices and palettes decode to, in shape, dtype and device of ``weight``."""
        if not self.keep_dense_weight or torch.compiler.is_compiling() or not is_plain_torch():
            return self._decode(weight)
        return self._dense.get(self._sources(), lambda: self._decode(weight))

    def _decode(self, weight: torch.Tensor) -> torch.Tensor:
        return self._palettize(self.lut, self.indices, weight)

    def _sources(self) -> tuple[torch.Tensor | None, ...]:
        quantizer = self._lut_fake_quantizer
        qparams = () if quantizer is None else frozen_qparams(quantizer)
        return (self.indices, self.centroids, self.per_channel_scale, *qparams)

    @property
    def lut(self) -> torch.Tensor | None:
        """Palettes as they decode, ``[groups along 0, groups along 1, K, D]`` in the weight's dtype; None at first."""
        if self.centroids is None:
            return None
        luts = self._raw_lut(self.centroids)
        if self._lut_fake_quantizer is not None and is_observed(self._lut_fake_quantizer):
            luts = quantize_frozen(self._lut_fake_quantizer, luts)[1].to(luts.dtype)
        return self._reshape_lut_tensor(luts)

    @property
    def quantized_lut(self) -> torch.Tensor | None:
        """Codes of the palettes, in the shape of :attr:`lut`; None where palettes are not quantized."""
        quantizer = self._lut_fake_quantizer
        if quantizer is None or self.centroids is None or not is_observed(quantizer):
            return None
        return self._reshape_lut_tensor(quantize_frozen(quantizer, self._raw_lut(self.centroids))[0])

    @property
    def lut_quantization_scale(self) -> torch.Tensor | None:
        """Scale of each palette, ``[groups along 0, groups along 1, 1, 1]``; None where palettes are not quantized."""
        return self._lut_qparam(0)

    @property
    def lut_quantization_zero_point(self) -> torch.Tensor | None:
        """Zero point of each palette like the scale; None for float formats or where palettes are not quantized."""
        return self._lut_qparam(1)

    def _lut_qparam(self, position: int) -> torch.Tensor | None:
        quantizer = self._lut_fake_quantizer
        if quantizer is None or self.centroids is None or not is_observed(quantizer):
            return None
        qparam = frozen_qparams(quantizer)[position]
        return None if qparam is None else self._reshape_lut_tensor(qparam)

    @property
    def table_bytes(self) -> int:
        """Bytes of palettes and scales in the packed artifact."""
        if self.centroids is None:
            return 0
        entries = self.centroids[0].numel()
        tables = table_bytes(self.lut_qspec, len(self.centroids), entries, self.centroids.dtype)
        scales = 0 if self.per_channel_scale is None else self.per_channel_scale.nbytes
        return tables + scales

    def quantize_lut(self, lut: torch.Tensor) -> torch.Tensor:
        """Return palettes ``[P, K, ...]`` as they decode after quantization, and take their scales over.

        The gradient goes straight through. Without ``lut_qspec`` that is ``lut`` itself.
        """
        if self._lut_fake_quantizer is None:
            return lut
        return observe_and_quantize(self._lut_fake_quantizer, lut).to(lut.dtype)

    def _palettize(self, lut: torch.Tensor | None, indices: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Return what indices into palettes of the shape of :attr:`lut` decode to, in shape and dtype of ``weight``."""
        assert lut is not None
        assert indices is not None
        layout = self._layout(self._reordered(weight).shape)
        entries = lut.shape[-2]
        places = layout.split_indices(indices).to(device=weight.device, dtype=torch.int32)
        if layout.groups > 1:
            places += torch.arange(layout.groups, dtype=torch.int32, device=places.device).unsqueeze(1) * entries
        table = lut.reshape(layout.groups * entries, layout.dim).to(weight.device)
        places = places.reshape(-1)  # transposed where one input channel is a group
        decoded = torch.index_select(table.view(-1), 0, places) if layout.dim == 1 else F.embedding(places, table)
        return self.devectorize(decoded.to(weight.dtype), VectorContext(layout, weight.detach()))

    def vectorize(self, weight: torch.Tensor) -> tuple[torch.Tensor, VectorContext]:
        """Return the vectors of each group, ``[P, N, D]``, divided by the channel scale; and the way back."""
        matrix = self._reordered(self._divided(weight))
        layout = self._layout(matrix.shape)
        return layout.split(matrix), VectorContext(layout, weight.detach())

    def devectorize(self, vectors: torch.Tensor, context: VectorContext) -> torch.Tensor:
        """Undo :meth:`vectorize`, in the strides of the weight."""
        matrix = context.layout.join(vectors)
        axis = self.granularity.axis or 0
        weight = self.reshape_strategy.reshape_to_original(matrix, axis, context.weight.shape)
        return _laid_out_as(context.weight, self._unscale_by_per_channel_scale(weight))

    def _layout(self, shape: torch.Size) -> VectorLayout:
        return VectorLayout.of(shape, self.granularity, self.cluster_dim)

    def _reordered(self, weight: torch.Tensor) -> torch.Tensor:
        return self.reshape_strategy.reshape_for_kmeans(weight, self.granularity.axis or 0)

    def _raw_lut(self, centroids: torch.Tensor) -> torch.Tensor:
        return centroids.detach()

    def _reshape_lut_tensor(self, luts: torch.Tensor) -> torch.Tensor:
        groups = luts.shape[0]
        along = (1, groups) if self.granularity.axis == 1 else (groups, 1)
        return luts.reshape(*along, *luts.shape[1:])

    def _scale_by_per_channel_scale(self, weight: torch.Tensor) -> torch.Tensor:
        """Set the channel scale to the largest magnitude of each output channel, and divide by it."""
        axis = min(self.output_axis, weight.ndim - 1)
        others = [dim for dim in range(weight.ndim) if dim != axis]
        peak = weight.detach().abs().amax(others) if others else weight.detach().abs()
        peak = torch.where(peak == 0, torch.ones_like(peak), peak)
        self.per_channel_scale = peak.view(-1, 1) if axis == 0 else peak.view(1, -1)
        return self._divided(weight)

    def _broadcast_scale(self, weight: torch.Tensor) -> torch.Tensor:
        assert self.per_channel_scale is not None
        scale = self.per_channel_scale
        return scale.view(-1) if weight.ndim == 1 else scale.view(*scale.shape, *[1] * (weight.ndim - 2))

    def _divided(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.per_channel_scale is None else weight / self._broadcast_scale(weight)

    def _unscale_by_per_channel_scale(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.per_channel_scale is None else weight * self._broadcast_scale(weight)

    def _other_palettes(self, loaded: torch.Tensor) -> str | None:
        """Say how saved palettes differ from those of this simulator's settings; None if they do not."""
        groups = loaded.shape[0] if self.centroids is None else self.centroids.shape[0]
        expected = (groups, 1 << self.n_bits, self.cluster_dim)
        if loaded.shape == expected:
            return None
        settings = f"n_bits={self.n_bits}, granularity {self.granularity.describe()}, cluster_dim={self.cluster_dim}"
        return (
            f"{self.tensor_fqn}: the checkpoint has palettes [P, K, D] of shape {tuple(loaded.shape)}, this model was "
            f"prepared for {expected} ({settings}). Prepare it with the spec that the checkpoint was made with."
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Take over saved palettes and indices as they are; the buffers take the saved shapes."""
        centroids = state_dict.get(prefix + "centroids")
        difference = None if centroids is None else self._other_palettes(centroids)
        if difference is not None:
            errors: list[str] = rest[-1]
            errors.append(difference)
            return
        device = self.fake_palett_enabled.device
        for name in _STATE_BUFFERS:
            loaded, own = state_dict.get(prefix + name), self._buffers[name]
            if loaded is not None and (own is None or own.shape != loaded.shape or own.dtype != loaded.dtype):
                with torch.inference_mode(False):
                    self._buffers[name] = torch.empty(loaded.shape, dtype=loaded.dtype, device=device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "centroids" in state_dict:
            self._centroids_initialized = True
            self._indices_stale = prefix + "indices" not in state_dict
            self._disabled = False


def _laid_out_as(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the strides of ``weight`` of the same shape, on which those of outputs depend.

    A weight with gaps, or whose elements share memory, has none to offer.
    """
    if tensor.stride() == weight.stride():
        return tensor
    laid_out = torch.empty_like(weight, dtype=tensor.dtype)
    return tensor if laid_out.stride() == tensor.stride() else laid_out.copy_(tensor)
